"""GetTokenizer: the engine's tokenizer as a zip archive of the files that gateways expect of a checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from smg_grpc_proto.generated import common_pb2

from ..engine_file import EngineFile
from ..tokenizer import CHAT_TEMPLATE, TOKENIZER, read_config
from .grpc_errors import Unsupported

if TYPE_CHECKING:
    from .rpc import Call

_CHUNK_BYTES = 64 << 10
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the same engine gives the same archive, whenever it is made


_archives: WeakKeyDictionary[EngineFile, bytes] = WeakKeyDictionary()


async def send_tokenizer(file: EngineFile, call: Call) -> None:
    """Writes GetTokenizerChunks; the last one tells the archive's SHA-256. Raises Unsupported."""
    data = tokenizer_archive(file)
    if not data:
        raise Unsupported("GetTokenizer", "this engine has no tokenizer; it takes token ids")
    digest = hashlib.sha256(data).hexdigest()
    for begin in range(0, len(data), _CHUNK_BYTES):
        is_last = begin + _CHUNK_BYTES >= len(data)
        await call.write(common_pb2.GetTokenizerChunk(data=data[begin : begin + _CHUNK_BYTES],
                                                      sha256=digest if is_last else ""))


def tokenizer_archive(file: EngineFile) -> bytes:
    """The archive; empty if the engine has no tokenizer."""
    if file not in _archives:
        _archives[file] = _archive(file)
    return _archives[file]


def _archive(file: EngineFile) -> bytes:
    if TOKENIZER not in file.sizes:
        return b""
    config = read_config(file)
    special = dict(config.get("special_tokens", {}))
    files = {"tokenizer.json": file.read(TOKENIZER)}
    if CHAT_TEMPLATE in file.sizes:
        template = file.read(CHAT_TEMPLATE)
        files["chat_template.jinja"] = template
        special["chat_template"] = template.decode()
    files["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    eos = list(config.get("eos_token_ids", ()))
    ids = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": eos[0] if len(eos) == 1 else eos}
    files["config.json"] = _json({**ids, "architectures": [file.manifest["model"]["architecture"]]})
    files["generation_config.json"] = _json({**ids, **config.get("generation", {})})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps({key: item for key, item in value.items() if item not in (None, [])}, indent=1).encode()

"""A llama of Llama-3.2-1B's shape with random weights, for all peers: what it says is noise, what it costs is not.

Rotary embedding without llama3's scaling of frequencies, which changes no operation. Prompts are texts all the same:
the tokenizer is that of SmolLM2, whose ids are a part of the vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ... import demo_models
from ...large_build import Llama, write_checkpoint
from .environments import Say
from .prepare import Model

NAME = "llama-1b"
SHAPE = Llama(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=128_256)
_ROPE_THETA, _EPS = 500_000.0, 1e-5
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def provide(cache: Path, say: Say) -> Model:
    """Made once: 2.5 GB as a checkpoint in bfloat16, and as much as GGUF in float16."""
    def checkpoint(folder: Path) -> None:
        tokenizer = demo_models.provide(demo_models.MODELS["smollm2"], say=say).checkpoint
        write_model(SHAPE, folder, tokenizer)

    def gguf(folder: Path) -> None:
        folder.mkdir(parents=True)
        write_gguf(SHAPE, made, folder / f"{NAME}-F16.gguf")

    made = _once(cache / "models" / NAME, checkpoint, say)
    return Model(NAME, made, _once(cache / "models" / f"{NAME}-gguf", gguf, say) / f"{NAME}-F16.gguf", is_random=True)


def _once(folder: Path, make: Callable[[Path], None], say: Say) -> Path:
    if not folder.exists():
        say(f"{folder.name}: writing random weights")
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            make(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_model(shape: Llama, folder: Path, tokenizer: Path) -> None:
    """A checkpoint with the tokenizer of another."""
    write_checkpoint(shape, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "head_dim": shape.hidden // shape.heads, "rms_norm_eps": _EPS, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA}}
    path.write_text(json.dumps(config, indent=1))
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)


def write_gguf(shape: Llama, checkpoint: Path, path: Path) -> None:
    """The same weights as llama.cpp loads them: no vocabulary, for its tools measure by random tokens. In memory is one
    tensor at a time."""
    import gguf

    head = shape.hidden // shape.heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(NAME)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(_ROPE_THETA)
    writer.add_layer_norm_rms_eps(_EPS)
    writer.add_tokenizer_model("no_vocab")
    tensors = [(name, _gguf_name(name), dims) for name, dims in shape.tensors()]
    for _, name, dims in tensors:
        kind = np.float32 if len(dims) == 1 else np.float16
        writer.add_tensor_info(name, dims, np.dtype(kind), int(np.prod(dims)) * np.dtype(kind).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    read = _reader(checkpoint)
    for name, _, dims in tensors:
        values = read(name).reshape(dims)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, values.shape[0] // head)
        writer.write_tensor_data(np.ascontiguousarray(values, np.float32 if len(dims) == 1 else np.float16))
    writer.close()


_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
          "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[part]}.weight"


def _interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves, as transformers turns them, to neighbours, as llama.cpp does."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _reader(checkpoint: Path) -> Callable[[str], np.ndarray]:
    """Name -> float32, flat, of a checkpoint that write_checkpoint has written."""
    index: dict[str, str] = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]

    def read(name: str) -> np.ndarray:
        with open(checkpoint / index[name], "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry: dict[str, Any] = json.loads(file.read(size))[name]
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            bits = np.frombuffer(file.read(end - begin), np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return read

"""A tiny engine in memory, put together without the writer, and what is needed to put wrong ones together."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.runtime.engine_format import MANIFEST, Member, directory, end_records, local_header
from ingot.runtime.manifest import canonical_json, weight_name

MANIFEST_FIELDS: dict[str, Any] = {
    "format_version": 1,
    "ingot_version": "0.1.0",
    "model": {"name": "tiny", "architecture": "TinyForCausalLM", "config_sha256": "0" * 64},
    "target": {"name": "cpu:x86-64-v3", "isa": "x86-64-v3"},
    "precision": "fp32",
    "limits": {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128},
    "kernels": [],
    "memory": {"arena_bytes": 4096},
    "toolchain": {"cc": "0.17.1"},
}
WEIGHTS = [bytes(range(100)), b"\xff" * 5000]
SMALL = {
    "debug/00_import.txt": b"graph\n",
    "tokenizer/tokenizer.json": b'{"model":{}}',
    "code/engine.so": b"\x7fELF" + bytes(60),
    "plan.json": b'{"launches":[1,2,3]}',
}


def weight_members(weights: Sequence[bytes] = WEIGHTS) -> dict[str, bytes]:
    return {weight_name(hashlib.sha256(data).hexdigest()): data for data in weights}


FILES = weight_members() | SMALL  # in file order


def table(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}


def manifest_of(files: Mapping[str, bytes], **fields: Any) -> bytes:
    return canonical_json({**MANIFEST_FIELDS, "members": table(files), **fields})


def assemble(files: Mapping[str, bytes] = FILES, manifest: bytes | None = None) -> bytes:
    """The engine that holds `files` in the order given, then the manifest (by default the right one)."""
    everything = {**files, MANIFEST: manifest_of(files) if manifest is None else manifest}
    blob = b""
    for member in place(everything):
        blob += local_header(member) + everything[member.name]
    return finish(blob, place(everything))


def place(files: Mapping[str, bytes]) -> list[Member]:
    """The members one behind the other from the start of the file."""
    members: list[Member] = []
    for name, data in files.items():
        members.append(Member(name, len(data), zlib.crc32(data), members[-1].end_offset if members else 0))
    return members


def finish(blob: bytes, members: list[Member], entries: bytes | None = None) -> bytes:
    """`blob`, which ends with the last member's data, with a directory and end records."""
    entries = directory(members) if entries is None else entries
    return blob + entries + end_records(len(members), len(blob), len(entries))

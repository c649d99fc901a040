"""Where the cpu device has an engine's weights: in large pages, where there are such and room for them, else mapped.

A token of a small batch reads every weight once, one after the other: with pages of 4 KiB it waits for a thousand
times as many addresses to be looked up as with pages of 2 MiB, and for fetches ahead, which end at a page's border.
Mapped weights are there for all processes once and take no memory that the system could not take back; so they stay
mapped where both forms together would take more than half of what is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..engine_file import EngineFile
from ..host import available_memory_bytes
from .host_memory import Bytes, anonymous
from .plan_fields import mapped_weight, weight_member

LARGE_PAGE = 2 << 20
_PAGE = 4096


def weights_in_memory(engine: EngineFile, weights: Mapping[str, tuple[str, int]]) -> dict[str, Bytes]:
    """weights: name in the plan -> (blob, bytes). The bytes of each; equal blobs are there once. They must live as long
    as a kernel may read them. Raises EngineFormatError, WeightsMissing, WorkFailed."""
    sizes = dict(weights.values())
    if not _large_pages_pay(sum(sizes.values())):
        return {name: mapped_weight(engine, blob, size) for name, (blob, size) in weights.items()}
    begins, end = {}, 0
    for blob, size in sizes.items():
        begins[blob] = end
        end += -(-size // _PAGE) * _PAGE
    memory = anonymous(end + LARGE_PAGE, "the weights")
    start = -memory.ctypes.data % LARGE_PAGE
    for blob, size in sizes.items():
        begin = start + begins[blob]
        engine.read_into(weight_member(engine, blob, size), memory[begin:begin + size])
    return {name: memory[start + begins[blob]:start + begins[blob] + size] for name, (blob, size) in weights.items()}


def _large_pages_pay(size: int, root: Path = Path("/")) -> bool:
    """Whether the system has large pages, and room for weights of so many bytes beside their file."""
    try:
        enabled = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in enabled and size >= LARGE_PAGE and 4 * size <= available_memory_bytes(root)

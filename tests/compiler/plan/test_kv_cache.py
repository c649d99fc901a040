"""Which layers share a block table, and where they lie in its blocks."""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.place_kv import place_kv
from ingot.compiler.plan.kv_cache import KvCache, KvSlot, plan_kv_cache
from ingot.runtime.program import Limits
from ingot.runtime.step import StepInputs
from tests.compiler.graphs import Builder

LONG = 1 << 20


def layers(*windows: int | None, max_seq_len: int = LONG) -> KvCache:
    """The cache of a model with an attention for each of the windows."""
    return of(*({"window": window} if window else {} for window in windows), max_seq_len=max_seq_len)


def of(*attentions: dict[str, Any], max_seq_len: int = LONG, widths: list[int] | None = None) -> KvCache:
    """widths: key and value elements of a token in each layer, in heads of 8."""
    b, outputs = Builder(), []
    for number, attrs in enumerate(attentions):
        heads = widths[number] // 8 if widths else 2
        q, k, v = (b.x(f"{name}{number}", "T", heads, 8) for name in ("query", "key", "value"))
        outputs.append(b.op("attention", q, k, v, slot=number, scale=0.5, **attrs))
    return plan_kv_cache(place_kv(b.made(*outputs), DType.F32), 16, max_seq_len)


LAYER = 2 * 2 * 8 * 16 * 4  # k and v, heads, width, tokens of a block, bytes


def test_layers_of_one_kind_share_a_table() -> None:
    for window in (None, 100):
        kv = layers(window, window, window)
        assert (kv.windows, kv.block_bytes) == ((window,), 3 * LAYER)
        assert [slot.table for slot in kv.slots] == [0, 0, 0]
        assert [slot.key_offset for slot in kv.slots] == [0, LAYER, 2 * LAYER]
        assert [slot.value_offset - slot.key_offset for slot in kv.slots] == [LAYER // 2] * 3
    assert kv.bytes_per_token == 3 * 2 * 2 * 8 * 4 and kv.bytes_per_token_beyond_windows == 0


@pytest.mark.parametrize(("windows", "tables", "layers_a_table"), [
    ((4, None), (None, 4), [1, 1]),
    ((4, 4, 4, 4, 4, None) * 3, (None, 4, 4, 4, 4, 4), [3, 3, 3, 3, 3, 3]),
    ((4, None, None, None, 4), (None, None, 4), [2, 1, 2]),
    ((4, 8, None, None, 8, 4, None), (None, None, 4, 8), [2, 1, 2, 2]),
    ((4,) * 22 + (None,) * 4, (None,) + (4,) * 6, [4, 4, 4, 4, 4, 3, 3]),
])  # fmt: skip
def test_the_commoner_kinds_are_divided(windows: tuple[int | None, ...], tables: tuple[int | None, ...],
                                        layers_a_table: list[int]) -> None:
    kv = layers(*windows)
    assert kv.windows == tables
    assert [sum(slot.table == table for slot in kv.slots) for table in range(len(tables))] == layers_a_table
    assert [kv.windows[slot.table] for slot in kv.slots] == list(windows)
    assert kv.block_bytes == max(layers_a_table) * LAYER
    assert kv.bytes_per_token * 16 == len(tables) * kv.block_bytes
    assert kv.bytes_per_token_beyond_windows * 16 == tables.count(None) * kv.block_bytes


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert layers(100, None, max_seq_len=100).windows == (None,)
    assert layers(100, None, max_seq_len=101).windows == (None, 100)


def test_chunks_are_windows_of_their_size() -> None:
    kv = of({"chunk": 64}, {}, {"chunk": 64, "window": 8}, {"window": 200, "chunk": 64})
    assert kv.windows == (None, 8, 64, 64)
    assert [slot.table for slot in kv.slots] == [2, 0, 1, 3]


def test_what_several_attentions_read_is_kept_for_the_one_that_looks_back_furthest() -> None:
    for windows, expected in (((4, 9), 9), ((4, 0), None), ((0, 9, 4), None)):
        b = Builder()
        k, v = b.x("k", "T", 2, 8), b.x("v", "T", 2, 8)
        outputs = [b.op("attention", b.x(f"query{i}", "T", 2, 8), k, v, slot=0, scale=0.5, window=window)
                   for i, window in enumerate(windows)]
        kv = plan_kv_cache(place_kv(b.made(*outputs), DType.F32), 16, LONG)
        assert kv.windows == (expected,) and len(kv.slots) == 1


def test_layers_of_different_sizes() -> None:
    """Tables of nearly equal bytes; none is empty, however large a layer is."""
    kv = of({}, {"window": 4}, {"window": 4}, {"window": 4}, {"window": 4}, widths=[32, 8, 24, 8, 8])
    assert kv.windows == (None, 4, 4) and kv.block_bytes == 4 * LAYER // 2
    assert [slot.table for slot in kv.slots] == [0, 1, 2, 1, 1]
    kv = of({}, {"window": 4}, {"window": 4}, widths=[8, 80, 80])
    assert kv.windows == (None, 4, 4) and [slot.table for slot in kv.slots] == [0, 1, 2]


def test_parts_are_aligned_and_apart() -> None:
    b, outputs = Builder(), []
    for number in range(3):
        q, k, v = b.x(f"query{number}", "T", 3, 5), b.x(f"key{number}", "T", 3, 5), b.x(f"value{number}", "T", 3, 7)
        outputs.append(b.op("attention", q, k, v, slot=number, scale=0.5))
    kv = plan_kv_cache(place_kv(b.made(*outputs), DType.BF16), 4, LONG)
    spans = [(begin, begin + 3 * 4 * width * 2) for slot in kv.slots
             for begin, width in ((slot.key_offset, 5), (slot.value_offset, 7))]
    assert all(begin % 64 == 0 for begin, _ in spans) and kv.block_bytes % 64 == 0
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)) and spans[-1][1] <= kv.block_bytes
    assert kv.block_bytes == 3 * (128 + 192)


def test_tables_of_the_step() -> None:
    """They begin where the arrays of a step have them, at a multiple of 16 bytes."""
    kv = layers(4, None, 4)
    for max_seq_len in (33, 400):
        offsets = [kv.table_offset(table, max_batch_size=3, max_seq_len=max_seq_len) for table in range(3)]
        tables = StepInputs(Limits(3, 8, max_seq_len), 50, kv.block_size, 3).block_tables
        assert offsets == [table.ctypes.data - tables.ctypes.data for table in tables]
        assert all(offset % 16 == 0 for offset in offsets)


def test_a_model_without_attention() -> None:
    b = Builder()
    kv = plan_kv_cache(b.made(b.op("exp", b.x("x", "T", 4))), 16, LONG)
    assert kv == KvCache(16, 0, (None,), ())


def slot_of(dtype: DType, heads: int = 3, key_dim: int = 72, value_dim: int = 40) -> KvSlot:
    b = Builder()
    q, k, v = (b.x(name, "T", heads, dim) for name, dim in (("q", key_dim), ("k", key_dim), ("v", value_dim)))
    return plan_kv_cache(place_kv(b.made(b.op("attention", q, k, v, slot=0, scale=0.5)), dtype), 16, LONG).slots[0]


@pytest.mark.parametrize(("dtype", "element_bytes"), [(DType.F32, 4), (DType.BF16, 2), (DType.F16, 2), (DType.FP8, 1)])
def test_the_values_of_an_unscaled_cache_follow_its_keys(dtype: DType, element_bytes: int) -> None:
    slot = slot_of(dtype)
    keys, values = (-(-3 * 16 * dim * element_bytes // 64) * 64 for dim in (72, 40))
    assert (slot.key_offset, slot.value_offset, slot.part_bytes(16)) == (0, keys, (keys, values))
    assert slot.key_scale_offset is None and slot.value_scale_offset is None


def test_scales_lie_behind_the_part_that_they_belong_to() -> None:
    slot = slot_of(DType.I8)
    keys, values, scales = 3 * 16 * 72, 3 * 16 * 40, 3 * 16 * 4
    assert slot.key_scale_offset == keys and slot.value_offset == keys + scales
    assert slot.value_scale_offset == slot.value_offset + values
    assert slot.part_bytes(16) == (keys + scales, values + scales)


def test_scales_of_odd_sizes_are_aligned() -> None:
    slot = slot_of(DType.I8, heads=1, key_dim=6, value_dim=2)
    assert (slot.key_scale_offset, slot.value_offset, slot.value_scale_offset) == (128, 192, 192 + 64)

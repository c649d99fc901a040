"""Per-head norm, rope and the write to the KV cache against their reference."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.plugins.rope.cpu import Rope, kv_write, rope, rope_kv_write
from ingot.plugins.rope.reference import rope as reference_rope
from ingot.plugins.rope.reference import rope_kv_write as reference

from .native import (
    ALL_ISAS,
    KV_ELEMENTS,
    Library,
    Step,
    aligned,
    kv_cache,
    kv_parts,
    placed,
    relative_error,
    to_bf16,
    to_i8,
)


def problem(q_heads: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, kv_dtype: str = "bf16",
            **more: Any) -> Rope:
    _, block_bytes = kv_parts(kv_heads, block_size, (key_dim, value_dim), KV_ELEMENTS[kv_dtype])
    return Rope(q_heads, kv_heads, key_dim, value_dim, block_size, block_bytes, kv_dtype, **more)


NO_SCALES: list[np.ndarray | None] = [None, None]
PLAIN = problem(9, 3, 64, 64, 16, rotary=64)
PROBLEMS = {
    "plain": PLAIN,
    "f32": problem(9, 3, 64, 64, 16, "f32", rotary=64),
    "i8": problem(9, 3, 64, 64, 16, "i8", rotary=64),
    "odd_i8": problem(4, 2, 21, 75, 16, "i8", rotary=10, norm=True, eps=1e-5),
    "norm": replace(PLAIN, norm=True, eps=1e-6),
    "pair_table": replace(PLAIN, table_width=32, table_stride=40),
    "interleaved": replace(PLAIN, interleaved=True),
    "interleaved_pairs": replace(PLAIN, interleaved=True, table_width=32),
    "partial": problem(4, 2, 80, 48, 32, "f32", rotary=20, norm=True, eps=1e-5),
    "at_the_end": problem(4, 4, 48, 32, 16, rotary=16, rotary_begin=32, interleaved=True),
    "merged": replace(PLAIN, q_stride=960, k_stride=960, v_stride=960, q_out_stride=960),
    "no_rope": replace(PLAIN, rotary=0, norm=True, eps=1e-6),
    "no_queries": replace(PLAIN, q_heads=0),
    "no_keys": replace(PLAIN, kv_heads=0),
}
STEP = Step([(40, 5), (17, 17), (300, 1)])


@pytest.fixture(scope="module", params=ALL_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [kernel(p) for p in PROBLEMS.values() for kernel in (rope_kv_write, rope, kv_write)]
    return Library(kernels, request.param, tmp_path_factory.mktemp("rope"))


def normal(*shape: int, seed: int) -> np.ndarray:
    return placed(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def cells(block_size: int) -> tuple[np.ndarray, slice, np.ndarray]:
    """Where the step's tokens lie in keys and values."""
    return STEP.block_table[STEP.token_seq, STEP.positions // block_size], slice(None), STEP.positions % block_size


def cached(cache: np.ndarray, block_size: int) -> np.ndarray:
    """What lies at the positions of the step's tokens: [T, H, D]."""
    return cache[cells(block_size)]


def heads(rows: np.ndarray, count: int, dim: int, begin: int = 0) -> np.ndarray:
    return rows[:, begin:begin + count * dim].reshape(len(rows), count, dim)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_equals_reference(library: Library, name: str, workers: int) -> None:
    p, tokens = PROBLEMS[name], STEP.num_tokens
    width = (p.q_heads + p.kv_heads) * p.key_dim + p.kv_heads * p.value_dim
    if p.q_stride:
        merged = normal(tokens, width, seed=1)
        q, k, v = merged, merged[:, p.q_heads * p.key_dim:], merged[:, (p.q_heads + p.kv_heads) * p.key_dim:]
    else:
        q, k = normal(tokens, p.q_heads * p.key_dim, seed=1), normal(tokens, p.kv_heads * p.key_dim, seed=2)
        v = normal(tokens, p.kv_heads * p.value_dim, seed=3)
    angles = normal(tokens, p.table_stride or p.table_width or p.rotary or 1, seed=4)
    cos, sin = placed(np.cos(angles)), placed(np.sin(angles))
    weights = (normal(p.key_dim, seed=5), normal(p.key_dim, seed=6)) if p.norm else (None, None)
    q_rows, k_rows = heads(q, p.q_heads, p.key_dim), heads(k, p.kv_heads, p.key_dim)
    table = slice(0, p.table_width or p.rotary)
    want_q, want_k = reference(q_rows, k_rows, cos[:, table], sin[:, table], *weights, rotary=p.rotary, norm=p.norm,
                               rotary_begin=p.rotary_begin, interleaved=p.interleaved, eps=p.eps)
    want_v = heads(v, p.kv_heads, p.value_dim).copy()
    blocks, k_cache, v_cache, *scales = kv_cache(STEP.num_blocks, p.kv_heads, p.block_size, (p.key_dim, p.value_dim),
                                                 KV_ELEMENTS[p.kv_dtype])
    before, written = blocks.copy(), [part[cells(p.block_size)] for part in (k_cache, v_cache, *scales)]
    library.run(rope_kv_write(p), STEP, q, k, v, cos, sin, *weights, q, k_cache, v_cache, *(scales or NO_SCALES),
                STEP.block_table, workers=workers)
    assert relative_error(q_rows, want_q) < 1e-6
    if not p.kv_heads:
        return
    if p.kv_dtype == "f32":
        assert relative_error(cached(k_cache, p.block_size), want_k) < 1e-6
        assert np.array_equal(cached(v_cache, p.block_size), want_v)
    elif p.kv_dtype == "i8":
        want, want_scale = to_i8(want_k.astype(np.float32))
        assert np.allclose(cached(scales[0], p.block_size), want_scale, rtol=1e-5)
        difference = cached(k_cache, p.block_size).astype(np.int32) - want
        assert np.abs(difference).max() <= 1 and np.count_nonzero(difference) < want.size / 500
        for got, expected in zip((v_cache, scales[1]), to_i8(want_v), strict=True):
            assert np.array_equal(cached(got, p.block_size), expected)
    else:
        bits = cached(k_cache, p.block_size).astype(np.int32) - to_bf16(want_k.astype(np.float32))
        assert np.abs(bits).max() <= 1 and np.count_nonzero(bits) < bits.size / 500  # rounded the other way
        assert np.array_equal(cached(v_cache, p.block_size), to_bf16(want_v))
    for part, old in zip((k_cache, v_cache, *scales), written, strict=True):
        part[cells(p.block_size)] = old
    assert np.array_equal(blocks, before), "wrote elsewhere in the blocks"


def test_parts_equal_the_whole(library: Library) -> None:
    q, k, v = (normal(STEP.num_tokens, n * 64, seed=n) for n in (9, 3, 4))
    v = placed(v[:, :192])
    cos, sin, out = normal(STEP.num_tokens, 64, seed=7), normal(STEP.num_tokens, 64, seed=8), aligned(q.shape)
    library.run(rope(PLAIN), STEP, q, cos, sin, out, workers=2)
    assert relative_error(out.reshape(-1, 9, 64), reference_rope(q.reshape(-1, 9, 64), cos, sin, rotary=64)) < 1e-6
    _, k_cache, v_cache = kv_cache(STEP.num_blocks, 3, 16, (64, 64), np.uint16)
    library.run(kv_write(PLAIN), STEP, k, v, k_cache, v_cache, None, None, STEP.block_table, workers=2)
    assert np.array_equal(cached(k_cache, 16).reshape(k.shape), to_bf16(k))
    assert np.array_equal(cached(v_cache, 16).reshape(v.shape), to_bf16(v))


def test_rows_of_8_bits_that_are_not_finite_or_zero(library: Library) -> None:
    """Rows with an infinity or a NaN become NaN, and a row of zeros has the scale 0."""
    p = PROBLEMS["i8"]
    k, v = normal(STEP.num_tokens, 192, seed=1), normal(STEP.num_tokens, 192, seed=2)
    k[0, 5], k[1, 64], v[2, :64], v[3, 130] = np.inf, np.nan, 0, -np.inf
    _, k_cache, v_cache, *scales = kv_cache(STEP.num_blocks, 3, 16, (64, 64), np.int8)
    library.run(kv_write(p), STEP, k, v, k_cache, v_cache, *scales, STEP.block_table)
    with np.errstate(invalid="ignore"):
        got_k, got_v = (cached(part, 16) * cached(scale, 16)[..., None]
                        for part, scale in zip((k_cache, v_cache), scales, strict=True))
    assert np.isnan(got_k[0, 0]).all() and np.isnan(got_k[1, 1]).all() and np.isnan(got_v[3, 2]).all()
    assert np.isfinite(got_k[2:]).all() and np.isfinite(got_k[0, 1:]).all()
    assert not got_v[2, 0].any() and cached(scales[1], 16)[2, 0] == 0

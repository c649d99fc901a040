"""Attention over a paged cache against its reference, for each instruction set that this machine runs."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ingot.plugins.attention.cpu import Attention, attention, attention_combine, scratch_bytes
from ingot.plugins.attention.reference import attention as one_sequence
from ingot.plugins.attention.reference import paged_attention

from .native import (
    KV_ELEMENTS,
    MATRIX_ISAS,
    Library,
    Step,
    aligned,
    from_bf16,
    kv_cache,
    kv_parts,
    placed,
    relative_error,
    to_bf16,
    to_i8,
)


def problem(q_heads: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, scale: float,
            kv_dtype: str = "bf16", **more: Any) -> Attention:
    _, block_bytes = kv_parts(kv_heads, block_size, (key_dim, value_dim), KV_ELEMENTS[kv_dtype])
    return Attention(q_heads, kv_heads, key_dim, value_dim, block_size, block_bytes, scale, kv_dtype=kv_dtype, **more)


FEW_ROWS = 12
"""ATTENTION_FEW_ROWS: up to so many rows a key/value head, queries are quantized where keys are."""

NO_SCALES: list[np.ndarray | None] = [None, None]
PLAIN = problem(6, 2, 64, 64, 16, 0.125)
PLAIN_F32 = problem(6, 2, 64, 64, 16, 0.125, "f32")
PLAIN_I8 = problem(6, 2, 64, 64, 16, 0.125, "i8")
PROBLEMS = {
    "plain": PLAIN,
    "f32": PLAIN_F32,
    "i8": PLAIN_I8,
    "window_i8": replace(PLAIN_I8, window=100),
    "odd_dims_i8": problem(14, 2, 21, 75, 4, 0.3, "i8"),
    "wide_i8": problem(4, 1, 256, 200, 16, 0.0625, "i8", window=20, softcap=30.0),
    "small_i8": problem(3, 3, 8, 8, 16, 0.4, "i8", q_stride=64, out_stride=40),
    "widest_group_i8": problem(130, 1, 32, 32, 16, 0.2, "i8"),
    "window": replace(PLAIN, window=100),
    "small_window": problem(4, 1, 256, 256, 16, 0.0625, window=20, softcap=30.0, kv_dtype="f32"),
    "chunk": replace(PLAIN, chunk=96),
    "softcap": replace(PLAIN, softcap=5.0),
    "strided": replace(PLAIN, q_stride=640, out_stride=400),
    "one_head_each": problem(3, 3, 48, 32, 16, 0.2),
    "two_dims": problem(5, 5, 40, 24, 16, 0.15, kv_dtype="f32"),
    "odd_dims": problem(4, 2, 37, 19, 32, 0.3),
    "odd_dims_f32": problem(14, 2, 21, 75, 4, 0.3, kv_dtype="f32"),
    "wide_group": problem(26, 2, 128, 96, 16, 0.09),
    "widest_group": problem(130, 1, 32, 32, 16, 0.2),
}
STEPS = {
    "one_token": [(1, 1)],
    "generation": [(700, 1)],
    "long_generation": [(3000, 1)],
    "some_generation": [(129, 1), (16, 1), (300, 1), (1, 1)],
    "few_tokens": [(500, 3), (40, 2), (260, 16), (900, 7)],
    "context": [(300, 300)],
    "continued": [(700, 130), (333, 50)],
    "mixture": [(200, 200), (513, 1), (130, 4), (97, 33), (64, 1), (17, 17)],
}


@dataclass
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scales: list[np.ndarray]
    sinks: np.ndarray | None
    step: Step

    @property
    def caches(self) -> list[np.ndarray]:
        """As float32."""
        if self.scales:
            return [c * scale[..., None] for c, scale in zip((self.k, self.v), self.scales, strict=True)]
        return [from_bf16(c) if c.dtype == np.uint16 else c for c in (self.k, self.v)]


def make(p: Attention, sequences: list[tuple[int, int]], seed: int = 0, sinks: bool = False) -> Case:
    """Random queries and caches. Slots past a sequence's end hold NaN; blocks that none of its new tokens sees are -1,
    which leads to NaN.
    """
    rng = np.random.default_rng(seed)
    step = Step(sequences, p.block_size, seed)
    stride = p.q_stride or p.q_heads * p.key_dim
    q = placed(rng.normal(size=(step.num_tokens, stride)).astype(np.float32) * 2)
    dtype = KV_ELEMENTS[p.kv_dtype]
    _, k, v, *scales = kv_cache(step.num_blocks, p.kv_heads, p.block_size, (p.key_dim, p.value_dim), dtype)
    for (length, new), blocks in zip(sequences, step.block_table, strict=True):
        first = length - new
        low = max(0, first - p.window + 1 if p.window else 0, first // p.chunk * p.chunk if p.chunk else 0)
        for position in range(low // p.block_size * p.block_size, length):
            at = blocks[position // p.block_size], slice(None), position % p.block_size
            for number, cache in enumerate((k, v)):
                values = rng.normal(size=cache[at].shape).astype(np.float32)
                if scales:
                    cache[at], scales[number][at] = to_i8(values)
                else:
                    cache[at] = values if p.kv_dtype == "f32" else to_bf16(values)
        blocks[:low // p.block_size] = -1
    return Case(q, k, v, scales, placed(rng.normal(size=p.q_heads).astype(np.float32) * 3) if sinks else None, step)


def run(library: Library, p: Attention, case: Case, workers: int = 1, apart: bool = False) -> np.ndarray:
    """apart: the two launches write to different memory."""
    tokens = case.step.num_tokens
    out = aligned((tokens, p.out_stride or p.q_heads * p.value_dim))
    whole = aligned(out.shape) if apart else out
    scratch = aligned((scratch_bytes(p, tokens, len(case.step.context_len)) // 4 + 16,))
    library.run(attention(p), case.step, case.q, case.k, case.v, *(case.scales or NO_SCALES), case.step.block_table,
                case.sinks, scratch[:-16], whole, workers=workers)
    library.run(attention_combine(p), case.step, scratch[:-16], case.sinks, whole if apart else None, out,
                workers=workers)
    assert np.isnan(scratch[-16:]).all(), "wrote past the scratch"
    width = p.q_heads * p.value_dim
    assert np.isnan(out[:, width:]).all(), "wrote between the rows"
    return out[:, :width].reshape(tokens, p.q_heads, p.value_dim)


def expected(p: Attention, case: Case) -> np.ndarray:
    q = case.q[:, :p.q_heads * p.key_dim].reshape(-1, p.q_heads, p.key_dim)
    if case.scales:
        rows = np.diff(case.step.query_start)[case.step.token_seq] * (p.q_heads // p.kv_heads)
        integers, scale = to_i8(q)
        q = np.where((rows <= FEW_ROWS)[:, None, None], integers * scale[..., None], q)
    k, v = case.caches
    return paged_attention(q, k, v, case.step.query_start, case.step.context_len, case.step.block_table, case.sinks,
                           scale=p.scale, window=p.window, chunk=p.chunk, softcap=p.softcap)


@pytest.fixture(scope="module", params=MATRIX_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [kernel(p) for p in PROBLEMS.values() for kernel in (attention, attention_combine)]
    return Library(kernels, request.param, tmp_path_factory.mktemp("attention"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_reference(library: Library, name: str) -> None:
    for seed, (kind, sequences) in enumerate(STEPS.items()):
        case = make(PROBLEMS[name], sequences, seed, sinks=seed % 2 == 1)
        want = expected(PROBLEMS[name], case)
        one = run(library, PROBLEMS[name], case)
        assert relative_error(one, want) < 1e-5, kind
        for workers in (2, 3):
            assert np.array_equal(run(library, PROBLEMS[name], case, workers, apart=workers == 3), one), (kind, workers)


@pytest.mark.parametrize("name", ["plain", "small_window", "odd_dims", "odd_dims_i8"])
def test_other_sequences_change_nothing(library: Library, name: str) -> None:
    """Bit for bit: a sequence alone in a step, and among others."""
    p, sequences = PROBLEMS[name], STEPS["mixture"] + STEPS["few_tokens"]
    case = make(p, sequences)
    together = run(library, p, case)
    for seq, shape in enumerate(sequences):
        alone = Step([shape], p.block_size)
        alone.block_table = case.step.block_table[seq:seq + 1].copy()
        begin, end = case.step.query_start[seq:seq + 2]
        part = replace(case, q=placed(case.q[begin:end]), step=alone)
        assert np.array_equal(run(library, p, part), together[begin:end]), shape


def test_tokens_of_a_context_change_nothing(library: Library) -> None:
    """Bit for bit: a context in one step, and cut in two (both parts long enough for tiles)."""
    case = make(PLAIN, [(400, 400)])
    whole = run(library, PLAIN, case)
    for begin, end in ((0, 150), (150, 400)):
        step = Step([(end, end - begin)])
        step.block_table = case.step.block_table
        assert np.array_equal(run(library, PLAIN, replace(case, q=placed(case.q[begin:end]), step=step)),
                              whole[begin:end])


def test_integer_products_cost_little(library: Library) -> None:
    """Beside the exact attention over keys and values that were never rounded to 8 bits."""
    rng, error = np.random.default_rng(1), []
    for sequences in ([(300, 300)], [(300, 1)], [(300, 3)]):
        case = make(PLAIN_I8, sequences)
        k, v = (rng.normal(size=(300, 2, 64)).astype(np.float32) for _ in range(2))
        at = case.step.block_table[0, np.arange(300) // 16], slice(None), np.arange(300) % 16
        for cache, scales, values in zip((case.k, case.v), case.scales, (k, v), strict=True):
            cache[at], scales[at] = to_i8(values)
        got = run(library, PLAIN_I8, case)
        want = one_sequence(case.q.reshape(-1, 6, 64), k, v, scale=0.125)
        error.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert min(error) > 1e-3 and max(error) < 1.5e-2, error


def test_large_scores(library: Library) -> None:
    """Scores of some hundreds, at which exp alone would overflow."""
    for sequences in ([(300, 300)], [(300, 1)]):
        case = make(PLAIN, sequences)
        case.q[...] *= 100
        assert relative_error(run(library, PLAIN, case), expected(PLAIN, case)) < 1e-4


def test_nan_stays_with_its_sequence(library: Library) -> None:
    for p in (PLAIN, PLAIN_I8):
        case = make(p, [(300, 1), (300, 1), (100, 100)])
        case.q[0, 0] = np.nan
        out = run(library, p, case)
        assert np.isnan(out[0, 0]).all() and np.isfinite(out[1:]).all() and np.isfinite(out[0, 1:]).all()


def test_scratch_does_not_grow_with_tokens() -> None:
    assert scratch_bytes(PLAIN, 512, 8) == scratch_bytes(PLAIN, 8, 64) == 16 * 8 * 6 * 80 * 4


def test_paged_reference_is_the_plain_one() -> None:
    case = make(PLAIN_F32, [(50, 50)])
    q = case.q.reshape(50, 6, 64)
    blocks = case.step.block_table[0, :4]
    k, v = (np.concatenate(list(c[blocks].transpose(0, 2, 1, 3)))[:50] for c in (case.k, case.v))
    scores = np.einsum("hd,shd->hs", q[49], np.repeat(k, 3, axis=1)) * 0.125
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    by_hand = np.einsum("hs,shd->hd", weights, np.repeat(v, 3, axis=1))
    assert relative_error(one_sequence(q, k, v, scale=0.125)[49], by_hand) < 1e-5
    assert relative_error(expected(PLAIN, case)[49], by_hand) < 1e-5

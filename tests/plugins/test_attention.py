"""Attention over a paged cache against its reference, for each instruction set that this machine runs."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.cpu.toolchain import assembly
from ingot.plugins.attention.cpu import Attention, attention, attention_combine, scratch_bytes
from ingot.plugins.attention.reference import attention as one_sequence
from ingot.plugins.attention.reference import paged_attention
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit

from .native import (
    KV_ELEMENTS,
    MATRIX_ISAS,
    PAIR_ISA,
    Library,
    Step,
    aligned,
    from_bf16,
    kv_cache,
    kv_parts,
    needs_pairs,
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
    if not has_code_of_its_own(p, library.isa):
        pytest.skip(f"{library.isa} adds nothing for keys in {p.kv_dtype}")
    scratch = aligned((scratch_bytes(p, tokens, len(case.step.context_len)) // 4 + 16,))
    library.run(attention(p), case.step, case.q, case.k, case.v, *(case.scales or NO_SCALES), case.step.block_table,
                case.sinks, scratch[:-16], whole, workers=workers)
    library.run(attention_combine(p), case.step, scratch[:-16], case.sinks, whole if apart else None, out,
                workers=workers)
    assert np.isnan(scratch[-16:]).all(), "wrote past the scratch"
    width = p.q_heads * p.value_dim
    assert np.isnan(out[:, width:]).all(), "wrote between the rows"
    return out[:, :width].reshape(tokens, p.q_heads, p.value_dim)


def has_code_of_its_own(p: Attention, isa: str) -> bool:
    """What VNNI adds are products of integers; the rest is the code of x86-64-v4."""
    return isa != "x86-64-v4-vnni" or p.kv_dtype == "i8"


def multiplies_pairs(p: Attention, isa: str) -> bool:
    return isa == PAIR_ISA and p.kv_dtype == "bf16"


def allowed_error(p: Attention, isa: str) -> float:
    """Relative to a row's norm. Pairs: a weight is rounded to bfloat16, at most 2^-8 of it off; the sum that divides it
    may be off as much the other way."""
    return 2 ** -7 if multiplies_pairs(p, isa) else 1e-5


def expected(p: Attention, case: Case, isa: str) -> np.ndarray:
    """Of queries rounded as the kernels of that instruction set round them."""
    q = case.q[:, :p.q_heads * p.key_dim].reshape(-1, p.q_heads, p.key_dim)
    if multiplies_pairs(p, isa):
        q = from_bf16(to_bf16(q * np.float32(p.scale))) / np.float64(p.scale)
    if case.scales:
        rows = np.diff(case.step.query_start)[case.step.token_seq] * (p.q_heads // p.kv_heads)
        integers, scale = to_i8(q)
        q = np.where((rows <= FEW_ROWS)[:, None, None], integers * scale[..., None], q)
    k, v = case.caches
    return paged_attention(q, k, v, case.step.query_start, case.step.context_len, case.step.block_table, case.sinks,
                           scale=p.scale, window=p.window, chunk=p.chunk, softcap=p.softcap)


@pytest.fixture(scope="module", params=MATRIX_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [kernel(p) for p in PROBLEMS.values() if has_code_of_its_own(p, request.param)
               for kernel in (attention, attention_combine)]
    return Library(kernels, request.param, tmp_path_factory.mktemp("attention"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_reference(library: Library, name: str) -> None:
    for seed, (kind, sequences) in enumerate(STEPS.items()):
        case = make(PROBLEMS[name], sequences, seed, sinks=seed % 2 == 1)
        want = expected(PROBLEMS[name], case, library.isa)
        one = run(library, PROBLEMS[name], case)
        assert relative_error(one, want) < allowed_error(PROBLEMS[name], library.isa), kind
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
        error = relative_error(run(library, PLAIN, case), expected(PLAIN, case, library.isa))
        assert error < max(1e-4, allowed_error(PLAIN, library.isa))


def test_nan_stays_with_its_sequence(library: Library) -> None:
    for p in (PLAIN_I8, PLAIN):
        case = make(p, [(300, 1), (300, 1), (100, 100)])
        case.q[0, 0] = np.nan
        out = run(library, p, case)
        assert np.isnan(out[0, 0]).all() and np.isfinite(out[1:]).all() and np.isfinite(out[0, 1:]).all()


def test_what_all_values_have_in_common_stays(library: Library) -> None:
    """Weights add up to 1 however each of them was rounded: equal values come out as they are."""
    rng = np.random.default_rng(2)
    for sequences in ([(300, 300)], [(300, 1)], [(300, 3)], [(61, 61)]):
        case = make(PLAIN, sequences)
        length = sequences[0][0]
        common = to_bf16(rng.normal(size=(2, 64)).astype(np.float32))
        blocks, slots = case.step.block_table[0, np.arange(length) // 16], np.arange(length) % 16
        case.v[blocks, :, slots] = common
        want = np.broadcast_to(np.repeat(from_bf16(common), 3, axis=0), (case.step.num_tokens, 6, 64))
        assert relative_error(run(library, PLAIN, case), want) < 1e-6, sequences


def test_values_that_nobody_sees_may_be_anything(library: Library) -> None:
    """Slots before a window and behind a sequence's end are NaN, at places that pairs of keys straddle."""
    p = PROBLEMS["window"]
    for length, new in ((300, 1), (301, 1), (333, 5), (334, 4), (350, 50), (351, 50)):
        case = make(p, [(length, new)])
        low = length - new - p.window + 1
        for position in range(low // 16 * 16, low):
            for cache in (case.k, case.v):
                cache[case.step.block_table[0, position // 16], :, position % 16] = 0x7FFF
        error = relative_error(run(library, p, case), expected(p, case, library.isa))
        assert error < allowed_error(p, library.isa), (length, new)


WEIGHTS = CpuKernel("weights", "attention/attention_pairs.h", """\
float *row = args[0];
*(float *)args[1] = ingot_few_weights(row, 64, *(const float *)args[2]);""")


@needs_pairs
def test_weights_of_pairs(tmp_path: Path) -> None:
    """e^(score - m), rounded to bfloat16: 2^-8 off, and 2^-13 for the polynomial; the sum is that of the rounded."""
    library = Library([WEIGHTS], PAIR_ISA, tmp_path)
    rng = np.random.default_rng(0)
    for m in (0.0, -3.25, 41.7, 600.0):
        scores = (m - np.concatenate([[0.0], rng.uniform(0, 87, 30), rng.uniform(0, 1, 31), [200.0, np.inf]]))
        row, total = placed(scores.astype(np.float32)), aligned((1,))
        with np.errstate(over="ignore"):
            want = np.exp(row.astype(np.float64) - np.float32(m))
        library.run(WEIGHTS, Step.of_tokens(1), row, total, placed(np.array([m], np.float32)))
        got = from_bf16(row.view(np.uint16)[:64])
        assert got[0] == 1 and (got[want < 2 ** -127] < 2 ** -126).all()
        normal = want > 2 ** -125
        assert (np.abs(got - want) <= (2 ** -8 + 2 ** -13 + abs(m) * 2 ** -22) * want)[normal].all()
        assert total[0] == pytest.approx(got[normal].sum(), rel=1e-6)
    row = placed(np.resize(np.array([np.nan, -np.inf], np.float32), 64))
    library.run(WEIGHTS, Step.of_tokens(1), row, total, placed(np.array([-1e30], np.float32)))
    assert np.isnan(from_bf16(row.view(np.uint16)[:64:2])).all() and np.isnan(total[0])
    assert (np.abs(from_bf16(row.view(np.uint16)[1:64:2])) < 2 ** -126).all()


@pytest.mark.parametrize("isa", ["x86-64-v4-vnni", PAIR_ISA])
def test_instructions(isa: str) -> None:
    """Pairs are multiplied where the cache holds bfloat16 and the target has them; kernels call nothing."""
    for p in (PLAIN, PLAIN_F32):
        text = assembly(translation_unit([attention(p)]), ISAS[isa], [INCLUDE_DIR])
        assert bool(re.search(r"^\s+vdpbf16ps\s.*%zmm", text, re.MULTILINE)) == multiplies_pairs(p, isa)
        calls = re.findall(r"^\s+call\w*\s+(\S+)", text, re.MULTILINE)
        assert all("mem" in call for call in calls), calls


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
    assert relative_error(expected(PLAIN_F32, case, "")[49], by_hand) < 1e-5

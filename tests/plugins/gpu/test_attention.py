"""Paged attention in the interpreter: mixed steps, groups of heads, windows, types of the cache, split contexts."""
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Call, Interpreter
from ingot.plugins.attention import reference
from ingot.plugins.attention.tactics import Problem, Rope, Tile, candidates, launch
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch
from ingot.plugins.quantize.tactics import Problem as Quantize
from ingot.plugins.quantize.tactics import candidates as quantize_candidates
from ingot.plugins.quantize.tactics import split_form
from ingot.plugins.rope.tactics import Problem as RopeProblem
from ingot.plugins.rope.tactics import candidates as rope_candidates

from .paged import BLOCK_SIZE, Paged
from .support import assert_close, compiled, device, load, scratch, store, unwritten

GENERATION = Tile(1, 32, 4, 4, 2)
MIXED = Tile(4, 32, 1, 4, 2)
MIXED_SPLIT = Tile(4, 16, 3, 4, 2)


def check(interpreter: Interpreter, tile: Tile, lengths: list[int], counts: list[int], q_heads: int = 4,
          kv_heads: int = 2, key_dim: int = 32, value_dim: int = 32, float_type: str = "fp32", kv_type: str = "fp32",
          sums: float = 2e-5, **options: float | bool) -> None:
    rng = np.random.default_rng(7)
    paged = Paged(lengths, counts, kv_heads, key_dim, value_dim, kv_type)
    static = (0.5, 0.25) if options.get("static") else (1.0, 1.0)
    paged.fill([rng.standard_normal((n, kv_heads, key_dim)) for n in lengths],
               [rng.standard_normal((n, kv_heads, value_dim)) for n in lengths], static)
    total = sum(counts)
    q = store(rng.standard_normal((total, q_heads, key_dim)) * 1.5, float_type)
    sinks = rng.standard_normal(q_heads).astype(np.float32) if options.get("sinks") else None
    p = Problem(total + 2, paged.max_batch, q_heads, kv_heads, key_dim, value_dim, key_dim**-0.5, float_type, kv_type,
                BLOCK_SIZE, paged.block_bytes, paged.max_blocks, **options)  # type: ignore[arg-type]
    # Blocks that have left the window are gone: their numbers must not be used.
    window = int(options.get("window", 0) or 0)
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if window:
            paged.table[seq, :max(0, length - count - window + 1) // BLOCK_SIZE] = 2**30
    one = launch(p, tile)
    arrays = {"q": q, "out": unwritten((total + 2, q_heads, value_dim), float_type), **paged.step, **paged.parts(),
              **scratch(one), "k_static": np.array([static[0]], np.float32),
              "v_static": np.array([static[1]], np.float32)}
    if sinks is not None:
        arrays["sinks"] = sinks
    needed = {name for name, _ in one.kernel.parameters}
    out = interpreter.run([(one, {})], {name: array for name, array in arrays.items() if name in needed})
    untouched = Paged(lengths, counts, kv_heads, key_dim, value_dim, kv_type)
    wanted = np.empty((total, q_heads, value_dim))
    shape = {name: options[name] for name in ("window", "chunk", "softcap") if name in options}
    for seq, (begin, end) in enumerate(pairwise(np.cumsum([0, *counts]).tolist())):
        k, v = (untouched.read(paged.pool, seq, keys, static[not keys]) for keys in (True, False))
        wanted[begin:end] = reference.attention(load(q[begin:end], float_type), k, v, sinks, scale=key_dim**-0.5,
                                                **shape)  # type: ignore[arg-type]
    assert_close(load(out["out"][:total], float_type), wanted, float_type, sums)
    assert np.isnan(load(out["out"][total:], float_type)).all()
    if "arrived" in out:
        assert not out["arrived"].any()


@pytest.mark.parametrize("lengths", [[1], [16, 17], [100, 1, 33, 64]])
def test_generation(interpreter: Interpreter, lengths: list[int]) -> None:
    check(interpreter, GENERATION, lengths, [1] * len(lengths))


@pytest.mark.parametrize("tile", [MIXED, MIXED_SPLIT])
def test_context_chunks_beside_generation(interpreter: Interpreter, tile: Tile) -> None:
    check(interpreter, tile, [9, 40, 70, 5], [9, 1, 13, 5])


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 1), (7, 1), (2, 2), (6, 2)])
def test_groups_of_heads(interpreter: Interpreter, q_heads: int, kv_heads: int) -> None:
    check(interpreter, MIXED_SPLIT, [20, 37], [6, 1], q_heads, kv_heads)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (48, 32)])
def test_sizes_of_heads(interpreter: Interpreter, key_dim: int, value_dim: int) -> None:
    check(interpreter, MIXED, [20], [3], 2, 1, key_dim, value_dim)


@pytest.mark.parametrize("tile", [MIXED, MIXED_SPLIT, GENERATION])
@pytest.mark.parametrize("options", [{"window": 24}, {"window": 1}, {"chunk": 20}, {"softcap": 5.0}, {"sinks": True},
                                     {"window": 40, "sinks": True, "softcap": 3.0}], ids=str)
def test_variants(interpreter: Interpreter, tile: Tile, options: dict[str, float | bool]) -> None:
    counts = [1, 1, 1] if tile is GENERATION else [7, 1, 12]
    check(interpreter, tile, [90, 61, 12], counts, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv_type", "static"), [("bf16", False), ("fp16", False), ("fp8", False), ("fp8", True),
                                                 ("int8", False)])
def test_types_of_the_cache(interpreter: Interpreter, kv_type: str, static: bool) -> None:
    """Queries in fp32, so that nothing but the cache is rounded: its values are read exactly."""
    check(interpreter, MIXED_SPLIT, [30, 41], [5, 1], kv_type=kv_type, static=static)
    check(interpreter, GENERATION, [30, 41], [1, 1], kv_type=kv_type, static=static)


@pytest.mark.parametrize("kv_type", ["bf16", "fp8", "int8"])
def test_bf16_arithmetic(interpreter: Interpreter, kv_type: str) -> None:
    """Weights of the softmax are rounded to bf16 before they meet the values."""
    check(interpreter, MIXED_SPLIT, [50, 7], [5, 1], float_type="bf16", kv_type=kv_type, sums=4e-3)


@pytest.mark.parametrize(("kv_type", "options"), [
    ("fp32", {}), ("bf16", {"norm_eps": 1e-6}), ("int8", {"rotary": 16, "interleaved": True}), ("fp8", {})])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("lengths", "counts"), [([40, 17, 1, 64], [1, 1, 1, 1]), ([50, 33], [3, 1]), ([6], [6])])
def test_rope_and_write_inside(interpreter: Interpreter, kv_type: str, options: dict[str, float], splits: int,
                               lengths: list[int], counts: list[int]) -> None:
    """The fused launch against rope_kv_write followed by attention: the same cache to the bit, the same results."""
    rng = np.random.default_rng(5)
    q_heads, kv_heads, dim, total = 6, 2, 32, sum(counts)
    paged = Paged(lengths, counts, kv_heads, dim, dim, kv_type)
    old = [length - count for length, count in zip(lengths, counts, strict=True)]
    keys, values = ([rng.standard_normal((n, kv_heads, dim)) for n in old] for _ in range(2))
    paged.fill(keys, values)
    width = (q_heads + 2 * kv_heads) * dim
    merged = rng.standard_normal((total, width)).astype(np.float32)
    rotary = int(options.get("rotary", dim))
    angles = rng.uniform(0, 6, (total, rotary))
    arrays = {"q": merged.reshape(-1), "cos": np.cos(angles).astype(np.float32),
              "sin": np.sin(angles).astype(np.float32), "q_norm": rng.uniform(0.5, 1.5, dim).astype(np.float32),
              "k_norm": rng.uniform(0.5, 1.5, dim).astype(np.float32), **paged.step, "pool": paged.pool,
              "q_out": unwritten((total, q_heads, dim), "fp32"), "out": unwritten((total, q_heads, dim), "fp32")}
    offsets = {"k": ("q", 4 * q_heads * dim), "v": ("q", 4 * (q_heads + kv_heads) * dim),
               "k_part": ("pool", paged.key_offset), "v_part": ("pool", paged.value_offset),
               "k_scales": ("pool", paged.k_scale_offset), "v_scales": ("pool", paged.v_scale_offset)}
    rope = {"rotary": rotary, "interleaved": "interleaved" in options, "norm_eps": options.get("norm_eps")}
    p = Problem(total, paged.max_batch, q_heads, kv_heads, dim, dim, 0.2, "fp32", kv_type, BLOCK_SIZE,
                paged.block_bytes, paged.max_blocks)
    write = rope_candidates(RopeProblem(total, q_heads, kv_heads, dim, dim, width, width, width, float_type="fp32",
                                        kv_type=kv_type, block_size=BLOCK_SIZE, block_bytes=paged.block_bytes,
                                        max_blocks=paged.max_blocks, **rope),  # type: ignore[arg-type]
                            device("sm_90a")).legal[0].launches[0]
    tile = Tile(total, 32, splits, 4, 2)
    whole = launch(replace(p, rope=Rope(width, width, width, **rope)), tile)  # type: ignore[arg-type]

    def run(calls: list[Call]) -> dict[str, np.ndarray]:
        needed = {name for one, _ in calls for name, _ in one.kernel.parameters} | {"pool", "q", "out", "q_out"}
        held = {name: a for name, a in (arrays | scratch(calls[-1][0])).items() if name in needed}
        return interpreter.run(calls, held)
    apart = run([(write, offsets), (launch(p, tile), offsets | {"q": "q_out"})])
    together = run([(whole, offsets)])
    assert np.array_equal(apart["pool"], together["pool"])
    assert np.allclose(apart["out"], together["out"], rtol=1e-5, atol=1e-5) and np.isfinite(together["out"]).all()


def problem(m: int, kv_type: str = "bf16", **changes: int) -> Problem:
    return replace(Problem(m, 64, 32, 8, 128, 128, 128**-0.5, "bf16", kv_type, 16, 1 << 20, 256), **changes)  # type: ignore[arg-type]


def test_candidates() -> None:
    h200 = device("sm_90a")
    few = candidates(problem(1), h200)
    assert max(c.launches[0].grid[2] for c in few.legal) > 1, "one sequence is read by many blocks"
    many = candidates(problem(2048), h200)
    assert {dict(c.launches[0].kernel.constants)["BM"] for c in many.legal} == {16, 64, 128}
    assert "fp8 needs sm_89" in candidates(problem(1, "fp8"), device("sm_80")).refused[0].reason
    assert "up to 512" in candidates(problem(1, key_dim=576), h200).refused[0].reason
    assert "multiples of 16" in candidates(problem(1, block_size=8), h200).refused[0].reason
    fused = candidates(replace(problem(8), rope=Rope(6144, 6144, 6144, 128)), h200).legal
    assert {dict(c.launches[0].kernel.constants)["QB"] for c in fused} == {8}
    refused = candidates(replace(problem(16), rope=Rope(6144, 6144, 6144, 128)), h200).refused
    assert "up to 8 tokens are written here, this bucket has 16" in refused[0].reason
    kernels = {c.launches[0].kernel for c in few.legal + many.legal + fused}
    assert len({kernel.symbol for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in (
    "sm_80", "sm_89", "sm_100a", "sm_120a"))])
def test_compiles_without_spills(arch: str) -> None:
    """Of the first and the last candidate of each problem at least one keeps to its registers."""
    problems = []
    for kv_type in ("bf16", "int8") if arch == "sm_80" else ("bf16", "fp8", "int8"):
        fused = replace(problem(8, kv_type), rope=Rope(6144, 6144, 6144, 128, norm_eps=1e-6))
        problems += [problem(8, kv_type), problem(512, kv_type), fused]
    chosen = []
    for p in problems:
        legal = candidates(p, device(arch)).legal
        chosen.append([legal[0].launches[0].kernel, legal[-1].launches[0].kernel])
    code = compiled([kernel for pair in chosen for kernel in pair], arch)
    for pair in chosen:
        assert all(code[kernel].matrix for kernel in pair)
        assert min(code[kernel].spill_stores for kernel in pair) == 0, [kernel.symbol for kernel in pair]


@pytest.mark.parametrize("kv_type", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_tall_tiles_of_large_heads_compile_without_spills(kv_type: str) -> None:
    """Eight tokens of four heads of 256, turned in registers: for each number of splits a candidate that fits."""
    p = replace(problem(8, kv_type), q_heads=4, kv_heads=1, key_dim=256, value_dim=256,
                rope=Rope(1536, 1536, 1536, 256, norm_eps=1e-6))
    splits: dict[int, list[GpuKernel]] = {}
    for candidate in candidates(p, device("sm_80")).legal:
        kernel = candidate.launches[0].kernel
        splits.setdefault(candidate.launches[0].grid[2], []).append(kernel)
    assert len(splits) > 1
    for kernels in splits.values():
        assert any(not compiled([kernel], "sm_80")[kernel].spill_stores for kernel in kernels)


@pytest.mark.parametrize("y_type", ["fp8", "int8", "int8_sum32", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("tile", [MIXED, MIXED_SPLIT])
def test_what_is_quantized_is_that_of_a_launch_of_its_own(interpreter: Interpreter, tile: Tile, y_type: str) -> None:
    lengths, counts, d = [40, 21], [6, 1], 128
    rng = np.random.default_rng(3)
    paged = Paged(lengths, counts, 2, 32, 32, "fp32")
    keys, values = ([rng.standard_normal((n, 2, 32)) for n in lengths] for _ in range(2))
    paged.fill(keys, values)
    total = sum(counts)
    p = Problem(total + 2, paged.max_batch, 4, 2, 32, 32, 32**-0.5, "fp32", "fp32", BLOCK_SIZE, paged.block_bytes,
                paged.max_blocks, y_type=y_type)
    one = launch(p, tile)
    apart, = quantize_candidates(Quantize(total + 2, d, "fp32", y_type), device("sm_100a")).legal[0].launches
    name, group = split_form(y_type)
    scales = {"nvfp4": (np.uint8, 16), "fp8_block": (np.float32, 128)}.get(name, (np.float32, d))
    made = {"y": np.full((total + 2, d // 2 if name == "nvfp4" else d), 0x55, np.uint8),
            "y_scale": np.zeros((total + 2, d // scales[1]), scales[0]), "y_factor": np.zeros(total + 2, np.float32),
            "y_sum": np.zeros((total + 2, d // (group or d)), np.float16)}
    arrays = {"q": store(rng.standard_normal((total, 4, 32)), "fp32"), "out": unwritten((total + 2, 4, 32), "fp32"),
              **paged.step, **paged.parts(), **scratch(one), **made,
              "arrived": np.zeros(one.zeroed_bytes // 4, np.int32)}

    def run(what: GpuLaunch, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        needed = {parameter for parameter, _ in what.kernel.parameters}
        return interpreter.run([(what, {})], {key: array.copy() for key, array in given.items() if key in needed})

    together = run(one, arrays)
    separate = run(apart, made | {"x": together["out"].reshape(-1, d), "sizes": np.array([total, 1, 1], np.int32)})
    written = made.keys() & separate.keys()
    assert written >= {"y", "y_scale"} and not together["arrived"].any()
    for key in written:
        assert np.array_equal(together[key], separate[key]), key

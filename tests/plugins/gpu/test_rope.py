"""Rotary embedding and the write to the paged cache in the interpreter."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.gpu.floats import from_e4m3, to_e4m3
from ingot.plugins.rope import reference
from ingot.plugins.rope.tactics import Problem, candidates

from .paged import BLOCK_SIZE, Paged
from .support import assert_close, compiled, device, load, store, unwritten

LENGTHS, COUNTS = [20, 33, 16], [5, 1, 3]
Q_HEADS, KV_HEADS = 3, 2


def check(interpreter: Interpreter, kv_type: str, key_dim: int = 32, value_dim: int = 32, rotary: int = 32,
          begin: int = 0, interleaved: bool = False, norm: bool = False, static: bool = False,
          float_type: str = "fp32", q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS) -> None:
    """q, k and v are ranges of one merged matrix, as the projection leaves them. Without heads, none are given."""
    rng = np.random.default_rng(11)
    total = sum(COUNTS)
    paged = Paged(LENGTHS, COUNTS, KV_HEADS, key_dim, value_dim, kv_type)
    width = (Q_HEADS + KV_HEADS) * key_dim + KV_HEADS * value_dim
    merged = store(rng.standard_normal((total, width)), float_type)
    angles = rng.uniform(0, 6, (total, max(rotary, 1)))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q_norm, k_norm = (rng.uniform(0.5, 1.5, key_dim).astype(np.float32) for _ in range(2))
    p = Problem(total + 2, q_heads, kv_heads, key_dim, value_dim, width, width, width, rotary, float_type, kv_type,
                BLOCK_SIZE, paged.block_bytes, paged.max_blocks, begin, interleaved, 1e-6 if norm else None, static)
    one = candidates(p, device("sm_90a")).legal[0].launches[0]
    factors = (0.02, 0.03) if static else (1.0, 1.0)
    flat = merged.reshape(-1)
    q_end, k_end = Q_HEADS * key_dim, (Q_HEADS + KV_HEADS) * key_dim
    arrays = {"q": flat, "k": flat[q_end:], "v": flat[k_end:], "cos": cos, "sin": sin, "q_norm": q_norm,
              "k_norm": k_norm, "q_out": unwritten((total + 2, Q_HEADS, key_dim), float_type), **paged.step,
              "k_static": np.array([factors[0]], np.float32), "v_static": np.array([factors[1]], np.float32),
              "pool": paged.pool}
    offsets = {"k_part": paged.key_offset, "v_part": paged.value_offset, "k_scales": paged.k_scale_offset,
               "v_scales": paged.v_scale_offset}
    needed = {name for name, _ in one.kernel.parameters}
    if not q_heads or not kv_heads:
        assert not needed & ({"q", "q_out"} if not q_heads else {"k", "v", "k_part", "block_table"})
    out = interpreter.run([(one, {name: ("pool", offset) for name, offset in offsets.items() if name in needed})],
                          {name: array for name, array in arrays.items() if name in needed | {"pool"}})
    wide = load(merged, float_type)
    q, k, v = (wide[:, a:b].reshape(total, -1, dim) for a, b, dim in (
        (0, q_end, key_dim), (q_end, k_end, key_dim), (k_end, width, value_dim)))
    q, k = reference.rope_kv_write(q, k, cos, sin, q_norm, k_norm, rotary=rotary, rotary_begin=begin,
                                   interleaved=interleaved, norm=norm, eps=1e-6)
    if q_heads:
        assert_close(load(out["q_out"][:total], float_type), q, float_type)
        assert np.isnan(load(out["q_out"][total:], float_type)).all()
    if not kv_heads:
        assert out["pool"].tobytes() == paged.pool.tobytes()
        return
    start = 0
    for seq, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        for keys, x, factor in ((True, k, factors[0]), (False, v, factors[1])):
            got = paged.read(out["pool"], seq, keys, factor)
            rows = x[start:start + count]
            wanted, error = rows, 1e-6
            if kv_type == "fp8":
                wanted, error = from_e4m3(to_e4m3((rows / factor).astype(np.float32))) * np.float64(factor), 0.08
                assert (got[length - count:] == wanted).mean() > 0.97, "all but values that lie next to a tie"
            elif kv_type == "int8":
                error = 0.51 * np.abs(rows).max() / 127
            elif kv_type != "fp32":
                error = 2.0**-8 * np.abs(rows).max()
            assert np.abs(got[length - count:] - wanted).max() <= error
            assert not np.isfinite(got[:length - count]).any() or kv_type == "int8", "other tokens are not touched"
        start += count


@pytest.mark.parametrize("kv_type", ["fp32", "bf16", "fp16", "fp8", "int8"])
def test_types_of_the_cache(interpreter: Interpreter, kv_type: str) -> None:
    check(interpreter, kv_type)


def test_static_scales(interpreter: Interpreter) -> None:
    check(interpreter, "fp8", static=True)


@pytest.mark.parametrize("shape", [
    {"rotary": 16}, {"rotary": 16, "begin": 16}, {"rotary": 0}, {"interleaved": True}, {"norm": True},
    {"rotary": 12, "interleaved": True, "norm": True}, {"key_dim": 48, "value_dim": 32, "rotary": 24},
    {"key_dim": 32, "value_dim": 64}], ids=str)
def test_variants(interpreter: Interpreter, shape: dict[str, int]) -> None:
    check(interpreter, "fp32", **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_type", ["bf16", "fp8", "int8"])
def test_one_of_its_parts(interpreter: Interpreter, kv_type: str) -> None:
    """Rotation of q alone, and the write to the cache alone, of values that nothing turns."""
    check(interpreter, kv_type, kv_heads=0, norm=True)
    check(interpreter, kv_type, kv_heads=0, rotary=12, interleaved=True)
    check(interpreter, kv_type, q_heads=0, rotary=0, key_dim=48)
    check(interpreter, kv_type, q_heads=0, norm=True, static=True)


def test_bf16(interpreter: Interpreter) -> None:
    check(interpreter, "bf16", norm=True, float_type="bf16")


def test_refusals() -> None:
    p = Problem(8, 4, 2, 64, 64, 512, 512, 512, 64, "bf16", "fp8", 16, 4096, 8)
    assert "fp8 needs sm_89" in candidates(p, device("sm_86")).refused[0].reason
    assert candidates(p, device("sm_89")).legal


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_compiles(arch: str) -> None:
    kernels = [candidates(Problem(8, 32, 8, 128, 128, 6144, 6144, 6144, 128, "bf16", kv_type, 16, 65536, 256,
                                  norm_eps=1e-6), device(arch)).legal[0].launches[0].kernel
               for kv_type in ("bf16", "fp8", "int8")]
    kernels += [candidates(Problem(8, q_heads, kv_heads, 128, 128, 6144, 6144, 6144, 128, "bf16", "bf16", 16, 65536,
                                   256), device(arch)).legal[0].launches[0].kernel
                for q_heads, kv_heads in ((32, 0), (0, 8))]
    for kernel, code in compiled(kernels, arch).items():
        assert code.spill_stores == 0 and code.shared_bytes <= 1024, kernel.symbol

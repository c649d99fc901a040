"""Section "rates": linear and attention kernels at the sizes of an 8-billion-parameter llama, checked and timed.

For each problem the candidates that the cost model likes best: whether its first choice is the fastest is seen here.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.compiler.gpu.interpret import Binding
from ingot.compiler.gpu.select import expected, shortlist
from ingot.compiler.precision import find_precision
from ingot.compiler.targets import Gpu, Target
from ingot.plugins.attention import reference as attention_reference
from ingot.plugins.attention.tactics import Problem as Attention
from ingot.plugins.attention.tactics import candidates as attention_candidates
from ingot.plugins.gpu.floats import from_bf16, from_e4m3, to_bf16, to_e4m3
from ingot.plugins.gpu.kernel import Candidate, GpuKernel
from ingot.plugins.linear import gpu_reference
from ingot.plugins.linear.gpu_formats import FORMATS, Packed, nvfp4_blocks, nvfp4_factor, pack
from ingot.plugins.linear.gpu_reference import group_sums, quantize_tokens, values
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.tactics import Problem as Linear
from ingot.plugins.linear.tactics import candidates as linear_candidates

from .kernels import multiplies_fp8
from .runner import DeviceRunner, NoCode

ROWS = (1, 8, 64, 2048)
MATRICES = ((6144, 4096), (4096, 14336))
CONTEXTS = ((1, 1, 8192), (64, 1, 2048), (1, 2048, 2048))
"""(sequences, new tokens of each, length of each)."""
_CHOICES = 2
_PATTERN_ROWS = 256
"""Rows of a matrix that differ; the others repeat them, which no kernel can tell."""
_CHECKED_ROWS = 64
_CACHE_FACTOR = 4
"""Data of so many times the second-level cache are read in turn, so that they come from memory."""
_TOLERANCE, _FP8_TOLERANCE = 1.5e-2, 2.5e-2
"""Root of the mean square error relative to the result's: rounding to bf16, and sums in fp8 Tensor Cores."""


@dataclass(frozen=True)
class Rate:
    """seconds: of a launch; expected_s: what the cost model says; error: relative; problem: what is wrong, or ""."""

    name: str
    precision: str
    candidate: str
    rank: int
    seconds: float
    expected_s: float
    num_bytes: float
    flops: float
    error: float
    problem: str = ""


@dataclass(frozen=True)
class RateCase:
    """arrays(copies) -> arrays, and the bindings of each of so many copies; error(output) of the first copy."""

    name: str
    precision: str
    candidates: tuple[Candidate, ...]
    flops: float
    data_bytes: int
    arrays: Callable[[int], tuple[dict[str, np.ndarray], list[dict[str, Binding]]]]
    error: Callable[[dict[str, np.ndarray]], float]


def rate_cases(target: Target, matrices: tuple[tuple[int, int], ...] = MATRICES, rows: tuple[int, ...] = ROWS,
               contexts: tuple[tuple[int, int, int], ...] = CONTEXTS, heads: tuple[int, int, int] = (32, 8, 128),
               ) -> Iterator[RateCase]:
    """heads: of queries, of keys and values, and the size of each."""
    assert target.gpu is not None
    for precision in target.precisions:
        if precision not in ("fp32", "fp16"):
            for n, k in matrices:
                shared = _Matrix(precision, target.gpu, n, k)
                for m in rows:
                    yield _linear(shared, m)
    for kv_type in ("bf16", "fp8"):
        if kv_type == "bf16" or target.gpu.device.has_fp8:
            for context in contexts:
                yield _attention(target.gpu, kv_type, context, heads)


def rate_kernels(target: Target) -> list[GpuKernel]:
    """What the cases launch."""
    return [launch.kernel for case in rate_cases(target) for candidate in case.candidates
            for launch in candidate.launches]


def measure_rates(cases: Iterator[RateCase], runner: DeviceRunner, gpu: Gpu,
                  progress: Callable[[str], None] = lambda text: None, most_copies: int = 8) -> list[Rate]:
    found = []
    for case in cases:
        copies = max(1, min(most_copies, -(-int(_CACHE_FACTOR * gpu.l2_mib * 2**20) // case.data_bytes)))
        arrays, bindings = case.arrays(copies)
        for rank, candidate in enumerate(case.candidates):
            found.append(_measure(case, candidate, rank, arrays, bindings, runner, gpu))
            progress(f"{case.name}, {candidate.name}: {found[-1].problem or f'{1e6 * found[-1].seconds:.1f} us'}")
    return found


def _measure(case: RateCase, candidate: Candidate, rank: int, arrays: dict[str, np.ndarray],
             bindings: list[dict[str, Binding]], runner: DeviceRunner, gpu: Gpu) -> Rate:
    (launch,) = candidate.launches
    needed = {name for name, _ in launch.kernel.parameters}
    held_arrays = dict(arrays)
    if launch.scratch_bytes:
        held_arrays |= {"partial": np.full(launch.scratch_bytes // 4, np.nan, np.float32),
                        "arrived": np.zeros(launch.zeroed_bytes // 4, np.int32)}
    bound_names = {to[0] if isinstance(to, tuple) else to for one in bindings for to in one.values()}
    held_arrays = {name: array for name, array in held_arrays.items() if name in needed or name in bound_names}
    seconds, error, problem = float("nan"), float("nan"), ""
    try:
        outputs = runner.run([(launch, bindings[0])], held_arrays)
        error = case.error(outputs)
        allowed = _FP8_TOLERANCE if multiplies_fp8(launch.kernel) else _TOLERANCE
        if not error <= allowed:
            problem = f"wrong: relative error {error:.3g}, allowed {allowed}"
        with runner.context.temporary():
            held = runner.hold(held_arrays)
            seconds = runner.seconds([runner.bound(launch, one, held) for one in bindings])
    except NoCode as reason:
        problem = f"not compiled: {reason}"
    return Rate(case.name, case.precision, candidate.name, rank, seconds, expected(candidate, gpu, case.precision),
                candidate.cost.num_bytes, case.flops, error, problem)


class _Matrix:
    """One matrix in a precision, made when it is first needed, and 64 rows of inputs with their product."""

    def __init__(self, precision: str, gpu: Gpu, n: int, k: int) -> None:
        self.precision, self.gpu, self.n, self.k = precision, gpu, n, k
        scheme = GPU_SCHEMES[find_precision(precision, gpu).scheme("linear")]
        self.format, self.activation = scheme.format, scheme.activation
        self._made: tuple[Packed, np.ndarray, np.ndarray] | None = None

    def problem(self, m: int) -> Linear:
        return Linear(m, self.n, self.k, self.format, self.activation, token_scales=self.activation in ("fp8", "int8"),
                      scale=self.precision == "nvfp4")

    def made(self) -> tuple[Packed, np.ndarray, np.ndarray]:
        """(whole matrix, inputs float32 [64, K], products float64 [64, N])"""
        if self._made is None:
            rng = np.random.default_rng(self.k)
            part = pack(rng.standard_normal((_PATTERN_ROWS, self.k)).astype(np.float32), FORMATS[self.format])
            x = rng.standard_normal((_CHECKED_ROWS, self.k)).astype(np.float32)
            times = -(-self.n // _PATTERN_ROWS)

            def whole(array: np.ndarray | None, axis: int) -> np.ndarray | None:
                if array is None:
                    return None
                return np.take(np.concatenate([array] * times, axis=axis), np.arange(self.n), axis=axis)

            scales_axis = 1 if FORMATS[self.format].is_int4 else 0
            w = whole(part.w, 0)
            assert w is not None
            matrix = replace(part, w=w, w_scale=whole(part.w_scale, scales_axis), w_minimum=whole(part.w_minimum, 1))
            arrays, factor = self.inputs(x, part)
            given = {"x_scale": arrays["x_scale"]} if "x_scale" in arrays else {}
            small = replace(self.problem(_CHECKED_ROWS), n=_PATTERN_ROWS)
            product = gpu_reference.linear(small, arrays["x"], part, scale=factor, **given)  # type: ignore[arg-type]
            self._made = matrix, x, np.concatenate([product] * times, axis=1)[:, : self.n]
        return self._made

    def inputs(self, x: np.ndarray, packed: Packed) -> tuple[dict[str, np.ndarray], float]:
        """x as the kernel takes it, and the factor of the product."""
        if self.activation == "nvfp4":
            factor = nvfp4_factor(x)
            bits, scales = nvfp4_blocks(x, factor)
            return {"x": bits, "x_scale": scales}, factor * packed.factor
        if self.activation in ("fp8", "int8"):
            bits, scale = quantize_tokens(x, self.activation)
            sums = {"x_sum": group_sums(values(bits, self.activation), group)
                    } if (group := self.problem(1).sum_group) else {}
            return {"x": bits, "x_scale": scale, **sums}, 1.0
        return {"x": to_bf16(x)}, 1.0


def _linear(matrix: _Matrix, m: int) -> RateCase:
    p = matrix.problem(m)
    legal = linear_candidates(p, matrix.gpu.device).legal
    checked = min(m, _CHECKED_ROWS)

    def arrays(copies: int) -> tuple[dict[str, np.ndarray], list[dict[str, Binding]]]:
        packed, x, _ = matrix.made()
        rows = np.resize(x, (m, p.k))
        given, factor = matrix.inputs(rows, packed)
        found = {f"w{number}": packed.w for number in range(copies)} | given | {
            "sizes": np.array([m, 1, m, 0], np.int32), "scale": np.array([factor], np.float32),
            "y": np.full((m, p.n), 0x7FC0, np.uint16)}
        if packed.w_scale is not None:
            found["w_scale"] = packed.w_scale
        if packed.w_minimum is not None:
            found["w_minimum"] = packed.w_minimum
        return found, [{"w": f"w{number}"} for number in range(copies)]

    def error(outputs: dict[str, np.ndarray]) -> float:
        return relative(from_bf16(outputs["y"][:checked]), matrix.made()[2][:checked])

    return RateCase(f"linear {p.n} x {p.k}, {m} rows", matrix.precision,
                    shortlist(legal, matrix.gpu, matrix.precision, _CHOICES), 2.0 * m * p.n * p.k,
                    FORMATS[p.format].weight_bytes(p.n, p.k), arrays, error)


def _attention(gpu: Gpu, kv_type: str, context: tuple[int, int, int], heads: tuple[int, int, int]) -> RateCase:
    seqs, new, length = context
    q_heads, kv_heads, dim = heads
    size, element = 16, 2 if kv_type == "bf16" else 1
    part = kv_heads * size * dim * element
    blocks = -(-length // size)
    width = -(-blocks // 4) * 4
    p = Attention(seqs * new, seqs, q_heads, kv_heads, dim, dim, dim**-0.5, "bf16", kv_type, size, 2 * part, width,
                  context=length)
    legal = attention_candidates(p, gpu.device).legal
    pool_bytes = seqs * blocks * 2 * part
    checked = min(new, 8)
    rng = np.random.default_rng(length)
    q = to_bf16(rng.standard_normal((seqs * new, q_heads, dim)).astype(np.float32))
    values = rng.standard_normal(1 << 20).astype(np.float32)
    pattern = (to_bf16(values) if kv_type == "bf16" else to_e4m3(values)).view(np.uint8)
    table = rng.permutation(seqs * blocks).astype(np.int32).reshape(seqs, blocks)

    def pool() -> np.ndarray:
        return np.resize(np.concatenate([pattern, pattern[:4096]]), pool_bytes)

    def arrays(copies: int) -> tuple[dict[str, np.ndarray], list[dict[str, Binding]]]:
        tables = np.full((seqs, width), -1, np.int32)
        tables[:, :blocks] = table
        found = {
            "q": q, "out": np.full((seqs * new, q_heads, dim), 0x7FC0, np.uint16), "block_table": tables,
            "sizes": np.array([seqs * new, seqs, seqs, 0], np.int32),
            "query_start": np.arange(0, (seqs + 1) * new, new, dtype=np.int32),
            "context_len": np.full(seqs, length, np.int32),
            "positions": np.tile(np.arange(length - new, length, dtype=np.int32), seqs),
            "token_seq": np.repeat(np.arange(seqs, dtype=np.int32), new),
            **{f"pool{number}": pool() for number in range(copies)}}
        return found, [{"k_part": (f"pool{number}", 0), "v_part": (f"pool{number}", part)} for number in range(copies)]

    def error(outputs: dict[str, np.ndarray]) -> float:
        """Of the last tokens of the first sequence."""
        mine = pool().reshape(seqs * blocks, 2, kv_heads, size, dim * element)[table[0]]
        wide = from_bf16(mine.view(np.uint16)) if kv_type == "bf16" else from_e4m3(mine)
        k, v = (wide[:, which].transpose(0, 2, 1, 3).reshape(-1, kv_heads, dim)[:length].astype(np.float64)
                for which in (0, 1))
        wanted = attention_reference.attention(from_bf16(q[new - checked:new]).astype(np.float64), k, v,
                                               scale=dim**-0.5)
        return relative(from_bf16(outputs["out"][new - checked:new]), np.asarray(wanted))

    pairs = seqs * (new * length - new * (new - 1) // 2)
    return RateCase(f"attention, {seqs} x {new} tokens, context {length}", kv_type,
                    shortlist(legal, gpu, "bf16", _CHOICES), 4.0 * pairs * q_heads * dim, pool_bytes, arrays, error)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Root of the mean square of the difference over that of what is wanted; infinite if something is no number."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(np.square(wanted))))


def rows_of(rates: list[Rate]) -> list[dict[str, Any]]:
    return [dict(vars(rate)) for rate in rates]

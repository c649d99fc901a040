"""What the tests of kernels share: compile them for an instruction set, call them on numpy arrays.

Sets of other machines run under an emulator, where there is one. AMX runs anywhere with AVX512-BF16: where there are no
tile instructions, amx.h takes their place.
"""
from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS, CpuIsa, host_isas
from ingot.compiler.cpu.toolchain import Compiler, compile_shared
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.plugins.scheme import SCHEMES, Scheme
from ingot.runtime import amx

from .emulated import EmulatedKernels, emulator

PAIR_ISA = "x86-64-v4-bf16"
"""Where pairs of bfloat16 are multiplied."""

AMX_ISA = "x86-64-amx"

HOST_ISAS = [isa.name for isa in host_isas() if isa.name not in ("x86-64-v4-vnni", PAIR_ISA, AMX_ISA)]
"""Float kernels make no use of VNNI, nor of pairs of bfloat16 or tiles; the other sets each have code of their own."""

ALL_ISAS = [*HOST_ISAS, *(
    pytest.param(isa.name, marks=[pytest.mark.slow, pytest.mark.skipif(
        emulator(isa.machine) is None, reason=f"no emulator for {isa.machine} (qemu-user-static) on this machine")])
    for isa in ISAS.values() if isa.machine == "aarch64" != platform.machine())]
"""And, among the slow tests, those that only an emulator can run here."""

needs_pairs = pytest.mark.skipif(PAIR_ISA not in {isa.name for isa in host_isas()},
                                 reason="this machine has no AVX512-BF16")

MATRIX_ISAS = [*ALL_ISAS, *(isa.name for isa in host_isas() if isa.name not in (*HOST_ISAS, PAIR_ISA, AMX_ISA)),
               pytest.param(PAIR_ISA, marks=needs_pairs)]
"""The products of integers have code of their own for VNNI, attention and matrices for pairs of bfloat16."""

TILE_ISAS = [*MATRIX_ISAS, pytest.param(AMX_ISA, marks=needs_pairs)]
"""And matrices for AMX."""

_AMX = Path(__file__).with_name("amx.h")


def runnable(name: str) -> CpuIsa:
    """The instruction set, or, of AMX where it is missing, what computes the same on this machine."""
    isa = ISAS[name]
    if name != AMX_ISA or isa in host_isas():
        return isa
    pairs = ISAS[PAIR_ISA]
    return replace(isa, required=pairs.required, zig_cpu=pairs.zig_cpu, march=pairs.march,
                   extra_flags=(*isa.extra_flags, "-include", str(_AMX)))


def schemes_of(isa: str) -> list[Scheme]:
    """Those that an instruction set has kernels for."""
    return [scheme for scheme in SCHEMES.values() if scheme.act_bits != 16 or ISAS[isa].multiplies_pairs]


def require_scheme(isa: str, scheme: Scheme) -> None:
    if scheme.name in SCHEMES and SCHEMES[scheme.name] not in schemes_of(isa):
        pytest.skip(f"{isa} does not multiply pairs of bfloat16")


_COUNTS = ("num_tokens", "num_seqs", "num_logits", "max_blocks")
_ARRAYS = ("token_ids", "positions", "token_seq", "logit_rows", "query_start", "context_len", "adapters")


class StepStruct(ctypes.Structure):
    """ingot_step of ingot_kernel.h."""

    _fields_ = [*((name, ctypes.c_int32) for name in _COUNTS),
                *((name, ctypes.c_void_p) for name in (*_ARRAYS, "sampling"))]


class Step:
    """A step of sequences given as (context length after the step, new tokens), their blocks in random order.

    adapters: the slot of each sequence's LoRA adapter, by default none.
    num_blocks: so many blocks a cache must have. block_table: behind a sequence's blocks -1; more columns than needed.
    """

    def __init__(self, sequences: Sequence[tuple[int, int]], block_size: int = 16, seed: int = 0,
                 logit_rows: Sequence[int] = (), adapters: Sequence[int] = ()) -> None:
        lengths = [length for length, _ in sequences]
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(counts) + 1
        order = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        self.block_table = np.full((len(lengths), max(counts, default=0) + 1), -1, np.int32)
        for row, start, count in zip(self.block_table, np.cumsum([0, *counts]), counts, strict=False):
            row[:count] = order[start:start + count]
        self.context_len = np.array(lengths, np.int32)
        self.adapters = np.array(adapters or [-1] * len(lengths), np.int32)
        self.query_start = np.cumsum([0, *(new for _, new in sequences)]).astype(np.int32)
        self.positions = np.array([p for n, new in sequences for p in range(n - new, n)], np.int32)
        self.token_seq = np.repeat(np.arange(len(sequences)), [new for _, new in sequences]).astype(np.int32)
        self.token_ids = np.zeros_like(self.positions)
        self.logit_rows = np.array(logit_rows, np.int32)
        self.num_tokens = len(self.positions)

    @classmethod
    def of_tokens(cls, tokens: int, logit_rows: Sequence[int] = ()) -> Step:
        return cls([(tokens, tokens)], logit_rows=logit_rows)

    @property
    def struct(self) -> StepStruct:
        arrays = {name: getattr(self, name).ctypes.data for name in _ARRAYS}
        return StepStruct(num_tokens=self.num_tokens, num_seqs=len(self.context_len), num_logits=len(self.logit_rows),
                          max_blocks=self.block_table.shape[1], **arrays)


class Library:
    """The kernels, compiled for one instruction set into one shared object."""

    def __init__(self, kernels: Iterable[CpuKernel], isa: str, folder: Path, compiler: Compiler = "zig") -> None:
        self._emulated = None
        self.isa = isa
        if ISAS[isa].machine != platform.machine():
            self._emulated = EmulatedKernels(kernels, ISAS[isa], folder)
            return
        if amx.FEATURE in runnable(isa).required:
            amx.request_tiles(isa)
        path = folder / f"{isa}-{compiler}.so"
        compile_shared({"kernels.c": translation_unit(kernels)}, runnable(isa), [INCLUDE_DIR], path, compiler)
        self._library = ctypes.CDLL(str(path))

    def run(self, kernel: CpuKernel, step: Step, *args: np.ndarray | None, workers: int = 1) -> None:
        """One launch: each worker's part in turn, the last one first (any order must do)."""
        if self._emulated:
            counts = [step.num_tokens, len(step.context_len), len(step.logit_rows), step.block_table.shape[1]]
            self._emulated.run(kernel.symbol, counts, [getattr(step, name) for name in _ARRAYS], args, workers)
            return
        function = getattr(self._library, kernel.symbol)
        pointers = (ctypes.c_void_p * len(args))(*(None if a is None else a.ctypes.data for a in args))
        struct = step.struct
        for worker in reversed(range(workers)):
            function(ctypes.byref(struct), pointers, worker, workers)


def aligned(shape: Sequence[int], dtype: type = np.float32, fill: float | None = np.nan) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes, as all buffers of an engine do; filled, by default with NaN."""
    itemsize = np.dtype(dtype).itemsize
    size = int(np.prod(shape)) * itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: np.ndarray = raw[start:start + size].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill if np.dtype(dtype).kind == "f" else 0
    return array


KV_ELEMENTS: dict[str, type] = {"f32": np.float32, "bf16": np.uint16, "i8": np.int8}
"""kv_dtype of a kernel -> numpy type of the cache; i8 has scales beside it."""


def kv_parts(heads: int, block_size: int, dims: tuple[int, int], dtype: type) -> tuple[list[int], int]:
    """A layer's place in blocks that hold more: where its keys and its values begin, then their scales, and the bytes
    of a block."""
    begins, at = [], 192
    sizes = [heads * block_size * dim * np.dtype(dtype).itemsize for dim in dims]
    for size in [*sizes, *([4 * heads * block_size] * 2 if dtype is np.int8 else [])]:
        begins.append(at)
        at += -(-size // 64) * 64 + 64
    return begins, at


def kv_cache(num_blocks: int, heads: int, block_size: int, dims: tuple[int, int], dtype: type) -> list[np.ndarray]:
    """Blocks laid out by kv_parts, as bytes [num_blocks, block_bytes], the keys and values in them, [num_blocks,
    heads, block_size, dim], and their scales if there are any. All is NaN, as float32 and as bfloat16, the block before
    the first too, to which -1 leads.
    """
    begins, block_bytes = kv_parts(heads, block_size, dims, dtype)
    bits = np.full((num_blocks + 1) * block_bytes // 2, 0x7FFF, np.uint16)
    blocks = placed(bits).view(np.uint8).reshape(num_blocks + 1, block_bytes)[1:]
    sizes = [heads * block_size * dim * np.dtype(dtype).itemsize for dim in dims]
    views: list[np.ndarray] = [
        blocks[:, begin:begin + size].view(dtype).reshape(num_blocks, heads, block_size, dim)
        for begin, size, dim in zip(begins[:2], sizes, dims, strict=True)]
    size = 4 * heads * block_size
    views += [blocks[:, begin:begin + size].view(np.float32).reshape(num_blocks, heads, block_size)
              for begin in begins[2:]]
    assert all(np.shares_memory(view, blocks) for view in views if view.size)
    return [blocks, *views]


def to_i8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8, and the scale of each row (last dimension): symmetric, to nearest even, in float32."""
    largest = np.abs(values).max(axis=-1).astype(np.float32)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(values * inverse[..., None]).astype(np.int8), largest / np.float32(127)


def placed(values: np.ndarray) -> np.ndarray:
    """A copy of the values at an aligned address."""
    out = aligned(values.shape, values.dtype.type, None)
    out[...] = values
    return out


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error of a row (last dimension) relative to that row's norm."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} of {got.size} elements are not finite"
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float(np.max(difference / np.maximum(np.linalg.norm(want, axis=-1), 1e-30), initial=0.0))

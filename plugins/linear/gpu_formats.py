"""How GPU kernels hold the weights of a linear layer, from float matrices and back.

| format | w | w_scale | w_zero |
|---|---|---|---|
| bf16, fp16, fp32 | [N, K] | | |
| fp8 | e4m3 [N, K] | f32 [N] | |
| fp8_block | e4m3 [N, K], K a multiple of 128 | f32 [ceil(N / 128), K / 128] | |
| int8 | i8 [N, K] | f32 [N] | |
| int4 | u8 [N, Kp / 2], Kp = K up to a multiple of 128 | f16 [Kp / 128, N] | u8 [Kp / 128, N], or none: 8 |
| nvfp4 | u8 [N, K / 2], low nibble the even channel | e4m3 [N, K / 16] | |

int4: byte j of a group of 128 channels holds channel j in its low nibble and channel j + 64 in its high one, so that a
kernel widens a tile into two dense halves. A weight is (nibble - zero) * scale. nvfp4 has one more float32 factor for
the whole matrix.

What the activations are is told apart: `Format.activations` lists what the kernels multiply a format with. Those of
fp8_block have a scale for every 128 channels of a token.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..gpu.floats import E2M1_MAX, E4M3_MAX, from_bf16, from_e2m1, from_e4m3, to_bf16, to_e2m1, to_e4m3
from .compensate import Feedback, compensated_rows, round_compensated, round_plain
from .grids import E2M1Grid, ZeroGrid

GROUP = 128
"""Channels of K that share a scale in int4."""

BLOCK = 16
"""Channels of K that share a scale in nvfp4."""


@dataclass(frozen=True)
class Format:
    """weights      Triton's element type of w
    bits         of a stored weight
    scales       Triton's element type of w_scale, or ""
    channels_per_scale  0: one scale an output channel
    rows_per_scale  output channels that share a scale
    activations  types that x may have in the matrix instruction
    """

    name: str
    weights: str
    bits: int
    scales: str = ""
    channels_per_scale: int = 0
    activations: tuple[str, ...] = ()
    rows_per_scale: int = 1

    def stored_row(self, k: int) -> int:
        """Stored elements of a row of k channels."""
        if self.name == "int4":
            return -(-k // GROUP) * GROUP // 2
        return k // 2 if self.name == "nvfp4" else k

    def weight_bytes(self, n: int, k: int, zero_points: bool = False) -> int:
        """Of w, w_scale and w_zero."""
        element = {"fp32": 4, "bf16": 2, "fp16": 2}.get(self.weights, 1)
        scale_bytes = {"": 0, "fp32": 4, "fp16": 2, "fp8e4nv": 1}[self.scales]
        num_scales = -(-k // self.channels_per_scale) if self.channels_per_scale else 1
        scales = -(-n // self.rows_per_scale) * num_scales * (scale_bytes + zero_points)
        return n * self.stored_row(k) * element + scales


FORMATS = {f.name: f for f in (
    Format("fp32", "fp32", 32, activations=("fp32",)),
    Format("bf16", "bf16", 16, activations=("bf16",)),
    Format("fp16", "fp16", 16, activations=("fp16",)),
    Format("fp8", "fp8e4nv", 8, "fp32", activations=("fp8",)),
    Format("fp8_block", "fp8e4nv", 8, "fp32", GROUP, activations=("fp8",), rows_per_scale=GROUP),
    Format("int8", "i8", 8, "fp32", activations=("int8",)),
    Format("int4", "u8", 4, "fp16", GROUP, activations=("bf16", "fp16", "fp8", "int8")),
    Format("nvfp4", "u8", 4, "fp8e4nv", BLOCK, activations=("nvfp4",)),
)}

ELEMENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv", "int8": "i8", "nvfp4": "u8"}
"""Activation type -> Triton's element type."""


@dataclass(frozen=True)
class Packed:
    """Arrays as the table above tells, bits for types that numpy lacks; factor of the whole matrix (nvfp4), else 1."""

    format: Format
    k: int
    w: np.ndarray
    w_scale: np.ndarray | None = None
    w_zero: np.ndarray | None = None
    factor: float = 1.0


def pack(w: np.ndarray, format: Format, *, zero_points: bool = False, factor: float | None = None,
         inputs: Feedback | None = None) -> Packed:
    """Round w float32 [N, K] to nearest, or, fp8 and four bits, for the least error with these inputs.

    The values of rows are independent, in fp8_block of each 128 of them, but for nvfp4's factor: give it when w is a
    part of the matrix. zero_points: int4 with a zero point a group, for the span of its weights.
    """
    k = w.shape[1]
    if format.name == "fp32":
        return Packed(format, k, np.ascontiguousarray(w, np.float32))
    if format.name == "bf16":
        return Packed(format, k, to_bf16(w))
    if format.name == "fp16":
        return Packed(format, k, w.astype(np.float16))
    if format.name == "fp8":
        scale = _scale(np.abs(w).max(axis=1), E4M3_MAX)
        divisor = _divisor(scale)
        if inputs is not None:
            w = compensated_rows(w, lambda x: from_e4m3(to_e4m3(x / divisor)) * divisor, inputs)
        return Packed(format, k, to_e4m3(w / divisor[:, None]), scale)
    if format.name == "fp8_block":
        scale = _scale(_blocks_of(np.abs(w)).max(axis=(1, 3)), E4M3_MAX)
        return Packed(format, k, to_e4m3(w / spread(_divisor(scale), w.shape)), scale)
    if format.name == "int8":
        scale = _scale(np.abs(w).max(axis=1), np.float32(127))
        return Packed(format, k, np.rint(w / _divisor(scale)[:, None]).clip(-127, 127).astype(np.int8), scale)
    if format.name == "int4":
        return _pack_int4(w, format, zero_points, inputs)
    assert format.name == "nvfp4" and k % BLOCK == 0, (format, w.shape)
    return _pack_nvfp4(w, format, factor if factor is not None else nvfp4_factor(w), inputs)


def unpack(packed: Packed) -> np.ndarray:
    """The float32 weights [N, K] that the arrays stand for."""
    w, scale = packed.w, packed.w_scale
    name = packed.format.name
    if name in ("fp32", "fp16"):
        return w.astype(np.float32)
    if name == "bf16":
        return from_bf16(w)
    assert scale is not None
    if name == "fp8":
        return from_e4m3(w) * scale[:, None]
    if name == "fp8_block":
        return from_e4m3(w) * spread(scale, w.shape)
    if name == "int8":
        return w.astype(np.float32) * scale[:, None]
    if name == "int4":
        groups = w.reshape(len(w), -1, GROUP // 2)
        q = np.concatenate([groups & 15, groups >> 4], axis=2).astype(np.float32)
        zero = np.float32(8) if packed.w_zero is None else packed.w_zero.T.astype(np.float32)[..., None]
        return ((q - zero) * scale.T.astype(np.float32)[..., None]).reshape(len(w), -1)[:, :packed.k]
    values = from_e2m1(unpack_nibbles(w)).reshape(len(w), -1, BLOCK) * from_e4m3(scale)[..., None]
    return (values * np.float32(packed.factor)).reshape(len(w), -1)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of blocks of 128 x 128, one for each element of a matrix of that shape."""
    return scale.repeat(GROUP, axis=0)[:shape[0]].repeat(GROUP, axis=1)[:, :shape[1]]


def _blocks_of(w: np.ndarray) -> np.ndarray:
    """[N, K] -> [ceil(N / 128), 128, K / 128, 128], zero beyond N."""
    whole = np.zeros((-(-len(w) // GROUP) * GROUP, w.shape[1]), w.dtype)
    whole[:len(w)] = w
    return whole.reshape(-1, GROUP, w.shape[1] // GROUP, GROUP)


def nvfp4_factor(x: np.ndarray) -> float:
    """The factor that lets the largest block scale be the largest e4m3."""
    most = float(np.abs(x).max(initial=0))
    return float(np.float32(most / float(E4M3_MAX * E2M1_MAX))) if most else 1.0


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [.., K] in 0..15 -> [.., K / 2], the even one low."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def nvfp4_blocks(x: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [M, K] -> (packed u8 [M, K / 2], e4m3 bits [M, K / 16]) with x about value * block scale * factor."""
    blocks = x.reshape(len(x), -1, BLOCK) / np.float32(factor)
    scale = to_e4m3(np.abs(blocks).max(axis=2) / E2M1_MAX)
    codes = to_e2m1(blocks / _divisor(from_e4m3(scale))[..., None])
    return pack_nibbles(codes.reshape(len(x), -1)), scale


def _pack_int4(w: np.ndarray, format: Format, zero_points: bool, inputs: Feedback | None) -> Packed:
    k = w.shape[1]
    padded = np.zeros((len(w), -(-k // GROUP) * GROUP), np.float32)
    padded[:, :k] = w
    grid = ZeroGrid(GROUP, zero_points)
    codes, grids = round_plain(padded, grid) if inputs is None else round_compensated(padded, grid, inputs)
    q, half = codes.reshape(len(w), -1, GROUP), GROUP // 2
    packed = (q[..., :half] | (q[..., half:] << 4)).reshape(len(w), -1)
    scale, *zero = (np.ascontiguousarray(array.T) for array in grids)
    return Packed(format, k, packed, scale, zero[0] if zero else None)


def _pack_nvfp4(w: np.ndarray, format: Format, factor: float, inputs: Feedback | None) -> Packed:
    grid = E2M1Grid(factor)
    codes, (scale,) = round_plain(w, grid) if inputs is None else round_compensated(w, grid, inputs)
    return Packed(format, w.shape[1], pack_nibbles(codes), scale, factor=factor)


def _scale(most: np.ndarray, largest: np.float32) -> np.ndarray:
    return (most / largest).astype(np.float32)


def _divisor(scale: np.ndarray) -> np.ndarray:
    """What is zero all over stays zero."""
    return np.where(scale > 0, scale, np.float32(1))

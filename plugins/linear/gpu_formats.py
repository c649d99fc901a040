"""How GPU kernels hold the weights of a linear layer, from float matrices and back.

| format | w | w_scale | w_minimum |
|---|---|---|---|
| bf16, fp16, fp32 | [N, K] | | |
| fp8 | e4m3 [N, K] | f32 [N] | |
| fp8_block | e4m3 [N, K], K a multiple of 128 | f32 [ceil(N / 128), K / 128] | |
| int8 | i8 [N, K] | f32 [N] | |
| int4, int4_g64, int4_g32 | u8 [N, Kp / 2] | f16 [Kp / G, N] | |
| int4_g128m, int4_g64m, int4_g32m | u8 [N, Kp / 2] | f16 [Kp / G, N] | f16 [Kp / G, N] |
| nvfp4 | u8 [N, K / 2], low nibble the even channel | e4m3 [N, K / 16] | |

int4 has a scale for G channels, 128 unless the name says otherwise: a weight is (nibble - 8) * scale, or, where groups
have minimums, nibble * scale + minimum. Kp is K up to a multiple of 128, of 64 for groups of 32; a last group that K
does not fill holds fewer channels. Byte j of such a step holds channel j in its low nibble and, in its high one, the
channel half a step further, so that a kernel widens a tile into two dense halves, each of one group. nvfp4 has one more
float32 factor for the whole matrix.

What the activations are is told apart: `Format.activations` lists what the kernels multiply a format with. Those of
fp8_block have a scale for every 128 channels of a token.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..gpu.floats import E2M1_MAX, E4M3_MAX, from_bf16, from_e2m1, from_e4m3, to_bf16, to_e2m1, to_e4m3
from .compensate import Feedback, compensated_rows, dequantized, round_compensated, round_plain
from .grids import E2M1Grid, GridFormat, MinimumGrid, SymmetricGrid

GROUP = 128
"""Channels of K that share a scale in fp8_block, and in int4 unless something else is asked for."""

GROUPS = (32, 64, 128)
"""Of int4."""

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
    minimum      each scale has a minimum beside it
    """

    name: str
    weights: str
    bits: int
    scales: str = ""
    channels_per_scale: int = 0
    activations: tuple[str, ...] = ()
    rows_per_scale: int = 1
    minimum: bool = False

    @property
    def is_int4(self) -> bool:
        return self.bits == 4 and self.name != "nvfp4"

    @property
    def step(self) -> int:
        """int4: channels whose two halves share bytes."""
        assert self.is_int4, self
        return min(2 * self.channels_per_scale, GROUP)

    @property
    def grid(self) -> GridFormat:
        """int4: how the weights of a group are rounded."""
        assert self.is_int4, self
        return MinimumGrid(self.channels_per_scale) if self.minimum else SymmetricGrid(self.channels_per_scale)

    def stored_row(self, k: int) -> int:
        """Stored elements of a row of k channels."""
        if self.is_int4:
            return -(-k // self.step) * self.step // 2
        return k // 2 if self.name == "nvfp4" else k

    def num_scales(self, k: int) -> int:
        """Of a row of k channels."""
        if self.is_int4:
            return 2 * self.stored_row(k) // self.channels_per_scale
        return -(-k // self.channels_per_scale) if self.channels_per_scale else 1

    def weight_bytes(self, n: int, k: int) -> int:
        """Of w, w_scale and w_minimum."""
        element = {"fp32": 4, "bf16": 2, "fp16": 2}.get(self.weights, 1)
        scale_bytes = {"": 0, "fp32": 4, "fp16": 2, "fp8e4nv": 1}[self.scales] * (1 + self.minimum)
        return n * self.stored_row(k) * element + -(-n // self.rows_per_scale) * self.num_scales(k) * scale_bytes


def int4_format(group: int, minimum: bool) -> str:
    """The name of the format with these groups."""
    assert group in GROUPS, group
    return "int4" if (group, minimum) == (GROUP, False) else f"int4_g{group}{'m' if minimum else ''}"


FORMATS = {f.name: f for f in (
    Format("fp32", "fp32", 32, activations=("fp32",)),
    Format("bf16", "bf16", 16, activations=("bf16",)),
    Format("fp16", "fp16", 16, activations=("fp16",)),
    Format("fp8", "fp8e4nv", 8, "fp32", activations=("fp8",)),
    Format("fp8_block", "fp8e4nv", 8, "fp32", GROUP, activations=("fp8",), rows_per_scale=GROUP),
    Format("int8", "i8", 8, "fp32", activations=("int8",)),
    *(Format(int4_format(group, minimum), "u8", 4, "fp16", group, ("bf16", "fp16", "fp8", "int8"), minimum=minimum)
      for minimum in (False, True) for group in reversed(GROUPS)),
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
    w_minimum: np.ndarray | None = None
    factor: float = 1.0


def pack(w: np.ndarray, format: Format, *, factor: float | None = None, inputs: Feedback | None = None) -> Packed:
    """Round w float32 [N, K] to nearest, or, fp8, int8 and four bits, for the least error with these inputs.

    The values of rows are independent, in fp8_block of each 128 of them, but for nvfp4's factor: give it when w is a
    part of the matrix.
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
        divisor = _divisor(scale)
        if inputs is not None:
            w = compensated_rows(w, lambda x: np.rint(x / divisor).clip(-127, 127) * divisor, inputs)
        return Packed(format, k, np.rint(w / divisor[:, None]).clip(-127, 127).astype(np.int8), scale)
    if format.is_int4:
        return _pack_int4(w, format, inputs)
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
    if packed.format.is_int4:
        grids = tuple(array.T for array in (scale, packed.w_minimum) if array is not None)
        return dequantized(int4_codes(packed), grids, packed.format.grid)[:, :packed.k]
    values = from_e2m1(unpack_nibbles(w)).reshape(len(w), -1, BLOCK) * from_e4m3(scale)[..., None]
    return (values * np.float32(packed.factor)).reshape(len(w), -1)


def int4_codes(packed: Packed) -> np.ndarray:
    """u8 [N, Kp] in 0..15."""
    steps = packed.w.reshape(len(packed.w), -1, packed.format.step // 2)
    return np.concatenate([steps & 15, steps >> 4], axis=2).reshape(len(packed.w), -1)


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


def _pack_int4(w: np.ndarray, format: Format, inputs: Feedback | None) -> Packed:
    k, grid, step = w.shape[1], format.grid, format.step
    # Channels that fill up a group repeat its last one, which lies within the group's span.
    in_groups = np.pad(w, ((0, 0), (0, -k % grid.group)), mode="edge")
    codes, grids = round_plain(in_groups, grid) if inputs is None else round_compensated(in_groups, grid, inputs)
    missing = -k % step - -k % grid.group
    q = np.pad(codes, ((0, 0), (0, missing))).reshape(len(w), -1, step)
    packed = (q[..., :step // 2] | (q[..., step // 2:] << 4)).reshape(len(w), -1)
    scale, *minimum = (np.ascontiguousarray(np.pad(array, ((0, 0), (0, missing // grid.group))).T) for array in grids)
    return Packed(format, k, packed, scale, minimum[0] if minimum else None)


def _pack_nvfp4(w: np.ndarray, format: Format, factor: float, inputs: Feedback | None) -> Packed:
    grid = E2M1Grid(factor)
    codes, (scale,) = round_plain(w, grid) if inputs is None else round_compensated(w, grid, inputs)
    return Packed(format, w.shape[1], pack_nibbles(codes), scale, factor=factor)


def _scale(most: np.ndarray, largest: np.float32) -> np.ndarray:
    return (most / largest).astype(np.float32)


def _divisor(scale: np.ndarray) -> np.ndarray:
    """What is zero all over stays zero."""
    return np.where(scale > 0, scale, np.float32(1))

"""The meaning of the GPU's linear layer in numpy: integers and scales to the bit, sums in float64."""
from __future__ import annotations

from math import erf

import numpy as np

from ..gpu.floats import E2M1_MAX, E4M3_MAX, from_bf16, from_e2m1, from_e4m3, to_bf16, to_e4m3
from .gpu_formats import BLOCK, GROUP, Packed, nvfp4_blocks, unpack, unpack_nibbles
from .tactics import Problem


def quantize_tokens(x: np.ndarray, to: str) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [M, K] -> (bits u8 e4m3 or i8 [M, K], scale float32 [M]): one scale a token."""
    most = np.abs(x).max(axis=1)
    largest = E4M3_MAX if to == "fp8" else np.float32(127)
    inverse = np.divide(largest, most, out=np.zeros_like(most), where=most > 0)
    scaled = x * inverse[:, None]
    return (to_e4m3(scaled) if to == "fp8" else np.rint(scaled).astype(np.int8)), most / largest


def quantize_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [M, K] -> (e4m3 bits [M, K], scale float32 [M, K / 128]): one scale for 128 channels of a token."""
    bits, scale = quantize_tokens(x.reshape(-1, GROUP), "fp8")
    return bits.reshape(x.shape), scale.reshape(len(x), -1)


def token_factors(x: np.ndarray) -> np.ndarray:
    """float32 [M]: the factor of each token in nvfp4, which lets its largest block scale be the largest e4m3."""
    most = np.abs(x).max(axis=1)
    return np.where(most > 0, most / (E4M3_MAX * E2M1_MAX), np.float32(1)).astype(np.float32)


def nvfp4_tokens(x: np.ndarray) -> np.ndarray:
    """What rows float32 [M, K] are worth in e2m1 with a scale for 16 channels and a factor a token."""
    factor = token_factors(x)
    packed, scale = nvfp4_blocks(x / factor[:, None], 1.0)
    blocks = from_e2m1(unpack_nibbles(packed)).reshape(len(x), -1, BLOCK) * from_e4m3(scale)[..., None]
    return (blocks.reshape(x.shape) * factor[:, None]).astype(np.float32)


def group_sums(x: np.ndarray, group: int) -> np.ndarray:
    """What quantized activations [M, K] are worth without their scale -> float16 [M, ceil(K / group)]: the sums of
    groups of channels."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    return padded.reshape(len(x), -1, group).sum(axis=2).astype(np.float16)


def values(x: np.ndarray, to: str) -> np.ndarray:
    """What the stored activations are worth without their scale, float64."""
    if to == "bf16":
        return from_bf16(x).astype(np.float64)
    return (from_e4m3(x) if to == "fp8" else x).astype(np.float64)


def linear(problem: Problem, x: np.ndarray, packed: Packed, *, x_scale: np.ndarray | None = None, scale: float = 1.0,
           bias: np.ndarray | None = None, residual: np.ndarray | None = None, norm_weight: np.ndarray | None = None,
           y_scale: float | None = None) -> np.ndarray:
    """float64 [M, N] before it is rounded to the type of y. Arrays as the kernel takes them, bits where numpy lacks
    the type."""
    p = problem
    weights = unpack(packed).astype(np.float64)
    form = packed.format
    if form.is_int4 and p.activation in ("bf16", "fp16"):  # dequantized to the type of the activations
        weights = from_bf16(to_bf16(weights)).astype(np.float64) if p.activation == "bf16" else \
            weights.astype(np.float16).astype(np.float64)
    if p.activation == "nvfp4":
        weights = weights / packed.factor  # it is part of `scale`
    if p.x_type == "nvfp4":
        assert x_scale is not None
        blocks = from_e2m1(unpack_nibbles(x)).reshape(len(x), -1, 16).astype(np.float64)
        rows = (blocks * from_e4m3(x_scale)[..., None]).reshape(len(x), -1)
    else:
        rows = values(x, p.float_type if p.quantizes else p.activation)
        if p.norm_eps is not None:
            rows = rows * norm_weight
        if p.quantizes and p.format == "fp8_block":
            bits, group_scale = quantize_groups(rows.astype(np.float32))
            rows = values(bits, "fp8") * group_scale.repeat(GROUP, axis=1)
        elif p.quantizes and p.activation == "nvfp4":
            rows = nvfp4_tokens(rows.astype(np.float32)).astype(np.float64)
        elif p.quantizes:
            bits, token_scale = quantize_tokens(rows.astype(np.float32), p.activation)
            rows = values(bits, p.activation) * token_scale[:, None]
        elif p.norm_eps is not None:
            rows = from_bf16(to_bf16(rows)).astype(np.float64) if p.activation == "bf16" else rows
        if x_scale is not None:
            rows = rows * (x_scale.repeat(GROUP, axis=1) if p.format == "fp8_block" else x_scale[:, None])
        if p.norm_eps is not None:
            wide = values(x, p.float_type)
            rows = rows / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + p.norm_eps)
    y = rows @ weights.T * scale
    if p.sum_group:
        y = y + _rounding_of_sums(x, packed, p.activation) * (1 if x_scale is None else x_scale[:, None]) * scale
    if bias is not None:
        y = y + bias
    if p.gated:
        y = gate(y[:, :p.n], y[:, p.n:], p.gated)
    if residual is not None:
        y = y + values(residual, p.float_type)
    return y if y_scale is None else y / y_scale


def _rounding_of_sums(x: np.ndarray, packed: Packed, activation: str) -> np.ndarray:
    """float64 [M, N]: what it changes that the sums of activations, and what they are multiplied with, the middle of
    a group's grid, are float16 in the kernel."""
    assert packed.w_scale is not None and packed.w_minimum is not None
    wide, group = values(x, activation), packed.format.channels_per_scale
    padded = np.pad(wide, ((0, 0), (0, -wide.shape[1] % group)))
    exact = padded.reshape(len(x), -1, group).sum(axis=2)
    middle = packed.w_minimum.astype(np.float64) + 8 * packed.w_scale.astype(np.float64)
    middle, sums = middle[:exact.shape[1]], group_sums(wide, group).astype(np.float64)
    return np.asarray(sums @ middle.astype(np.float32).astype(np.float16).astype(np.float64) - exact @ middle)


def gate(v: np.ndarray, other: np.ndarray, kind: str) -> np.ndarray:
    """float64."""
    if kind == "clamped_swiglu":
        v = np.minimum(v, 7)
        return v / (1 + np.exp(-1.702 * v)) * (other.clip(-7, 7) + 1)
    return activate(v, kind) * other


def activate(v: np.ndarray, kind: str) -> np.ndarray:
    """float64."""
    if kind == "silu":
        return v / (1 + np.exp(-v))
    if kind == "gelu_tanh":
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    if kind == "gelu":
        return 0.5 * v * (1 + np.vectorize(erf)(v / np.sqrt(2)))
    assert kind == "relu", kind
    return np.maximum(v, 0)

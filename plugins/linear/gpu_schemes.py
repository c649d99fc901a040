"""How a linear layer of a GPU engine holds its weights and takes its inputs, and what both are worth in numpy.

A scheme is a format of weights (gpu_formats.py) and the type of activations in the matrix instruction. Activations of
eight and four bits are quantized in every step, by a scale a token (fp8_block: a scale for 128 channels of a token).

The schemes of int4 have the names of their activations, and of their groups behind these: "w4a8_fp8" has symmetric
groups of 128 channels, "w4a8_fp8_g32m" groups of 32 with a minimum each.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..gpu.floats import from_bf16, from_e4m3, to_bf16
from .compensate import Feedback
from .gpu_formats import (
    FORMATS,
    GROUPS,
    Format,
    int4_format,
    pack,
    unpack,
)
from .gpu_reference import nvfp4_tokens, quantize_groups, quantize_tokens

QUANTIZED = ("fp8", "int8", "nvfp4")
"""Types of activations that a step has to make first."""


@dataclass(frozen=True)
class GpuScheme:
    """name        as the graph has it; it tells weights and inputs apart from those of CPU schemes of a like name
    format      key of gpu_formats.FORMATS
    activation  type of the inputs in the matrix instruction
    """

    name: str
    format: str
    activation: str

    def __post_init__(self) -> None:
        assert self.activation in FORMATS[self.format].activations, self

    @property
    def weights(self) -> Format:
        return FORMATS[self.format]

    @property
    def quantized(self) -> str:
        """What the inputs are quantized to: "fp8", "int8", "nvfp4", "fp8_block"; "" if they stay floating. "int8_sum32"
        where weights have a minimum for 32 channels: the sums of a token's integers over these come beside them."""
        if self.format == "fp8_block":
            return "fp8_block"
        if self.activation in ("fp8", "int8") and self.weights.minimum:
            return f"{self.activation}_sum{self.weights.channels_per_scale}"
        return self.activation if self.activation in QUANTIZED else ""

    def stored(self, w: np.ndarray, inputs: Feedback | None = None) -> np.ndarray:
        """What weights float32 [.., N, K] are worth once they are packed; each matrix for itself. inputs: as pack's."""
        if self.format == "fp32":
            return w
        if w.ndim > 2:
            return np.stack([self.stored(matrix, inputs) for matrix in w])
        values = unpack(pack(np.ascontiguousarray(w, np.float32), self.weights, inputs=inputs)).astype(np.float32)
        if self.weights.is_int4 and self.activation in ("bf16", "fp16"):  # dequantized to that type
            return from_bf16(to_bf16(values)) if self.activation == "bf16" else values.astype(np.float16).astype(
                np.float32)
        return values

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """What inputs float32 [.., K] are worth once they are quantized; floating ones as they are."""
        if not self.quantized:
            return x
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)
        if self.quantized == "fp8_block":
            bits, scale = quantize_groups(rows)
            values = from_e4m3(bits) * scale.repeat(rows.shape[1] // scale.shape[1], axis=1)
        elif self.quantized == "nvfp4":
            values = nvfp4_tokens(rows)
        else:
            bits, scale = quantize_tokens(rows, self.activation)
            values = (from_e4m3(bits) if self.activation == "fp8" else bits.astype(np.float32)) * scale[:, None]
        return values.reshape(x.shape).astype(np.float32)


INT4_SCHEMES = {"int4": "bf16", "int4_fp16": "fp16", "w4a8_fp8": "fp8", "w4a8_int8": "int8"}
"""Schemes of int4, as they are called with groups of the default form -> activations."""


def int4_scheme(base: str, group: int, minimum: bool) -> str:
    """The name of one of INT4_SCHEMES with these groups."""
    assert base in INT4_SCHEMES, base
    return base + int4_format(group, minimum).removeprefix("int4")


GPU_SCHEMES = {scheme.name: scheme for scheme in (
    GpuScheme("fp32", "fp32", "fp32"),
    GpuScheme("bf16", "bf16", "bf16"),
    GpuScheme("fp16", "fp16", "fp16"),
    GpuScheme("fp8", "fp8", "fp8"),
    GpuScheme("fp8_block", "fp8_block", "fp8"),
    GpuScheme("int8_token", "int8", "int8"),
    *(GpuScheme(int4_scheme(base, group, minimum), int4_format(group, minimum), activation)
      for base, activation in INT4_SCHEMES.items() for minimum in (False, True) for group in reversed(GROUPS)),
    GpuScheme("nvfp4", "nvfp4", "nvfp4"),
)}


def regrouped(scheme: str, group: int, minimum: bool) -> str:
    """The scheme with other groups where its weights are int4, else the scheme itself."""
    one = GPU_SCHEMES[scheme]
    return with_format(scheme, int4_format(group, minimum)) if one.weights.is_int4 else scheme


def with_format(scheme: str, format: str) -> str:
    """The scheme that takes the same inputs and holds its weights so; the scheme itself if there is none."""
    activation = GPU_SCHEMES[scheme].activation
    return next((other.name for other in GPU_SCHEMES.values()
                 if (other.format, other.activation) == (format, activation)), scheme)

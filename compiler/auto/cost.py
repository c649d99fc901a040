"""What a unit costs in a scheme, by what is known of the target: bytes, and seconds of a token."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.plugins.linear.gpu_arithmetic import scaling, widening
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.scheme import SCHEMES

from ..targets import Gpu, Target
from ..weights.expr import tensor
from ..weights.packed import ROWS, PackedWeight, Packing
from .units import Unit

_PROMPT_TOKENS = 512
"""Of a step that reads a prompt."""

_TILE_TOKENS = 128
"""Of a block in such a step."""

_CORE_BYTES_S = 8e9
_CORE_CLOCK_HZ = 3e9
_VECTOR_BYTES = {"x86-64-v3": 32, "x86-64-v4": 64, "x86-64-v4-vnni": 64, "x86-64-v4-bf16": 64, "x86-64-amx": 64,
                 "aarch64-dotprod": 16}

# Multiply-adds that one of a core's two vector units does for each byte of its width and cycle: a product of floats
# takes four bytes, two where pairs of bfloat16 are multiplied; of integers, vpdpbusd and sdot four in one instruction,
# others two (w4a8) to five instructions. AMX: 16 cycles for 8,192 products of bfloat16; of integers, whose sums vectors
# scale, some 32. The figures of AMX are its manual's, not measured.
_RATES = {"float": 1 / 4, "bf16": 1 / 4, "int8": 1.0, "w4a8": 1.0}
_WITHOUT_DOTS = _RATES | {"int8": 1 / 5, "w4a8": 1 / 2}
_RATES_OF = {"x86-64-v3": _WITHOUT_DOTS, "x86-64-v4": _WITHOUT_DOTS, "x86-64-v4-bf16": _RATES | {"bf16": 1 / 2},
             "x86-64-amx": {"float": 1 / 4, "bf16": 4.0, "int8": 2.0, "w4a8": 2.0}}


@dataclass(frozen=True)
class Cost:
    """size_bytes: of the weights. seconds: of one token of a prompt, read in a large step, and one token of an answer
    alone in its step, together."""

    size_bytes: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size_bytes + other.size_bytes, self.seconds + other.seconds)


def unit_cost(unit: Unit, scheme: str, target: Target) -> Cost:
    """Of a CPU: on one core of 3 GHz with 8 GB/s of memory, for want of figures of its own."""
    size = sum(_size_bytes(shape, scheme, target.gpu) for shape in unit.shapes)
    if unit.role == "embedding":  # a token reads its row
        return Cost(size, 0.0)
    read, weights = size, sum(math.prod(shape) for shape in unit.shapes)
    if unit.role == "experts":
        share = min(1.0, unit.choices / unit.matrices[0].weight.shape[0])
        read, weights = int(size * share), int(weights * share)
    bytes_s = target.gpu.bytes_per_s if target.gpu is not None else _CORE_BYTES_S
    alone = max(read / bytes_s, weights * _multiply_add_s(scheme, target, 1))
    # Of a prompt only the last token's logits are computed.
    prompt = 0.0 if unit.role == "head" else max(size / _PROMPT_TOKENS / bytes_s,
                                                 weights * _multiply_add_s(scheme, target, _TILE_TOKENS))
    return Cost(size, alone + prompt)


def _size_bytes(shape: tuple[int, ...], scheme: str, gpu: Gpu | None) -> int:
    *experts, n, k = shape
    if gpu is None:
        return math.prod(experts) * packed_size(n, k, SCHEMES[scheme])
    return PackedWeight("", tensor("", shape), Packing(scheme, ROWS), "").size_bytes


def _multiply_add_s(scheme: str, target: Target, tokens: int) -> float:
    """Seconds of one, where so many tokens share a weight. On GPUs with what threads compute beside it."""
    if target.gpu is not None:
        held = GPU_SCHEMES[scheme]
        beside = widening(held.format, held.activation) / tokens + scaling(held.format, held.activation)
        return 2 / (target.gpu.tflops[held.activation] * 1e12) + beside / target.gpu.instructions_per_s
    kind = {32: "float", 16: "bf16", 8: "int8", 4: "w4a8"}[SCHEMES[scheme].weight_bits]
    rate = _RATES_OF.get(target.isa, _RATES)[kind]
    return 1 / (2 * _VECTOR_BYTES[target.isa] * rate * _CORE_CLOCK_HZ)

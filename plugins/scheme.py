"""How the weights and the inputs of a matrix are represented."""
from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
"""Channels of K that an integer kernel takes at a time; K is padded to a multiple with zeros."""

PANEL = 16
"""Output channels that lie together in a packed matrix; N is padded to a multiple with zeros."""


@dataclass(frozen=True)
class Scheme:
    """weight_bits   32: float32, 16: bfloat16, 8: symmetric, 4: asymmetric with a scale and a minimum (float16) for
                  every BLOCK channels of K
    act_bits      32: float32, 16: bfloat16, 8: symmetric; rounded in every step
    act_group     channels of K that share an activation scale, a multiple of BLOCK; 0: all of a token's
    weight_group  of 8 bits: channels of K that share a scale. 0: all of an output channel's, float32; BLOCK: float16
    """

    name: str
    weight_bits: int
    act_bits: int = 32
    act_group: int = 0
    weight_group: int = 0

    def __post_init__(self) -> None:
        assert (self.weight_bits, self.act_bits) in ((32, 32), (16, 32), (16, 16), (8, 8), (4, 8)), self
        assert self.act_group % BLOCK == 0 and (self.act_bits == 8 or not self.act_group), self
        assert self.weight_group in (0, BLOCK) and (self.weight_bits == 8 or not self.weight_group), self
        assert self.act_group or not self.weight_group, self

    @property
    def is_integer(self) -> bool:
        return self.act_bits == 8

    @property
    def rounds_inputs(self) -> bool:
        """Whether a matrix takes rows that `quantize` has written, not float32."""
        return self.act_bits < 32

    @property
    def stored(self) -> str:
        """The scheme whose packed matrices these are: one blob serves both."""
        return "bf16" if self.weight_bits == 16 else self.name

    @property
    def tag(self) -> str:
        """The scheme in a kernel's symbol: "w4a8", or "w4a8g128" where the activation group is not BLOCK."""
        return self.name if not self.is_integer or self.act_group == BLOCK else f"{self.name}g{self.act_group}"


# Activation groups of 32 cost two instructions in ten at large T, nothing at T = 1, and keep the outliers that some
# models have in a few channels from taking the resolution of all the others.
SCHEMES = {scheme.name: scheme for scheme in (
    Scheme("fp32", 32),
    Scheme("bf16", 16),
    Scheme("bf16_pairs", 16, act_bits=16),
    Scheme("int8", 8, act_bits=8, act_group=BLOCK),
    Scheme("int8g32", 8, act_bits=8, act_group=BLOCK, weight_group=BLOCK),
    Scheme("w4a8", 4, act_bits=8, act_group=BLOCK),
)}

"""A kernel of a GPU target, told without triton: which function of which module, and every constant filled in."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = {"T": 0, "B": 1, "L": 2}
"""Where a step's counts stand in its array `sizes` (i32): tokens, sequences, rows of logits. Kernels read them from
there, since a recorded launch has fixed arguments."""

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class TensorMap:
    """A rectangle of memory that the Tensor Memory Accelerator copies by blocks; row-major, rows `stride` apart.

    block   extent of a copy; rows beyond `shape` are read as zero and not written
    dtype   Triton's name of the element type
    """

    dtype: str
    shape: tuple[int, int]
    stride: int
    block: tuple[int, int]

    @property
    def type(self) -> str:
        """As it stands in a kernel's signature."""
        return f"tensordesc<{self.dtype}[{self.block[0]}, {self.block[1]}]>"


Parameter = str | TensorMap
"""The type of a parameter: "*bf16" a pointer, "i32", "fp32", or what a descriptor describes."""


@dataclass(frozen=True)
class GpuKernel:
    """symbol      names it in plans and reports; derived from the operator and its constants
    module      "ingot.plugins.linear.gpu", or of a generated one "generated.<hash>" (generated.py)
    function    the @triton.jit function in it
    parameters  (name, type) of each parameter that is no constant, in the function's order. Every pointer is aligned
                to 16 bytes; a descriptor's shape and stride are launch data: they are no part of the code.
    constants   (name, value) of every constexpr parameter
    num_stages  depth of the software pipeline of loops
    source      text of a generated module, else ""
    """

    symbol: str
    module: str
    function: str
    parameters: tuple[tuple[str, Parameter], ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        names = [name for name, _ in (*self.parameters, *self.constants)]
        assert len(set(names)) == len(names), f"{self.symbol}: a parameter stands twice in {names}"

    @property
    def signature(self) -> dict[str, str]:
        """Parameter -> type, without the constants."""
        return {name: kind.type if isinstance(kind, TensorMap) else kind for name, kind in self.parameters}

    def to_json(self) -> dict[str, Any]:
        """What the compiler has to know; equal for kernels that differ in launch data alone."""
        return {"module": self.module, "function": self.function, "signature": self.signature,
                "constants": dict(self.constants), "num_warps": self.num_warps, "num_stages": self.num_stages,
                "max_registers": self.max_registers, **({"text": self.source} if self.source else {})}


@dataclass(frozen=True)
class GpuLaunch:
    """A kernel over the whole of its problem.

    grid           blocks in x, y, z; for a token bucket it covers the bucket's largest step
    scratch_bytes  memory that launches of one plan share, for partial results; zeroed if `zeroed_bytes` > 0: so many of
                   its first bytes must be zero before the first launch, and every launch leaves them zero
    signal_bytes   memory that the GPUs of a tensor-parallel engine write to each other, which launches of one plan
                   share: zero before the first launch, and kept from launch to launch
    """

    kernel: GpuKernel
    grid: tuple[int, int, int]
    scratch_bytes: int = 0
    zeroed_bytes: int = 0
    signal_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """What a launch moves and computes. num_bytes counts each operand as often as it comes from device memory,
    cache_bytes as often as it comes to a multiprocessor. flops: of the products. instructions: of threads beside them,
    where they are so many that they may be waited for. link_bytes: that other GPUs send to this one; link_waits: how
    often it waits for what is on its way from there."""

    num_bytes: float
    flops: float
    cache_bytes: float = 0.0
    instructions: float = 0.0
    link_bytes: float = 0.0
    link_waits: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One legal way to compute a problem. name: "linear.fp8 128x128x128". launches run one after the other.
    shared_bytes: of a block, as far as it is known before the kernel is compiled."""

    name: str
    launches: tuple[GpuLaunch, ...]
    cost: Cost
    shared_bytes: int = 0


@dataclass(frozen=True)
class Refusal:
    """A way that cannot serve the problem, and why: "needs sm_89 or newer"."""

    name: str
    reason: str


@dataclass(frozen=True)
class Candidates:
    legal: tuple[Candidate, ...] = ()
    refused: tuple[Refusal, ...] = field(default=())


def symbol(name: str, *words: object) -> str:
    """An identifier of letters, digits and underscores; long ones end in a digest."""
    text = "_".join(str(word).replace(".", "p").replace("-", "m") for word in (name, *words) if word not in ("", None))
    if len(text) <= 100:
        return text
    return f"{text[:83]}_{hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]}"


def arguments(parameters: Mapping[str, Parameter | None], constants: Mapping[str, Constant],
              ) -> tuple[tuple[tuple[str, Parameter], ...], tuple[tuple[str, Constant], ...]]:
    """What a kernel is made of: parameters that are None become constants, so that the code without them is gone."""
    absent: dict[str, Constant] = {name: None for name, kind in parameters.items() if kind is None}
    return (tuple((name, kind) for name, kind in parameters.items() if kind is not None),
            tuple((absent | dict(constants)).items()))

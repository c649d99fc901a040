"""Element types and tensor types of the IR."""
from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import numpy as np

Dim = int | str
"""An extent: an integer, or a symbol with an optional factor: "T" tokens in this step, "L" rows of logits, "8*T"."""


class DType(enum.Enum):
    """Element type; the value is its name in dumps, plans and manifests."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    FP8 = "fp8"  # e4m3
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    BOOL = "bool"

    @property
    def size_bytes(self) -> int:
        return {"f32": 4, "i32": 4, "bf16": 2, "f16": 2}.get(self.value, 1)

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.BF16, DType.F16, DType.FP8)

    @property
    def numpy(self) -> np.dtype:
        """The numpy type that holds it; bf16 and fp8 have none of their own and are carried as bits."""
        names = {"f32": "float32", "bf16": "uint16", "f16": "float16", "fp8": "uint8", "i8": "int8", "u8": "uint8",
                 "i32": "int32"}
        return np.dtype(names.get(self.value, "bool"))


@dataclass(frozen=True)
class TensorType:
    """Shape and element type of a value. Values lie contiguous in memory, row-major."""

    shape: tuple[Dim, ...]
    dtype: DType = DType.F32

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"


_DIM = re.compile(r"(?:(\d+)\*)?([A-Za-z]\w*)$")


def split_dim(dim: Dim) -> tuple[int, str | None]:
    """64 -> (64, None); "T" -> (1, "T"); "8*T" -> (8, "T")."""
    if isinstance(dim, int):
        return dim, None
    match = _DIM.match(dim)
    assert match, f"malformed dimension {dim!r}"
    return int(match[1] or 1), match[2]


def make_dim(factor: int, symbol: str | None) -> Dim:
    """The inverse of split_dim."""
    if symbol is None:
        return factor
    return symbol if factor == 1 else f"{factor}*{symbol}"


def product(dims: tuple[Dim, ...]) -> Dim:
    """Number of elements. At most one symbol may take part: the T of this step."""
    factor, symbol = 1, None
    for dim in dims:
        f, s = split_dim(dim)
        factor *= f
        assert not (s and symbol), f"two symbolic dimensions in {dims}"
        symbol = s or symbol
    return make_dim(factor, symbol)


def extent(dim: Dim, bindings: dict[str, int]) -> int:
    """The number that a dimension is under the given values of its symbols."""
    factor, symbol = split_dim(dim)
    return factor if symbol is None else factor * bindings[symbol]


def concrete(shape: tuple[Dim, ...], bindings: dict[str, int]) -> tuple[int, ...]:
    return tuple(extent(dim, bindings) for dim in shape)

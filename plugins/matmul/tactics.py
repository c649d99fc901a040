"""The product of two activations on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..constants import Rows
from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Constant, Cost, GpuKernel, GpuLaunch, Refusal, arguments, symbol
from ..select.tactics import BYTES, ELEMENTS

_LEADING = 3
"""Leading dimensions of a result, at most."""


@dataclass(frozen=True)
class Matmul:
    """y [.., M, N] = a [.., M, K] @ b [.., K, N], the leading dimensions broadcast, all without gaps.

    Extents may be symbolic: "T", "L", "9*T". bindings: the largest of each symbol in a step.
    Element types "bf16", "fp16", "fp32"; sums are float32.
    """

    a_shape: tuple[Rows, ...]
    b_shape: tuple[Rows, ...]
    a_type: str
    b_type: str
    y_type: str
    bindings: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.a_shape) >= 2 and len(self.b_shape) >= 2 and self.a_shape[-1] == self.b_shape[-2], self

    def most(self, extent: Rows) -> int:
        """The number that an extent is in the largest step."""
        factor, name = _parts(extent)
        return factor * (dict(self.bindings)[name] if name else 1)


def candidates(problem: Matmul, device: Device) -> Candidates:
    """Parameters: a, b, y, and sizes where an extent is symbolic."""
    p = problem
    leading, a_varies, b_varies = _leading(p.a_shape[:-2], p.b_shape[:-2])
    if len(leading) > _LEADING:
        return Candidates(refused=(Refusal("matmul", f"{len(leading)} leading dimensions that both operands do not "
                                                     f"share alike; up to {_LEADING}"),))
    m, n, k = p.a_shape[-2], p.b_shape[-1], p.a_shape[-1]
    matrices = prod(map(p.most, leading))
    most_m, most_n, most_k = map(p.most, (m, n, k))
    tile = {"BLOCK_M": 64 if most_m > 32 else 16, "BLOCK_N": 64, "BLOCK_K": 32 if p.a_type == "fp32" else 64}
    extents = {"M": m, "N": n, "K": k, **{f"D{axis}": leading[axis] if axis < len(leading) else 1
                                         for axis in range(_LEADING)}}
    constants: dict[str, Constant] = {"RANK": len(leading), "A_VARIES": a_varies, "B_VARIES": b_varies, **tile}
    for name, extent in extents.items():
        factor, of = _parts(extent)
        constants |= {name: factor, f"{name}_OF": SIZES[of] if of else -1}
    symbolic = any(isinstance(extent, str) for extent in extents.values())
    types = p.a_type, p.b_type, p.y_type
    kernel = GpuKernel(
        symbol("matmul", *(str(extent).replace("*", "") for extent in extents.values()), len(leading), a_varies,
               b_varies, *tile.values(), *types), "ingot.plugins.matmul.gpu", "matmul",
        *arguments({**{name: f"*{ELEMENTS[kind]}" for name, kind in zip("aby", types, strict=True)},
                    "sizes": "*i32" if symbolic else None}, constants), 4, 3)
    grid = matrices, -(-most_m // tile["BLOCK_M"]), -(-most_n // tile["BLOCK_N"])
    moved = (prod(map(p.most, p.a_shape)) * BYTES[p.a_type] + prod(map(p.most, p.b_shape)) * BYTES[p.b_type]
             + matrices * most_m * most_n * BYTES[p.y_type])
    cost = Cost(moved, 2.0 * matrices * most_m * most_n * most_k)
    return Candidates((Candidate("matmul", (GpuLaunch(kernel, grid),), cost),))


def _parts(extent: Rows) -> tuple[int, str]:
    """9*T -> (9, "T"); 9 -> (9, "")."""
    if isinstance(extent, int):
        return extent, ""
    factor, _, name = extent.rpartition("*")
    return int(factor or 1), name


def _leading(a: tuple[Rows, ...], b: tuple[Rows, ...]) -> tuple[list[Rows], int, int]:
    """The leading dimensions of the result, neighbours that both operands have or lack alike taken as one; and for each
    operand the bits of those that it has."""
    rank = max(len(a), len(b))
    wide = [(1,) * (rank - len(shape)) + shape for shape in (a, b)]
    found: list[tuple[Rows, bool, bool]] = []
    for x, y in zip(*wide, strict=True):
        assert x == y or 1 in (x, y), f"{a} and {b} do not broadcast"
        if x == y == 1:
            continue
        own = (y if x == 1 else x, x != 1, y != 1)
        merged = _product(found[-1][0], own[0]) if found and found[-1][1:] == own[1:] else None
        if merged is None:
            found.append(own)
        else:
            found[-1] = (merged, *own[1:])
    bits = [sum(1 << axis for axis, part in enumerate(found) if part[1 + side]) for side in range(2)]
    return [extent for extent, _, _ in found], bits[0], bits[1]


def _product(a: Rows, b: Rows) -> Rows | None:
    """None for two symbols."""
    (left, left_of), (right, right_of) = _parts(a), _parts(b)
    if left_of and right_of:
        return None
    of = left_of or right_of
    return f"{left * right}*{of}" if of else left * right

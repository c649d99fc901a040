"""Programs of views, elementwise operators and reductions from a list of numbers: any list is some program."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.compiler.ir.types import Dim, DType, make_dim, product, split_dim
from tests.compiler.graphs import Builder

MAX_FACTOR = 1500
"""Elements of a value, for one token."""

Step = tuple[int, int, int]


def build_from(start: Sequence[int], steps: Sequence[Step]) -> Callable[[Builder], list[str]]:
    """start: the extents after T of the input; each step takes the last value, or with its last number an older one."""
    def build(b: Builder) -> list[str]:
        values = [b.x("x", "T", *start)]
        for number, first, second in steps:
            value = _STEPS[number % len(_STEPS)](b, values, first, second)
            if value is not None and split_dim(product(_shape(b, value)))[0] <= MAX_FACTOR:
                values.append(value)
        return list(dict.fromkeys([values[-1], values[len(values) // 2]])) if len(values) > 1 else [
            b.op("neg", values[0])]
    return build


def _shape(b: Builder, value: str) -> tuple[Dim, ...]:
    return b.types[value].shape


def _plain_axes(b: Builder, value: str) -> list[int]:
    return [axis for axis, dim in enumerate(_shape(b, value)) if isinstance(dim, int)]


def _unary(b: Builder, values: list[str], first: int, second: int) -> str:
    if second % 5 == 0:  # an older value becomes the last one
        return b.op("abs", values[first % len(values)])
    return b.op(("neg", "tanh", "sigmoid", "abs", "cos")[first % 5], values[-1])


def _binary(b: Builder, values: list[str], first: int, second: int) -> str:
    x, op = values[-1], ("add", "mul", "maximum", "sub", "minimum")[first % 5]
    same = [v for v in values[:-1] if _shape(b, v) == _shape(b, x)]
    return b.op(op, x, same[second % len(same)] if same and second % 3 else (0.5, -1, 2)[second % 3])


def _permute(b: Builder, values: list[str], first: int, second: int) -> str | None:
    dims = list(range(len(_shape(b, values[-1]))))
    i, j = first % len(dims), second % len(dims)
    dims[i], dims[j] = dims[j], dims[i]
    return b.op("permute", values[-1], dims=tuple(dims)) if i != j else None


def _slice(b: Builder, values: list[str], first: int, second: int) -> str | None:
    x = values[-1]
    axes = [axis for axis in _plain_axes(b, x) if int(_shape(b, x)[axis]) > 1]
    if not axes:
        return None
    axis = axes[first % len(axes)]
    size = int(_shape(b, x)[axis])
    start = second % size
    return b.slice(x, axis, start, start + 1 + second // 7 % (size - start), 1 + second % 3)


def _merge(b: Builder, values: list[str], first: int, second: int) -> str | None:
    """Two neighbouring dimensions become one."""
    shape = _shape(b, values[-1])
    if len(shape) == 1:
        return None
    i = first % (len(shape) - 1)
    return b.op("reshape", values[-1], shape=(*shape[:i], product(shape[i:i + 2]), *shape[i + 2:]))


def _split(b: Builder, values: list[str], first: int, second: int) -> str | None:
    shape = _shape(b, values[-1])
    i = first % len(shape)
    factor, symbol = split_dim(shape[i])
    divisors = [d for d in range(1, factor + 1) if factor % d == 0]
    inner = divisors[second % len(divisors)]
    return b.op("reshape", values[-1], shape=(*shape[:i], make_dim(factor // inner, symbol), inner, *shape[i + 1:]))


def _repeat(b: Builder, values: list[str], first: int, second: int) -> str:
    """A new dimension of some copies."""
    shape = _shape(b, values[-1])
    i = first % (len(shape) + 1)
    narrow = b.op("reshape", values[-1], shape=(*shape[:i], 1, *shape[i:]))
    return b.op("expand", narrow, shape=(*shape[:i], 2 + second % 2, *shape[i:]))


def _cat(b: Builder, values: list[str], first: int, second: int) -> str | None:
    x, axes = values[-1], _plain_axes(b, values[-1])
    if not axes:
        return None
    axis = axes[first % len(axes)]
    size = int(_shape(b, x)[axis])
    return b.op("cat", b.slice(x, axis, 0, 1 + second % size), b.op("mul", x, -0.75), dim=axis)


def _reduce(b: Builder, values: list[str], first: int, second: int) -> str | None:
    axes = _plain_axes(b, values[-1])
    if not axes:
        return None
    dims = tuple(axis for axis in axes if (second >> axis) & 1) or (axes[-1],)
    return b.op(f"reduce_{('sum', 'max', 'mean', 'min')[first % 4]}", values[-1], dims=dims, keepdim=bool(second % 3))


def _take(b: Builder, values: list[str], first: int, second: int) -> str | None:
    x, axes = values[-1], _plain_axes(b, values[-1])
    if not axes:
        return None
    axis = axes[first % len(axes)]
    counted = b.op("arange", start=second % 5, step=3, length=1 + second % 4, dtype=DType.I32)
    return b.op("take", x, b.op("mod", counted, _shape(b, x)[axis]), dim=axis)


def _choose(b: Builder, values: list[str], first: int, second: int) -> str:
    x = values[-1]
    return b.op("where", b.op("gt", x, (second % 5 - 2) / 4), x, b.op("mul", x, 0.25))


_STEPS = (_unary, _binary, _permute, _slice, _merge, _split, _repeat, _cat, _reduce, _take, _choose, _split, _permute)

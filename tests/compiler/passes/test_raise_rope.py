from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.merge_duplicates import merge_duplicates
from ingot.compiler.passes.raise_rope import raise_rope
from ingot.compiler.weights.expr import literal
from tests.compiler.graphs import Builder, expect_same_meaning, only, ops

H, D = 3, 8
Spelling = Callable[[Builder, str, str, str], str]


def tables(b: Builder, width: int, repeat: str = "halves") -> tuple[str, str]:
    """cos and sin [1, T, 1, width] of the positions. repeat: each angle twice, as halves or as neighbours, or once."""
    count = width if repeat == "once" else width // 2
    frequencies = b.constant(literal(np.float32(0.7) ** np.arange(count, dtype=np.float32)), "frequencies")
    angles = b.op("mul", b.op("reshape", b.op("cast", "positions", dtype=DType.F32), shape=("T", 1)), frequencies)
    if repeat == "halves":
        angles = b.op("cat", angles, angles, dim=1)
    if repeat == "neighbours":
        pairs = b.op("expand", b.op("reshape", angles, shape=("T", count, 1)), shape=("T", count, 2))
        angles = b.op("reshape", pairs, shape=("T", width))
    angles = b.op("reshape", angles, shape=(1, "T", 1, width if repeat != "once" else count))
    return b.op("cos", angles), b.op("sin", angles)


def last(b: Builder, x: str) -> tuple[int, int]:
    shape = b.types[x].shape
    return len(shape) - 1, int(shape[-1])


def rotate_half(b: Builder, x: str, cos: str, sin: str) -> str:
    dim, width = last(b, x)
    second = b.op("neg", b.slice(x, dim, width // 2, width))
    turned = b.op("cat", second, b.slice(x, dim, 0, width // 2), dim=dim)
    return b.op("add", b.op("mul", x, cos), b.op("mul", turned, sin))


def two_halves(b: Builder, x: str, cos: str, sin: str) -> str:
    """Factors of half the width."""
    dim, width = last(b, x)
    first, second = b.slice(x, dim, 0, width // 2), b.slice(x, dim, width // 2, width)
    return b.op("cat", b.op("sub", b.op("mul", first, cos), b.op("mul", second, sin)),
                b.op("add", b.op("mul", second, cos), b.op("mul", first, sin)), dim=dim)


def transposed(b: Builder, x: str, cos: str, sin: str) -> str:
    """In [1, H, T, D], as models do around attention."""
    x, cos, sin = (b.op("permute", value, dims=(0, 2, 1, 3)) for value in (x, cos, sin))
    return b.op("permute", rotate_half(b, x, cos, sin), dims=(0, 2, 1, 3))


def stacked(b: Builder, even: str, odd: str) -> str:
    shape = b.types[even].shape
    pair = [b.op("reshape", half, shape=(*shape, 1)) for half in (even, odd)]
    return b.op("reshape", b.op("cat", *pair, dim=len(shape)), shape=(*shape[:-1], 2 * int(shape[-1])))


def interleaved(b: Builder, x: str, cos: str, sin: str) -> str:
    dim, width = last(b, x)
    even, odd = b.slice(x, dim, 0, width, 2), b.slice(x, dim, 1, width, 2)
    return b.op("add", b.op("mul", x, cos), b.op("mul", stacked(b, b.op("neg", odd), even), sin))


def of_pairs(b: Builder, x: str, cos: str, sin: str) -> str:
    """As complex numbers: x [.., D/2, 2], factors of half the width."""
    *outer, width = b.types[x].shape
    pairs = b.op("reshape", x, shape=(*outer, int(width) // 2, 2))
    real, imaginary = (b.op("reshape", b.slice(pairs, len(outer) + 1, i, i + 1), shape=(*outer, int(width) // 2))
                       for i in (0, 1))
    return stacked(b, b.op("sub", b.op("mul", real, cos), b.op("mul", imaginary, sin)),
                   b.op("add", b.op("mul", real, sin), b.op("mul", imaginary, cos)))


SPELLINGS: dict[str, tuple[Spelling, str, bool]] = {
    "rotate_half": (rotate_half, "halves", False), "two_halves": (two_halves, "once half", False),
    "transposed": (transposed, "halves", False), "interleaved": (interleaved, "neighbours", True),
    "of_pairs": (of_pairs, "once half", True)}


def graph_of(spelling: Spelling, repeat: str, take_x: Callable[[Builder], str] | None = None, rotary: int = D) -> Graph:
    """The rotation as attention's queries."""
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    x = take_x(b) if take_x else b.x("x", 1, "T", H, D)
    cos, sin = tables(b, rotary // 2, "once") if repeat == "once half" else tables(b, rotary, repeat)
    turned = b.slice(x, 3, 0, rotary) if rotary < D else x
    y = spelling(b, turned, cos, sin)
    if rotary < D:
        y = b.op("cat", y, b.slice(x, 3, rotary, D), dim=3)
    shape = b.types[y].shape
    return b.made(attention(b, b.op("reshape", y, shape=("T", shape[-2], shape[-1]))))


def attention(b: Builder, q: str) -> str:
    k, v = b.x("k", "T", 1, b.types[q].shape[2]), b.x("v", "T", 1, 4)
    return b.op("attention", q, k, v, slot=0, scale=0.5)


@pytest.mark.parametrize("rotary", [D, 4])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, rotary: int) -> None:
    spelling, repeat, is_interleaved = SPELLINGS[name]
    graph = graph_of(spelling, repeat, rotary=rotary)
    raised = raise_rope(graph)
    rope = only(raised, "rope")
    assert dict(rope.attrs) == ({"interleaved": True} if is_interleaved else {})
    assert raised.types[rope.inputs[0]].shape == ("T", H, D)  # type: ignore[index]
    assert raised.types[rope.inputs[1]].shape == ("T", rotary)  # type: ignore[index]
    assert not {"neg", "sub", "add"} & set(ops(raised))
    expect_same_meaning(graph, raised, tokens=(1, 2, 5))


def merged(b: Builder) -> str:
    """The queries of a row [q | k | v]."""
    row = b.op("rms_norm", b.x("qkv", 1, "T", H * D + 24), eps=1e-6)
    return b.op("reshape", b.slice(row, 2, 16, 16 + H * D), shape=(1, "T", H, D))


def of_each_head(b: Builder) -> str:
    """The keys of a row [q, k, v of head 0 | q, k, v of head 1 | …]."""
    row = b.op("reshape", b.op("rms_norm", b.x("qkv", 1, "T", H * 3 * D), eps=1e-6), shape=(1, "T", H, 3 * D))
    return b.slice(row, 3, D, 2 * D)


def one_head(b: Builder) -> str:
    return b.op("reshape", b.slice(b.op("rms_norm", b.x("row", "T", 20), eps=1e-6), 1, 5, 5 + D), shape=(1, "T", 1, D))


def normed(b: Builder) -> str:
    return b.op("rms_norm", b.x("x", 1, "T", H, D), b.weight("w", D), eps=1e-6)


def clamped(b: Builder) -> str:
    """Arithmetic before the rotation is not looked into."""
    return b.op("minimum", b.x("x", 1, "T", H, D), 0.5)


@pytest.mark.parametrize("take_x", [merged, of_each_head, one_head, normed, clamped])
def test_where_the_heads_come_from(take_x: Callable[[Builder], str]) -> None:
    graph = graph_of(rotate_half, "halves", take_x)
    raised = raise_rope(graph)
    assert raised.types[only(raised, "rope").output].shape[2] == D
    expect_same_meaning(graph, raised)


def test_rotations_with_the_same_factors_share_their_tables() -> None:
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    cos, sin = tables(b, D // 2, "once")
    graph = b.made(*(attention_of(b, two_halves(b, b.x(name, 1, "T", H, D), cos, sin)) for name in ("x", "y")))
    raised = raise_rope(graph)
    assert ops(raised).count("rope") == 2
    assert len({str(expr) for expr in raised.constants.values()}) == len(raised.constants) == 2
    expect_same_meaning(graph, raised)


def test_a_single_head_of_keys_gets_the_tables_of_the_queries() -> None:
    """Though they are shaped for it otherwise: with one head, [1, 1, T, D] is [1, T, 1, D]."""
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    cos, sin = tables(b, D)
    shaped = [b.op("reshape", table, shape=(1, 1, "T", D)) for table in (cos, sin)]
    q = rotate_half(b, b.x("q", 1, "T", H, D), cos, sin)
    k = rotate_half(b, b.x("one", 1, 1, "T", D), *shaped)
    graph = b.made(*(attention_of(b, b.op("reshape", x, shape=("T", n, D))) for x, n in ((q, H), (k, 1))))
    raised = merge_duplicates(raise_rope(graph))
    first, second = (node.inputs[1:] for node in raised.nodes if node.op == "rope")
    assert first == second
    expect_same_meaning(graph, raised)


def attention_of(b: Builder, y: str) -> str:
    return b.op("rms_norm", y, eps=1e-6)


def flipped(b: Builder, x: str, cos: str, sin: str) -> str:
    """Turns the other way: by the negative sine."""
    return rotate_half(b, x, cos, b.op("neg", sin))


def reordered(b: Builder, x: str, cos: str, sin: str) -> str:
    """Pairs of neighbours in, halves out."""
    dim, width = last(b, x)
    halves = b.op("cat", b.slice(x, dim, 0, width, 2), b.slice(x, dim, 1, width, 2), dim=dim)
    return rotate_half(b, halves, cos, sin)


def of_two(b: Builder, x: str, cos: str, sin: str) -> str:
    """The partner is an element of another value."""
    dim, width = last(b, x)
    other = b.x("other", *b.types[x].shape)
    second = b.op("neg", b.slice(other, dim, width // 2, width))
    turned = b.op("cat", second, b.slice(other, dim, 0, width // 2), dim=dim)
    return b.op("add", b.op("mul", x, cos), b.op("mul", turned, sin))


def by_head(b: Builder, x: str, cos: str, sin: str) -> str:
    """Every head has its own factors."""
    scale = b.constant(literal(np.arange(1, H + 1, dtype=np.float32).reshape(1, 1, H, 1)), "scale")
    return rotate_half(b, x, b.op("mul", cos, scale), b.op("mul", sin, scale))


def scaled(b: Builder, x: str, cos: str, sin: str) -> str:
    """No rotation at all."""
    return b.op("mul", x, cos)


def shifted(b: Builder, x: str, cos: str, sin: str) -> str:
    """The sine of another element."""
    dim, width = last(b, sin)
    table = b.op("cat", b.slice(sin, dim, 1, width), b.slice(sin, dim, 0, 1), dim=dim)
    return rotate_half(b, x, cos, table)


@pytest.mark.parametrize("spelling", [reordered, of_two, scaled])
def test_what_is_no_rotation_stays(spelling: Spelling) -> None:
    graph = graph_of(spelling, "halves")
    assert "rope" not in ops(raise_rope(graph))
    expect_same_meaning(graph, raise_rope(graph), 0.0)


@pytest.mark.parametrize("spelling", [by_head, shifted, flipped])
def test_unusual_factors(spelling: Spelling) -> None:
    """Any table will do, as long as all heads share it."""
    graph = graph_of(spelling, "halves")
    expect_same_meaning(graph, raise_rope(graph))
    assert ("rope" in ops(raise_rope(graph))) == (spelling is not by_head)


def test_factors_that_are_no_function_of_positions_stay_arithmetic() -> None:
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    y = rotate_half(b, b.x("x", 1, "T", H, D), b.x("cos", 1, "T", 1, D), b.x("sin", 1, "T", 1, D))
    graph = b.made(attention_of(b, y))
    assert "rope" not in ops(raise_rope(graph))


def test_the_last_part_of_a_head_stays_arithmetic() -> None:
    """rope turns the first elements of a head; multi-head latent attention the last ones."""
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    x, (cos, sin) = b.x("x", 1, "T", H, D), tables(b, 4)
    y = b.op("cat", b.slice(x, 3, 0, 4), rotate_half(b, b.slice(x, 3, 4, D), cos, sin), dim=3)
    graph = b.made(attention_of(b, y))
    assert raise_rope(graph) == graph

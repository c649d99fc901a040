"""Launches over the same rows become one: which ones, and which of their values need no memory."""
from __future__ import annotations

from typing import Any

import pytest

from ingot.compiler.cpu.join_rows import join_rows
from ingot.compiler.fusion import c_emit
from ingot.compiler.fusion.expr import add, const, index, load
from ingot.compiler.ir.graph import Node
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.plan.plan import Arg, Launch, Write
from ingot.plugins.kernel import CpuKernel
from tests.compiler.cpu.test_lower import final, lowered
from tests.compiler.graphs import Builder

ROW_BYTES = {"y": 256, "s": 256, "z": 256, "wide": 1 << 20}


def value(name: str) -> Arg:
    return Arg("value", name)


def launch(op: str, read: list[str], written: list[str], rows: str = "T") -> Launch:
    args = tuple(map(value, [*read, *written]))
    writes = {name: Write(len(read) + i, ("T", 64), "f32") for i, name in enumerate(written)}
    return Launch(f"{op}_kernel", args, f"of {op}", (*read, *written), writes, op=op, rows=rows)


def joined(*launches: Launch, tokens: int = 16, kept: tuple[str, ...] = ()) -> list[Launch]:
    kernels = {entry.kernel: CpuKernel(entry.kernel, "", "") for entry in launches}
    found = join_rows(list(launches), kernels, ROW_BYTES, kept, tokens)
    assert {entry.kernel for entry in found} <= set(kernels)
    return found


NORM = launch("add_rms_norm", ["x", "r"], ["y", "s"])
QUANTIZE = launch("quantize", ["y"], ["q"])
LINEAR = launch("linear", ["q"], ["z"], rows="")


def test_what_only_they_use_has_no_memory() -> None:
    one, linear = joined(NORM, QUANTIZE, LINEAR)
    assert linear == LINEAR and one.op == "add_rms_norm+quantize" and one.origin == "of quantize" and one.rows == "T"
    assert [arg.name for arg in one.args] == ["x", "r", "s", "q"] == list(one.reads)
    assert {name: write.arg for name, write in one.writes.items()} == {"s": 2, "q": 3}


@pytest.mark.parametrize(("others", "kept"), [
    ([launch("linear", ["y"], ["z"], rows="")], ()),
    ([], ("y",)),
], ids=["read later", "looked into"])
def test_what_others_use_stays_in_memory(others: list[Launch], kept: tuple[str, ...]) -> None:
    one, *_ = joined(NORM, QUANTIZE, *others, kept=kept)
    assert [arg.name for arg in one.args] == ["x", "r", "y", "s", "q"] and set(one.writes) == {"y", "s", "q"}


def test_rows_too_large_for_a_stack_stay_in_memory() -> None:
    one, = joined(launch("loop", ["x"], ["wide"]), launch("quantize", ["wide"], ["q"]))
    assert [arg.name for arg in one.args] == ["x", "wide", "q"]


@pytest.mark.parametrize("launches", [
    (launch("rms_norm", ["x"], ["y"], rows="9*T"), QUANTIZE),
    (launch("rms_norm", ["x"], ["y"], rows=""), QUANTIZE),
    (NORM, LINEAR, QUANTIZE),
], ids=["other rows", "no rows", "not neighbours"])
def test_others_stay_apart(launches: tuple[Launch, ...]) -> None:
    assert joined(*launches) == list(launches)


def test_few_tokens_are_repeated_instead() -> None:
    assert joined(NORM, QUANTIZE, tokens=2) == [NORM, QUANTIZE]


def test_gated_activation_is_quantized_where_it_is_made() -> None:
    b = Builder()
    both = b.op("linear", b.x("x", "T", 64), b.weight("w", 128, 64))
    gated = b.op("mul", b.op("silu", b.slice(both, 1, 0, 64)), b.slice(both, 1, 64, 128))
    down = b.op("linear", gated, b.weight("v", 64, 64))
    graph = final(b.made(b.op("linear", b.op("cumsum", down, dim=1), b.weight("u", 64, 64))), "w4a8")
    assert "loop+quantize" in [entry.op for entry in lowered(graph, 16)[1].launches]
    assert "loop+quantize" not in [entry.op for entry in lowered(graph, 2)[1].launches]


ROW, COLUMN = index(0), index(1)


@pytest.mark.parametrize(("shape", "loads", "rows"), [
    (("T", 64), [("T", 128), (ROW, add(COLUMN, const(64)))], "T"),
    (("T", 64), [("T", 1), (ROW, const(0))], "T"),
    (("T", 64), [(64,), (COLUMN,)], "T"),
    (("T", 8, 64), [("T", 8, 64), (ROW, COLUMN, index(2))], "8*T"),
    (("T", 8, 64), [("T", 64), (ROW, index(2))], ""),
    (("T", 64), [("T", 64), (add(ROW, const(1)), COLUMN)], ""),
    (("L", 64), [("T", 64), (ROW, COLUMN)], ""),
    ((8, 64), [(8, 64), (ROW, COLUMN)], ""),
    (("T", 1), [("T", 1), (ROW, const(0))], ""),
], ids=str)
def test_rows_of_a_loop(shape: tuple[int | str, ...], loads: list[Any], rows: str) -> None:
    """Only if it reads nothing of other rows."""
    read, at = loads
    node = Node("loop", ("x",), ("y",), {"shape": shape, "dtype": DType.F32, "reduce": None,
                                         "expr": load(0, at, DType.F32)})
    assert c_emit.own_rows(node, [TensorType(read, DType.F32)]) == rows

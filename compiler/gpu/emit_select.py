"""What works along the last dimension of a value, and products of two activations."""
from __future__ import annotations

from ingot.plugins.matmul import tactics as matmul_tactics
from ingot.plugins.select import tactics as select_tactics

from ..ir.graph import Node
from ..ir.types import DType
from ..plan.plan import Arg
from .lower import GpuLowering


def emit_softmax(low: GpuLowering, node: Node) -> None:
    x, y = node.values[0], node.output
    problem = select_tactics.Softmax(*_rows(low, x), low.stored[x], low.stored[y])
    args = {"x": low.arg(x), "y": _over(low, y, x)}
    low.request(node, low.candidates(problem, select_tactics.softmax), args, {y: "y"})


def emit_cumsum(low: GpuLowering, node: Node) -> None:
    x, y = node.values[0], node.output
    problem = select_tactics.Cumsum(*_rows(low, x), low.stored[x], low.stored[y])
    args = {"x": low.arg(x), "y": _over(low, y, x)}
    low.request(node, low.candidates(problem, select_tactics.cumsum), args, {y: "y"})


def emit_argmax(low: GpuLowering, node: Node) -> None:
    x, y = node.values[0], node.output
    problem = select_tactics.Argmax(*_rows(low, x), low.stored[x])
    low.request(node, low.candidates(problem, select_tactics.argmax), {"x": low.arg(x), "y": low.output(y)}, {y: "y"})


def emit_topk(low: GpuLowering, node: Node) -> None:
    """And sort, which is a topk of all."""
    x, (values, indices) = node.values[0], node.outputs
    largest, k = node.attrs.get("descending", False), low.width(x)
    if node.op == "topk":
        largest, k = node.attrs.get("largest", True), node.attrs["k"]
    assert low.stored[values] == low.stored[x], f"topk keeps the elements that it chooses: {node.origin}"
    problem = select_tactics.TopK(*_rows(low, x), k, low.stored[x], largest)
    args = {"x": low.arg(x), "values": low.output(values), "indices": low.output(indices)}
    low.request(node, low.candidates(problem, select_tactics.topk), args, {values: "values", indices: "indices"})


def emit_scatter(low: GpuLowering, node: Node) -> None:
    x, index, source = node.values
    low.require_same_rows(node)
    assert low.stored[x] == low.stored[source] == low.stored[node.output], f"scatter moves elements: {node.origin}"
    problem = select_tactics.Scatter(*_rows(low, x), low.width(index),
                                     low.width(source) if low.type(source).shape else 0, low.stored[x])
    args = {"x": low.arg(x), "index": low.arg(index), "source": low.arg(source), "y": low.output(node.output)}
    low.request(node, low.candidates(problem, select_tactics.scatter), args, {node.output: "y"})


def emit_matmul(low: GpuLowering, node: Node) -> None:
    a, b = node.values
    for value in (a, b):
        assert low.type(value).dtype == DType.F32 and low.place(value).stride is None, node.origin
    problem = matmul_tactics.Matmul(low.type(a).shape, low.type(b).shape, low.stored[a], low.stored[b],
                                    low.stored[node.output], tuple(low.bindings.items()))
    args = {"a": low.arg(a), "b": low.arg(b), "y": low.output(node.output)}
    low.request(node, low.candidates(problem, matmul_tactics.candidates), args, {node.output: "y"})


def _rows(low: GpuLowering, x: str) -> tuple[int, int | str, int]:
    """The most rows, how many there are in symbols, and how wide they are."""
    assert low.place(x).stride is None, f"rows of {x} that are apart"
    rows = low.rows(x)
    return low.count(rows), rows, low.width(x)


def _over(low: GpuLowering, y: str, x: str) -> Arg:
    """The place of y, in that of x if it may be."""
    same = low.stored[x] == low.stored[y]
    return (low.in_place(y, x) if same else None) or low.output(y)

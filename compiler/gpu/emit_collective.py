"""Where the ranks of a tensor-parallel engine meet."""
from __future__ import annotations

from ingot.plugins.all_reduce import tactics

from ..ir.graph import Node
from ..plan.plan import Arg
from .lower import GpuLowering


def emit_collective(low: GpuLowering, node: Node) -> None:
    """all_reduce [R, N] -> the sum over ranks, in place if nobody reads the part any more; all_gather [R, N] -> the
    ranks' parts side by side, [R, N * ranks]."""
    source, result = node.values[0], node.output
    element = low.stored[source]
    assert element == low.stored[result], f"{node.op} of {element} gives {low.stored[result]}: {node.origin}"
    symbol = low.row_symbol(source, node)
    problem = tactics.Problem(node.op, low.count(symbol), low.width(source), element, symbol, node.attrs["ranks"])
    place = low.in_place(result, source) if node.op == "all_reduce" else None
    args = {"source": low.arg(source), "destination": place or low.output(result), "peers": Arg("peers")}
    low.request(node, low.candidates(problem, tactics.candidates), args, {result: "destination"})

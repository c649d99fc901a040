"""Where the ranks of a tensor-parallel engine meet: launches that the device itself performs."""
from __future__ import annotations

from ingot.plugins.gpu.kernel import SIZES

from ..ir.graph import Node
from ..plan.plan import Arg, Write
from .lower import GpuLowering, Meeting
from .storage import PLAN_DTYPES


def emit_collective(low: GpuLowering, node: Node) -> None:
    """all_reduce [R, N] -> the sum over ranks, in place if nobody reads the part any more; all_gather [R, N] -> the
    ranks' parts side by side, [R, N * ranks]."""
    source, result = node.values[0], node.output
    element = low.stored[source]
    assert element == low.stored[result], f"{node.op} of {element} gives {low.stored[result]}: {node.origin}"
    place = low.in_place(result, source) if node.op == "all_reduce" else None
    symbol = low.row_symbol(source, node)
    args = (low.arg(source), place or low.output(result), Arg("input", "sizes"), Arg("scalar", offset=SIZES[symbol]),
            Arg("scalar", offset=low.width(source)))
    kernel = {"collective": node.op, "parameters": [
        ["source", f"*{element}"], ["destination", f"*{element}"], ["sizes", "*i32"], ["rows", "i32"],
        ["width", "i32"]]}
    buffers = tuple(dict.fromkeys(arg.name for arg in args if arg.kind == "value"))
    shown = Write(1, low.type(result).shape, PLAN_DTYPES[element])
    low.requests.append(Meeting(node.op, node.origin, f"{node.op}_{element}", kernel, args, buffers, {result: shown}))

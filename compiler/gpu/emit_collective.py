"""Where the ranks of a tensor-parallel engine meet."""
from __future__ import annotations

from ingot.plugins.all_reduce import tactics
from ingot.plugins.norm import tactics as norm_tactics

from ..ir.graph import Node
from ..plan.lowering import Place
from ..plan.plan import Arg
from .adapter_inputs import others
from .emit_linear import wanted_form, write_quantized
from .lower import GpuLowering


def emit_collective(low: GpuLowering, node: Node) -> None:
    """all_reduce [R, N] -> the sum over ranks, in place if nobody reads the part any more; with the residual sum and
    the norm that read it. all_gather [R, N] -> the ranks' parts side by side, [R, N * ranks]."""
    source, result = node.values[0], node.output
    element = low.stored[source]
    assert element == low.stored[result], f"{node.op} of {element} gives {low.stored[result]}: {node.origin}"
    symbol = low.row_symbol(source, node)
    problem = tactics.Problem(node.op, low.count(symbol), low.width(source), element, symbol, node.attrs["ranks"])
    place = low.in_place(result, source) if node.op == "all_reduce" else None
    args = {"source": low.arg(source), "destination": place or low.output(result), "peers": Arg("peers")}
    norm = _norm_behind(low, node)
    residual = "" if norm is None else _other_summand(low, norm, result)
    if norm is not None and residual:
        _emit_with_norm(low, node, norm, residual, problem, args)
        return
    low.request(node, low.candidates(problem, tactics.candidates), args, {result: "destination"})


def _norm_behind(low: GpuLowering, node: Node) -> Node | None:
    """The residual sum and rms_norm that nobody but they reads the sum for."""
    users = low.users(node.output) if node.op == "all_reduce" and node.output not in low.graph.outputs else []
    if len(users) != 1 or users[0].op != "add_rms_norm" or not low.is_next(node, users[0]):
        return None
    return users[0]


def _other_summand(low: GpuLowering, norm: Node, result: str) -> str:
    """What is added to `result` before the norm; "" if it lies otherwise, or if a part of `result` alone is summed."""
    whole = [value for value in norm.values[:2]
             if low.root(value) == result and low.type(value).shape == low.type(result).shape]
    rest = [value for value in norm.values[:2] if value not in whole]
    dense = len(rest) == 1 and low.stored[rest[0]] == low.stored[result] and not low.x_stride(rest[0])
    return rest[0] if dense else ""


def _emit_with_norm(low: GpuLowering, node: Node, norm: Node, residual: str, reduce: tactics.Problem,
                    args: dict[str, Arg]) -> None:
    weight = norm.values[2:]
    y, total = norm.outputs
    form = wanted_form(low, y, others(low, y))
    problem = tactics.SumAndNorm(reduce, norm_tactics.Problem(
        reduce.m, reduce.width, norm.attrs["eps"], reduce.float_type, form or low.stored[y], rows=reduce.rows,
        weight=bool(weight), residual=True))
    args |= {"x": args["destination"], "residual": low.arg(residual), "total": low.output(total),
             **({"weight": low.arg(weight[0])} if weight else {})}
    writes = {node.output: "destination", total: "total"}
    if form:
        low.places[y] = Place(Arg("value", y))
        args |= write_quantized(low, y, form)
    else:
        args["y"] = low.output(y)
        writes[y] = "y"
    low.made.add(y)
    low.request(node, low.candidates(problem, tactics.sums_and_norms), args, writes, op=f"{node.op}+{norm.op}")

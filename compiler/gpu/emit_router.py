"""What leads to the experts of a token in one launch: norm, router, choice, and the rows of each expert."""
from __future__ import annotations

from collections.abc import Mapping

from ingot.plugins.expert_linear import tactics as experts_tactics
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ..ir.graph import Node
from ..plan.lowering import Place
from ..plan.plan import Arg
from .emit_linear import MATRICES, write_quantized
from .lower import GpuLowering

BY_EXPERT = "by expert"
"""Beside the quantized forms of a value: of the experts of tokens, where the rows of each are listed."""


def emit_router(low: GpuLowering, linear: Node) -> bool:
    """The launch of a router and the choice behind it, if the matrix is one. A norm that was left to its readers is
    taken in."""
    norm = low.absorbed.get(low.buffer(linear.values[0]))
    if norm is not None and norm.op != "rms_norm":
        return False
    problem = router_problem(low, linear, norm)
    if problem is None:
        return False
    _request(low, linear, problem, norm, {}, {})
    return True


def emit_norm_and_router(low: GpuLowering, norm: Node) -> bool:
    """The launch of a norm, the router that reads it, and the choice, if there are such; others get the norm too."""
    linear = leads_to_router(low, norm)
    if linear is None:
        return False
    y, form = wanted(low, norm.output, linear)
    problem = router_problem(low, linear, norm, y, form)
    if problem is None:
        return False
    args = write_wanted(low, norm.output, y, form, "y")
    _request(low, linear, problem, norm, args, {norm.output: "y"} if y else {})
    low.made.add(norm.output)
    return True


def leads_to_router(low: GpuLowering, norm: Node) -> Node | None:
    """The router that reads a norm, where one launch may do both."""
    if (norm.op, len(norm.values)) != ("rms_norm", 2) or norm.output in low.graph.outputs:
        return None
    for user in low.users(norm.output):
        if user.op == "linear" and router_problem(low, user, norm) is not None:
            return user
    return None


def norm_behind(low: GpuLowering, node: Node) -> Node | None:
    """The first rms_norm that reads the rows of a node's result, where there are too many tokens for matrices to take
    it in and no router does so."""
    for user in () if low.few else low.users(node.output):
        if (user.op, len(user.values)) == ("rms_norm", 2) and low.root(user.values[0]) == node.output \
                and low.width(user.values[0]) == low.width(node.output) and low.rows(user.output) == "T" \
                and user.output not in low.graph.outputs and low.stored[user.output] == low.stored[node.output]:
            return None if leads_to_router(low, user) else user
    return None


def router_problem(low: GpuLowering, linear: Node, norm: Node | None, y: bool = False, form: str = "",
                   ) -> experts_tactics.Routing | None:
    """None if the matrix is no router, or has no such launch. norm: whose result it reads, if the launch has to make
    that; y, form: it is written for others, as it is and quantized."""
    x, _, *w_bias = linear.values
    users = low.users(linear.output)
    if len(users) != 1 or users[0].op != "route" or linear.output in low.graph.outputs \
            or linear.attrs.get("gated") or linear.attrs.get("residual") or low.rows(x) != "T":
        return None
    route = users[0]
    logits, *bias = route.values
    source = norm.values[0] if norm else x
    scheme = GPU_SCHEMES[linear.attrs["scheme"]]
    if low.root(logits) != linear.output or low.width(logits) != low.width(linear.output) \
            or any(low.root(value) not in low.graph.constants for value in bias) \
            or scheme.format != low.floats or scheme.activation != low.floats \
            or low.stored[source] != low.floats or (norm is None and low.x_stride(x)) \
            or (norm is not None and (low.place(source).stride or low.rows(source) != "T")):
        return None
    problem = experts_tactics.Routing(
        low.tokens, num_experts(low, route), bias=bool(bias), **route.attrs, k=low.width(x), x_type=low.floats,
        w_bias=bool(w_bias), norm_eps=norm.attrs["eps"] if norm else None, y=y, y_form=form)
    return problem if low.candidates(problem, experts_tactics.routing).legal else None


def request_route(low: GpuLowering, node: Node, problem: experts_tactics.Routing, args: Mapping[str, Arg],
                  writes: Mapping[str, str]) -> None:
    """Ask for the launch that makes what a route node gives, and lists the rows of each expert."""
    ids, weights = node.outputs
    args = {**args, "ids": low.output(ids), "weights": low.output(weights)}
    low.quantized[low.identity(ids), BY_EXPERT] = places = lists(low, ids, problem.all_experts)
    low.request(node, low.candidates(problem, experts_tactics.routing), args | places,
                {ids: "ids", weights: "weights", **writes}, problem.x_type if problem.k else "",
                native=bool(problem.k))


def num_experts(low: GpuLowering, route: Node) -> int:
    """That a route node chooses of."""
    return low.width(route.values[0]) - bool(route.attrs.get("shared_gate"))


def lists(low: GpuLowering, ids: str, experts: int) -> dict[str, Arg]:
    """Memory for the rows of each expert."""
    return {"order": low.temporary(f"{ids}.order", 4 * low.tokens * experts),
            "starts": low.temporary(f"{ids}.starts", 4 * (experts + 1))}


def wanted(low: GpuLowering, value: str, *apart: Node) -> tuple[bool, str]:
    """(whether a norm is read as it is, what it is read quantized to), by all but the nodes `apart`."""
    forms = {GPU_SCHEMES[user.attrs["scheme"]].quantized if user.op in MATRICES and not low.few else ""
             for user in low.users(value) if user not in apart}
    quantized = {form for form in forms if experts_tactics.quantizes_to(form)}
    form = quantized.pop() if len(quantized) == 1 else ""
    return bool(forms - {form} if form else forms) or value in low.graph.outputs, form


def write_wanted(low: GpuLowering, value: str, floats: bool, form: str, parameter: str) -> dict[str, Arg]:
    """Memory for what `wanted` tells: `parameter` of the launch that makes it, and q, q_scale, q_factor, q_sum."""
    args = {}
    if floats:
        args[parameter] = low.output(value)
    else:
        low.places[value] = Place(Arg("value", value))
    if form:
        args |= {f"q{name[1:]}": place for name, place in write_quantized(low, value, form).items()}
    return args


def _request(low: GpuLowering, linear: Node, problem: experts_tactics.Routing, norm: Node | None,
             args: Mapping[str, Arg], writes: Mapping[str, str]) -> None:
    x, w, *w_bias = linear.values
    route = low.users(linear.output)[0]
    _, matrix = low.matrix(w, linear.attrs["scheme"])
    given = {**args, **matrix, "x": low.arg(norm.values[0] if norm else x)}
    if norm is not None:
        given["norm_weight"] = low.arg(norm.values[1])
    if w_bias:
        given["w_bias"] = low.arg(w_bias[0])
    if problem.bias:
        given["bias"] = low.arg(low.root(route.values[1]))
    request_route(low, route, problem, given, writes)
    low.made |= {linear.output, route.outputs[0]}

"""Which norms are left to the matrices that read them."""
from __future__ import annotations

from ingot.plugins.linear import tactics as linear_tactics

from ..ir.graph import Node
from .adapter_inputs import others
from .emit_experts import expert_problem
from .emit_linear import linear_problem
from .emit_router import router_problem
from .lower import GpuLowering


def absorbs_norm(low: GpuLowering, norm: Node) -> bool:
    """Whether all readers of a norm, but for adapters, are matrices that can normalise their inputs themselves."""
    y = norm.outputs[0]
    users = others(low, y)
    if not low.few or (norm.op, len(norm.values)) not in (("rms_norm", 2), ("norm_add_norm", 4)) \
            or low.rows_a_token(norm.values[0]) != 1 or y in low.graph.outputs:
        return False
    if norm.op == "norm_add_norm" and (len(users) != 1 or not low.is_next(norm, users[0]) or any(
            low.place(value).stride for value in norm.values[:2])):
        return False  # one of them writes the sum, before anything else may read it
    return bool(users) and all(_reads_rows(low, user, y) and _normalises(low, user, norm) for user in users)


def _reads_rows(low: GpuLowering, user: Node, y: str) -> bool:
    """Whether a node's first operand is the whole of y, and no other one is."""
    first, *others = user.values
    return low.root(first) == y and low.width(first) == low.width(y) and y not in map(low.root, others)


def _normalises(low: GpuLowering, user: Node, norm: Node) -> bool:
    plain = norm.op == "rms_norm"
    if plain and user.op == "linear" and router_problem(low, user, norm) is not None:
        return True
    if user.op == "linear":
        return bool(low.candidates(linear_problem(low, user, norm), linear_tactics.candidates).legal)
    return plain and user.op == "expert_linear" and not low.place(norm.values[0]).stride and \
        bool(low.candidates(expert_problem(low, user, norm), linear_tactics.candidates).legal)

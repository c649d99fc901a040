"""Raise what mixtures of experts do beside their matrices: the choice of experts, and the sum of what they give."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ingot.plugins.expert_linear.tactics import MAX_CHOICES, MAX_EXPERTS

from ..ir.graph import Graph, Node, Operand
from .match import Matcher, eliminate_dead_code, rebuilt

_TINY = 1e-9
"""Added to a sum of weights, or its lower bound, against a division by zero."""


def raise_moe(graph: Graph) -> Graph:
    """The arithmetic between a router and its experts, and behind them:

    softmax | sigmoid, [+ bias], [best groups of experts], topk, [gather], [/ sum], [* factor]  ->  route
    topk of logits, softmax | sigmoid of the chosen                                             ->  route
    reduce_sum(expert_linear(…) * weights), [+ residual]                                        ->  combine

    What matches no pattern stays as it is.
    """
    m = Matcher(graph)
    users = graph.consumers()
    chosen = {node.values[1] for node in graph.nodes if node.op == "expert_linear"}
    kept = {*graph.outputs, *graph.probes.values()}
    placed: dict[str, list[Node]] = {}  # output of a node -> what takes its place
    for node in graph.nodes:
        if node.op == "topk" and node.outputs[1] in chosen:
            found = _Router(m, users, kept, node).raised()
            placed |= found or {}
        elif node.op == "reduce_sum":
            placed |= _combined(m, users, kept, node) or {}
    nodes = [new for node in graph.nodes for new in placed.get(node.outputs[0], [node])]
    return eliminate_dead_code(rebuilt(graph, nodes))


@dataclass
class _Router:
    """What a topk chooses by, and what becomes of the weights of those that it chooses."""

    m: Matcher
    users: dict[str, list[Node]]
    kept: set[str]
    topk: Node
    attrs: dict[str, Any] = field(default_factory=dict)
    made: list[Node] = field(default_factory=list)

    def raised(self) -> dict[str, list[Node]] | None:
        """Output of a node -> what takes its place; None if the pattern is another."""
        key, (values, ids) = self.topk.inputs[0], self.topk.outputs
        experts = self.m.type(key).shape[-1]
        if len(self.m.type(key).shape) != 2 or not self.topk.attrs.get("largest", True) \
                or self.topk.attrs["dim"] != 1 or int(experts) > MAX_EXPERTS or self.topk.attrs["k"] > MAX_CHOICES:
            return None
        self.attrs["choices"] = self.topk.attrs["k"]
        key = self._without_groups(key)
        key, bias = self._without_bias(key)
        score = self.m.node(key, "softmax", "sigmoid")
        if score is None:
            if bias is not None or "groups" in self.attrs:
                return None
            return self._scores_of_chosen(key, values, ids)
        self.attrs["scores"] = score.op
        gathered = [user for user in self.users[score.output] if user.op == "gather" and user.values[1] == ids
                    and user.attrs["dim"] == 1]
        of_topk = bias is None and "groups" not in self.attrs
        if len(gathered) > 1 or (gathered and of_topk and self._is_read(values)) or not (gathered or of_topk):
            return None
        weights = gathered[0].output if gathered else values
        if gathered and self._is_read(values):
            return None
        return self._route(score.inputs[0], bias, weights, ids)

    def _scores_of_chosen(self, logits: Operand, values: str, ids: str) -> dict[str, list[Node]] | None:
        if len(self.users[values]) != 1 or values in self.kept:
            return None
        score = self.users[values][0]
        if score.op not in ("softmax", "sigmoid") or score.attrs.get("dim", 1) != 1:
            return None
        self.attrs["scores"] = "softmax_of_chosen" if score.op == "softmax" else "sigmoid"
        return self._route(logits, None, score.output, ids)

    def _route(self, logits: Operand, bias: str | None, weights: str, ids: str) -> dict[str, list[Node]]:
        """weights: the scores of the chosen experts, in front of what is done to them all."""
        dropped = [] if weights in self.topk.outputs else [weights]
        weights = self._normalised(weights, dropped)
        weights = self._scaled(weights, dropped)
        node = Node("route", (logits, *([bias] if bias else [])), (ids, weights), self.attrs, self.topk.origin)
        return {self.topk.outputs[0]: [*self.made, node], **{name: [] for name in dropped}}

    def _normalised(self, weights: str, dropped: list[str]) -> str:
        """w / sum(w), w / (sum(w) + tiny), w / max(sum(w), tiny)"""
        readers = self.users[weights]
        total = next((node for node in readers if node.op == "reduce_sum" and node.attrs["dims"] in ((1,), [1])
                      and node.attrs["keepdim"]), None)
        if total is None or len(readers) != 2 or weights in self.kept:
            return weights
        eps, sums = 0.0, [total.output]
        after = self._only_reader(total.output)
        number = self.m.number(after.inputs[1]) if after is not None and after.op in ("add", "maximum") else None
        if after is not None and number is not None and 0 <= number <= _TINY:
            # A bound that no sum of float32 scores of a softmax falls below changes nothing.
            eps = number if after.op == "add" else 0.0
            if after.op == "maximum" and self.attrs["scores"] != "softmax":
                return weights
            sums.append(after.output)
            after = self._only_reader(after.output)
        if after is None or after.op != "div" or after.inputs != (weights, sums[-1]) or after not in readers:
            return weights
        self.attrs |= {"normalise": True} | ({"eps": eps} if eps else {})
        dropped += [*sums, after.output]
        return after.output

    def _scaled(self, weights: str, dropped: list[str]) -> str:
        after = self._only_reader(weights)
        if after is None or after.op != "mul" or self.m.type(after.output) != self.m.type(weights):
            return weights
        factor = self.m.number(after.inputs[1] if after.inputs[0] == weights else after.inputs[0])
        if factor is None:
            return weights
        self.attrs["factor"] = factor
        dropped.append(after.output)
        return after.output

    def _without_bias(self, key: Operand) -> tuple[Operand, str | None]:
        """score + bias -> score, bias [E]"""
        add = self.m.node(key, "add")
        found = self.m.split(add, lambda value: self.m.is_row(value, key)) if add is not None else None
        if add is None or found is None:
            return key, None
        bias, nodes = self.m.as_row(found[0], add)
        self.made += nodes
        return found[1], str(bias)

    def _without_groups(self, key: Operand) -> Operand:
        """where(not(mask of the best groups != 0), -inf, x) -> x"""
        choice = self.m.node(key, "where")
        if choice is None or self.m.number(choice.inputs[1]) != float("-inf"):
            return key
        condition = self.m.node(choice.inputs[0], "logical_not")
        mask = condition and self.m.node(condition.inputs[0], "ne", "cast")
        if mask is None or (mask.op == "ne" and self.m.number(mask.inputs[1]) != 0):
            return key
        x = choice.inputs[2]
        found = self._groups(self._spread(mask.inputs[0], x), x)
        if found is None:
            return key
        groups, kept, best = found
        if kept < groups:
            self.attrs |= {"groups": groups, "kept_groups": kept, "group_best": best}
        return x

    def _spread(self, mask: Operand, x: Operand) -> Operand | None:
        """reshape(expand(reshape(m [T, G]); [T, G, E / G]); [T, E]) -> m"""
        whole = self.m.node(mask, "reshape")
        wide = whole and self.m.node(whole.inputs[0], "expand")
        narrow = wide and self.m.node(wide.inputs[0], "reshape")
        if wide is None or narrow is None or self.m.type(mask).shape != self.m.type(x).shape:
            return None
        shape = self.m.type(wide.output).shape
        return narrow.inputs[0] if self.m.type(narrow.output).shape == (*shape[:2], 1) else None

    def _groups(self, mask: Operand | None, x: Operand) -> tuple[int, int, int] | None:
        """(groups, kept, best) of scatter(zeros, topk(sum of the best of each group) -> ids, 1)"""
        scatter = self.m.node(mask, "scatter")
        picked = scatter and self.m.node(scatter.inputs[1], "topk")
        zeros = scatter and self.m.node(scatter.inputs[0], "full")
        if scatter is None or picked is None or zeros is None or zeros.attrs["value"] != 0 \
                or self._filled(scatter.inputs[2]) != 1 or not picked.attrs.get("largest", True) \
                or scatter.inputs[1] != picked.outputs[1]:
            return None
        total = self.m.node(picked.inputs[0], "reduce_sum", "reduce_max")
        groups = int(self.m.type(picked.inputs[0]).shape[-1])
        if total is None or total.attrs["dims"] not in ((2,), [2]) or total.attrs["keepdim"]:
            return None
        inner, best = total.inputs[0], 1
        if total.op == "reduce_sum":
            top = self.m.node(inner, "topk")
            if top is None or not top.attrs.get("largest", True) or inner != top.outputs[0]:
                return None
            inner, best = top.inputs[0], top.attrs["k"]
        grouped = self.m.node(inner, "reshape")
        if grouped is None or grouped.inputs[0] != x or len(self.m.type(inner).shape) != 3 \
                or self.m.type(inner).shape[1] != groups:
            return None
        return groups, picked.attrs["k"], best

    def _filled(self, value: Operand) -> float | None:
        """The number that all elements are."""
        made = self.m.node(value, "full")
        expr = self.m.graph.constants.get(value) if isinstance(value, str) else None
        if expr is not None and expr.op == "full":
            return float(expr.attr("value"))
        return float(made.attrs["value"]) if made is not None else self.m.number(value)

    def _is_read(self, value: str) -> bool:
        return bool(self.users[value]) or value in self.kept

    def _only_reader(self, value: str) -> Node | None:
        readers = self.users[value]
        return readers[0] if len(readers) == 1 and value not in self.kept else None


def _combined(m: Matcher, users: dict[str, list[Node]], kept: set[str], total: Node) -> dict[str, list[Node]] | None:
    """reduce_sum(x [T, k, D] * reshape(w [T, k]; [T, k, 1])) -> combine(x, w), with the sum that follows it."""
    product = m.node(total.inputs[0], "mul")
    shape = m.type(total.inputs[0]).shape
    if product is None or len(shape) != 3 or total.attrs["dims"] not in ((1,), [1]) or total.attrs["keepdim"]:
        return None
    found = m.split(product, lambda value: m.type(value).shape == (*shape[:2], 1))
    if found is None or m.node(found[1], "expert_linear") is None or m.type(found[1]).shape != shape:
        return None
    weights, made = m.through_reshapes(found[0]), []
    if m.type(weights).shape != shape[:2]:
        made.append(Node("reshape", (weights,), (f"{total.output}.weights",), {"shape": shape[:2]}, total.origin))
        weights = made[0].output
    combine = Node("combine", (found[1], weights), (total.output,), {}, total.origin)
    added = _residual(m, users, kept, total)
    if added is None:
        return {total.output: [*made, combine]}
    add, other, gone = added
    flat, result = f"{total.output}.residual", f"{total.output}.sum"
    made += [Node("reshape", (other,), (flat,), {"shape": m.type(total.output).shape}, add.origin),
             Node("combine", (*combine.inputs, flat), (result,), {}, total.origin),
             Node("reshape", (result,), (add.output,), {"shape": m.type(add.output).shape}, add.origin)]
    return {**{name: [] for name in gone}, add.output: made}


def _residual(m: Matcher, users: dict[str, list[Node]], kept: set[str], total: Node,
              ) -> tuple[Node, str, list[str]] | None:
    """(the addition, what is added, the values that vanish) where the sum over experts is read by an addition alone."""
    value, gone = total.output, []
    while len(users[value]) == 1 and value not in kept:
        reader = users[value][0]
        gone.append(value)
        if reader.op == "add":
            other = next((operand for operand in reader.inputs if operand != value), None)
            same = isinstance(other, str) and not m.is_constant(other) and m.type(other) == m.type(reader.output)
            return (reader, str(other), gone) if same and m.type(value) == m.type(reader.output) else None
        if reader.op != "reshape":
            return None
        value = reader.output
    return None

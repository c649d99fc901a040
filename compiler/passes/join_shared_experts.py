"""Make a shared expert some of the experts that tokens are sent to: those that every token chooses."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ingot.plugins.expert_linear.tactics import MAX_CHOICES, MAX_EXPERTS
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ..ir.graph import Graph, Node, Operand
from ..weights.carried import carried
from ..weights.expr import WeightExpr, concat, slice_, stack
from .match import Matcher, eliminate_dead_code, rebuilt


def join_shared_experts(graph: Graph) -> Graph:
    """combine(experts of x, w, [r +] [sigmoid(g x) *] down(act(gate x) * up x))  ->  combine(more experts of x, w', r)

    Where the shared expert is m times as wide as the others, of their activation and schemes: cut by its inner
    channels it is m more matrices of each stack. `route` gives every token these m behind its choices, of weight one,
    or of sigmoid(g x), where g becomes one more row of the router and is held as that is. So its matrices, its gate
    and its sum take no launches. Scales of rounded weights are then found for each part alone; what a checkpoint holds
    quantized stays only in its own numbers, else nothing is done.
    """
    m = Matcher(graph)
    kept = {*graph.outputs, *graph.probes.values()}
    constants: dict[str, WeightExpr] = {}
    placed: dict[str, list[Node]] = {}  # first output of a node -> what takes its place
    for node in graph.nodes:
        if node.op == "combine" and (found := _find(m, kept, node)) is not None:
            placed |= _joined(graph, found, constants)
    nodes = [new for node in graph.nodes for new in placed.get(node.outputs[0], [node])]
    return eliminate_dead_code(rebuilt(graph, nodes, constants=constants))


@dataclass(frozen=True)
class _Mixture:
    """residual: of the block. gate: the matrix of one row that weighs the shared expert."""

    router: Node
    route: Node
    up: Node
    down: Node
    combine: Node
    shared_up: Node
    shared_down: Node
    gate: Node | None
    residual: Operand | None
    parts: int


def _find(m: Matcher, kept: set[str], combine: Node) -> _Mixture | None:
    """What is to be joined at a sum over experts; None where that is not possible."""
    if len(combine.values) < 3:
        return None
    alone = _Alone(m, kept)
    down = alone.node(combine.values[0], "expert_linear")
    up = alone.node(down.values[0], "expert_linear") if down is not None else None
    route = alone.node(combine.values[1], "route")
    router = alone.node(route.values[0], "linear") if route is not None else None
    if up is None or down is None or route is None or router is None or route.attrs.get("shared") \
            or up.values[1] != route.outputs[0] or down.values[1] != route.outputs[0] \
            or m.uses(route.outputs[0]) != 2 or route.outputs[0] in kept \
            or (down.values[0], *combine.values[:2]) != (up.output, down.output, route.outputs[1]):
        return None
    for shared_down, gate, residual in alone.shared(combine.values[2]):
        shared_up = alone.node(shared_down.values[0], "linear")
        parts = _parts(m, up, down, shared_up, shared_down) if shared_up is not None else 0
        readers = [node for node in (up, router, shared_up, gate) if node is not None]
        if shared_up is not None and parts and len({m.through_reshapes(node.values[0]) for node in readers}) == 1 \
                and _takes_gate(m, router, gate) and int(route.attrs["choices"]) + parts <= MAX_CHOICES \
                and int(m.type(up.values[2]).shape[0]) + parts <= MAX_EXPERTS:
            return _Mixture(router, route, up, down, combine, shared_up, shared_down, gate, residual, parts)
    return None


@dataclass(frozen=True)
class _Alone:
    """Finds nodes whose results nothing else reads."""

    m: Matcher
    kept: set[str]

    def node(self, value: Operand, *ops: str) -> Node | None:
        """The node that makes the value, or what it is a reshape of."""
        while isinstance(value, str) and value not in self.kept:
            node = self.m.node(value)
            if node is None or self.m.uses(value) != 1:
                return None
            if node.op != "reshape":
                return node if node.op in ops else None
            value = node.inputs[0]
        return None

    def shared(self, value: Operand) -> Iterator[tuple[Node, Node | None, Operand | None]]:
        """(last matrix of the shared expert, matrix of its weight, residual): what may be added to the chosen ones."""
        yield from ((*found, None) for found in self._weighed(value))
        total = self.node(value, "add")
        for inner, residual in (total.inputs, total.inputs[::-1]) if total is not None else ():
            if total is not None and self.m.type(residual) == self.m.type(total.output):
                yield from ((*found, residual) for found in self._weighed(inner))

    def _weighed(self, value: Operand) -> Iterator[tuple[Node, Node | None]]:
        plain, product = self.node(value, "linear"), self.node(value, "mul")
        if plain is not None:
            yield plain, None
        for weight, inner in (product.inputs, product.inputs[::-1]) if product is not None else ():
            sigmoid, matrix = self.node(weight, "sigmoid"), self.node(inner, "linear")
            gate = self.node(sigmoid.inputs[0], "linear") if sigmoid is not None else None
            if matrix is not None and gate is not None:
                yield matrix, gate


def _parts(m: Matcher, up: Node, down: Node, shared_up: Node, shared_down: Node) -> int:
    """How many experts the shared one becomes; 0: it cannot be cut so."""
    if not up.attrs.get("gated") or shared_up.attrs != up.attrs or shared_down.attrs != down.attrs \
            or [len(node.values) for node in (up, down, shared_up, shared_down)] != [3, 3, 2, 2]:
        return 0
    matrices = [up.values[2], down.values[2], shared_up.values[1], shared_down.values[1]]
    if not all(map(m.is_constant, matrices)):
        return 0
    width, whole = int(m.type(matrices[1]).shape[-1]), int(m.type(matrices[3]).shape[-1])
    parts = whole // width
    if whole % width or any(_is_rounded_again(m.graph.constants[experts], m.graph.constants[shared], parts, scheme)
                            for experts, shared, scheme in ((*matrices[::2], up.attrs["scheme"]),
                                                            (*matrices[1::2], down.attrs["scheme"]))):
        return 0
    return parts


def _is_rounded_again(experts: WeightExpr, shared: WeightExpr, parts: int, scheme: str) -> bool:
    """Whether weights that the checkpoint holds as the scheme does would have to be rounded to lie in one stack."""
    form = GPU_SCHEMES[scheme].format
    if carried(experts, form) is None and carried(shared, form) is None:
        return False
    return carried(_stacked(experts, shared, parts), form) is None


def _takes_gate(m: Matcher, router: Node, gate: Node | None) -> bool:
    """Whether the shared expert's weight can be a row of the router, where there is one."""
    return gate is None or (
        [len(node.values) for node in (gate, router)] == [2, 2] and m.type(gate.output).shape[-1] == 1
        and m.is_constant(gate.values[1]) and m.is_constant(router.values[1])
        and GPU_SCHEMES[router.attrs["scheme"]].weights.bits >= 16)


def _stacked(experts: WeightExpr, shared: WeightExpr, parts: int) -> WeightExpr:
    """experts [E, N, K] and, of the shared expert's matrix, `parts` of that shape: [2 S, D] with its two halves by
    rows, or [D, S] by channels. One operand of the result each: see PackedWeight.shared."""
    _, n, k = experts.shape
    if shared.shape[0] == n:
        pieces = [slice_(shared, 1, part * k, (part + 1) * k) for part in range(parts)]
    else:
        half, whole = n // 2, shared.shape[0] // 2
        pieces = [concat([slice_(shared, 0, begin + part * half, begin + (part + 1) * half) for begin in (0, whole)], 0)
                  for part in range(parts)]
    return concat([experts, stack(pieces, 0)], 0)


def _joined(graph: Graph, found: _Mixture, constants: dict[str, WeightExpr]) -> dict[str, list[Node]]:
    """First output of a node -> what takes its place. constants gains the stacks, named for all that is in them."""
    ids, weights, ups, downs = (f"{name}.all" for name in (*found.route.outputs, found.up.output, found.down.output))
    logits, *bias = found.route.inputs
    attrs = {**found.route.attrs, "shared": found.parts}
    placed: dict[str, list[Node]] = {}
    if found.gate is not None:
        x, router, gate = found.router.inputs[0], found.router.values[1], found.gate.values[1]
        logits, attrs["shared_gate"] = f"{found.router.output}.all", True
        constants[f"{router}+{gate}"] = concat([graph.constants[router], graph.constants[gate]], 0)
        placed[found.router.output] = [replace(found.router, inputs=(x, f"{router}+{gate}"), outputs=(logits,))]
    placed[found.route.outputs[0]] = [replace(found.route, inputs=(logits, *bias), outputs=(ids, weights), attrs=attrs)]
    for node, x, shared, output in ((found.up, found.up.inputs[0], found.shared_up, ups),
                                    (found.down, ups, found.shared_down, downs)):
        names = node.values[2], shared.values[1]
        constants["+".join(names)] = _stacked(graph.constants[names[0]], graph.constants[names[1]], found.parts)
        placed[node.output] = [replace(node, inputs=(x, ids, "+".join(names)), outputs=(output,))]
    placed[found.combine.output] = _sum(graph, found, downs, weights)
    return placed


def _sum(graph: Graph, found: _Mixture, downs: str, weights: str) -> list[Node]:
    combine, residual, made = found.combine, found.residual, list[Node]()
    shape = graph.types[combine.output].shape
    if isinstance(residual, str) and graph.types[residual].shape != shape:
        residual = f"{combine.output}.flat"
        made.append(Node("reshape", (str(found.residual),), (residual,), {"shape": shape}, combine.origin))
    inputs = (downs, weights) if residual is None else (downs, weights, residual)
    return [*made, replace(combine, inputs=inputs)]

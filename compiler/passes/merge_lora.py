"""What adapters add to a merged matrix is added at once."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.graph import Graph, Node
from .match import Matcher, rebuilt


def merge_lora(graph: Graph) -> Graph:
    """Y = linear(x, [a; b]), lora_expand(Y[a], h), lora_expand(Y[b], h)  ->  Y' = lora_expand(Y, h), Y'[a], Y'[b].

    The shrink that makes h moves behind the matrix: norm and matrix stay neighbours, which the back ends make one.
    """
    consumers, producers = graph.consumers(), graph.producers()
    merged: dict[str, tuple[Node, list[Node]]] = {}  # output of a matrix -> the expand, and the slices of its result
    gone: set[str] = set()
    for node in graph.nodes:
        found = _merged(graph, consumers, node) if node.op == "linear" else None
        if found is not None:
            merged[node.output] = found
            gone.update(one.output for one in consumers[node.output])
            gone.update(one.output for one in found[1])
    nodes: list[Node] = []
    placed: set[str] = set()
    for node in graph.nodes:
        if node.outputs[0] in gone | placed:
            continue
        nodes.append(node)
        if node.op in ("lora_shrink", "div"):
            placed.add(node.output)
        elif node.outputs[0] in merged:
            expand, slices = merged[node.output]
            h = expand.values[1]
            before = [one for one in _shrink(producers[h], producers, consumers) if one.output not in placed]
            nodes += [*before, expand, *slices]
            placed.update(one.output for one in before)
    return rebuilt(graph, nodes)


def _shrink(shrink: Node, producers: Mapping[str, Node], consumers: Mapping[str, list[Node]]) -> list[Node]:
    """A shrink, with the division in front of it that smooth_inputs makes, if there is one."""
    division = producers.get(shrink.values[0])
    alone = division is not None and division.op == "div" and consumers[division.output] == [shrink]
    return [division, shrink] if division is not None and alone else [shrink]


def _merged(graph: Graph, consumers: dict[str, list[Node]], linear: Node) -> tuple[Node, list[Node]] | None:
    """The expand of a whole matrix, and the slices of what it gives; None if there are none of both."""
    slices = consumers[linear.output]
    axis = len(graph.types[linear.output].shape) - 1
    if not slices or linear.output in graph.outputs or any(
            one.op != "slice" or one.attrs["dim"] != axis or one.attrs.get("step", 1) != 1 for one in slices):
        return None
    parts, again, expands = [], list[Node](), list[Node]()
    whole = f"{linear.output}.adapted"
    for one in slices:
        readers = consumers[one.output]
        output = one.output
        if len(readers) == 1 and readers[0].op == "lora_expand" and readers[0].values[0] == one.output:
            expands.append(readers[0])
            parts += [(name, start + one.attrs["start"], *rest) for name, start, *rest in readers[0].attrs["parts"]]
            output = readers[0].output
        again.append(replace(one, inputs=(whole,), outputs=(output,)))
    if not expands or len({expand.values[1] for expand in expands}) != 1:
        return None
    attrs = {**expands[0].attrs, "parts": tuple(parts)}
    return replace(expands[0], inputs=(linear.output, *expands[0].inputs[1:]), outputs=(whole,), attrs=attrs), again


def add_residuals_first(graph: Graph) -> Graph:
    """add(lora_expand(linear(x, w), h), r) -> lora_expand(add(linear(x, w), r), h), where nothing else reads them: the
    matrix takes the residual in."""
    m = Matcher(graph)
    moved: dict[str, list[Node]] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        found = m.summand(node, lambda value, other: _may_move(m, value, other, gone))
        if found is not None:
            value, other = found
            expand = m.node(value, "lora_expand")
            assert expand is not None
            gone.add(expand.output)
            total = f"{node.output}.unadapted"
            moved[node.output] = [replace(node, inputs=(expand.inputs[0], other), outputs=(total,)),
                                  replace(expand, inputs=(total, *expand.inputs[1:]), outputs=node.outputs)]
    nodes = [made for node in graph.nodes if node.outputs[0] not in gone
             for made in moved.get(node.outputs[0], [node])]
    return rebuilt(graph, nodes)


def _may_move(m: Matcher, value: object, other: object, gone: set[str]) -> bool:
    expand = m.node(value, "lora_expand") if isinstance(value, str) else None
    if expand is None or expand.output in gone or m.uses(expand.output) != 1:
        return False
    linear = m.node(expand.inputs[0], "linear")
    return linear is not None and m.uses(linear.output) == 1 and isinstance(other, str) and other != value \
        and not m.is_constant(other) and m.type(other).shape == m.type(expand.output).shape

"""Let the parts that heads are cut into lie side by side, so that kernels read each of them in place."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ..ir.graph import Graph, Node
from ..weights.carried import carried
from ..weights.expr import WeightExpr, concat, reshape, slice_
from .match import Matcher, rebuilt


def part_heads(graph: Graph) -> Graph:
    """y = reshape(linear(x, w), [.., H, D]); y[.., :d], y[.., d:]  ->  the same of linear(x, w'), rows of w' reordered:
    first the first d of all heads, then the rest of all.

    Where one of the parts goes to the cache as it is, such as the values of latent attention, which one matrix makes
    with the keys: heads that lie apart would have to be copied first. What a checkpoint holds quantized stays in its
    own numbers, else nothing is done.
    """
    m = Matcher(graph)
    consumers, kept = graph.consumers(), {*graph.outputs, *graph.probes.values()}
    placed: dict[str, list[Node]] = {}  # output of a slice -> what takes its place
    constants: dict[str, WeightExpr] = {}
    for node in graph.nodes:
        found = _parted(m, consumers, kept, node) if node.op == "linear" else None
        weight = graph.constants[node.values[1]] if found is not None else None
        if found is not None and weight is not None and not _is_rounded_again(weight, found, node.attrs["scheme"]):
            constants[node.values[1]] = _reordered(weight, found)
            placed |= {part.output: _read_apart(graph, node, found, part) for part in found.parts}
    return rebuilt(graph, [new for node in graph.nodes for new in placed.get(node.outputs[0], [node])],
                   constants=constants)


@dataclass(frozen=True)
class _Heads:
    """width: of a head. parts: its slices, in their order."""

    heads: int
    width: int
    parts: tuple[Node, ...]


def _parted(m: Matcher, consumers: dict[str, list[Node]], kept: set[str], linear: Node) -> _Heads | None:
    if set(linear.attrs) != {"scheme"} or len(linear.values) != 2 or not m.is_constant(linear.values[1]) \
            or m.uses(linear.values[1]) != 1:
        return None
    rows = int(m.type(linear.output).shape[-1])
    value, readers = linear.output, consumers[linear.output]
    while len(readers) == 1 and readers[0].op == "reshape" and value not in kept:
        value = readers[0].output
        readers = consumers[value]
    shape = m.type(value).shape
    if value in kept or len(shape) < 3 or not isinstance(shape[-1], int) or not isinstance(shape[-2], int) \
            or shape[-2] * shape[-1] != rows or shape[-2] == 1 or len(readers) < 2:
        return None
    if any(part.op != "slice" or part.attrs["dim"] != len(shape) - 1 or part.attrs.get("step", 1) != 1
           for part in readers):
        return None
    parts = tuple(sorted(readers, key=lambda part: int(part.attrs["start"])))
    ends = [0, *(part.attrs["stop"] for part in parts)]
    if ends[-1] != shape[-1] or [part.attrs["start"] for part in parts] != ends[:-1] \
            or not any(_is_written(consumers, part.output) for part in parts):
        return None
    return _Heads(shape[-2], shape[-1], parts)


def _is_written(consumers: dict[str, list[Node]], value: str) -> bool:
    """Whether a value goes to the cache, in no other order."""
    return any(user.op == "kv_write" or (user.op == "reshape" and _is_written(consumers, user.output))
               for user in consumers[value])


def _reordered(weight: WeightExpr, found: _Heads) -> WeightExpr:
    channels = weight.shape[-1]
    heads = reshape(weight, (found.heads, found.width, channels))
    spans = [(part.attrs["start"], part.attrs["stop"]) for part in found.parts]
    return concat([reshape(slice_(heads, 1, a, b), (found.heads * (b - a), channels)) for a, b in spans], 0)


def _is_rounded_again(weight: WeightExpr, found: _Heads, scheme: str) -> bool:
    form = GPU_SCHEMES[scheme].format
    return carried(weight, form) is not None and carried(_reordered(weight, found), form) is None


def _read_apart(graph: Graph, linear: Node, found: _Heads, part: Node) -> list[Node]:
    shape = graph.types[linear.output].shape
    attrs = {"dim": len(shape) - 1, "start": found.heads * part.attrs["start"],
             "stop": found.heads * part.attrs["stop"], "step": 1}
    name = f"{part.output}.heads"
    return [replace(part, inputs=(linear.output,), outputs=(name,), attrs=attrs),
            Node("reshape", (name,), part.outputs, {"shape": graph.types[part.output].shape}, part.origin)]

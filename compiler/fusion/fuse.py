"""The pass that turns elementwise operators, views and reductions into loops."""
from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import CannotCompile
from ..ir.graph import Graph, Node, Operand, through_reshapes
from ..ir.registry import OPS
from ..ir.types import Dim, DType
from ..ir.verify import operand_type
from ..weights.expr import literal_value
from .expr import ZERO, Expr, UnknownExtent, add, bounds, const, index, load, times
from .placement import AcceptsStrided, Placement, is_fused, place_values
from .views import Index, broadcast_index, permuted_index, reshaped_index, sliced_index


def fuse_loops(graph: Graph, accepts_strided: AcceptsStrided = lambda node, operand, type_: False,
               multiple: int = 1) -> Graph:
    """Every elementwise, view and reduce node becomes part of a `loop` node, or stays as a view.

    A loop is made for each value that must be in memory (placement.py). Reshapes of values in memory stay nodes: they
    cost nothing. So do slices that are column ranges of rows, where accepts_strided(node, operand, type) says that the
    reader takes such, and the range and its rows begin at multiples of `multiple` elements. Probes move to what they
    are a reshape of.

    Raises CannotCompile for a view that no index expression describes.
    """
    placement = place_values(graph, accepts_strided, multiple)
    producers = graph.producers()
    nodes: list[Node] = []
    for node in graph.nodes:
        if not is_fused(node) or node.output in placement.kept_views:
            nodes.append(node)
        elif node.output in placement.in_memory:
            nodes.append(_LoopBuilder(graph, placement, producers).loop(node))
    probes = {label: through_reshapes(value, producers) for label, value in graph.probes.items()}
    return graph.rebuilt(nodes, probes=probes)


@dataclass
class _LoopBuilder:
    """The expression of one loop. extents: of the loop's axes; inputs: the values in memory that it loads."""

    graph: Graph
    placement: Placement
    producers: dict[str, Node]
    extents: dict[int, Dim] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def loop(self, node: Node) -> Node:
        """The loop that computes the output of `node`."""
        type_ = self.graph.types[node.output]
        self.extents.update(enumerate(type_.shape))
        at: Index = tuple(ZERO if dim == 1 else index(axis) for axis, dim in enumerate(type_.shape))
        reduce: tuple[str, tuple[int, ...]] | None = None
        if OPS[node.op].kind == "reduce":
            at, sizes = self._reduced_index(node, at)
            reduce = node.op.removeprefix("reduce_"), sizes
            expr = self._element(node.inputs[0], at)
        else:
            expr = self._node_element(node, at)
        attrs = {"shape": type_.shape, "dtype": type_.dtype, "expr": expr, "reduce": reduce}
        return Node("loop", tuple(self.inputs), (node.output,), attrs, node.origin)

    def _reduced_index(self, node: Node, at: Index) -> tuple[Index, tuple[int, ...]]:
        """Index of the reduced value, whose reduced axes are numbered after those of the result, and their extents."""
        source, dims, rank = self.graph.types[node.values[0]].shape, node.attrs["dims"], len(at)
        kept = iter([place for axis, place in enumerate(at) if axis not in dims] if node.attrs["keepdim"] else at)
        inner: list[Expr] = []
        sizes: list[int] = []
        for axis, dim in enumerate(source):
            if axis not in dims:
                inner.append(next(kept))
                continue
            if not isinstance(dim, int):
                raise _refusal(node, f"a reduction over {dim}, the tokens of a step")
            self.extents[rank + len(sizes)] = dim
            inner.append(index(rank + len(sizes)))
            sizes.append(dim)
        return tuple(inner), tuple(sizes)

    def _element(self, operand: Operand, at: Index) -> Expr:
        if not isinstance(operand, str):
            return const(operand, operand_type(operand, {}).dtype)
        number = self._literal(operand)
        if number is not None:
            return number
        if operand in self.placement.in_memory:
            if operand not in self.inputs:
                self.inputs.append(operand)
            return load(self.inputs.index(operand), at, self.graph.types[operand].dtype)
        return self._node_element(self.producers[operand], at)

    def _literal(self, value: str) -> Expr | None:
        """A constant that is one number, whatever its shape."""
        expr = self.graph.constants.get(value)
        if expr is None or expr.op not in ("literal", "full") or (expr.op == "literal" and expr.size_bytes > 4):
            return None
        number = expr.attr("value") if expr.op == "full" else literal_value(expr).reshape(-1)[0].item()
        return const(number, expr.type.dtype)

    def _node_element(self, node: Node, at: Index) -> Expr:
        """The element of a node's output at an index."""
        type_ = self.graph.types[node.output]
        source = operand_type(node.inputs[0], dict(self.graph.types)).shape if node.inputs else ()
        match node.op:
            case "reshape":
                try:
                    inner = reshaped_index(at, type_.shape, source, self.extents)
                except UnknownExtent as error:
                    raise _refusal(node, f"a reshape that takes {error}, the tokens of a step, apart") from error
            case "permute":
                inner = permuted_index(at, node.attrs["dims"])
            case "expand":
                inner = broadcast_index(at, source)
            case "slice":
                if isinstance(node.attrs["start"], str):
                    raise _refusal(node, f"a slice from {node.attrs['start']}")
                inner = sliced_index(at, node.attrs["dim"], node.attrs["start"], node.attrs["step"])
            case "cat":
                return self._cat(node, at)
            case "arange":
                return _arange(node, at[0])
            case "full":
                return const(node.attrs["value"], type_.dtype)
            case "gather" | "take" | "gather_rows":
                return self._indirect(node, at)
            case _:
                return self._elementwise(node, at)
        return self._element(node.inputs[0], inner)

    def _cat(self, node: Node, at: Index) -> Expr:
        axis, start, ends, parts = node.attrs["dim"], 0, [], [at[node.attrs["dim"]]]
        for value in node.values:
            size = self.graph.types[value].shape[axis]
            if not isinstance(size, int):
                raise _refusal(node, f"a concatenation along {size}, the tokens of a step")
            if size == 0:
                continue
            place = ZERO if size == 1 else add(at[axis], const(-start))
            parts.append(self._element(value, (*at[:axis], place, *at[axis + 1:])))
            start += size
            ends.append(start)
        if len(ends) == 1:
            return parts[1]
        return Expr("pick", tuple(parts), tuple(ends), self.graph.types[node.output].dtype)

    def _indirect(self, node: Node, at: Index) -> Expr:
        source, picks = node.values
        dim, rank = node.attrs["dim"], len(self.graph.types[picks].shape)
        if node.op == "gather":
            rank, chosen = 1, self._element(picks, at)
        else:
            chosen = self._element(picks, at[dim:dim + rank])
        chosen = self._from_start(chosen, picks, self.graph.types[source].shape[dim])
        return self._element(source, (*at[:dim], chosen, *at[dim + rank:]))

    def _from_start(self, chosen: Expr, picks: str, size: Dim) -> Expr:
        """A negative index counts from the end."""
        if chosen.op == "const" and isinstance(size, int):
            return const(int(chosen.value) % size)
        low, _ = bounds(chosen, self.extents)
        made = self.producers.get(picks)
        never = picks in self.graph.inputs or (made is not None and made.op in ("topk", "sort", "argmax"))
        if never or not isinstance(size, int) or (low is not None and low >= 0):
            return chosen
        is_negative = Expr("lt", (chosen, ZERO), None, DType.BOOL)
        return Expr("where", (is_negative, add(chosen, const(size)), chosen), None, DType.I32)

    def _elementwise(self, node: Node, at: Index) -> Expr:
        args = []
        for operand in node.inputs:
            shape = self.graph.types[operand].shape if isinstance(operand, str) else ()
            args.append(self._element(operand, broadcast_index(at, shape)))
        extra = next(iter(node.attrs.values())) if node.attrs else None
        return Expr(node.op, tuple(args), extra, self.graph.types[node.output].dtype)


def _refusal(node: Node, what: str) -> CannotCompile:
    return CannotCompile(f"{node.op}: {what} cannot be compiled\n  in {node.origin or 'an operation without a name'}")


def _arange(node: Node, at: Expr) -> Expr:
    dtype, start, step = node.attrs["dtype"], node.attrs["start"], node.attrs["step"]
    if dtype == DType.I32 and float(start).is_integer() and float(step).is_integer():
        return add(times(at, int(step)), const(int(start)))
    scaled = Expr("mul", (Expr("cast", (at,), DType.F32), const(float(step), DType.F32)))
    total = Expr("add", (scaled, const(float(start), DType.F32)))
    return total if dtype == DType.F32 else Expr("cast", (total,), dtype, dtype)

"""The pass that turns elementwise operators, views and reductions into loops."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir.graph import Graph, Node, Operand
from ..ir.registry import OPS
from ..ir.types import Dim, DType, TensorType, split_dim
from ..ir.verify import operand_type
from .expr import ZERO, Expr, add, const, index, load, times
from .views import Index, broadcast_index, permuted_index, reshaped_index, sliced_index

AcceptsStrided = Callable[[Node, int], bool]

_COSTLY = {"exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "silu", "gelu", "softplus", "pow",
           "rsqrt", "sqrt", "div", "reciprocal", "mod", "floor_div"}
_COSTLY_COST = 8
MAX_REPEATED_COST = 6
"""A value that several loops need is computed in each of them, if that takes no more operations than this."""
_INDIRECT = ("gather", "take", "gather_rows")


def fuse_loops(graph: Graph, accepts_strided: AcceptsStrided = lambda node, operand: False) -> Graph:
    """Every elementwise, view and reduce node becomes part of a `loop` node, or stays as a view.

    A loop is made for each value that must be in memory: what structured operators and outputs read, reductions, and
    what several loops read and is dear to compute. Reshapes of values in memory stay nodes: they cost nothing. Slices
    of the rows of a value stay where accepts_strided(node, operand) says that the reader takes strided rows.
    """
    return _Fuser(graph, accepts_strided).run()


@dataclass
class _Fuser:
    graph: Graph
    accepts_strided: AcceptsStrided
    in_memory: set[str] = field(default_factory=set)
    kept_views: set[str] = field(default_factory=set)

    def run(self) -> Graph:
        self.producers = self.graph.producers()
        self.consumers = self.graph.consumers()
        self._choose()
        nodes: list[Node] = []
        for node in self.graph.nodes:
            structured = OPS[node.op].kind == "structured" and not self._inlined(node)
            if structured or node.output in self.kept_views:
                nodes.append(node)
            elif node.output in self.in_memory:
                nodes.append(self._loop(node))
        return self.graph.rebuilt(nodes)

    # --- which values are in memory ---

    def _choose(self) -> None:
        graph = self.graph
        self.in_memory.update(graph.inputs, graph.constants)
        for node in graph.nodes:
            if OPS[node.op].kind == "structured" and not self._inlined(node):
                self.in_memory.update(node.outputs)
            elif OPS[node.op].kind == "reduce":
                self.in_memory.add(node.output)
        cost: dict[str, int] = {}
        for node in graph.nodes:
            if OPS[node.op].kind in ("structured", "reduce") and not self._inlined(node):
                continue
            cost[node.output] = _own_cost(node) + sum(cost.get(value, 0) for value in node.values)
            repeats = self._reads(node.output) - 1
            dear = _own_cost(node) > 0 and repeats > 0 and cost[node.output] * repeats > MAX_REPEATED_COST
            if dear or node.output in graph.probes.values():
                self.in_memory.add(node.output)
                cost[node.output] = 0
        for node in graph.nodes:
            if OPS[node.op].kind == "structured" and not self._inlined(node):
                for number, value in enumerate(node.values):
                    self._require(value, node, number)
        for value in graph.outputs:
            self._require(value, None, 0)
        # A probe that is a view is worth no copy.
        for value in graph.probes.values():
            node = self.producers.get(value)
            if node is not None and OPS[node.op].kind == "view" and value not in self.kept_views:
                self.in_memory.add(value)

    def _reads(self, value: str) -> int:
        """How many nodes read a value, by itself or through views."""
        return sum(self._reads(user.output) if OPS[user.op].kind == "view" else 1 for user in self.consumers[value])

    def _require(self, value: str, reader: Node | None, operand: int) -> None:
        """Make sure that a structured operator finds the value: in memory, or as a view of what is there."""
        chain, source = [], value
        while source not in self.in_memory and (node := self.producers[source]).op in ("reshape", "slice"):
            if node.op == "slice" and not self._readable_in_place(node, reader, operand):
                break
            chain.append(node)
            source = node.values[0]
        sliced = any(node.op == "slice" for node in chain)
        computed = source not in self.in_memory and self.producers[source].op != "slice"
        if sliced and (computed or not self._rows_stay(chain)):
            # Something has to be computed anyway, or the rows come apart: then the last slice is what is computed.
            last = next(i for i, node in enumerate(chain) if node.op == "slice")
            chain, source = chain[:last], chain[last].output
        self.in_memory.add(source)
        self.kept_views.update(node.output for node in chain)

    def _readable_in_place(self, node: Node, reader: Node | None, operand: int) -> bool:
        before = self.graph.types[node.values[0]].shape[:node.attrs["dim"]]
        return reader is not None and self.accepts_strided(reader, operand) and node.attrs.get("step", 1) == 1 \
            and sum(dim != 1 for dim in before) == 1 and not isinstance(node.attrs["start"], str)

    def _rows_stay(self, chain: list[Node]) -> bool:
        """Whether the reshapes of a chain with a slice leave the dimension of rows alone."""
        rows = {next((dim for dim in self.graph.types[name].shape if dim != 1), 1)
                for node in chain for name in (node.output, node.values[0])}
        return len(rows) == 1

    def _inlined(self, node: Node) -> bool:
        """Indirect reads: a gather from what is in memory is a load with a loaded index."""
        return node.op in _INDIRECT

    # --- expressions ---

    def _loop(self, node: Node) -> Node:
        """The loop that computes the output of `node`."""
        type_ = self.graph.types[node.output]
        self._inputs: list[str] = []
        extents: dict[int, Dim] = dict(enumerate(type_.shape))
        at: Index = tuple(ZERO if dim == 1 else index(axis) for axis, dim in enumerate(type_.shape))
        reduce: tuple[str, tuple[int, ...]] | None = None
        if OPS[node.op].kind == "reduce":
            source = self.graph.types[node.values[0]]
            dims = node.attrs["dims"]
            kept = iter(at) if not node.attrs["keepdim"] else iter(a for i, a in enumerate(at) if i not in dims)
            inner: list[Expr] = []
            sizes: list[int] = []
            for axis, dim in enumerate(source.shape):
                if axis not in dims:
                    inner.append(next(kept))
                    continue
                assert isinstance(dim, int), f"reduction over {dim}: {node.origin}"
                extents[len(type_.shape) + len(sizes)] = dim
                inner.append(index(len(type_.shape) + len(sizes)))
                sizes.append(dim)
            reduce = node.op.removeprefix("reduce_"), tuple(sizes)
            expr = self._element(node.inputs[0], tuple(inner), extents)
        else:
            expr = self._node_element(node, at, extents)
        attrs = {"shape": type_.shape, "dtype": type_.dtype, "expr": expr, "reduce": reduce}
        return Node("loop", tuple(self._inputs), (node.output,), attrs, node.origin)

    def _element(self, operand: Operand, at: Index, extents: dict[int, Dim]) -> Expr:
        if not isinstance(operand, str):
            return const(operand, operand_type(operand, {}).dtype)
        if operand in self.in_memory:
            return self._load(operand, at)
        return self._node_element(self.producers[operand], at, extents)

    def _load(self, value: str, at: Index) -> Expr:
        if value not in self._inputs:
            self._inputs.append(value)
        return load(self._inputs.index(value), at, self.graph.types[value].dtype)

    def _node_element(self, node: Node, at: Index, extents: dict[int, Dim]) -> Expr:
        """The element of a node's output at an index."""
        types, type_ = self.graph.types, self.graph.types[node.output]
        source = operand_type(node.inputs[0], dict(types)).shape if node.inputs else ()
        match node.op:
            case "reshape":
                inner = reshaped_index(at, type_.shape, source, extents)
            case "permute":
                inner = permuted_index(at, node.attrs["dims"])
            case "expand":
                inner = broadcast_index(at, source)
            case "slice":
                inner = self._slice_index(node, at)
            case "cat":
                return self._cat(node, at, extents)
            case "arange":
                return _arange(node, at[0])
            case "full":
                return const(node.attrs["value"], type_.dtype)
            case "gather" | "take" | "gather_rows":
                return self._indirect(node, at, extents)
            case _:
                return self._elementwise(node, at, extents)
        return self._element(node.inputs[0], inner, extents)

    def _slice_index(self, node: Node, at: Index) -> Index:
        start = node.attrs["start"]
        factor, symbol = split_dim(start)
        assert symbol is None or factor == 0, f"slice from {start}: {node.origin}"
        return sliced_index(at, node.attrs["dim"], factor if symbol is None else 0, node.attrs.get("step", 1))

    def _cat(self, node: Node, at: Index, extents: dict[int, Dim]) -> Expr:
        axis, start, ends, parts = node.attrs["dim"], 0, [], [at[node.attrs["dim"]]]
        for value in node.values:
            size = self.graph.types[value].shape[axis]
            assert isinstance(size, int), f"cat along {size}: {node.origin}"
            if size == 0:
                continue
            place = ZERO if size == 1 else add(at[axis], const(-start))
            parts.append(self._element(value, (*at[:axis], place, *at[axis + 1:]), extents))
            start += size
            ends.append(start)
        if len(ends) == 1:
            return parts[1]
        return Expr("pick", tuple(parts), tuple(ends), self.graph.types[node.output].dtype)

    def _indirect(self, node: Node, at: Index, extents: dict[int, Dim]) -> Expr:
        source, picks = node.values
        dim, rank = node.attrs["dim"], len(self.graph.types[picks].shape)
        if node.op == "gather":
            chosen = self._element(picks, at, extents)
            return self._element(source, (*at[:dim], chosen, *at[dim + 1:]), extents)
        chosen = self._element(picks, at[dim:dim + rank], extents)
        return self._element(source, (*at[:dim], chosen, *at[dim + rank:]), extents)

    def _elementwise(self, node: Node, at: Index, extents: dict[int, Dim]) -> Expr:
        args = []
        for operand in node.inputs:
            shape = operand_type(operand, dict(self.graph.types) if isinstance(operand, str) else {}).shape
            args.append(self._element(operand, broadcast_index(at, shape), extents))
        extra = next(iter(node.attrs.values())) if node.attrs else None
        return Expr(node.op, tuple(args), extra, self.graph.types[node.output].dtype)


def _own_cost(node: Node) -> int:
    if OPS[node.op].kind == "view":
        return 0
    return _COSTLY_COST if node.op in _COSTLY else 1


def _arange(node: Node, at: Expr) -> Expr:
    dtype, start, step = node.attrs["dtype"], node.attrs["start"], node.attrs["step"]
    if dtype == DType.I32 and float(start).is_integer() and float(step).is_integer():
        return add(times(at, int(step)), const(int(start)))
    scaled = Expr("mul", (Expr("cast", (at,), DType.F32), const(float(step), DType.F32)))
    total = Expr("add", (scaled, const(float(start), DType.F32)))
    return total if dtype == DType.F32 else Expr("cast", (total,), dtype, dtype)


def loop_type(node: Node) -> TensorType:
    return TensorType(tuple(node.attrs["shape"]), node.attrs["dtype"])

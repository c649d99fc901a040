"""Only the rows whose logits are asked for go through the head."""
from __future__ import annotations

from typing import Any

from ..ir.graph import Graph, Node
from ..ir.op import OPS
from ..ir.types import DType, TensorType, make_dim, split_dim
from .match import rebuilt

_ROWWISE = {"linear", "rms_norm", "layer_norm", "softmax", "reshape", "slice"}


def gather_logits(graph: Graph) -> Graph:
    """… -> h[T, D] -> norm -> head -> logits[T, V]   becomes   h -> gather_rows(h; logit_rows i32[L]) -> … [L, V].

    The gather goes as far up as each row depends on its own row of one value alone.
    """
    producers = graph.producers()
    logits = graph.outputs[0]
    tail: list[Node] = []
    cut = logits
    while (node := producers.get(cut)) is not None and (source := _single_row_input(graph, node)) is not None:
        tail.append(node)
        cut = source
    rows = graph.types[cut].shape.index("T")
    assert all(dim == 1 for dim in graph.types[cut].shape[:rows]), f"{cut} is {graph.types[cut]}"

    gathered = f"{cut}.rows"
    renamed = {cut: gathered}
    gather = Node("gather_rows", (cut, "logit_rows"), (gathered,), {"dim": rows}, tail[-1].origin if tail else "")
    new_tail = []
    for node in reversed(tail):
        inputs = tuple(renamed.get(i, i) if isinstance(i, str) else i for i in node.inputs)
        made = tuple(f"{name}.rows" for name in node.outputs)
        renamed.update(zip(node.outputs, made, strict=True))
        new_tail.append(Node(node.op, inputs, made, _row_attrs(node.attrs), node.origin))
    outputs = [renamed.get(name, name) for name in graph.outputs]
    probes = {label: renamed.get(value, value) if value != cut else value for label, value in graph.probes.items()}
    moved = {name for node in tail for name in node.outputs}
    kept = [node for node in graph.nodes if not moved.intersection(node.outputs)]
    return rebuilt(graph, [*kept, gather, *new_tail], outputs=outputs, probes=probes,
                   inputs={"logit_rows": TensorType(("L",), DType.I32)})


def _single_row_input(graph: Graph, node: Node) -> str | None:
    """The one input with a token axis, if the node computes each row from the same row of it."""
    if node.op not in _ROWWISE and OPS[node.op].kind != "elementwise":
        return None
    rows = [name for name in node.values if name not in graph.constants]
    if len(rows) != 1 or "T" not in graph.types[rows[0]].shape:
        return None
    shape, result = graph.types[rows[0]].shape, graph.types[node.output].shape
    axis = shape.index("T")
    lost = "T" not in result or any(dim != 1 for dim in (*shape[:axis], *result[:result.index("T")]))
    mixes_rows = node.op in ("softmax", "slice") and node.attrs["dim"] == axis
    return None if lost or mixes_rows else rows[0]


def _row_dim(dim: Any) -> Any:
    factor, symbol = split_dim(dim)
    return make_dim(factor, "L") if symbol == "T" else dim


def _row_attrs(attrs: Any) -> dict[str, Any]:
    """Shapes in attributes follow; all else stays."""
    return {key: tuple(_row_dim(dim) for dim in value) if key == "shape" else value for key, value in attrs.items()}

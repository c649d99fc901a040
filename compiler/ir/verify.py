"""The rules of a well-formed graph, checked after every pass."""
from __future__ import annotations

from .graph import Graph, Node, Operand
from .infer import InferError
from .registry import OPS
from .types import DType, TensorType


class GraphError(Exception):
    """A graph that breaks a rule: the fault of the importer or of a pass, not of the user."""


def operand_type(operand: Operand, types: dict[str, TensorType]) -> TensorType:
    """A literal scalar counts as a value of shape ()."""
    match operand:
        case str():
            return types[operand]
        case bool():
            return TensorType((), DType.BOOL)
        case int():
            return TensorType((), DType.I32)
        case _:
            return TensorType((), DType.F32)


def infer_types(node: Node, types: dict[str, TensorType]) -> tuple[TensorType, ...]:
    """The types of a node's outputs. Raises InferError for operands that the operator cannot take."""
    return tuple(OPS[node.op].infer([operand_type(i, types) for i in node.inputs], node.attrs))


def node_text(node: Node) -> str:
    return f"{', '.join(node.outputs)} = {node.op}({', '.join(map(str, node.inputs))}) from {node.origin or 'nowhere'}"


def verify(graph: Graph) -> Graph:
    """Returns the graph if it is well-formed, else raises GraphError that names node and origin:

    each value is defined once and before its use, has a type, and that is the type which inference gives; operators
    are known and have as many operands as they take; constants have the type of their recipe.
    """
    types = dict(graph.types)
    defined = set(graph.inputs)
    if len(defined) != len(graph.inputs):
        raise GraphError(f"an input is named twice: {', '.join(graph.inputs)}")
    for name, expr in graph.constants.items():
        if name in defined:
            raise GraphError(f"constant {name} has the name of an input")
        if types.get(name) != expr.type:
            raise GraphError(f"constant {name} is recorded as {types.get(name)}, its recipe {expr} gives {expr.type}")
        defined.add(name)
    for name in graph.inputs:
        if name not in types:
            raise GraphError(f"input {name} has no type")
    for node in graph.nodes:
        _verify_node(node, types, defined)
        defined.update(node.outputs)
    for name in [*graph.outputs, *graph.probes.values()]:
        if name not in defined:
            raise GraphError(f"output or probe {name} is not defined")
    return graph


def _verify_node(node: Node, types: dict[str, TensorType], defined: set[str]) -> None:
    text = node_text(node)
    if node.op not in OPS:
        raise GraphError(f"unknown operator: {text}")
    least, most = OPS[node.op].arity
    if not least <= len(node.inputs) <= most:
        raise GraphError(f"{node.op} takes {least} to {most} operands, got {len(node.inputs)}: {text}")
    for name in node.values:
        if name not in defined:
            raise GraphError(f"{name} is used before it is defined: {text}")
    for name in node.outputs:
        if name in defined:
            raise GraphError(f"{name} is defined twice: {text}")
    try:
        inferred = infer_types(node, types)
    except InferError as error:
        raise GraphError(f"{error}: {text}") from error
    recorded = tuple(types.get(name) for name in node.outputs)
    if inferred != recorded:
        raise GraphError(f"recorded as {', '.join(map(str, recorded))}, inferred as {', '.join(map(str, inferred))}: "
                         f"{text}")

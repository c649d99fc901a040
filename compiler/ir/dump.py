"""A graph as text: one line a constant, one line a node."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .graph import Graph
from .types import DType


def dump(graph: Graph) -> str:
    """Inputs, constants with their recipes, nodes with types, attributes and origins, outputs, probes."""
    lines = [f"input {name}: {graph.types[name]}" for name in graph.inputs]
    lines += [f"const {name}: {graph.types[name]} = {expr}" for name, expr in graph.constants.items()]
    for node in graph.nodes:
        outputs = ", ".join(f"{name}: {graph.types[name]}" for name in node.outputs)
        text = f"{outputs} = {node.op}({', '.join(map(str, node.inputs))}{_attrs_text(node.attrs)})"
        lines.append(f"{text}  # {node.origin}" if node.origin else text)
    lines.append(f"output {', '.join(graph.outputs)}")
    lines += [f"probe {label} = {name}" for label, name in graph.probes.items()]
    return "\n".join(lines) + "\n"


def _attrs_text(attrs: Mapping[str, Any]) -> str:
    return "".join(f"{'; ' if i == 0 else ', '}{key}={_value_text(value)}" for i, (key, value) in
                   enumerate(attrs.items()))


def _value_text(value: Any) -> str:
    match value:
        case DType():
            return value.value
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)

"""How the values of a graph are held in a GPU's memory: the graph's float32 is the arithmetic, not the storage."""
from __future__ import annotations

from ..ir.graph import Graph, Node
from ..ir.types import DType

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "i32": 4, "i8": 1, "u8": 1, "bool": 1, "fp8": 1}
"""Element type of a value in memory -> bytes."""

PLAN_DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "i32": "i32", "i8": "i8", "u8": "u8", "bool": "bool",
               "fp8": "fp8"}
"""The same as a plan calls it."""

_INTEGERS = {DType.I32: "i32", DType.I8: "i8", DType.U8: "u8", DType.BOOL: "bool"}

_EXACT_INPUTS = {"softmax": (0,), "topk": (0,), "sort": (0,), "argmax": (0,), "cumsum": (0,), "scatter": (0, 2),
                 "route": (0,), "combine": (1,), "rope": (1, 2), "rope_kv_write": (3, 4)}
"""Operands that kernels take in float32: scores, weights of experts, factors of rotations."""

_EXACT_OUTPUTS = ("softmax", "topk", "sort", "cumsum", "scatter", "route", "lora_shrink")

_ROUNDING = ("linear", "expert_linear", "embedding", "attention", "rms_norm", "layer_norm", "matmul", "lora_shrink")
"""What a value is made by needs not be exact beyond these: their own inputs are stored as all are."""


def stored_types(graph: Graph, floats: str) -> dict[str, str]:
    """Value -> element type in memory. Floating values are held as `floats`, in float32 where a rounding would show:

    - logits, and the scores that experts are chosen by, with what they are computed from, back to a matrix' result
    - rotations, and whatever else is computed from positions and constants alone
    """
    exact = set(graph.constants) | _computed_from_exact(graph)
    exact |= _needed_exactly(graph)
    return {name: _INTEGERS.get(type_.dtype, "fp32" if name in exact else floats)
            for name, type_ in graph.types.items()}


def _computed_from_exact(graph: Graph) -> set[str]:
    found: set[str] = set()
    for node in graph.nodes:
        values = [value for value in node.values if graph.types[value].dtype.is_float and value not in graph.constants]
        follows = node.op in ("loop", "reshape", "slice") and all(value in found for value in values)
        if follows or node.op in _EXACT_OUTPUTS:
            found.update(node.outputs)
    return found


def _needed_exactly(graph: Graph) -> set[str]:
    producers = graph.producers()
    stack = list(graph.outputs)
    for node in graph.nodes:
        operands = _EXACT_INPUTS.get(node.op, ())
        stack += [value for number, value in enumerate(node.inputs) if number in operands and isinstance(value, str)]
    found: set[str] = set()
    while stack:
        value = stack.pop()
        if value in found:
            continue
        found.add(value)
        made_by = producers.get(value)
        if made_by is not None and not _rounds(made_by):
            stack += made_by.values
    return found


def _rounds(node: Node) -> bool:
    return node.op in _ROUNDING or node.op.startswith(("add_", "norm_"))

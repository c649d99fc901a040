"""The executable meaning of a graph at any stage: its nodes run one after another by their numpy references."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..weights.evaluate import TensorSource, evaluate
from .graph import Graph, Node, Operand
from .op import as_tuple
from .registry import OPS
from .types import TensorType, extent, split_dim

SYMBOLIC_ATTRS = ("shape", "start", "stop", "length")
"""Attributes that may hold symbolic extents."""


def run(graph: Graph, inputs: Mapping[str, np.ndarray], checkpoint: TensorSource, keep: Iterable[str] = (),
        ) -> dict[str, np.ndarray]:
    """The values of the graph's outputs and of the names in `keep`.

    inputs: an array for each graph input; the extents of the symbols are read from their shapes. Constants are
    evaluated where they are first used; every value is freed after its last use.
    """
    bindings = bind_symbols(graph, inputs)
    wanted = {*graph.outputs, *keep}
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.values}
    values: dict[str, np.ndarray] = {name: np.asarray(inputs[name]) for name in graph.inputs}

    def value(operand: Operand) -> Any:
        if not isinstance(operand, str):
            return operand
        if operand not in values:
            values[operand] = evaluate(graph.constants[operand], checkpoint)
        return values[operand]

    for i, node in enumerate(graph.nodes):
        results = run_node(node, [value(operand) for operand in node.inputs], bindings)
        for name, result in zip(node.outputs, results, strict=True):
            _check_type(node, name, result, graph.types[name], bindings)
            values[name] = result
        for name in {*node.values, *node.outputs}:
            if last_use.get(name, -1) <= i and name not in wanted:
                values.pop(name, None)
    return {name: value(name) for name in wanted}


def bind_symbols(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Symbol -> extent, from the shapes of the given inputs."""
    bindings: dict[str, int] = {}
    for name in graph.inputs:
        shape, actual = graph.types[name].shape, np.shape(inputs[name])
        assert len(shape) == len(actual), f"input {name} is {graph.types[name]}, got an array of shape {actual}"
        for dim, size in zip(shape, actual, strict=True):
            factor, symbol = split_dim(dim)
            if symbol is not None:
                assert bindings.setdefault(symbol, size // factor) * factor == size, (
                    f"input {name}: {dim} is {size}, but {symbol} is {bindings[symbol]}")
    return bindings


def run_node(node: Node, operands: list[Any], bindings: dict[str, int]) -> tuple[np.ndarray, ...]:
    """One node on arrays and literal scalars."""
    attrs = {key: _resolve(value, bindings) if key in SYMBOLIC_ATTRS else value for key, value in node.attrs.items()}
    return as_tuple(OPS[node.op].reference(*operands, **attrs))


def _resolve(value: Any, bindings: dict[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(extent(dim, bindings) for dim in value)
    return extent(value, bindings) if isinstance(value, str) else value


def _check_type(node: Node, name: str, result: np.ndarray, expected: TensorType, bindings: dict[str, int]) -> None:
    shape = tuple(extent(dim, bindings) for dim in expected.shape)
    assert result.shape == shape and result.dtype == expected.dtype.numpy, (
        f"{name} = {node.op} from {node.origin}: recorded {expected}, the reference gives "
        f"{result.dtype.name}{list(result.shape)}")

"""Small graphs for tests: an operator a line, with random inputs and weights, compared by their structure."""
from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ingot.compiler.importer.builder import GraphBuilder
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import Dim, DType, TensorType, concrete
from ingot.compiler.ir.verify import verify
from ingot.compiler.weights.expr import WeightExpr, tensor


class Builder(GraphBuilder):
    """`b.op("add", x, 1.0)` adds a node as it is and gives the name of its one output."""

    def x(self, name: str, *shape: Dim, dtype: DType = DType.F32) -> str:
        return self.input(name, TensorType(shape, dtype))

    def weight(self, name: str, *shape: int) -> str:
        """A constant that is a tensor of the checkpoint."""
        return self.constant(tensor(name, shape), name)

    def op(self, op: str, *inputs: Any, **attrs: Any) -> str:
        (name,) = self.add(op, inputs, **attrs)
        return name

    def slice(self, x: str, dim: int, start: int, stop: int, step: int = 1) -> str:
        return self.op("slice", x, dim=dim, start=start, stop=stop, step=step)

    def made(self, *outputs: str, probes: Mapping[str, str] | None = None) -> Graph:
        self.probes.update(probes or {})
        return verify(self.graph(outputs))


class Weights:
    """Random tensors for the constants of some graphs, the same for the same name."""

    def __init__(self, *graphs: Graph) -> None:
        self._types: dict[str, TensorType] = {}
        stack: list[WeightExpr] = [expr for graph in graphs for expr in graph.constants.values()]
        while stack:
            expr = stack.pop()
            if expr.op == "tensor":
                self._types[expr.attr("name")] = expr.type
            stack.extend(expr.inputs)

    def shape(self, name: str) -> tuple[int, ...]:
        return concrete(self._types[name].shape, {})

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(self.shape(name))
        return values.astype(self._types[name].dtype.numpy)[begin:end]


def random_inputs(graph: Graph, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """positions count from 0, logit_rows are the last ones. Other integers: from -9 to 9; inputs whose name ends in
    "below<n>" are indices in [0, n)."""
    rng, inputs, rows = np.random.default_rng(seed), {}, min(tokens, 2)
    for name in graph.inputs:
        shape = concrete(graph.types[name].shape, {"T": tokens, "L": rows})
        match graph.types[name].dtype:
            case DType.F32:
                inputs[name] = rng.standard_normal(shape).astype(np.float32)
            case DType.BOOL:
                inputs[name] = np.asarray(rng.random(shape) < 0.5)
            case _ if name in ("positions", "logit_rows"):
                inputs[name] = np.arange(tokens if name == "positions" else rows, dtype=np.int32)
                inputs[name] += 0 if name == "positions" else tokens - rows
            case _:
                _, below, limit = name.partition("below")
                low, high = (0, int(limit)) if below else (-9, 10)
                inputs[name] = rng.integers(low, high, shape).astype(np.int32)
    return inputs


def compare(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], tolerance: float, what: str) -> None:
    """Integers and booleans equal; floats within tolerance of the largest one; NaN and infinity where expected."""
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype and got[name].shape == expected.shape, f"{what}: {name}"
        if expected.dtype.kind != "f":
            assert np.array_equal(got[name], expected), f"{what}: {name}"
            continue
        finite = np.isfinite(expected)
        assert np.array_equal(got[name][~finite], expected[~finite], equal_nan=True), f"{what}: {name}"
        scale = max(float(np.abs(expected[finite]).max(initial=0.0)), 1e-3)
        error = float(np.abs(got[name][finite] - expected[finite]).max(initial=0.0))
        assert error <= tolerance * scale, f"{what}: {name} is off by {error / scale:.1e}"


def expect_same_meaning(before: Graph, after: Graph, tolerance: float = 1e-6, tokens: Iterable[int] = (1, 5)) -> None:
    """The outputs of both graphs, in order, are equal. `after` is well-formed and may have more inputs."""
    verify(after)
    weights = Weights(before, after)
    for count in tokens:
        inputs = random_inputs(after, count)
        want = run(before, {name: inputs[name] for name in before.inputs}, weights)
        got = run(after, inputs, weights)
        compare({str(i): got[name] for i, name in enumerate(after.outputs)},
                {str(i): want[name] for i, name in enumerate(before.outputs)}, tolerance, f"T = {count}")


def structure(graph: Graph) -> list[tuple[Any, ...]]:
    """The nodes that the outputs need, independent of the names of values and of the order of what is independent."""
    producers = graph.producers()
    names: dict[str, str] = {name: name for name in graph.inputs}
    names.update({name: str(expr) for name, expr in graph.constants.items()})
    found: list[tuple[Any, ...]] = []

    def visit(value: str) -> str:
        if value not in names:
            node = producers[value]
            inputs = [visit(i) if isinstance(i, str) else i for i in node.inputs]
            number = len(found)
            names.update({name: f"%{number}.{i}" for i, name in enumerate(node.outputs)})
            attrs = sorted((key, str(attr)) for key, attr in node.attrs.items())
            found.append((node.op, *inputs, *attrs, *(str(graph.types[name]) for name in node.outputs)))
        return names[value]

    outputs = [visit(name) for name in graph.outputs]
    return [*found, ("output", *outputs)]


def expect_structure(graph: Graph, expected: Graph) -> None:
    assert structure(graph) == structure(expected)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def only(graph: Graph, op: str) -> Node:
    node, = (node for node in graph.nodes if node.op == op)
    return node

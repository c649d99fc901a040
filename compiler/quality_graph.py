"""The meaning of an engine without the engine: its last graph in numpy, with the weights as they would be stored.

So GPU engines are measured on machines without a GPU. Sums are float32's; what a device rounds between its launches
(bf16 values) is left out, what its matrices round (weights, inputs) is not.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .cache.calibration import Calibration
from .checkpoint.checkpoint import Checkpoint
from .ir.graph import Graph, Node, Operand
from .ir.interpret import bind_symbols, run_node
from .ir.ops_linear import quantized_inputs
from .quality import Scorer
from .weights.evaluate import TensorSource, evaluate
from .weights.packed import PANELS, ROWS, PackedWeight, Packing, WeightTable

_WEIGHT = {"linear": 1, "expert_linear": 2, "embedding": 0}
"""Operator -> which of its inputs is the matrix."""


class QuantizedGraph:
    """A graph after a pipeline's passes, with its weights in memory, each rounded once."""

    def __init__(self, graph: Graph, for_gpu: bool) -> None:
        self.graph, self.table = graph, WeightTable()
        layout = ROWS if for_gpu else PANELS
        self.of: dict[str, PackedWeight] = {}
        for node in graph.nodes:
            if (place := _place(graph, node)) is not None:
                name = node.values[place]
                self.of[node.output] = self.table.packed(graph.constants[name], Packing(node.attrs["scheme"], layout),
                                                         name)

    @property
    def weights(self) -> list[PackedWeight]:
        return list(self.table.entries.values())

    @property
    def size_bytes(self) -> int:
        """Of the stored matrices."""
        return sum(weight.size_bytes for weight in self.weights)

    def scorer(self, checkpoint: Checkpoint, calibration: Calibration,
               progress: Callable[[str], None] = lambda detail: None) -> Scorer:
        """Rounds every weight, and keeps it in float32."""
        weights, source = {}, calibration.source(checkpoint)
        for number, weight in enumerate(self.weights, 1):
            progress(f"weight {number} of {len(self.weights)}")
            weights[weight.name] = weight.values(source, calibration.moments(weight))
        constants: dict[str, np.ndarray] = {}

        def score(tokens: Sequence[int]) -> Iterable[np.ndarray]:
            ids, places = np.asarray(tokens, np.int32), np.arange(len(tokens), dtype=np.int32)
            given = {"token_ids": ids, "positions": places, "logit_rows": places}
            return [self._run({name: given[name] for name in self.graph.inputs}, weights, constants, source)]
        return score

    def _run(self, values: dict[str, Any], weights: dict[str, np.ndarray], constants: dict[str, np.ndarray],
             source: TensorSource) -> np.ndarray:
        """The first output. constants: those that were used before; what is new is added."""
        graph, bindings = self.graph, bind_symbols(self.graph, values)
        last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.values}

        def value(operand: Operand) -> Any:
            if not isinstance(operand, str) or operand in values:
                return values[operand] if isinstance(operand, str) else operand
            if operand not in constants:
                constants[operand] = evaluate(graph.constants[operand], source)
            return constants[operand]

        for i, node in enumerate(graph.nodes):
            if node.outputs[0] in self.of:
                place, scheme = _WEIGHT[node.op], node.attrs["scheme"]
                w = weights[self.of[node.output].name]
                operands = [w if at == place else value(operand) for at, operand in enumerate(node.inputs)]
                if node.op != "embedding":
                    operands[0] = quantized_inputs(operands[0], w.shape[-1], scheme)
                node = node.with_attrs(scheme="fp32")
            else:
                operands = [value(operand) for operand in node.inputs]
            values.update(zip(node.outputs, run_node(node, operands, bindings), strict=True))
            for name in node.values:
                if last_use[name] <= i and name not in graph.outputs:
                    values.pop(name, None)
        return np.asarray(values[graph.outputs[0]])


def _place(graph: Graph, node: Node) -> int | None:
    place = _WEIGHT.get(node.op)
    if place is None or "scheme" not in node.attrs or node.values[place] not in graph.constants:
        return None
    return place

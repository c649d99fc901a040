"""The order in which a model's code computes independent values leaves no trace in its graph."""
from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from ingot.compiler.importer.canonical import canonical
from ingot.compiler.ir.dump import dump
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.verify import verify
from tests.compiler.graphs import Weights, random_inputs
from tests.compiler.models import random_model


def shuffled(graph: Graph, seed: int) -> Graph:
    """The same nodes in another order that computes the same."""
    rng, left, made = random.Random(seed), list(graph.nodes), {*graph.inputs, *graph.constants}
    nodes: list[Node] = []
    while left:
        node = rng.choice([node for node in left if made.issuperset(node.values)])
        left.remove(node)
        made.update(node.outputs)
        nodes.append(node)
    constants = list(graph.constants)
    rng.shuffle(constants)
    return Graph(graph.inputs, {name: graph.constants[name] for name in constants}, tuple(nodes), graph.outputs,
                 graph.types, graph.probes)


@pytest.mark.parametrize("seed", range(6))
def test_order_does_not_matter(seed: int) -> None:
    graph = random_model(seed)
    wanted = canonical(graph)
    assert dump(canonical(verify(shuffled(graph, seed)))) == dump(wanted)
    assert canonical(wanted) == wanted
    weights, inputs = Weights(graph), random_inputs(graph, 6)
    np.testing.assert_array_equal(run(verify(wanted), inputs, weights)[wanted.outputs[0]],
                                  run(graph, inputs, weights)[graph.outputs[0]])


IMPORTED = """
import hashlib
from ingot.compiler.importer.importer import import_config
from ingot.compiler.ir.dump import dump
from tools.small_models import small_config
print(hashlib.sha256(dump(import_config(small_config("gemma3_text")).graph).encode()).hexdigest())
"""


@pytest.mark.slow
def test_models_that_iterate_over_sets() -> None:
    """Gemma 3 computes its two kinds of rotary embedding in the order of a set."""
    found = {subprocess.run([sys.executable, "-c", IMPORTED], env=os.environ | {"PYTHONHASHSEED": str(seed)},
                            capture_output=True, text=True, check=True).stdout for seed in range(3)}
    assert len(found) == 1

"""A quantized graph with its weights in memory gives what the interpreter gives, and takes calibrated weights."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cache.calibration import Calibration
from ingot.compiler.calibration.smooth import Choice
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.targets import find_target

IDS = np.arange(3, 43, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def imported(tiny_checkpoint: Path) -> Graph:
    return import_model(open_checkpoint(tiny_checkpoint)).graph


@pytest.mark.parametrize(("target", "precision"), [("cpu", "w4a8"), ("cpu", "int8"), ("h200", "fp8"), ("h200", "int4"),
                                                   ("h200", "int8")])
def test_as_the_interpreter(tiny_checkpoint: Path, imported: Graph, target: str, precision: str) -> None:
    gpu, checkpoint = find_target(target).gpu, open_checkpoint(tiny_checkpoint)
    chosen = find_precision(precision, gpu)
    graph = run_passes(imported, (cpu_pipeline if gpu is None else gpu_pipeline)(chosen, chosen.kv))
    places = np.arange(len(IDS), dtype=np.int32)
    want, = run(graph, {"token_ids": IDS, "positions": places, "logit_rows": places}, checkpoint).values()
    quantized = QuantizedGraph(graph, gpu is not None)
    score = quantized.scorer(checkpoint, Calibration())
    for _ in range(2):  # constants are kept after the first window
        got = np.concatenate(list(score(IDS.tolist())))
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert quantized.size_bytes == sum(weight.size_bytes for weight in quantized.weights)


def test_scales_of_inputs_are_taken_by_weights_and_norms_alike(tiny_checkpoint: Path, imported: Graph) -> None:
    """Powers of two in bf16: the same logits to a rounding of float32."""
    checkpoint, precision = open_checkpoint(tiny_checkpoint), find_precision("int8", find_target("h200").gpu)
    quantized = QuantizedGraph(run_passes(imported, gpu_pipeline(precision, precision.kv)), True)
    plain = next(iter(quantized.scorer(checkpoint, Calibration())(IDS.tolist())))
    scale = np.exp2(np.arange(64) % 3).astype(np.float32)
    scaled = Calibration(choices={weight.name: Choice("awq", scale) for weight in quantized.weights},
                         scales={"model.layers.0.self_attn.q_proj.weight": scale})
    got = next(iter(quantized.scorer(checkpoint, scaled)(IDS.tolist())))
    error = np.linalg.norm(got - plain) / np.linalg.norm(plain)
    assert 0 < error < 0.15

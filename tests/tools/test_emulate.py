"""tools/emulate.py: what it takes for a failure, and engines of every family and precision in the emulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.compare import Greedy, GreedyDifference
from ingot.compiler.ir.types import DType
from ingot.compiler.precision import GPU_PRECISIONS, find_precision
from ingot.compiler.targets import find_target
from ingot.runtime.folders import cache_folder
from tests.compiler.graphs import Builder, Weights
from tools.emulate import (
    FAMILIES,
    QUANTIZES_INPUTS,
    Exactness,
    Reference,
    Row,
    emulate,
    in_float32,
    random_checkpoint,
    report,
)

FINE = Row("llama", "h200", "bf16", 8e-3, None, 1e-2, 7e-3, Greedy(16, ()), 0.0, 0.01, 40, 40, 1.0)


@pytest.mark.parametrize(("changes", "told"), [
    ({}, None), ({"graph": 2.1e-2}, "against the graph exceeds 2e-02"), ({"graph": float("nan")}, "nan against the"),
    ({"precision": "fp32"}, "exceeds 1e-03"), ({"precision": "fp32", "graph": 9e-4}, None),
    ({"precision": "fp8", "float32": Exactness(1e-6, 1e-6, 0), "graph": 0.06, "engine": 0.08, "scheme": 0.08}, None),
    ({"precision": "fp8", "float32": Exactness(2e-3, 2e-3, 24)}, "in float32 exceeds 1e-03"),
    ({"precision": "int8", "float32": Exactness(1e-6, 3e-2, 7)}, "or 3.00e-02 of all tokens 2e-02"),
    ({"precision": "fp8", "float32": Exactness(float("nan"), float("nan"), 0)}, "nan in float32"),
    ({"precision": "fp8", "float32": Exactness(1e-6, 1e-6, 0), "engine": 0.13, "scheme": 0.08},
     "the engine's error 1.30e-01 is beyond"),
    ({"gap": 0.05}, None), ({"gap": 0.07}, "a greedy token differs where the two best logits are 0.070 apart"),
    ({"num_clear": 20}, None), ({"num_clear": 19}, "only 19 of 40 tokens choose their experts clearly")])
def test_what_fails(changes: dict[str, Any], told: str | None) -> None:
    failures = replace(FINE, **changes).failures
    assert not failures if told is None else [told in failure for failure in failures] == [True]


def test_the_report() -> None:
    differs = Greedy(16, (GreedyDifference(0, 3, 0.05),))
    rows = [FINE, replace(FINE, precision="fp8", float32=Exactness(5e-7, 4e-3, 7), greedy=None),
            replace(FINE, greedy=differs, gap=0.05), replace(FINE, greedy=differs, num_clear=38)]
    lines = report(rows).splitlines()[2:]
    assert lines[0] == "| llama | h200 | bf16 | 40 | 8.0e-03 |  | 1.0e-02 | 7.0e-03 | 16 of 16 | 1 |"
    assert "| 5.0e-07, codes differ in 7 |" in lines[1]
    assert "15 of 16 (gap 0.050, error 0.010)" in lines[2]
    assert "| 38 of 40 |" in lines[3] and "15 of 16 (experts at a near tie)" in lines[3]


def test_a_precision_with_all_else_in_float32() -> None:
    before, target = dict(GPU_PRECISIONS), find_target("h200")
    with in_float32("fp8", "h200") as name:
        wide = find_precision(name, target.gpu)
        target.require_precision(name)
        assert (wide.floats, wide.kv) == ("fp32", "fp32")
        assert (wide.scheme("linear"), wide.scheme("head")) == ("fp8", "fp32")
    assert before == GPU_PRECISIONS and name not in target.precisions


def test_near_ties_of_experts() -> None:
    """Of four experts two are chosen: what counts is how far the second is from the third."""
    b = Builder()
    logits = b.op("embedding", b.weight("router", 5, 4), b.x("token_ids", "T", dtype=DType.I32), scheme="fp32")
    ids, weights = b.add("route", (logits,), choices=2)
    graph = b.made(logits, ids, weights)

    class Router(Weights):
        def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
            return np.array([[3, 2, 1, 0], [3, 2, 1.99, 0], [3, 2.99, 1, 0], [0, 1, 1.01, 3], [0, 0, 3, 3]], np.float32)

    clear = Reference(graph, Router(graph)).is_clear([0, 1, 2, 3, 4, 0])
    assert clear.tolist() == [True, False, True, False, True, True]
    dense = b.made(logits)
    assert Reference(dense, Router(dense)).is_clear([1, 3]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [
    *((family, "bf16") for family in FAMILIES), *(("llama", precision) for precision in (
        "fp16", "fp32", "int4", *QUANTIZES_INPUTS) if precision != "nvfp4")])
def test_engines_in_the_emulator(tmp_path: Path, family: str, precision: str) -> None:
    checkpoint = random_checkpoint(family, tmp_path / family)
    row = emulate(family, checkpoint, "h200", precision, tmp_path, BuildCache(cache_folder()), num_tokens=24,
                  num_new_tokens=4)
    assert not row.failures, report([row])

"""Precision auto of models with experts: what a rounded layer of experts costs, and that it is what the engine has."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler import quality_gate
from ingot.compiler.auto import find
from ingot.compiler.auto.find import Finder
from ingot.compiler.auto.simulate import rounded
from ingot.compiler.build import BuildRequest, build
from ingot.compiler.clock import Clock
from ingot.compiler.compare import kl_divergence
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.targets import find_target
from ingot.runtime.engine import Engine
from tests.runtime.mock_engine import tokenizer_json
from tools.small_models import save_random, small_config

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 256}
IDS = list(range(5, 90, 3))


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt_oss keeps its experts' matrices the other way round."""
    folder = tmp_path_factory.mktemp("experts") / request.param
    save_random(small_config(request.param, **SIZES), folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def finder(checkpoint: Path, target: str, calibrate: bool = False) -> Finder:
    asked = BuildRequest(str(checkpoint), target, "auto", max_batch_size=2, max_num_tokens=8, max_seq_len=128,
                         calibrate=calibrate)
    return Finder(asked, open_checkpoint_source(str(checkpoint), None), find_target(target),
                  Clock(lambda stage, detail: None), None)


@pytest.mark.parametrize(("target", "schemes"), [("cpu", ("w4a8", "int8g32")), ("h200", ("fp8", "int4_g128m"))])
def test_what_experts_lose_is_told_before_it_is_measured(checkpoint: Path, target: str, schemes: tuple[str, ...],
                                                         ) -> None:
    found = finder(checkpoint, target)
    losses, units, reference = found._losses, found._units, found._reference
    experts = [number for number, unit in enumerate(units) if unit.role == "experts"]
    assert len(experts) == 2
    assert all(set(schemes) < set(losses[number]) and losses[number]["fp32"] == 0 for number in experts)
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 256, 96).tolist() for _ in range(6)]
    plain = [reference.logits(ids) for ids in windows]
    last = experts[-1]  # behind the others there is a router, which a rounding may tip: more than a gradient tells
    for scheme in schemes:
        chosen = ["fp32"] * len(units)
        chosen[last] = scheme
        with rounded(reference, units, chosen, found.target, found._errors) as score:
            measured = [kl_divergence(p, next(iter(score(ids)))) for p, ids in zip(plain, windows, strict=True)]
        assert 0.4 < losses[last][scheme] / np.mean(measured) < 2.5, scheme
    for logits, ids in zip(plain, windows, strict=True):  # the model is as it was
        np.testing.assert_array_equal(reference.logits(ids), logits)


def test_the_simulation_is_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    """Of a CPU: but for the order of sums, and keys and values in bf16. A router may choose otherwise at a near tie."""
    found, path = finder(checkpoint, "cpu"), tmp_path / "x.engine"
    build(BuildRequest(str(checkpoint), "cpu", "w4a8", path, max_batch_size=2, max_num_tokens=8, max_seq_len=128,
                       calibrate=False))
    with Engine.load(path, kv_cache_tokens=64) as engine:
        got = engine.logits(IDS)
    exact = found._reference.logits(IDS)
    with rounded(found._reference, found._units, [found.base.scheme(unit.role) for unit in found._units], found.target,
                 found._errors) as score:
        simulated = next(iter(score(IDS)))
    assert np.median(_errors(got, simulated)) < 0.3 * np.median(_errors(got, exact))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_the_simulation_is_the_calibrated_graph_of_a_gpu(checkpoint: Path, name: str) -> None:
    found = finder(checkpoint, "h200", calibrate=True)
    on_gpu, precision = found._errors._on_gpu, find_precision(name, found.target.gpu)
    assert on_gpu is not None
    known = on_gpu._schemes[precision.scheme("experts")]
    assert any(len(weight.expr.shape) == 3 and known.calibration.method(weight) == "gptq" for weight in known.weights)
    graph = QuantizedGraph(run_passes(found._graph, gpu_pipeline(precision, "fp32")), True)
    engine = next(iter(graph.scorer(found.source.checkpoint, known.calibration)(IDS)))
    exact = found._reference.logits(IDS)
    with rounded(found._reference, found._units, [precision.scheme(unit.role) for unit in found._units], found.target,
                 found._errors) as score:
        simulated = next(iter(score(IDS)))
    assert np.median(_errors(engine, simulated)) < 0.4 * np.median(_errors(engine, exact))


@pytest.mark.slow  # test_auto.py has the same of a dense model
def test_experts_get_more_bits_where_the_budget_needs_them(checkpoint: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (find, quality_gate):
        monkeypatch.setattr(module, "NUM_TOKENS", 500)
    asked = BuildRequest(str(checkpoint), "cpu", "auto", max_batch_size=2, max_num_tokens=8, max_seq_len=128,
                         calibrate=False)
    sizes = {}
    for name, increase in (("loose", 10.0), ("tight", 1e-5)):
        result = build(replace(asked, output=tmp_path / f"{name}.engine", max_perplexity_increase=increase,
                               kv_precision="fp32"))
        assert result.quality is not None and result.quality.perplexity_increase <= increase
        sizes[name] = result.manifest["memory"]["weights_bytes"]
    assert sizes["loose"] < 0.7 * sizes["tight"]
    recipe = (tmp_path / "tight.yaml").read_text()
    assert "experts.down_proj" in recipe or "*.down_proj" in recipe


def _errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of each token's logits: f32 [T]."""
    return np.asarray(np.linalg.norm(got - wanted, axis=1))

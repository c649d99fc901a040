"""The quality of an engine: measured by the definition, recorded, and asked for; a layer that errs is found."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.calibration.text import default_text
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.cli.build import share
from ingot.compiler.compare import compare, kl_divergence
from ingot.compiler.quality import engine_scorer, perplexity, reference_scorer
from ingot.compiler.quality_gate import (
    NUM_TOKENS,
    Gate,
    LayerError,
    Quality,
    QualitySums,
    held_out_text,
    measure_quality,
    require_measurable,
)
from ingot.compiler.reference_model import ReferenceModel
from ingot.runtime.cli import main
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed
from tests.compiler.checkpoint.quantized.layouts import LAYOUTS, write_checkpoint
from tests.compiler.checkpoint.quantized.test_read import IDS, small_model

QUALITY = Quality(20.6, 20.0, 0.03, 0.004, 0.95, 0.01, (LayerError("layers.4", 0.2), LayerError("layers.1", 0.1)), 99,
                  256, "")


@pytest.fixture(scope="module")
def measured(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quality") / "x.engine"
    build(request(speaking_checkpoint, output, measure_quality=True))
    return output


def request(checkpoint: Path, output: Path, **options: Any) -> BuildRequest:
    return BuildRequest(str(checkpoint), "cpu", "w4a8", output, max_batch_size=4, max_num_tokens=32, calibrate=False,
                        **options)


def test_the_definition(measured: Path, speaking_checkpoint: Path) -> None:
    reference = ReferenceModel(str(speaking_checkpoint))
    with Engine.load(measured, kv_cache_tokens=256) as engine:
        found = measure_quality(engine, reference)
        again = measure_quality(engine, reference)
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode(held_out_text(), add_special_tokens=False)[:NUM_TOKENS]
        window = found.window
        mine = perplexity(engine_scorer(engine), tokens, window)
        theirs = perplexity(reference_scorer(reference), tokens, window)
        pairs = [(engine.logits(ids)[:-1], reference.logits(ids)[:-1])
                 for ids in (tokens[i:i + window] for i in range(0, len(tokens), window))]
    assert found == again
    assert window == 128  # the model's longest sequence
    assert found.num_tokens == mine.num_tokens == sum(len(got) for got, _ in pairs)
    assert found.perplexity == pytest.approx(mine.value, rel=1e-5)
    assert found.reference_perplexity == pytest.approx(theirs.value, rel=1e-5)
    assert found.perplexity_increase == pytest.approx(mine.value / theirs.value - 1, abs=1e-5)
    assert found.top1_agreement == np.mean(np.concatenate([a.argmax(1) == b.argmax(1) for a, b in pairs]))
    assert found.kl_divergence == pytest.approx(
        np.average([kl_divergence(b, a) for a, b in pairs], weights=[len(a) for a, _ in pairs]), rel=1e-3)
    assert {layer.name for layer in found.worst_layers} >= {"model.layers.0", "model.layers.1"}
    errors = [layer.error for layer in found.worst_layers]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01


def test_the_standard_error_is_that_of_the_differences() -> None:
    sums, rng = QualitySums(), np.random.default_rng(0)
    expected = rng.normal(size=(400, 16)).astype(np.float32)
    logits = expected + rng.normal(scale=0.1, size=expected.shape).astype(np.float32)
    ids = rng.integers(16, size=400).tolist()
    sums.add(lambda _: [logits], lambda _: [expected], ids, 1)

    def nll(rows: np.ndarray) -> np.ndarray:
        return np.log(np.exp(rows[:-1]).sum(1)) - rows[np.arange(399), ids[1:]]

    differences = nll(logits) - nll(expected)
    assert sums.standard_error() == pytest.approx(np.exp(differences.mean()) * differences.std() / 399 ** 0.5, rel=1e-4)
    assert dict(QUALITY.describe())["perplexity"].endswith("(+3.00% ± 0.40%)")


def test_the_manifest_records_it(measured: Path, speaking_checkpoint: Path) -> None:
    with EngineFile.open(measured) as engine:
        quality, recipe = engine.manifest["quality"], engine.manifest["recipe"]
        assert engine.manifest["calibration"] == {"method": "none", "num_weights": 0, "num_not_calibrated": 8}
    assert recipe["measure_quality"] is True
    assert quality["command"] == "ingot compare ENGINE CHECKPOINT --quality"
    with Engine.load(measured, kv_cache_tokens=256) as loaded:
        assert measure_quality(loaded, ReferenceModel(str(speaking_checkpoint))).to_json() == quality


def test_a_gate_that_cannot_be_kept_leaves_nothing(speaking_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match=r"(?s)asked for.*No engine was written.*model\.layers\.1 \(\d+\.\d\d%\)"):
        build(request(speaking_checkpoint, tmp_path / "x.engine", min_top1_agreement=1.0))
    assert list(tmp_path.iterdir()) == []


def test_what_a_gate_asks() -> None:
    QUALITY.require(Gate(0.03, 0.95, 0.01), "x")
    with pytest.raises(WorkFailed, match=r"KL divergence of its predictions is 0\.01 nats; at most 0\.005 was asked"):
        QUALITY.require(Gate(max_kl_divergence=0.005), "x")
    with pytest.raises(WorkFailed) as error:
        QUALITY.require(Gate(0.02, 0.97), "x.engine")
    assert str(error.value).startswith(
        "x.engine is not good enough: its perplexity of 20.6000 is 3.00% above the checkpoint's 20.0000; at most 2.00% "
        "was asked for; its best next token is the checkpoint's for 95.00% of the tokens; at least 97.00% was "
        "asked for.")
    assert "layers.4 (20.00%), layers.1 (10.00%)" in str(error.value)
    assert error.value.exit_status == 1
    with pytest.raises(WorkFailed):
        replace(QUALITY, perplexity_increase=float("nan")).require(Gate(0.5), "x")


@pytest.mark.parametrize("gate", [(-0.1, None), (float("nan"), None), (None, 1.1), (None, float("nan")),
                                  (None, None, -1.0), (None, None, float("nan"))])
def test_figures_that_mean_nothing(gate: tuple[float | None, ...]) -> None:
    with pytest.raises(RequestError, match="expected 0"):
        Gate(*gate)


def test_shares() -> None:
    assert [share(text) for text in ("1%", "0.5%", "0.97")] == [0.01, 0.005, 0.97]


def test_what_cannot_be_measured_is_told_before_the_work(speaking_checkpoint: Path, tiny_checkpoint: Path,
                                                         tmp_path: Path) -> None:
    asked = request(tiny_checkpoint, tmp_path / "x.engine", max_perplexity_increase=0.01)
    with pytest.raises(RequestError, match="has no tokenizer"):
        build(asked)
    with pytest.raises(RequestError, match="without weights cannot be measured"):
        build(replace(asked, strip_weights=True))
    with pytest.raises(RequestError, match=r"this machine cannot: it is for sparc\. Build"):
        require_measurable("sparc", [], open_checkpoint(speaking_checkpoint), ["tokenizer.json"])
    assert list(tmp_path.iterdir()) == []


def test_the_text_is_not_that_of_the_calibration() -> None:
    def pieces(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[i:i + 8]) for i in range(len(words) - 7)}

    assert len(held_out_text()) > 15_000
    assert not pieces(held_out_text()) & pieces(default_text().documents[0])


PLANTED = [
    # what wrote the checkpoint, precision of the engine, the scale that is wrong, its layer
    ("modelopt fp8", "int8", "model.layers.2.mlp.up_proj.weight_scale", "model.layers.2"),
    ("modelopt fp8", "w4a8", "model.layers.1.self_attn.o_proj.weight_scale", "model.layers.1"),
    ("compressed int8", "int8", "model.layers.3.mlp.down_proj.weight_scale", "model.layers.3"),
    ("compressed w4a16", "w4a8", "model.layers.2.mlp.down_proj.weight_scale", "model.layers.2"),
    ("awq", "w4a8", "model.layers.1.mlp.gate_proj.scales", "model.layers.1"),
    ("modelopt nvfp4", "bf16", "model.layers.2.self_attn.v_proj.weight_scale_2", "model.layers.2"),
]


@pytest.mark.parametrize(("layout", "precision", "scale", "layer"), [
    PLANTED[0], PLANTED[3],
    *(pytest.param(*row, marks=pytest.mark.slow) for row in PLANTED[1:3] + PLANTED[4:])])
def test_a_wrong_scale_is_found(layout: str, precision: str, scale: str, layer: str, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    """An engine of a copy in which one scale is 1.3 times as large, against the good checkpoint: ingot compare names
    the layer first."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        write_checkpoint(folder, small_model(num_hidden_layers=4), LAYOUTS[layout])
    tensors = load_file(bad / "model.safetensors")
    tensors[scale] = (tensors[scale].float() * 1.3).to(tensors[scale].dtype)
    save_file(tensors, bad / "model.safetensors")
    output = tmp_path / "x.engine"
    build(BuildRequest(str(bad), "cpu", precision, output, max_batch_size=4, max_num_tokens=32))
    with Engine.load(output, kv_cache_tokens=64) as engine:
        found = compare(engine, ReferenceModel(str(good)), [IDS], 0)
    first, second = found.worst_layers[:2]
    assert first.name == layer
    assert first.own is not None and second.own is not None and first.own > 2 * second.own
    store = ["--store", str(tmp_path / "store")]
    assert main(["engines", "add", str(output), "prod", *store]) == 0
    command = ["compare", "prod", str(good), *store, "--tokens", "20", "--prompts", "1", "--new-tokens", "0"]
    assert main(command) == 0
    assert f"layers that err most by themselves: {layer} (" in capsys.readouterr().out


def test_the_manifest_tells_what_became_of_quantized_weights(tmp_path: Path) -> None:
    def built(name: str, precision: str) -> tuple[dict[str, Any], Sequence[str]]:
        write_checkpoint(tmp_path / name, small_model(), LAYOUTS[name])
        asked = BuildRequest(str(tmp_path / name), "cpu", precision, dry_run=True, max_batch_size=1, max_num_tokens=32)
        plan = build(asked)
        return plan.manifest["model"]["quantization"], plan.warnings

    found, warnings = built("modelopt fp8", "int8")
    assert found["method"] == "ModelOpt FP8"
    assert found["weights"] == [{"format": "fp8, one scale a tensor", "scheme": "int8g32", "kept": False, "count": 14}]
    assert any("14 weights that the checkpoint holds as fp8, one scale a tensor become int8" in w for w in warnings)
    assert any("scales of the KV cache are not used" in w for w in warnings)
    found, warnings = built("gptq", "w4a8")
    assert found["weights"] == [{"format": "int4, groups of 64", "scheme": "w4a8", "kept": True, "count": 14}]
    assert not any("become" in warning for warning in warnings)

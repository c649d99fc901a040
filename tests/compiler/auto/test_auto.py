"""Sensitivities against what rounding does, the simulation against the engine, and builds in precision auto."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler import quality_gate
from ingot.compiler.auto import find
from ingot.compiler.auto.find import Finder
from ingot.compiler.auto.layers import precision_names
from ingot.compiler.auto.simulate import rounded, windows_of
from ingot.compiler.build import BuildRequest, build
from ingot.compiler.clock import Clock
from ingot.compiler.compare import kl_divergence
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.recipe.read import read_recipe
from ingot.compiler.targets import find_target
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (find, quality_gate):
        monkeypatch.setattr(module, "NUM_TOKENS", 500)


def request(checkpoint: Path, output: Path, target: str = "cpu", **options: Any) -> BuildRequest:
    return BuildRequest(str(checkpoint), target, "auto", output, max_batch_size=2, max_num_tokens=8, calibrate=False,
                        **options)


@pytest.fixture(scope="module")
def finder(speaking_checkpoint: Path) -> Callable[[str], Finder]:
    def made(target: str) -> Finder:
        asked = request(speaking_checkpoint, Path("unused.engine"), target)
        source = open_checkpoint_source(str(speaking_checkpoint), None)
        return Finder(asked, source, find_target(target), Clock(lambda stage, detail: None), None)
    return made


@pytest.mark.parametrize(("target", "schemes"), [("cpu", ("w4a8", "int8g32", "bf16")), ("h200", ("fp8", "int4_g128m"))])
def test_sensitivities_are_the_divergence_of_a_rounded_unit(finder: Callable[[str], Finder], target: str,
                                                            schemes: tuple[str, ...]) -> None:
    """Measured on other tokens than it was told by: within half of it, over two decades. Errors of all units together
    are nearly the sum."""
    found = finder(target)
    losses, units, reference = found._losses, found._units, found._reference
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 256, 96).tolist() for _ in range(6)]
    plain = [reference.logits(ids) for ids in windows]

    def measured(chosen: list[str]) -> float:
        with rounded(reference, units, chosen, found.target, found._errors) as score:
            return float(np.mean([kl_divergence(p, next(iter(score(ids)))) for p, ids in zip(plain, windows,
                                                                                            strict=True)]))

    linear = [number for number, unit in enumerate(units) if unit.role == "linear"]
    ratios = []
    for number in linear:
        for scheme in schemes:
            chosen = ["fp32"] * len(units)
            chosen[number] = scheme
            ratios.append(losses[number][scheme] / measured(chosen))
    assert 0.4 < np.median(ratios) < 2.0
    assert max(ratios) < 5 * min(ratios)
    everywhere = [schemes[0] if number in linear else "fp32" for number in range(len(units))]
    assert sum(losses[number][schemes[0]] for number in linear) == pytest.approx(measured(everywhere), rel=0.5)
    assert all(known["fp32"] == 0 for known in losses)
    for plain_logits, ids in zip(plain, windows, strict=True):  # as it was
        np.testing.assert_array_equal(reference.logits(ids), plain_logits)


def test_the_simulation_is_the_engine(finder: Callable[[str], Finder], speaking_engine: Callable[..., Path]) -> None:
    """But for the order of sums, and keys and values in bf16."""
    found = finder("cpu")
    base = found.base
    schemes = [base.scheme(unit.role) for unit in found._units]
    ids = list(range(5, 90, 3))
    with Engine.load(speaking_engine("cpu", "w4a8"), kv_cache_tokens=64) as engine:
        got = engine.logits(ids)
    exact = found._reference.logits(ids)
    with rounded(found._reference, found._units, schemes, found.target, found._errors) as score:
        simulated = next(iter(score(ids)))
    assert np.linalg.norm(got - simulated) < 0.2 * np.linalg.norm(got - exact)


def test_the_simulation_is_the_calibrated_graph_of_a_gpu(speaking_checkpoint: Path) -> None:
    """Merged, scaled by their inputs' and outputs' channels, rounded with compensation: all taken back to the model's
    own matrices. Where a sum of floats ends in another last bit a rounded input may end a step further."""
    asked = replace(request(speaking_checkpoint, Path("unused.engine"), "h200"), calibrate=True)
    source = open_checkpoint_source(str(speaking_checkpoint), None)
    found = Finder(asked, source, find_target("h200"), Clock(lambda stage, detail: None), None)
    on_gpu, ids = found._errors._on_gpu, list(range(5, 90, 3))
    assert on_gpu is not None
    exact = found._reference.logits(ids)
    for scheme in ("int8_token", "int4_g128m", "fp8"):
        known = on_gpu._schemes[scheme]
        assert known.calibration.choices and (known.calibration.scales or scheme != "int8_token")
        precision = find_precision(precision_names(found.target)[scheme], found.target.gpu)
        graph = QuantizedGraph(run_passes(found._graph, gpu_pipeline(precision, "fp32")), True)
        engine = next(iter(graph.scorer(source.checkpoint, known.calibration)(ids)))
        schemes = [precision.scheme(unit.role) for unit in found._units]
        with rounded(found._reference, found._units, schemes, found.target, found._errors) as score:
            simulated = next(iter(score(ids)))
        assert np.linalg.norm(engine - simulated) < 0.35 * np.linalg.norm(engine - exact), scheme


@pytest.mark.parametrize(("loses", "groups"), [("g32m", None), ("", (32, True))])
def test_groups_of_four_bits_are_found_for_the_whole_model(finder: Callable[[str], Finder], loses: str,
                                                           groups: tuple[int, bool] | None,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with which the budget is kept: loses is the end of the names that do not."""
    found = finder("h200")
    monkeypatch.setattr(Finder, "_losses", [dict.fromkeys(names, 1e-4) | {"fp32": 0.0} for names in found._candidates])
    bad = {scheme for names in found._candidates for scheme in names if GPU_SCHEMES[scheme].weights.is_int4
           and scheme.endswith("g32m") == (loses == "g32m")}
    assert len(bad) == 2
    monkeypatch.setattr(Finder, "_measure", lambda self, schemes: 1.0 * sum(scheme in bad for scheme in schemes))
    choice = found.find(0.01, 0.9)
    assert choice.groups == groups and not bad & set(choice.found.schemes)
    assert all(precision in found.target.precisions for precision in choice.layers.values())


def test_windows_are_spread_over_the_text() -> None:
    got = windows_of(list(range(100)), [7, 8], 12, 3)
    assert got.tolist() == [[7, 8, *range(b, b + 10)] for b in (0, 30, 60)]
    assert windows_of([1, 2], [], 12, 3).shape == (0, 12)


def test_a_loose_budget_is_the_cheapest_and_a_tight_one_the_best(speaking_checkpoint: Path, tmp_path: Path) -> None:
    loose = build(request(speaking_checkpoint, tmp_path / "loose.engine", max_perplexity_increase=10.0))
    tight = build(request(speaking_checkpoint, tmp_path / "tight.engine", max_perplexity_increase=1e-5,
                          kv_precision="fp32"))
    assert loose.manifest["memory"]["weights_bytes"] < 0.9 * tight.manifest["memory"]["weights_bytes"]
    for result, increase in ((loose, 10.0), (tight, 1e-5)):
        assert result.quality is not None and result.quality.perplexity_increase <= increase
        assert result.path is not None and result.path.exists() and result.path.with_suffix(".yaml").exists()
    assert tight.manifest["precision"] == "mixed" and tight.manifest["recipe"]["precision"] == "w4a8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loose.engine", "loose.yaml", "tight.engine", "tight.yaml"]


def test_its_recipe_builds_the_same_engine(speaking_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    found = build(request(speaking_checkpoint, path, layers={"model.layers.0.*": "bf16"}, max_perplexity_increase=0.02))
    with EngineFile.open(path) as engine:
        layers = engine.manifest["recipe"]["layers"]
    assert layers["model.layers.0.*"] == "bf16"
    (asked,) = read_recipe(tmp_path / "x.yaml").requests(tmp_path, measure_quality=True)
    again = build(asked)
    assert again.hash == found.hash and asked.precision == "w4a8"


def test_what_cannot_be_searched_is_told_before_the_work(speaking_checkpoint: Path, tiny_checkpoint: Path,
                                                         tmp_path: Path) -> None:
    output = tmp_path / "x.engine"
    with pytest.raises(RequestError, match="dry run"):
        build(request(speaking_checkpoint, output, dry_run=True))
    with pytest.raises(RequestError, match="no tokenizer"):
        build(request(tiny_checkpoint, output))
    with pytest.raises(RequestError, match=r"no layer of the model matches 'lm_hed'. Near it: lm_head"):
        build(request(speaking_checkpoint, output, layers={"lm_hed": "bf16"}))
    output.with_suffix(".yaml").write_text("mine")
    with pytest.raises(RequestError, match=r"x\.yaml exists"):
        build(request(speaking_checkpoint, output))
    assert not output.exists()


def test_an_engine_that_loses_more_than_its_simulation_is_not_kept(speaking_checkpoint: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is told that all is well."""
    monkeypatch.setattr(Finder, "_measure", lambda self, schemes: 0.0)
    output = tmp_path / "x.engine"
    with pytest.raises(WorkFailed, match="is not good enough"):
        build(request(speaking_checkpoint, output, layers={"*": "w4a8"}, max_perplexity_increase=0.0))
    assert list(tmp_path.iterdir()) == []

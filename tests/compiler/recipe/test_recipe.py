"""Recipes: what is refused and how, what they expand to, and those that come with Ingot."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.quality_gate import Gate
from ingot.compiler.recipe.fields import BadRecipe
from ingot.compiler.recipe.read import read_recipe
from ingot.compiler.recipe.schema import json_schema, schema_text
from ingot.compiler.targets import find_target

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
GOOD = {"model": "org/tiny", "builds": [{"targets": ["cpu:x86-64-v3"], "precisions": ["int8"]}]}


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_matrix(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, {
        "model": "org/tiny", "limits": {"max_batch_size": 4, "max_seq_len": 64}, "calibrate": False, "builds": [
            {"targets": ["cpu:x86-64-v3", "h200"], "precisions": ["int8", "w4a8"]},
            {"targets": ["b200"], "precisions": ["fp8"], "limits": {"max_batch_size": 64}, "kv_precision": "fp8"}]}))
    asked = recipe.requests(tmp_path, dry_run=True)
    assert [(r.target, r.precision, r.max_batch_size) for r in asked] == [
        ("cpu:x86-64-v3", "int8", 4), ("cpu:x86-64-v3", "w4a8", 4), ("h200", "int8", 4), ("h200", "w4a8", 4),
        ("b200", "fp8", 64)]
    assert asked[0] == BuildRequest("org/tiny", "cpu:x86-64-v3", "int8", tmp_path / "tiny.cpu-x86-64-v3.int8.engine",
                                    name="tiny", max_batch_size=4, max_seq_len=64, calibrate=False, dry_run=True)
    assert asked[-1].kv_precision == "fp8" and asked[-1].max_seq_len == 64


def test_files_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, {
        "model": "org/tiny", "tuning_records": "x.json", "builds": [
            {"targets": ["cpu"], "precisions": ["int8"]},
            {"targets": ["cpu"], "precisions": ["w4a8"], "tuning_records": "/there/y.json", "calibration": "z.txt"}]}))
    first, second = recipe.requests(tmp_path)
    assert first.tuning_records == tmp_path / "x.json" and first.calibration is None
    assert second.tuning_records == Path("/there/y.json") and second.calibration == tmp_path / "z.txt"


def test_room_for_adapters(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, {
        "model": "org/tiny", "lora": {"max_rank": 16, "modules": ["q_proj"]}, "builds": [
            {"targets": ["cpu"], "precisions": ["int8"]},
            {"targets": ["cpu"], "precisions": ["w4a8"], "lora": {"max_rank": 8, "max_adapters": 2}}]}))
    first, second = recipe.requests(tmp_path)
    assert (first.lora_max_rank, first.lora_max_adapters, first.lora_modules) == (16, None, ["q_proj"])
    assert (second.lora_max_rank, second.lora_max_adapters, second.lora_modules) == (8, 2, ["q_proj"])
    with pytest.raises(BadRecipe, match=r"lora: max_rank is missing\. Largest rank of an adapter, 1 to 256"):
        read_recipe(written(tmp_path, {**GOOD, "lora": {"max_adapters": 2}}))


def test_gates(tmp_path: Path) -> None:
    """A build's go over the recipe's, the command line's over both."""
    recipe = read_recipe(written(tmp_path, {
        "model": "org/tiny", "quality": {"measure": True, "min_top1_agreement": 0.9, "max_kl_divergence": 0.02},
        "builds": [{"targets": ["cpu:x86-64-v3"], "precisions": ["int8"], "quality": {"min_top1_agreement": 0.8}}]}))
    request, = recipe.requests(tmp_path, max_perplexity_increase=None)
    assert (request.measure_quality, request.min_top1_agreement, request.max_perplexity_increase) == (True, 0.8, None)
    assert request.gate == Gate(None, 0.8, 0.02)
    request, = recipe.requests(tmp_path, min_top1_agreement=0.95)
    assert request.min_top1_agreement == 0.95


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    path = written(tmp_path, {**GOOD, "model": "./models/tiny"})
    assert read_recipe(path).requests(Path())[0].model == str(tmp_path / "models/tiny")
    assert read_recipe(path).requests(Path(), "/other")[0].model == "/other"


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.mark.parametrize(("content", "message"), [
    ({"builds": GOOD["builds"]}, "the recipe: model is missing. Hub name, or"),
    (changed(precison="int8"), "unknown key 'precison'. Did you mean kv_precision?\n  Valid keys: model, name,"),
    (changed(limits={"max_batch": 3}), "limits: unknown key 'max_batch'. Did you mean max_batch_size?"),
    (changed(limits={"max_batch_size": 0}), "limits.max_batch_size: expected an integer of at least 1, got 0"),
    (changed(limits={"max_batch_size": True}), "limits.max_batch_size: expected an integer of at least 1, got True"),
    (changed(limits=[1]), "limits: expected an object with some of max_batch_size, max_num_tokens"),
    (changed(calibrate="yes please"), "calibrate: expected true or false, got 'yes please'"),
    (changed(quality={"min_top1_agreement": 1.5}), "quality.min_top1_agreement: expected a number of 0 to 1, got 1.5"),
    (changed(quality={"max_perplexity": 1}), "unknown key 'max_perplexity'. Did you mean max_perplexity_increase?"),
    (changed(compiler="gcc"), "compiler: unknown value 'gcc'. Did you mean cc?\n  Valid values: zig, cc"),
    (changed(config="x"), "config: expected an object, got 'x'"),
    (changed(name="a/b"), "name: expected the beginning of a file's name, got 'a/b'"),
    (changed(model=3), "model: expected a text, got 3"),
    (changed(builds={}), "builds: expected a list of objects, got {}"),
    (changed(builds=[]), "builds: expected a list of objects, got []"),
    (changed(builds=[{"targets": ["cpu"]}]), "builds[0]: precisions is missing. Each with each target."),
    (changed(builds=[{"targets": "cpu", "precisions": ["int8"]}]), "builds[0].targets: expected a list of texts"),
    (changed(builds=[{"targets": ["a", "a"], "precisions": ["int8"]}]), "targets: expected a list without repetition"),
    (changed(builds=[{"targets": ["cpu"], "precisions": ["int9"]}]),
     "builds[0].precisions[0]: unknown value 'int9'. Did you mean int8?\n  Valid values: fp32, bf16, int8, w4a8"),
    ([1], "the recipe: expected an object with some of model, name"),
    ("a: [", "not a YAML file"),
    ("model: a\nmodel: b\n", "key 'model' stands twice"),
    ("model: !!python/object:os.system {}\n", "not a YAML file"),
])
def test_what_is_wrong_is_named(tmp_path: Path, content: object, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(BadRecipe) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_no_build_twice(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, changed(builds=[*GOOD["builds"], *GOOD["builds"]])))
    with pytest.raises(BadRecipe, match=r"builds\[1\]: cpu:x86-64-v3 in int8 is asked for twice"):
        recipe.requests(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="cannot be read: No such file"):
        read_recipe(tmp_path / "none.yaml")


def test_the_published_schema_is_made_from_the_table() -> None:
    assert (FOLDER / "schema.json").read_text() == schema_text(), \
        "python -m ingot.compiler.recipe.schema > recipes/schema.json"


def valid(value: object, schema: dict[str, Any]) -> bool:
    """As much of JSON schema as the published one uses."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    match schema["type"]:
        case "object":
            properties = schema.get("properties")
            return isinstance(value, dict) and (properties is None or (
                set(value) <= set(properties) and set(schema["required"]) <= set(value)
                and all(valid(item, properties[name]) for name, item in value.items())))
        case "array":
            return isinstance(value, list) and len(value) >= schema["minItems"] and all(
                valid(item, schema["items"]) for item in value)
        case "number":
            return isinstance(value, int | float) and schema["minimum"] <= value <= schema["maximum"]
        case "integer":
            return type(value) is int and value >= schema["minimum"]
        case "boolean":
            return isinstance(value, bool)
    return isinstance(value, str)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_those_that_come_with_ingot(path: Path) -> None:
    recipe = read_recipe(path)
    assert valid(yaml.safe_load(path.read_text()), json_schema())
    assert not valid({**recipe.entries, "extra": 1}, json_schema())
    assert recipe.name == path.stem and "/" in recipe.entries["model"] and "model_type" in recipe.entries["config"]
    for request in recipe.requests(Path()):
        find_target(request.target).require_precision(request.precision)


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 12


SLOW = [pytest.param(path, id=path.stem, marks=[] if path.stem == "llama-3.2-1b" else pytest.mark.slow)
        for path in RECIPES]


@pytest.mark.parametrize("path", SLOW)
def test_each_is_planned_from_its_configuration_alone(path: Path) -> None:
    """Without the hub and without a checkpoint, for the first CPU target it names."""
    recipe = read_recipe(path)
    request = next(r for r in recipe.requests(Path(), dry_run=True) if r.target.startswith("cpu"))
    result = build(request)
    assert result.path is None and result.manifest["memory"]["weights_bytes"] > 100_000_000
    assert result.manifest["model"]["architecture"] == recipe.entries["config"]["architectures"][0]
    json.dumps(result.manifest)

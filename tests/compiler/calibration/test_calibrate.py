"""Which weights are rounded for their inputs, and what becomes of the others."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ingot.compiler.cache import calibration as module
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.cache.calibration import InputsOfModel, calibrated
from ingot.compiler.cache.tensor_digests import tensor_digests
from ingot.compiler.calibration.text import CalibrationText
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.targets import find_target
from ingot.compiler.tokenizer import CONFIG, TOKENIZER
from ingot.compiler.weights.expr import concat, literal, tensor
from ingot.compiler.weights.packed import PANELS, ROWS, PackedWeight, Packing
from ingot.compiler.weights.sharding import Segment, shard
from ingot.compiler.write_weights import by_rank
from ingot.plugins.linear.pack import unpack
from ingot.plugins.scheme import SCHEMES

QKV = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
DOWN = "model.layers.0.mlp.down_proj.weight"
W4A8 = Packing("w4a8")
WORDS = Tokenizer(WordLevel({"a": 1, "b": 2}, unk_token="a"))
WORDS.pre_tokenizer = Whitespace()
TOKENIZER_FILES = {CONFIG: json.dumps({"bos_token_id": None, "eos_token_ids": [], "special_tokens": {}}).encode(),
                   TOKENIZER: WORDS.to_str().encode()}


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint)


def inputs(checkpoint: Checkpoint, tokenizer: dict[str, bytes] = TOKENIZER_FILES, cache: BuildCache | None = None,
           text: str = "a b " * 40) -> InputsOfModel:
    return InputsOfModel(checkpoint, tensor_digests(checkpoint, None), tokenizer, CalibrationText("", (text,)), cache,
                         lambda detail: None)


def packed(checkpoint: Checkpoint, name: str, parameters: tuple[str, ...], packing: Packing = W4A8) -> PackedWeight:
    expr = concat([tensor(parameter, checkpoint.shape(parameter)) for parameter in parameters], 0)
    return PackedWeight(name, expr, packing, "+".join(parameters), parameters)


def test_moments_for_what_four_bits_change(checkpoint: Checkpoint) -> None:
    weights = [packed(checkpoint, "w0", QKV), packed(checkpoint, "w1", (DOWN,)),
               packed(checkpoint, "w2", (DOWN,), Packing("int8")),
               PackedWeight("w3", literal(np.ones((32, 32), np.float32)), W4A8, "on the grid", ("none",))]
    found = calibrated(checkpoint, weights, inputs(checkpoint))
    assert [found.method(weight) for weight in weights] == ["gptq", "gptq", "rtn", "rtn"] and found.warnings == ()
    of = found.moments(weights[0])
    assert of is not None and of(0)[0].shape == (64, 64)  # type: ignore[index]
    assert found.moments(weights[2]) is None and found.moments(weights[3]) is None and found.key(weights[3]) is None


@pytest.mark.parametrize("packing", [Packing("int4", ROWS), Packing("fp8", ROWS), Packing("int8_token", ROWS)], ids=str)
def test_of_what_ranks_divide_the_first_decides(checkpoint: Checkpoint, packing: Packing) -> None:
    """By its inputs' channels a matrix is rounded for itself: the moments are those of all of them."""
    rows, width = checkpoint.shape(DOWN)
    whole = tensor(DOWN, (rows, width))
    weights = [PackedWeight(f"w{axis}", shard(whole, axis, [Segment(size, 2)], 2), packing, f"part {axis}", (DOWN,))
               for axis, size in enumerate((rows, width))]
    found = calibrated(checkpoint, weights, inputs(checkpoint))
    assert [found.method(weight) for weight in weights] == ["gptq", "rtn"]
    assert found.warnings == ("not calibrated: 1 of 2 weights, such as part 1; they are rounded to nearest",)
    for weight in map(by_rank, weights):
        assert len(weight) == 2 and all(part.make(checkpoint, found.moments(part)).size for part in weight)


@pytest.mark.parametrize("packing", [W4A8, Packing("int4", "rows"), Packing("nvfp4", "rows")], ids=str)
def test_the_moments_change_the_blob(checkpoint: Checkpoint, packing: Packing) -> None:
    weight = packed(checkpoint, "w0", QKV, packing)
    of = calibrated(checkpoint, [weight], inputs(checkpoint)).moments(weight)
    assert of is not None and weight.make(checkpoint).tobytes() != weight.make(checkpoint, of).tobytes()


def test_the_moments_lower_the_error_of_the_outputs(checkpoint: Checkpoint) -> None:
    weight = packed(checkpoint, "w0", QKV)
    of = calibrated(checkpoint, [weight], inputs(checkpoint)).moments(weight)
    w = np.concatenate([checkpoint.get(name) for name in QKV])
    plain, fitted = (unpack(weight.make(checkpoint, given), w.shape[0], w.shape[1], SCHEMES["w4a8"]) - w
                     for given in (None, of))
    moment = of(0)[0]  # type: ignore[index, misc]
    assert np.sum(fitted @ moment * fitted) < 0.5 * np.sum(plain @ moment * plain)


def test_without_a_tokenizer(checkpoint: Checkpoint) -> None:
    weight = packed(checkpoint, "w1", (DOWN,))
    found = calibrated(checkpoint, [weight], inputs(checkpoint, {}))
    assert found.method(weight) == "rtn" and found.warnings[0].endswith("rounded to nearest: there is no tokenizer")


def test_a_matrix_that_no_layer_multiplies_with_is_named(checkpoint: Checkpoint) -> None:
    weight = packed(checkpoint, "w1", (DOWN,))
    lost = PackedWeight("w2", weight.expr, W4A8, "elsewhere", ("elsewhere.weight",))
    found = calibrated(checkpoint, [weight, lost], inputs(checkpoint))
    assert [found.method(weight), found.method(lost)] == ["gptq", "rtn"] and found.warnings == (
        "not calibrated: 1 of 2 weights, such as elsewhere; they are rounded to nearest",)


def test_one_run_serves_builds_of_every_precision(checkpoint: Checkpoint, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found for one weight is there for all others; another text is another calibration."""
    cache = BuildCache(tmp_path)
    calibrated(checkpoint, [packed(checkpoint, "w1", (DOWN,))], inputs(checkpoint, cache=cache))
    runs: list[object] = []
    monkeypatch.setattr(module, "run", lambda *arguments: runs.append(arguments))
    weights = [packed(checkpoint, "w5", QKV, Packing("int4", "rows")), packed(checkpoint, "w6", (DOWN,))]
    again = calibrated(checkpoint, weights, inputs(checkpoint, cache=cache))
    of = again.moments(weights[0])
    assert not runs and of is not None and of(0) is not None and again.method(weights[1]) == "gptq"
    calibrated(checkpoint, weights, inputs(checkpoint, cache=cache, text="b " * 90))
    assert len(runs) == 1


def test_statistics_that_were_trimmed_away_are_gathered_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)
    found = inputs(checkpoint, cache=cache)
    first = found.statistics(DOWN)
    cache.clear("calibration")
    found._last = None
    again = found.statistics(DOWN)
    assert first is not None and again is not None and again.to_bytes() == first.to_bytes()


def test_inputs_that_are_not_finite_are_left_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    plain = module.InputStatistics.from_bytes
    monkeypatch.setattr(module.InputStatistics, "from_bytes",
                        lambda data: replace(plain(data), amax=np.full(96, np.nan, np.float32)))
    weight = packed(checkpoint, "w1", (DOWN,))
    found = calibrated(checkpoint, [weight], inputs(checkpoint))
    assert found.method(weight) == "rtn" and "1 of 1 weights" in found.warnings[0]


@pytest.mark.parametrize("layout", [PANELS, ROWS])
def test_experts_are_rounded_each_for_its_own_inputs(mixtral: Callable[[int], Path], layout: str) -> None:
    """With one expert a token and two tokens in the text, some experts meet none: those are rounded to nearest."""
    checkpoint = open_checkpoint(mixtral(1))
    graph = import_model(checkpoint).graph
    precision = find_precision("w4a8") if layout == PANELS else find_precision("int4", find_target("h200").gpu)
    pipeline = cpu_pipeline if layout == PANELS else gpu_pipeline
    weights = QuantizedGraph(run_passes(graph, pipeline(precision, "bf16")), layout == ROWS).weights
    found = calibrated(checkpoint, weights, inputs(checkpoint))
    experts = [weight for weight in weights if len(weight.expr.shape) == 3]
    assert len(experts) == 2 and {found.method(weight) for weight in experts} == {"gptq"} and not found.warnings
    for weight in experts:
        plain, fitted = weight.values(checkpoint), weight.values(checkpoint, found.moments(weight))
        of = found.moments(weight)
        changed = [not np.array_equal(a, b) for a, b in zip(plain, fitted, strict=True)]
        assert of is not None and changed == [of(expert) is not None for expert in range(4)]
        assert any(changed) and not all(changed)


def test_parts_of_a_shared_expert_are_rounded_for_its_inputs(tmp_path: Path) -> None:
    """Its first matrices read all of them, the parts of its last each their channels."""
    from tools.small_models import save_random, small_config

    save_random(small_config("qwen2_moe", moe_intermediate_size=64, shared_expert_intermediate_size=192), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    passes = gpu_pipeline(find_precision("int4", find_target("h200").gpu), "bf16")
    weights = QuantizedGraph(run_passes(import_model(checkpoint).graph, passes), True).weights
    read = inputs(checkpoint)
    found = calibrated(checkpoint, weights, read)
    stacks = [weight for weight in weights if len(weight.expr.shape) == 3]
    assert [weight.shared for weight in stacks] == [3] * 4 and {found.method(weight) for weight in stacks} == {"gptq"}
    known = [read.statistics(f"model.layers.0.mlp.shared_expert.{name}_proj.weight") for name in ("gate", "down")]
    for weight, whole in zip(stacks, known, strict=False):
        of = found.moments(weight)
        assert of is not None and whole is not None
        plain, fitted = weight.values(checkpoint), weight.values(checkpoint, of)
        for part in range(3):
            got = of(8 + part)
            channels = slice(0, 64) if whole.width == 64 else slice(64 * part, 64 * part + 64)
            assert got is not None and np.array_equal(got[0], whole.blocks[0][channels, channels])
            assert not np.array_equal(plain[8 + part], fitted[8 + part])

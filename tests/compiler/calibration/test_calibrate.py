from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ingot.compiler.calibration import calibrate as module
from ingot.compiler.calibration.calibrate import calibrate
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.tokenizer import CONFIG, TOKENIZER
from ingot.compiler.weights.expr import concat, literal, tensor
from ingot.compiler.weights.packed import PackedWeight, Packing
from ingot.plugins.linear.pack import unpack
from ingot.plugins.scheme import SCHEMES

QKV = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
DOWN = "model.layers.0.mlp.down_proj.weight"
W4A8 = Packing("w4a8")
TOKENIZER_FILES = {CONFIG: json.dumps({"bos_token_id": None, "eos_token_ids": [], "special_tokens": {}}).encode(),
                   TOKENIZER: Tokenizer(WordLevel({"a": 1, "b": 2}, unk_token="a")).to_str().encode()}


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibration_text", lambda: "a b " * 40)


def packed(checkpoint: Checkpoint, name: str, parameters: tuple[str, ...], packing: Packing = W4A8) -> PackedWeight:
    expr = concat([tensor(parameter, checkpoint.shape(parameter)) for parameter in parameters], 0)
    return PackedWeight(name, expr, packing, "+".join(parameters), parameters)


def test_moments_for_what_four_bits_change(checkpoint: Checkpoint) -> None:
    weights = [packed(checkpoint, "w0", QKV), packed(checkpoint, "w1", (DOWN,)),
               packed(checkpoint, "w2", (DOWN,), Packing("int8")),
               PackedWeight("w3", literal(np.ones((32, 32), np.float32)), W4A8, "on the grid", ("none",))]
    found, warnings = calibrate(checkpoint, weights, TOKENIZER_FILES, lambda detail: None)
    assert {name: moment.shape[0] for name, moment in found.items()} == {
        "w0": checkpoint.shape(QKV[0])[1], "w1": checkpoint.shape(DOWN)[1]}
    assert warnings == []


def test_the_moment_changes_the_blob(checkpoint: Checkpoint) -> None:
    weight = packed(checkpoint, "w0", QKV)
    moment = calibrate(checkpoint, [weight], TOKENIZER_FILES, lambda detail: None)[0]["w0"]
    w = np.concatenate([checkpoint.get(name) for name in QKV])
    plain, fitted = (unpack(weight.make(checkpoint, given), w.shape[0], w.shape[1], SCHEMES["w4a8"]) - w
                     for given in (None, moment))
    assert np.sum(fitted @ moment * fitted) < 0.5 * np.sum(plain @ moment * plain)


def test_without_a_tokenizer(checkpoint: Checkpoint) -> None:
    found, warnings = calibrate(checkpoint, [packed(checkpoint, "w1", (DOWN,))], {}, lambda detail: None)
    assert found == {} and warnings[0].startswith("not calibrated, for want of a tokenizer")


def test_a_large_model_is_not_run(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PARAMETERS", 10)
    found, warnings = calibrate(checkpoint, [packed(checkpoint, "w1", (DOWN,))], TOKENIZER_FILES, lambda detail: None)
    assert found == {} and "billion parameters" in warnings[0]


def test_a_matrix_that_is_no_linear_layer_is_named(checkpoint: Checkpoint) -> None:
    weight = packed(checkpoint, "w1", (DOWN,))
    lost = PackedWeight("w2", weight.expr, W4A8, "elsewhere", ("elsewhere.weight",))
    found, warnings = calibrate(checkpoint, [weight, lost], TOKENIZER_FILES, lambda detail: None)
    assert set(found) == {"w1"} and warnings == [
        "not calibrated: 1 of 2 weights of 4 bits, such as elsewhere; they are rounded to nearest"]


def test_moments_that_are_not_finite_are_left_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gather", lambda *arguments: {DOWN: np.full((4, 4), np.nan, np.float32)})
    found, warnings = calibrate(checkpoint, [packed(checkpoint, "w1", (DOWN,))], TOKENIZER_FILES, lambda detail: None)
    assert found == {} and "1 of 1 weights" in warnings[0]

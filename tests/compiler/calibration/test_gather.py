from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ingot.compiler.calibration import gather as module
from ingot.compiler.calibration.gather import calibration_text, gather
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.passes.raise_linear import raise_linear
from ingot.compiler.quality import documentation_text
from ingot.compiler.reference_model import ReferenceModel
from ingot.compiler.weights.packed import RAW, WeightTable

LAYER = "model.layers.1."
NAMES = [f"{LAYER}{name}_proj.weight" for name in (
    "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
IDS = np.random.default_rng(0).integers(0, 256, 100).tolist()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(str(tiny_checkpoint))


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 32)


def test_moments_are_means_over_the_tokens(model: ReferenceModel) -> None:
    """Against the inputs of one layer, caught one window at a time; what opens a window does not count."""
    got, rows = gather(model, IDS, NAMES, prefix=[1, 2]), []
    handle = model.model.get_submodule(f"{LAYER}mlp.down_proj").register_forward_pre_hook(
        lambda module, inputs: rows.append(inputs[0][0, 2:].numpy()))
    for begin in range(0, 100, 30):
        model.logits([1, 2, *IDS[begin:begin + 30]])
    handle.remove()
    x = np.concatenate(rows)
    assert len(x) == 100
    want = x.T @ x / 100
    np.testing.assert_allclose(got[f"{LAYER}mlp.down_proj.weight"], want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


def test_layers_that_read_the_same_share_a_moment(model: ReferenceModel) -> None:
    found = gather(model, IDS, NAMES)
    q, k, v, o, gate, up, down = (found[name] for name in NAMES)
    assert q is k and k is v and gate is up
    assert len({id(moment) for moment in (q, o, gate, down)}) == 4
    assert q.dtype == np.float32 and q.shape == (q.shape[0],) * 2 and np.allclose(q, q.T)


def test_same_bytes_every_time_and_threads_as_before(model: ReferenceModel) -> None:
    torch.set_num_threads(2)
    first, second = gather(model, IDS, NAMES), gather(model, IDS, NAMES)
    assert torch.get_num_threads() == 2
    assert all(first[name].tobytes() == second[name].tobytes() for name in NAMES)


def test_only_what_is_asked_for_and_fits(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(gather(model, IDS, [*NAMES[3:4], "model.norm.weight", "model.embed_tokens.weight"])) == {NAMES[3]}
    monkeypatch.setattr(module, "MAX_MOMENT_BYTES", 4)
    assert gather(model, IDS, NAMES) == {}


def test_the_text_is_not_the_held_out_one() -> None:
    text, held_out = calibration_text(), documentation_text()
    assert len(text) > 12_000
    assert not any(line in held_out for line in text.splitlines() if len(line) > 60)


def test_matrices_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [K, N]; the build's name for its constant leads to the same module."""
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    graph = raise_linear(import_model(open_checkpoint(tmp_path)).graph)
    table = WeightTable()
    for name, expr in graph.constants.items():
        table.name(expr, RAW, name)
    names = {name for weight in table.entries.values() for name in weight.parameters}
    found = gather(ReferenceModel(str(tmp_path)), IDS, names)
    assert {name.removeprefix("transformer.h.0."): len(moment) for name, moment in found.items()} == {
        "attn.c_attn.weight": 16, "attn.c_proj.weight": 16, "mlp.c_fc.weight": 16, "mlp.c_proj.weight": 64}

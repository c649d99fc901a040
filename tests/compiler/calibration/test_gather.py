"""Inputs of a model's matrices, gathered with one layer in memory at a time, against the whole model."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ingot.compiler.calibration import gather as module
from ingot.compiler.calibration.gather import gather
from ingot.compiler.calibration.statistics import SAMPLES, InputStatistics
from ingot.compiler.calibration.streamed import StreamedModel
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.passes.raise_linear import raise_linear
from ingot.compiler.reference_model import ReferenceModel
from ingot.compiler.weights.packed import RAW, WeightTable

LAYER = "model.layers.1."
NAMES = [f"{LAYER}{name}_proj.weight" for name in (
    "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
PREFIX = [1, 2]
WINDOWS = [[*PREFIX, *window] for window in np.random.default_rng(0).integers(0, 256, (3, 30)).tolist()]


def gathered(folder: Path, prefix: int = 2) -> tuple[dict[str, InputStatistics], dict[str, str]]:
    """(statistics, parameter -> its statistics)."""
    found: dict[str, InputStatistics] = {}
    where: dict[str, str] = {}

    def sink(name: str, statistics: InputStatistics, parameters: list[str]) -> None:
        found[name] = statistics
        where.update(dict.fromkeys(parameters, name))

    gather(StreamedModel(open_checkpoint(folder)), WINDOWS, prefix, sink)
    return found, where


def inputs_of(model: ReferenceModel, name: str, skipped: int = 2) -> np.ndarray:
    """What the module reads in the whole model, one window after the other, without the first tokens of each."""
    rows: list[np.ndarray] = []
    handle = model.model.get_submodule(name).register_forward_pre_hook(
        lambda module, inputs: rows.append(inputs[0].reshape(len(WINDOWS[0]), -1)[skipped:].numpy()))
    for window in WINDOWS:
        model.logits(window)
    handle.remove()
    return np.concatenate(rows)


@pytest.mark.parametrize("name", [*NAMES, "lm_head.weight"])
def test_statistics_are_of_what_the_whole_model_reads(tiny_checkpoint: Path, name: str) -> None:
    found, where = gathered(tiny_checkpoint)
    x, got = inputs_of(ReferenceModel(str(tiny_checkpoint)), name.removesuffix(".weight")), found[where[name]]
    assert got.count == len(x) == 90
    want = x.T @ x / 90
    np.testing.assert_allclose(got.blocks[0], want, rtol=1e-3, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(got.amax, np.abs(x).max(axis=0), rtol=1e-4)


def test_layers_that_read_the_same_share_statistics(tiny_checkpoint: Path) -> None:
    _, where = gathered(tiny_checkpoint)
    q, k, v, o, gate, up, down = (where[name] for name in NAMES)
    assert q == k == v and gate == up and len({q, o, gate, down}) == 4


def test_same_bytes_every_time_and_threads_as_before(tiny_checkpoint: Path) -> None:
    torch.set_num_threads(2)
    first, second = gathered(tiny_checkpoint)[0], gathered(tiny_checkpoint)[0]
    assert torch.get_num_threads() == 2
    assert {name: s.to_bytes() for name, s in first.items()} == {name: s.to_bytes() for name, s in second.items()}


def test_one_layer_is_in_memory_at_a_time(tiny_checkpoint: Path) -> None:
    model = StreamedModel(open_checkpoint(tiny_checkpoint))
    loaded: list[set[str]] = []

    def sink(name: str, statistics: InputStatistics, parameters: list[str]) -> None:
        loaded.append({name.partition("layers.")[2][:1] for name, value in model.model.named_parameters()
                       if not value.is_meta and "layers." in name})

    gather(model, WINDOWS, 2, sink)
    assert {len(layers) for layers in loaded} <= {0, 1} and {"0"} in loaded and {"1"} in loaded
    assert all(value.is_meta for value in model.model.parameters())


def test_matrices_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [K, N]; the build's name for its constant leads to the same statistics. Its positions are
    learned: an embedding too."""
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    graph = raise_linear(import_model(open_checkpoint(tmp_path)).graph)
    table = WeightTable()
    for name, expr in graph.constants.items():
        table.name(expr, RAW, name)
    names = {name for weight in table.entries.values() for name in weight.parameters}
    found, where = gathered(tmp_path)
    assert {name.removeprefix("transformer.h.0."): found[where[name]].width for name in names & set(where)
            if ".h.0." in name} == {"attn.c_attn.weight": 16, "attn.c_proj.weight": 16, "mlp.c_fc.weight": 16,
                                    "mlp.c_proj.weight": 64}
    x = inputs_of(ReferenceModel(str(tmp_path)), "transformer.h.0.mlp.c_proj")
    got = found[where["transformer.h.0.mlp.c_proj.weight"]]
    np.testing.assert_allclose(got.mean_square, (x * x).mean(axis=0), rtol=1e-3)


def test_each_expert_has_statistics_of_the_tokens_that_it_gets(mixtral: Callable[[int], Path]) -> None:
    found, where = gathered(mixtral(2), prefix=0)
    prefix = "model.layers.0.mlp.experts."
    counts = [found[where[f"{prefix}gate_up_proj[{expert}]"]].count for expert in range(4)]
    assert sum(counts) == 2 * 96 and counts == [found[where[f"{prefix}down_proj[{e}]"]].count for e in range(4)]
    x = inputs_of(ReferenceModel(str(mixtral(2))), "model.layers.0.mlp", skipped=0)
    total = sum(found[where[f"{prefix}gate_up_proj[{e}]"]].mean_square * counts[e] for e in range(4))
    np.testing.assert_allclose(total, 2 * (x * x).sum(axis=0), rtol=1e-3)
    assert f"{prefix}gate_up_proj" not in where and "model.layers.0.mlp.gate.weight" in where


def test_too_many_experts_share_their_statistics(mixtral: Callable[[int], Path],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPERT_BYTES", 4 * 4 * 64 * 64)
    found, where = gathered(mixtral(2), prefix=0)
    prefix = "model.layers.0.mlp.experts."
    assert found[where[f"{prefix}down_proj"]].count == 2 * 96 and found[where[f"{prefix}gate_up_proj[1]"]].count < 192


def test_a_token_that_is_far_larger_than_others_does_not_decide() -> None:
    """Its largest values are known all the same."""
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32))
    rows[0] *= 1000
    sums = module._Sums.empty(8)
    sums.add(rows)
    found, others = sums.means(), rows[1:].square().sum(1)
    assert found.amax.max() == rows[0].abs().max()
    limit = 10 * float(rows.square().sum(1).median())
    assert float(np.trace(found.blocks[0])) * 60 == pytest.approx(float(others.sum()) + limit, rel=1e-4)
    assert np.square(found.rows).sum(axis=1).max() == pytest.approx(limit, rel=1e-4)


def test_first_tokens_are_samples_of_few_windows() -> None:
    sums = module._Sums.empty(4)
    for _ in range(20):
        rows = torch.ones(64, 4)
        rows[0] = 2
        sums.add(rows)
    found = sums.means().rows
    assert len(found) == SAMPLES and int((found[:, 0] == 2).sum()) == SAMPLES // 64

"""Throughput of gpu_check: what is timed computes the right thing, on devices and models that need no GPU."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import torch
from transformers import AutoModelForCausalLM, StaticCache

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.program import Limits
from ingot.runtime.step import StepInputs
from tools.gpu_check import throughput, torch_peer
from tools.small_models import save_random, small_config


class Profiled(NullProgram):
    """A device that keeps account of its KV cache: what is generated depends on every token of the context."""

    def __init__(self) -> None:
        super().__init__(Limits(8, 16, 128), 97, 64, (None, 32), simulate_kv=True)
        self.steps: list[tuple[int, int]] = []

    def launch(self, inputs: StepInputs) -> None:
        self.steps.append((inputs.num_tokens, int(inputs.positions[0])))
        super().launch(inputs)

    def profile(self, inputs: StepInputs) -> np.ndarray:
        return np.array([1000, 2000], np.int64)


def test_engine_steps_are_those_of_serving() -> None:
    program = Profiled()
    speed = throughput._generation(program, "ingot", 3, 40, 6)  # type: ignore[arg-type]
    assert (speed.batch, speed.tokens_per_step, speed.device_s) == (3, 3, 3e-6) and speed.seconds > 0
    assert program.steps[-6:] == [(3, 40 + step) for step in range(6)]
    assert program.steps[:3] == [(16, 0), (16, 16), (8, 32)], "a context in steps as long as the engine takes"
    context = throughput._context(program, "ingot", 20)  # type: ignore[arg-type]
    assert context.tokens_per_step == 20 and context.tokens_s > 0


def test_the_peer_computes_what_the_model_does(tmp_path: Path) -> None:
    save_random(small_config("llama"), tmp_path)
    model = torch_peer.load(tmp_path, "cpu")
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([[5, 9, 33, 7, 21]])
    with torch.inference_mode():
        cache = StaticCache(config=model.config, max_cache_len=8)
        first = torch_peer._step(model.forward, ids[:, :4], cache, 0)
        second = torch_peer._step(model.forward, ids[:, 4:], cache, 4)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
    assert first.shape[1] == second.shape[1] == 1
    for got, wanted in ((first, whole[:, 3]), (second, whole[:, 4])):
        assert torch.nn.functional.cosine_similarity(got[0].float(), wanted.float()).item() > 0.999


def test_the_peer_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_peer, "_STEPS", 3)
    monkeypatch.setattr(torch_peer, "_WARM_UP", 1)
    save_random(small_config("llama"), tmp_path)
    model = torch_peer.load(tmp_path, "cpu")
    speeds = torch_peer.peer_speeds(model, False, (1, 2), 10, 12)
    assert [(s.phase, s.batch, s.problem) for s in speeds] == [("generation", 1, ""), ("generation", 2, ""),
                                                               ("context", 1, "")]
    assert all(s.seconds > 0 for s in speeds) and speeds[2].tokens_per_step == 12
    late = torch_peer.peer_speeds(model, False, (1,), 10, 12, seconds=-1)
    assert {s.problem for s in late} == {"no time left"}


def test_the_large_model_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = throughput.Llama(hidden=64, inner=96, layers=2, heads=2, kv_heads=1, vocab=100)
    monkeypatch.setattr(throughput, "MODEL", small)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = throughput.checkpoint(tmp_path / "one"), throughput.checkpoint(tmp_path / "two")
    files = sorted(path.name for path in one.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)
    before = (one / "config.json").stat().st_mtime_ns
    assert throughput.checkpoint(tmp_path / "one") == one and (one / "config.json").stat().st_mtime_ns == before
    AutoModelForCausalLM.from_pretrained(one, local_files_only=True)

"""Whole engines in gpu_check, on the fake driver: from the pack to the comparison with transformers."""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices.cuda_driver import Driver
from ingot.runtime.devices.gpu_kernels import read_kernels
from ingot.runtime.engine_file import EngineFile
from tests.runtime.devices.conftest import no_sleep
from tests.runtime.devices.fake_cuda import FakeCuda
from tests.runtime.mock_engine import VOCAB_SIZE, tokenizer_json
from tools.gpu_check import engines, throughput
from tools.gpu_check.code import Pack, PackWriter, find_target
from tools.small_models import save_random, small_config

TARGET = find_target("h200")


def fake_for(*paths: Path, num_gpus: int = 1) -> FakeCuda:
    kernels, sources = {}, {}
    for path in paths:
        with EngineFile.open(path) as engine:
            for kernel in read_kernels(engine.plan).values():
                kernels[hashlib.sha256(engine.read(kernel.code)).hexdigest()] = kernel
                if kernel.source:
                    sources[kernel.module] = engine.read(kernel.source).decode()
    fake = FakeCuda(kernels, sources, memory_bytes=4 << 30, num_gpus=num_gpus)
    fake.cuInit(0)
    return fake


def use(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sleep(monkeypatch)
    for module in ("cuda", "cuda_driver"):
        monkeypatch.setattr(f"ingot.runtime.devices.{module}.load_driver", lambda: Driver(fake))


def packed(folder: Path, members: list[tuple[Path, str]]) -> Pack:
    writer = PackWriter(folder / "check.zip", TARGET)
    for path, name in members:
        writer.add_folder(path, name)
    writer.finish()
    return Pack(folder / "check.zip")


def test_what_the_pack_lacks_is_a_problem(tmp_path: Path) -> None:
    pack = packed(tmp_path, [])
    (row,) = engines.check_engines(pack, tmp_path, [("llama", "bf16")], "cuda:0")
    assert row.problem == "not in the pack: it could not be built"
    rows = engines.check_model(pack, tmp_path, "/models/some", "cuda:0")
    assert [(r.model, r.precision) for r in rows] == [("some", "bf16"), ("some", "fp8")]
    assert all("make one with --model" in r.problem for r in rows)


@pytest.mark.slow
def test_small_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [("llama", "bf16")]
    pack = packed(tmp_path, list(engines.make(tmp_path, TARGET, chosen)))
    fake = fake_for(tmp_path / "llama.bf16.engine")
    use(fake, monkeypatch)
    (row,) = engines.check_engines(pack, tmp_path / "out", chosen, "cuda:0")
    assert not row.problem and row.emulator_error == 0 and row.model_error < 0.03 and row.num_tokens == 16
    fake.assert_nothing_held()


@pytest.mark.slow
def test_a_real_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TEXTS", ("abc", "xy"))
    monkeypatch.setattr(engines, "NUM_NEW_OF_MODELS", 2)
    monkeypatch.setattr(engines, "_MODEL_LIMITS", ("--max-batch-size", "4", "--max-num-tokens", "8",
                                                   "--max-seq-len", "64"))
    monkeypatch.setattr(engines, "model_precisions", lambda target: ["bf16"])
    model = tmp_path / "model"
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": VOCAB_SIZE}
    save_random(small_config("llama", **sizes), model)
    (model / "tokenizer.json").write_bytes(tokenizer_json())
    made = list(engines.make_model(tmp_path, TARGET, str(model)))
    assert made[0][0].stat().st_size < 1 << 20, "without weights"
    fake = fake_for(made[0][0])
    use(fake, monkeypatch)
    (row,) = engines.check_model(packed(tmp_path, made), tmp_path / "out", str(model), "cuda:0")
    assert not row.problem and row.model_error < 0.03 and row.num_tokens == 4
    fake.assert_nothing_held()


@pytest.mark.slow
def test_throughput_of_an_engine_that_travels_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "MODEL", throughput.Llama(128, 192, 2, 2, 1, 300))
    for name, value in (("_MAX_BATCH_SIZE", 2), ("_MAX_NUM_TOKENS", 8), ("_MAX_SEQ_LEN", 64)):
        monkeypatch.setattr(throughput, name, value)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    stripped = throughput.build(here, TARGET, "bf16")
    whole = throughput.with_weights(stripped, there)
    assert whole.stat().st_size > stripped.stat().st_size
    fake = fake_for(whole)
    use(fake, monkeypatch)
    speeds = throughput.engine_speeds(whole, "ingot", 0, (1, 2), 6, 8, 4)
    assert [(s.phase, s.batch) for s in speeds] == [("generation", 1), ("generation", 2), ("context", 1)]
    assert all(s.seconds > 0 for s in speeds) and speeds[0].device_s > 0
    fake.assert_nothing_held()

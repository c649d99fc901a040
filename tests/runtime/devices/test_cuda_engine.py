"""A whole engine, as `ingot build` makes it, on the cuda device over the fake driver: the emulator's tokens."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.devices.cuda import CudaProgram
from ingot.runtime.devices.cuda_driver import Driver
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.sampling import SamplingParams
from tools.small_models import save_random, small_config

if TYPE_CHECKING:
    from .fake_cuda import FakeCuda

PROMPTS = [[5, 99, 17, 200, 3], [42, 7]]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "ranks"), [("llama", "bf16", 1), ("qwen3", "fp8", 1),
                                                            ("llama", "fp8", 2)])
def test_tokens_of_the_emulator(tmp_path: Path, fake_driver: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch,
                                family: str, precision: str, ranks: int) -> None:
    save_random(small_config(family, hidden_size=256, intermediate_size=384, head_dim=64), tmp_path / "model")
    path = tmp_path / "small.engine"
    build(BuildRequest(model=str(tmp_path / "model"), target="h200", precision=precision, output=path,
                       max_batch_size=2, max_num_tokens=8, max_seq_len=64,
                       tensor_parallel=ranks))
    with EngineFile.open(path) as file:
        fake = fake_driver(file, num_gpus=ranks)
    monkeypatch.setattr("ingot.runtime.devices.cuda.load_driver", lambda: Driver(fake))
    found = {}
    for device in ("emulator", "cuda"):
        with Engine.load(path, device=device, kv_cache_tokens=128) as engine:
            params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1)
            answers = engine.generate(PROMPTS, params)
            found[device] = [answer.token_ids for answer in answers], np.array(engine.logits(PROMPTS[0]))
            assert isinstance(engine.program, CudaProgram) is (device == "cuda")
    fake.assert_nothing_held()
    assert found["cuda"][0] == found["emulator"][0]
    np.testing.assert_array_equal(found["cuda"][1], found["emulator"][1])

"""Every kind of request at once, on models that compute: each gets what it gets alone, and the books are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.loaded import LoadedAdapter, LoadedAdapters
from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.executor import step_loop
from ingot.runtime.lora import LoraRoom
from ingot.runtime.program import Limits
from ingot.runtime.scheduler import ChunkingPolicy, SchedulerPolicy
from ingot.runtime.speculation import Speculator
from ingot.runtime.speculation.step_times import StepTimes
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.adapters.samples import matrices, write_adapter
from tests.runtime.executor.mixed_load import Known, Mix, Run, Setting, Speaker, mixed_run
from tests.runtime.mock_engine import EOS, VOCAB_SIZE, tokenizer_json
from tools.small_models import save_random, small_config

pytest.importorskip("llguidance")
RANK, SLOTS, NUM_ADAPTERS = 4, 2, 4
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window": 24, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind of model -> its engine, which has room for adapters; beside it folders 0, 1, … of adapters."""
    folder = tmp_path_factory.mktemp("mixed")

    def engine(kind: str) -> Path:
        path = folder / kind / "x.engine"
        if path.exists():
            return path
        checkpoint = folder / kind / "model"
        save_random(small_config(kind, vocab_size=VOCAB_SIZE, **KINDS[kind]), checkpoint)
        (checkpoint / "tokenizer.json").write_bytes(tokenizer_json())
        (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        build(BuildRequest(str(checkpoint), "cpu", "fp32", path, max_batch_size=6, max_num_tokens=40, max_seq_len=96,
                           lora_max_rank=RANK, lora_max_adapters=SLOTS, calibrate=False))
        room = LoraRoom.of(EngineFile.open(path).manifest)
        assert room is not None
        for number in range(NUM_ADAPTERS):
            rank, draw = RANK - number % 2, random.Random(number)
            shapes = {each.name: (each.in_features, each.out_features) for each in room.modules if draw.random() < 0.6}
            write_adapter(path.parent / str(number), matrices(shapes, rank=rank, seed=number, scale=0.25), "BF16",
                          rank=rank, targets=sorted({name.rpartition(".")[2] for name in shapes}))
        return path
    return engine


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is worth its time, and drafts are mostly right."""
    monkeypatch.setattr(StepTimes, "known", lambda self: [(1, 1.0), (1 << 20, 1.0)])
    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=Known))


def run_mix(path: Path, seed: int, setting: Setting, kv_tokens: int, host_tokens: int, num_requests: int) -> Run:
    with EngineFile.open(path) as file:
        program = load_program(file, kv_tokens * len({None, *_windows(file)}), 1, host_tokens)
        try:
            tokenizer = Tokenizer.of(file)
            assert tokenizer is not None
            speaker = Speaker(program, Limits.of(file.manifest), tokenizer, frozenset([EOS]))
            run = Run(speaker, setting)
            mixed_run(run, Mix(speaker, _adapters(path.parent, program.lora), seed), num_requests)
            return run
        finally:
            program.close()


def _windows(file: EngineFile) -> list[int | None]:
    windows: list[int | None] = file.plan["kv"]["windows"]
    return windows


def _adapters(folder: Path, room: LoraRoom | None) -> dict[str, LoadedAdapter]:
    loaded = LoadedAdapters(room)
    return {name: loaded.load(name, Adapter.read(folder / name)) for name in map(str, range(NUM_ADAPTERS))}


EQUAL, FIRST = ChunkingPolicy.EQUAL_PROGRESS, ChunkingPolicy.FIRST_COME_FIRST_SERVED


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize(("seed", "setting", "kv_tokens", "host_tokens"), [
    (11, Setting(SchedulerPolicy.MAX_UTILIZATION, EQUAL, drafts=3), 112, 256),
    (9, Setting(SchedulerPolicy.GUARANTEED_NO_EVICT, FIRST, 20, drafts=2), 192, 0),
    (9, Setting(SchedulerPolicy.STATIC_BATCH, EQUAL, 12), 192, 128),
], ids=str)
def test_each_gets_what_it_gets_alone(engines: Callable[[str], Path], seed: int, setting: Setting, kv_tokens: int,
                                      host_tokens: int) -> None:
    run = run_mix(engines("gemma3_text"), seed, setting, kv_tokens, host_tokens, 30)
    finished, stats = run.recorder.requests_finished, run.kv.stats
    assert {"stop", "length", "cancelled", "timeout"} <= set(finished)
    assert stats.hit_tokens > 0 and stats.evicted_blocks > 0 and run.recorder.adapter_writes > NUM_ADAPTERS
    assert (run.recorder.accepted_draft_tokens > 0) == (setting.drafts > 0)
    assert (run.recorder.requests_paused > 0) == (setting.policy is SchedulerPolicy.MAX_UTILIZATION)
    assert (stats.offloaded_blocks > 0) == (host_tokens > 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 140))
def test_many(engines: Callable[[str], Path], kind: str, seed: int) -> None:
    draw = random.Random(seed)
    setting = Setting(draw.choice(list(SchedulerPolicy)), draw.choice(list(ChunkingPolicy)),
                      draw.choice([None, None, 12, 20]), draw.random() < 0.85, draw.choice([0, 0, 2, 5]))
    run_mix(engines(kind), seed, setting, draw.choice([128, 192, 320, 1024]), draw.choice([0, 0, 128, 512]), 60)

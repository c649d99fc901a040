"""Requests with LoRA adapters on a device that computes nothing, but whose every token depends on the adapter's bytes
and on the whole context, computed with the same adapter."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.errors import UnknownAdapter
from ingot.runtime.adapters.loaded import LoadedAdapter
from ingot.runtime.devices.null import NullProgram
from ingot.runtime.devices.null_memory import NullMemory
from ingot.runtime.executor.executor import Executor
from ingot.runtime.executor.request_log import RequestLog
from ingot.runtime.scheduler import SchedulerPolicy
from tests.runtime.adapters.samples import room, seeded_adapter
from tests.runtime.executor.null_engine import (
    BLOCK_SIZE,
    LIMITS,
    GatedProgram,
    Sink,
    gated,
    null_executor,
    request,
)
from tests.runtime.mock_engine import VOCAB_SIZE

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def program(max_adapters: int = 2, num_blocks: int = 64, **options: Any) -> NullProgram:
    return NullProgram(LIMITS, VOCAB_SIZE, num_blocks, block_size=BLOCK_SIZE, simulate_kv=True,
                       lora=room(max_adapters=max_adapters), **options)


def load(executor: Executor, folder: Path, *numbers: int) -> list[LoadedAdapter]:
    """Adapters "1", "2", …, each with matrices of its own."""
    return [executor.adapters.load(str(number), Adapter.read(seeded_adapter(folder / str(number), number)))
            for number in numbers]


def expected(prompt: list[int], count: int, adapter: LoadedAdapter | None) -> list[int]:
    tokens, start = list(prompt), zlib.crc32(adapter.image.tobytes()) if adapter is not None else 0
    for _ in range(count):
        tokens.append(NullMemory.next_token(tokens, VOCAB_SIZE, start))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_many_requests_of_more_adapters_than_slots(tmp_path: Path, policy: SchedulerPolicy, num_blocks: int) -> None:
    """Every answer is that of its own adapter: whatever runs beside it, is cached, and is paused."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 256, 20).tolist()
    sink, device = Sink(), program(2, num_blocks)
    with null_executor(device, policy=policy) as executor:
        adapters: dict[str | None, LoadedAdapter | None] = {None: None}
        adapters.update((each.name, each) for each in load(executor, tmp_path, 1, 2, 3, 4, 5))
        asked = []
        for number in range(60):
            name = list(adapters)[rng.integers(0, 6)]
            prompt = shared[: rng.integers(0, 20)] + rng.integers(0, 256, rng.integers(1, 20)).tolist()
            asked.append((prompt, name))
            executor.submit(request(str(number), prompt, 8, lora=name), sink)
        answers = [sink.finished(str(number)) for number in range(60)]
        assert executor.recorder.requests_finished == {"length": 60}
        counts = {name: sum(lora == name for _, lora in asked) for name in adapters}
        assert executor.recorder.adapter_requests == {name or "": count for name, count in counts.items()}
        assert 5 <= executor.recorder.adapter_writes <= 60
    for (prompt, name), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == expected(prompt, 8, adapters[name]), name


def test_a_prefix_is_cached_for_its_adapter_alone(tmp_path: Path) -> None:
    sink = Sink()
    with null_executor(program()) as executor:
        one, two = load(executor, tmp_path, 1, 2)
        answers = {}
        for name, lora in (("base", None), ("one", "1"), ("two", "2"), ("again", "1"), ("base again", None)):
            executor.submit(request(name, PROMPT, 3, lora=lora), sink)
            answers[name] = sink.finished(name).token_ids
        cached = {name: sink.of(name)[0].num_cached_tokens for name in ("base", "one", "two", "again", "base again")}
        assert cached == {"base": 0, "one": 0, "two": 0, "again": 8, "base again": 8}
        assert executor.kv_stats.miss_tokens["lora"] == 16
        for name, adapter in (("base again", None), ("again", one), ("two", two)):
            assert answers[name] == expected(PROMPT, 3, adapter)


def test_the_n_answers_of_a_request_have_its_adapter(tmp_path: Path) -> None:
    sink = Sink()
    with null_executor(program()) as executor:
        (adapter,) = load(executor, tmp_path, 1)
        executor.submit(request("a", PROMPT, 5, lora="1", sampling={"n": 2}), sink)
        assert [sink.finished("a", index).token_ids for index in (0, 1)] == [expected(PROMPT, 5, adapter)] * 2


def test_unknown_adapters_are_refused_at_once(tmp_path: Path) -> None:
    with null_executor(program()) as executor:
        load(executor, tmp_path, 1)
        with pytest.raises(UnknownAdapter, match="no adapter '2' is loaded; loaded are: 1"):
            executor.submit(request("a", PROMPT, lora="2"), Sink())
        assert executor.recorder.requests_refused == {"UnknownAdapter": 1}
        assert not executor.recorder.adapter_requests
    with null_executor() as executor, pytest.raises(UnknownAdapter, match="loaded are: none"):
        executor.submit(request("a", PROMPT, lora="1"), Sink())


def gated_program(max_adapters: int) -> GatedProgram:
    return gated(simulate_kv=True, lora=room(max_adapters=max_adapters))


def test_unloading_while_requests_run_and_wait(tmp_path: Path) -> None:
    """Both end as they began; new ones are refused; the name may be another's meanwhile."""
    sink, device = Sink(), gated_program(1)
    with null_executor(device) as executor:
        first, _ = load(executor, tmp_path, 1, 2)
        executor.submit(request("runs", PROMPT, 6, lora="1"), sink)
        device.await_launch()
        executor.submit(request("waits", PROMPT[::-1], 6, lora="1"), sink)
        executor.adapters.unload("1")
        with pytest.raises(UnknownAdapter):
            executor.submit(request("late", PROMPT, 6, lora="1"), sink)
        other = executor.adapters.load("1", Adapter.read(seeded_adapter(tmp_path / "other", 7)))
        executor.submit(request("other", PROMPT, 6, lora="1"), sink)
        device.is_open = True
        assert sink.finished("runs").token_ids == expected(PROMPT, 6, first)
        assert sink.finished("waits").token_ids == expected(PROMPT[::-1], 6, first)
        assert sink.finished("other").token_ids == expected(PROMPT, 6, other)
        assert sink.of("other")[0].num_cached_tokens == 0, "found what another adapter computed under this name"


def test_a_slot_is_written_between_two_steps(tmp_path: Path) -> None:
    """Not while a step that reads it may be in flight: only when its last sequence has ended."""
    sink, device = Sink(), gated_program(1)
    in_flight: list[bool] = []
    write = device.write_adapter

    def checked_write(slot: int, image: np.ndarray) -> None:
        in_flight.append(device._in_flight is not None)
        write(slot, image)

    device.write_adapter = checked_write  # type: ignore[method-assign]
    with null_executor(device) as executor:
        load(executor, tmp_path, 1, 2)
        device.is_open = True
        for number in range(8):
            executor.submit(request(str(number), [number, *PROMPT], 5, lora=str(1 + number % 2)), sink)
        for number in range(8):
            sink.finished(str(number))
    assert len(in_flight) >= 2 and not any(in_flight)


def test_a_cancelled_request_leaves_its_slot(tmp_path: Path) -> None:
    sink, device = Sink(), gated_program(1)
    with null_executor(device) as executor:
        load(executor, tmp_path, 1, 2)
        executor.submit(request("a", PROMPT, 40, lora="1"), sink)
        device.await_launch()
        executor.submit(request("b", PROMPT, 3, lora="2"), sink)
        executor.cancel("a")
        device.is_open = True
        assert sink.finished("b").finish_reason == "length"
        assert sink.finished("a").finish_reason == "cancelled"


def test_the_log_tells_the_adapter(tmp_path: Path) -> None:
    sink, path = Sink(), tmp_path / "log"
    with null_executor(program(), log=RequestLog(str(path))) as executor:
        load(executor, tmp_path, 1)
        executor.submit(request("a", PROMPT, 2, lora="1"), sink)
        sink.finished("a")
        executor.drain()
    assert json.loads(path.read_text())["adapter"] == "1"


def test_a_closed_executor_holds_no_device(tmp_path: Path) -> None:
    import gc
    import weakref

    device = program()
    found = weakref.ref(device)
    with null_executor(device) as executor:
        load(executor, tmp_path, 1)
        sink = Sink()
        executor.submit(request("a", PROMPT, 2, lora="1"), sink)
        sink.finished("a")
    del device
    gc.collect()
    assert found() is None and executor.adapters.all()

"""The load generator: how many, when, with what history; and what becomes of requests that fail."""

import asyncio
import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest

from ingot.runtime.bench.drivers.driver import CallFailed, Refused
from ingot.runtime.bench.load import Generator, Load
from ingot.runtime.bench.recorder import Recorder, RequestRecord
from ingot.runtime.bench.workload import Session, Turn
from tests.runtime.bench.scripted_driver import ScriptedDriver


def run(driver: ScriptedDriver, load: Load, sessions: Iterable[Session]) -> list[RequestRecord]:
    recorder = Recorder()
    asyncio.run(asyncio.wait_for(Generator(driver, load, recorder, seed=0).run(iter(sessions)), 30))
    assert driver.under_way == 0
    return recorder.records


def single(count: int | None = None) -> Iterable[Session]:
    sessions = (Session(str(i), (Turn([i + 1] * 4, 3),)) for i in itertools.count())
    return itertools.islice(sessions, count)


def test_closed_loop_keeps_so_many_under_way() -> None:
    driver = ScriptedDriver(token_s=0.001)
    records = run(driver, Load(concurrency=4, num_requests=20), single())
    assert len(records) == 20 and driver.most_under_way == 4
    assert all(record.status == "finished" and record.num_output_tokens == 3 for record in records)
    assert len(set(driver.request_ids)) == 20


def test_all_at_once() -> None:
    driver = ScriptedDriver(token_s=0.001)
    records = run(driver, Load(request_rate=math.inf, num_requests=15), single())
    assert len(records) == 15 == driver.most_under_way
    assert len({record.scheduled_s for record in records}) == 1


def test_poisson_arrivals() -> None:
    records = run(ScriptedDriver(), Load(request_rate=2000, num_requests=400), single())
    gaps = np.diff([record.scheduled_s for record in records])
    assert len(records) == 400
    # Exponential: mean and standard deviation are equal.
    assert np.mean(gaps) == pytest.approx(1 / 2000, rel=0.2)
    assert np.std(gaps) == pytest.approx(1 / 2000, rel=0.25)


def test_a_slow_server_does_not_slow_arrivals_down() -> None:
    """Latency counts from the schedule: with a busy client the wait before the sending is part of it."""
    class Blocking(ScriptedDriver):
        def check(self, prompt: object) -> None:
            import time
            time.sleep(0.01)  # holds up the client itself

    records = run(Blocking(), Load(request_rate=1000, num_requests=30), single())
    last = max(record.scheduled_s for record in records)
    assert last < 0.2  # 30 ms at that rate; 300 ms if each arrival waited for the one before
    late = [record for record in records if record.sent_s - record.scheduled_s > 0.05]
    assert late and all(record.ttft_s > record.sent_s - record.scheduled_s for record in late)


def test_duration_ends_a_run() -> None:
    records = run(ScriptedDriver(token_s=0.001), Load(concurrency=2, duration_s=0.1), single())
    # A machine may be busy between the look at the clock and the sending.
    assert records and all(record.sent_s - records[0].sent_s <= 0.5 for record in records)
    assert all(record.status == "finished" for record in records)
    records = run(ScriptedDriver(), Load(request_rate=100, duration_s=0.1), single())
    assert all(record.scheduled_s - records[0].scheduled_s <= 0.1 for record in records)


def test_sessions_that_run_out() -> None:
    for load in (Load(concurrency=4), Load(request_rate=math.inf), Load(request_rate=1000)):
        assert len(run(ScriptedDriver(), load, single(7))) == 7


@pytest.mark.parametrize("load", [Load(concurrency=2, num_requests=5), Load(request_rate=math.inf, num_requests=5),
                                  Load(request_rate=10_000, num_requests=5)])
def test_later_turns_hold_all_that_was_said(load: Load) -> None:
    driver = ScriptedDriver()
    session = Session("s", (Turn([7, 8], 2), Turn([9], 3, think_s=0.01), Turn([5, 6], 1)))
    records = run(driver, load, itertools.chain([session], single()))
    prompts = [driver.prompts[i] for i, record in enumerate(records) if record.session == "s"]
    # The answers' tokens are 0, 1, … (see the driver).
    assert prompts[:3] == [[7, 8], [7, 8, 0, 1, 9], [7, 8, 0, 1, 9, 0, 1, 2, 5, 6]][: len(prompts)]
    assert len(records) == 5
    turns = [record for record in records if record.session == "s"]
    if len(turns) > 1:
        assert turns[1].scheduled_s == pytest.approx(turns[0].end_s + 0.01)


def test_answers_without_token_ids_go_on_with_as_many_others() -> None:
    class Wordless(ScriptedDriver):
        async def generate(self, request_id: str, prompt: list[int] | str, output_tokens: int):  # type: ignore[no-untyped-def]
            async for delivery in super().generate(request_id, prompt, output_tokens):
                yield delivery._replace(token_ids=None)

    driver = Wordless()
    run(driver, Load(concurrency=1), [Session("s", (Turn([7], 2), Turn([9], 1)))])
    assert driver.prompts == [[7], [7, 0, 0, 9]]


@pytest.mark.parametrize(("error", "status"), [(Refused("full"), "refused"), (CallFailed("broken"), "failed")])
def test_a_failed_request_ends_its_session(error: Exception, status: str) -> None:
    class Failing(ScriptedDriver):
        def check(self, prompt: list[int] | str) -> None:
            if len(prompt) == 1:
                raise error

    sessions = [Session("bad", (Turn([1], 2), Turn([2], 2))), *single(2)]
    records = run(Failing(), Load(concurrency=1), sessions)
    assert [(record.status, record.error) for record in records] == [
        (status, str(error)), ("finished", None), ("finished", None)]


def test_an_answer_without_tokens_has_failed() -> None:
    records = run(ScriptedDriver(), Load(concurrency=1), [Session("s", (Turn([1], 0),))])
    assert [record.status for record in records] == ["failed"]


def test_texts_are_sent_as_they_are() -> None:
    driver = ScriptedDriver()
    run(driver, Load(concurrency=1), [Session("s", (Turn("hello", 2),))])
    assert driver.prompts == ["hello"]

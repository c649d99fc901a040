"""The asyncio side: streams of outputs, and every way in which a reader may go away."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.executor.executor import Executor
from ingot.runtime.executor.request import DuplicateRequest, EngineFailed, PromptError, RequestOutput
from tests.runtime.executor.null_engine import WAIT_S, GatedProgram, gated, null_executor, request

PROMPT = [1, 2, 3]


@asynccontextmanager
async def async_engine(program: NullProgram | None = None) -> AsyncIterator[AsyncEngine]:
    with null_executor(program) as executor:
        yield AsyncEngine(executor)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), WAIT_S)

    asyncio.run(bounded())


def executor_of(engine: AsyncEngine) -> Executor:
    executor = engine._executor
    assert isinstance(executor, Executor)
    return executor


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def launched(program: GatedProgram) -> None:
    await asyncio.to_thread(program.await_launch)


def test_outputs_come_in_order() -> None:
    async def test() -> None:
        async with async_engine() as engine:
            async def answer(name: str) -> list[RequestOutput]:
                return [output async for output in engine.generate(request(name, PROMPT, 5))]

            answers = await asyncio.gather(*(answer(str(number)) for number in range(10)))
            for outputs in answers:
                assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4, 5]
                assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
            assert engine.request_ids == []
    run(test)


def test_several_answers_come_interleaved() -> None:
    async def test() -> None:
        async with async_engine() as engine:
            outputs = [output async for output in engine.generate(request("a", PROMPT, 4, sampling={"n": 3}))]
            assert sorted((output.index, output.num_output_tokens) for output in outputs) == [
                (index, number) for index in range(3) for number in range(1, 5)]
    run(test)


def test_refused_at_once() -> None:
    async def test() -> None:
        program = gated()
        async with async_engine(program) as engine:
            with pytest.raises(PromptError):
                engine.generate(request("a", []))
            stream = engine.generate(request("a", PROMPT))  # the id is free again
            with pytest.raises(DuplicateRequest):
                engine.generate(request("a", PROMPT))
            program.is_open = True
            assert len([output async for output in stream]) == 8
    run(test)


async def cancel_task(engine: AsyncEngine, program: GatedProgram) -> None:
    async def read() -> None:
        async for _ in engine.generate(request("a", PROMPT, 50)):
            pass

    task = asyncio.create_task(read())
    await launched(program)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def close(engine: AsyncEngine, program: GatedProgram) -> None:
    stream = engine.generate(request("a", PROMPT, 50))
    await launched(program)
    await stream.aclose()
    assert [output async for output in stream] == []


async def let_go(engine: AsyncEngine, program: GatedProgram) -> None:
    stream = engine.generate(request("a", PROMPT, 50))
    await launched(program)
    program.let(2)
    async for _ in stream:
        break
    del stream
    gc.collect()


@pytest.mark.parametrize("leave", [cancel_task, close, let_go])
def test_a_reader_that_goes_away_cancels(leave: Callable[[AsyncEngine, GatedProgram], Awaitable[None]]) -> None:
    async def test() -> None:
        program = gated()
        async with async_engine(program) as engine:
            await leave(engine, program)
            await until(lambda: bool(executor_of(engine)._commands))
            program.let()  # the step in flight
            await until(lambda: not engine.request_ids)
            assert engine.recorder.requests_finished == {"cancelled": 1}
            program.is_open = True
            assert len([output async for output in engine.generate(request("a", PROMPT, 3))]) == 3
    run(test)


def test_cancelled_by_id() -> None:
    async def test() -> None:
        program = gated()
        async with async_engine(program) as engine:
            stream = engine.generate(request("a", PROMPT, 50))
            await launched(program)
            assert engine.cancel("a")
            assert not engine.cancel("b")
            program.let(2)
            outputs = [output async for output in stream]
            assert [output.finish_reason for output in outputs][-1] == "cancelled"
            assert not engine.cancel("a")
    run(test)


def test_drain_and_health() -> None:
    async def test() -> None:
        program = gated()
        async with async_engine(program) as engine:
            told: list[str] = []
            engine.on_health(told.append)
            stream = engine.generate(request("a", PROMPT, 3))
            draining = asyncio.create_task(engine.drain())
            await until(lambda: told == ["draining"])
            assert engine.health == "draining" and not draining.done()
            program.is_open = True
            assert await draining
            assert len([output async for output in stream]) == 3
    run(test)


def test_a_failure_reaches_every_reader() -> None:
    async def test() -> None:
        program = gated()
        async with async_engine(program) as engine:
            streams = [engine.generate(request(name, PROMPT)) for name in "ab"]
            await launched(program)
            program.failure = EngineFailed("gone")
            program.let()
            for stream in streams:
                outputs = [output async for output in stream]
                assert outputs[-1].finish_reason == "error" and "gone" in str(outputs[-1].error)
            await until(lambda: engine.health == "failed")
    run(test)


def test_a_loop_that_is_gone() -> None:
    """What still runs when the loop ends must not trouble the executor."""
    program = gated()
    with null_executor(program) as executor:
        async def test() -> None:
            stream = AsyncEngine(executor).generate(request("a", PROMPT, 20))
            await launched(program)
            assert stream.request_id == "a"

        asyncio.run(test())
        program.is_open = True
        assert executor.drain(WAIT_S) is not None
        assert executor.health == "draining"

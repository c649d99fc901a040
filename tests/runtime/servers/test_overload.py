"""Ten times the load that a server can bear, and clients that leave in the middle (60 s: tools/bench/overload.py)."""

import asyncio
import statistics
from pathlib import Path

from grpc import aio
from smg_grpc_proto import trtllm_service_pb2_grpc as rpc

from ingot.runtime.program import Limits
from tests.runtime.servers.grpc_replica import Replica, replica
from tests.runtime.servers.test_trtllm import ask, wait_until
from tools.bench.overload import MAX_REFUSAL_S, Load, Outcome, capacity, growth, overload

LOAD = Load(num_prompt_tokens=20, max_tokens=30)
LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=256)
MAX_QUEUE_SIZE = 8


async def flood(served: Replica) -> Outcome:
    async with aio.insecure_channel(served.address) as channel:
        rate = await capacity(channel, LOAD, LIMITS.max_batch_size, 1.0)
        return await overload(channel, LOAD, 10 * rate, 2.0)


def test_overload(tmp_path: Path) -> None:
    with replica(tmp_path, limits=LIMITS, num_blocks=64, step_s=0.01, max_queue_size=MAX_QUEUE_SIZE) as served:
        outcome = asyncio.run(flood(served))
        assert set(outcome.codes) == {"OK", "RESOURCE_EXHAUSTED"}, outcome.codes
        assert outcome.codes["RESOURCE_EXHAUSTED"] > outcome.codes["OK"] > MAX_QUEUE_SIZE
        assert outcome.num_incomplete == 0
        # Client and server share an interpreter here, so that single refusals may be held up by both.
        assert statistics.median(outcome.refusal_s) < MAX_REFUSAL_S
        assert served.executor.health == "serving"
        wait_until(lambda: served.executor.stats().num_used_blocks == 0)
        assert served.executor.recorder.requests_refused == {"QueueFull": outcome.codes["RESOURCE_EXHAUSTED"]}


def test_blocks_of_a_client_that_leaves_are_free_within_one_step(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.02) as served:
        executor = served.executor
        steps: dict[str, int] = {}
        cancel, release = executor.cancel, executor.kv.release

        def noted_cancel(request_id: str) -> None:
            steps["cancel"] = executor.recorder.steps
            cancel(request_id)

        def noted_release(*arguments: object, **options: object) -> None:
            steps["release"] = executor.recorder.steps
            release(*arguments, **options)  # type: ignore[arg-type]

        executor.cancel, executor.kv.release = noted_cancel, noted_release  # type: ignore[method-assign]
        with served.channel() as channel:
            running = rpc.TrtllmServiceStub(channel).Generate(ask(max_tokens=200, streaming=True))
            next(running)
            running.cancel()
            wait_until(lambda: executor.stats().num_used_blocks == 0)
        assert steps["release"] - steps["cancel"] <= 1


def test_growth_is_told_from_warming_up() -> None:
    assert growth([1, 50, 90, 100, 100, 100, 100, 100, 100]) == 1.0
    assert growth([100] * 3 + [110] * 3 + [121] * 3) > 1.05
    assert growth([100, 200]) == 1.0

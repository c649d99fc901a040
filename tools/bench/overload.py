"""More requests than an engine can answer: what becomes of them, of the server's memory, and of its clients.

    python -m tools.bench.overload ENGINE [--seconds 60] [--factor 10] [--json]

1. Capacity: requests a second with as many at a time as the batch holds.
2. Overload: requests come at `factor` times that rate for `seconds`. Each is admitted and must end, or is refused with
   RESOURCE_EXHAUSTED. Told: how long a refusal took as the client saw it, and the server's memory all along.
3. A client process with streams open is killed: its KV blocks must be free.
4. SIGTERM while requests run: they finish, new ones get UNAVAILABLE, the exit status is 0.

Exit status 1 if anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from grpc import aio
from smg_grpc_proto import trtllm_service_pb2 as pb

from ingot.runtime.servers.proto import control_pb2 as control

from .replicas import Server, serve

_GENERATE = "/trtllm.TrtllmService/Generate"
_STATISTICS = "/ingot.v1.Control/GetStatistics"
MAX_REFUSAL_S = 0.05
# Allocators keep what a peak has taken, and caches fill: a leak goes on after that.
MAX_GROWTH = 1.05


@dataclass(frozen=True)
class Load:
    """num_prompt_tokens, max_tokens: of each request. All prompts differ."""

    num_prompt_tokens: int = 64
    max_tokens: int = 64

    def request(self, number: int, *, streaming: bool = False) -> bytes:
        # Different first tokens: nothing is found in the cache, so each request costs the same.
        prompt = [10 + number % 50, 10 + number // 50 % 50, 10 + number // 2500 % 50,
                  *(20 + index % 70 for index in range(self.num_prompt_tokens - 3))]
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_token_ids=prompt), max_tokens=self.max_tokens,
                                     ignore_eos=True, streaming=streaming)
        return bytes(request.SerializeToString())


@dataclass
class Outcome:
    """What became of the requests. codes: by gRPC status; refusal_s: how long each refusal took."""

    seconds: float = 0.0
    offered_rate: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    refusal_s: list[float] = field(default_factory=list)
    num_incomplete: int = 0

    def refusal_quantile(self, share: float) -> float:
        ordered = sorted(self.refusal_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def capacity(channel: aio.Channel, load: Load, concurrency: int, seconds: float) -> float:
    """Requests a second with `concurrency` of them at a time."""
    call, begin, counter = channel.unary_stream(_GENERATE), time.monotonic(), iter(range(1 << 30))

    async def work() -> int:
        done = 0
        while time.monotonic() < begin + seconds:
            async for _ in call(load.request(next(counter))):
                done += 1
        return done

    done = sum(await asyncio.gather(*(work() for _ in range(concurrency))))
    return done / (time.monotonic() - begin)


async def overload(channel: aio.Channel, load: Load, rate: float, seconds: float) -> Outcome:
    """Sends `rate` requests a second at even distances for so many seconds and waits for all of them."""
    outcome = Outcome(offered_rate=rate)
    call = channel.unary_stream(_GENERATE)

    async def ask(number: int) -> None:
        begin = time.monotonic()
        try:
            tokens = 0
            async for data in call(load.request(number)):
                tokens += len(pb.GenerateResponse.FromString(data).complete.output_token_ids)
            outcome.codes["OK"] += 1
            outcome.num_incomplete += tokens != load.max_tokens
        except grpc.RpcError as error:
            outcome.codes[error.code().name] += 1
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                outcome.refusal_s.append(time.monotonic() - begin)

    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(begin + number / rate - time.monotonic())
            group.create_task(ask(1_000_000 + number))
    outcome.seconds = time.monotonic() - begin
    return outcome


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def sampled(read: Callable[[], int], every_s: float, into: list[int]) -> None:
    while True:
        into.append(read())
        await asyncio.sleep(every_s)


def growth(samples: list[int]) -> float:
    """The last third's mean over the middle third's: 1 if memory is flat once it has been warm."""
    third = len(samples) // 3
    return statistics.mean(samples[-third:]) / statistics.mean(samples[third : 2 * third]) if third else 1.0


_KILLED_CLIENT = """
import sys, time
import grpc
channel = grpc.insecure_channel(sys.argv[1])
streams = [channel.unary_stream(sys.argv[2])(bytes.fromhex(sys.argv[3])) for _ in range(4)]
for stream in streams:
    next(stream)
print("streaming", flush=True)
time.sleep(600)
"""


def kill_a_client(server: Server, load: Load) -> tuple[bool, float]:
    """(whether its blocks became free, after how many seconds)."""
    request = Load(load.num_prompt_tokens, 1024).request(7, streaming=True).hex()
    client = subprocess.Popen([sys.executable, "-c", _KILLED_CLIENT, server.grpc, _GENERATE, request],
                              stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == b"streaming\n"
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(_STATISTICS, None, control.Statistics.FromString)
        assert ask(b"").num_used_blocks > 0
        os.kill(client.pid, signal.SIGKILL)
        begin = time.monotonic()
        client.wait()
        while (used := ask(b"").num_used_blocks) and time.monotonic() < begin + 10:
            time.sleep(0.002)
    return not used, time.monotonic() - begin


def end_by_signal(server: Server, load: Load) -> dict[str, bool]:
    """What a SIGTERM does to a running and to a new request, and to the process."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_stream(_GENERATE, None, pb.GenerateResponse.FromString)
        running = call(Load(load.num_prompt_tokens, 256).request(8, streaming=True))
        next(running)
        server.terminate()
        refused = None
        while refused is None:
            try:
                list(call(Load(load.num_prompt_tokens, 1).request(9)))
            except grpc.RpcError as error:
                refused = error.code()
        finished = list(running)[-1].complete.completion_tokens == 256
        status = server.wait()
    return {"running requests finished": finished, "new requests got UNAVAILABLE":
            refused == grpc.StatusCode.UNAVAILABLE, "exit status 0": status == 0}


async def measure(server: Server, load: Load, factor: float,
                  seconds: float) -> tuple[dict[str, object], dict[str, bool]]:
    """(figures, what had to hold and whether it did)."""
    memory: list[int] = []
    async with aio.insecure_channel(server.grpc) as channel:
        rate = await capacity(channel, load, int(server.start["max_batch_size"]), min(10.0, seconds))
        sampler = asyncio.create_task(sampled(lambda: resident_bytes(server.process.pid), 0.25, memory))
        outcome = await overload(channel, load, rate * factor, seconds)
        sampler.cancel()
        ask = channel.unary_unary(_STATISTICS, None, control.Statistics.FromString)
        end = time.monotonic() + 10
        while (used := (await ask(b"")).num_used_blocks) and time.monotonic() < end:
            await asyncio.sleep(0.01)
    figures: dict[str, object] = {
        "capacity_requests_per_s": round(rate, 2), "offered_requests_per_s": round(outcome.offered_rate, 2),
        "seconds": round(outcome.seconds, 1), "outcomes": dict(outcome.codes),
        "refusal_ms": {name: round(outcome.refusal_quantile(share) * 1e3, 2)
                       for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "memory_mb": [round(memory[index] / 1e6, 1) for index in (0, len(memory) // 2, -1)],
        "memory_growth": round(growth(memory), 4)}
    return figures, {
        "the server lives": server.process.poll() is None,
        "requests were refused": outcome.codes["RESOURCE_EXHAUSTED"] > 0,
        "all others ended with their whole answer": set(outcome.codes) <= {"OK", "RESOURCE_EXHAUSTED"}
        and outcome.num_incomplete == 0,
        f"refused within {MAX_REFUSAL_S * 1e3:.0f} ms": outcome.refusal_quantile(1.0) <= MAX_REFUSAL_S,
        "memory is flat": growth(memory) <= MAX_GROWTH, "no block is held at the end": used == 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0, help="offered load, in capacities (default 10)")
    parser.add_argument("--max-queue-size", type=int, default=32)
    parser.add_argument("--kv-cache-tokens", type=int, default=8192)
    for name in ("num_prompt_tokens", "max_tokens"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(Load, name))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = Load(arguments.num_prompt_tokens, arguments.max_tokens)
    with serve(arguments.engine, "--kv-cache-tokens", str(arguments.kv_cache_tokens),
               "--max-queue-size", str(arguments.max_queue_size)) as server:
        figures, held = asyncio.run(measure(server, load, arguments.factor, arguments.seconds))
        held["blocks of a killed client are free"], figures["killed_client_s"] = kill_a_client(server, load)
        held |= end_by_signal(server, load)
    if arguments.json:
        print(json.dumps({"load": asdict(load), **figures, "held": held}))
    else:
        print("\n".join([*(f"{name:<26} {value}" for name, value in figures.items()),
                         *(f"{'yes' if value else 'NO':<4} {name}" for name, value in held.items())]))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

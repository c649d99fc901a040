"""How much of the prompts a gateway's routing finds in the replicas' prefix caches: cache-aware against round-robin.

    python -m tools.bench.routing ENGINE [--sessions 12] [--turns 5] [--json]

Two `ingot serve` replicas stand behind an SMG gateway, once under each policy, with empty caches. Sessions talk over
OpenAI's chat interface, several at a time: each begins with a document of its own, and each turn sends the whole chat
so far. What is counted comes from the replicas' own counters (ingot.v1.Control, GetStatistics): tokens of prompts, and
how many of them were found in the cache.

The engine needs a chat template and --max-seq-len enough for document and turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import openai

from ingot.runtime.servers.proto import control_pb2
from ingot.runtime.servers.proto.control_pb2_grpc import ControlStub

from .replicas import gateway, serve

POLICIES = ("cache_aware", "round_robin")
_WORDS = Path(__file__).read_text().split()


@dataclass(frozen=True)
class Workload:
    """document_words: what each session begins with; turn_words: what each turn adds; concurrency: sessions at a
    time, an odd number: an even one falls into step with two replicas taken in turn."""

    sessions: int = 12
    turns: int = 5
    document_words: int = 300
    turn_words: int = 20
    max_tokens: int = 24
    concurrency: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """prompt_tokens, cached_tokens: of all replicas; requests: of each."""

    policy: str
    prompt_tokens: int
    cached_tokens: int
    requests: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def measure(engine: Path, policy: str, workload: Workload, options: Sequence[str] = ()) -> Outcome:
    """options: of `ingot serve`."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(serve(engine, *options)) for _ in range(2)]
        base = stack.enter_context(gateway([replica.grpc for replica in replicas], policy))
        asyncio.run(_talk(base, replicas[0].start["model"], workload))
        statistics = []
        for replica in replicas:
            with grpc.insecure_channel(replica.grpc) as channel:
                statistics.append(ControlStub(channel).GetStatistics(control_pb2.GetStatisticsRequest()))
    return Outcome(policy, sum(each.prefix_cache.query_tokens for each in statistics),
                   sum(each.prefix_cache.hit_tokens for each in statistics),
                   tuple(sum(each.requests_finished.values()) for each in statistics))


async def _talk(base: str, model: str, workload: Workload) -> None:
    waiting = list(range(workload.sessions))
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600) as client:
        async def work() -> None:
            while waiting:
                await _session(client, model, workload, waiting.pop(0))
        await asyncio.gather(*(work() for _ in range(workload.concurrency)))


async def _session(client: openai.AsyncOpenAI, model: str, workload: Workload, number: int) -> None:
    words = random.Random(workload.seed * 1_000_003 + number)
    text = " ".join(words.choices(_WORDS, k=workload.document_words))
    messages: list[dict[str, str]] = []
    for _ in range(workload.turns):
        text += " " + " ".join(words.choices(_WORDS, k=workload.turn_words))
        messages.append({"role": "user", "content": text.strip()})
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=workload.max_tokens, temperature=0)  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        text = ""


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| policy | prompt tokens | found in the cache | hit rate | requests of each replica |",
             "|---|---|---|---|---|"]
    lines += (f"| {each.policy} | {each.prompt_tokens:,} | {each.cached_tokens:,} | {each.hit_rate:.1%} | "
              f"{' + '.join(map(str, each.requests))} |" for each in outcomes)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    for name in ("sessions", "turns", "document_words", "turn_words", "max_tokens", "concurrency", "seed"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(Workload, name))
    parser.add_argument("--kv-cache-tokens", type=int, default=32768, help="of each replica (default 32768)")
    parser.add_argument("--json", action="store_true")
    arguments = vars(parser.parse_args())
    engine, as_json, tokens = (arguments.pop(name) for name in ("engine", "json", "kv_cache_tokens"))
    workload = Workload(**arguments)
    outcomes = [measure(engine, policy, workload, ("--kv-cache-tokens", str(tokens), "--num-workers", "1"))
                for policy in POLICIES]
    facts = [{**asdict(each), "hit_rate": each.hit_rate} for each in outcomes]
    print(json.dumps(facts) if as_json else table(outcomes))


if __name__ == "__main__":
    main()

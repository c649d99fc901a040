"""Which limits to serve an engine with: the same load on the engine in this process, by each of some settings.

As many requests as the largest batch holds are under way at any time, so that every setting is saturated; what it
cannot run waits, and the wait is part of the time to the first token.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ingot.runtime.bench.bench import Plan, bench
from ingot.runtime.bench.drivers.in_process import in_process
from ingot.runtime.bench.load import Load
from ingot.runtime.bench.workload import Lengths, Workload
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.executor.loading import EngineOptions
from ingot.runtime.program import Limits

from ..version import ingot_version

_STEPS = 3
"""Settings of each limit, where the user names none: the engine's own, a half of it, a quarter."""

_TOKEN_SEED = 1


@dataclass(frozen=True)
class Setting:
    """One pair of limits, and what came of it. Times in milliseconds."""

    max_batch_size: int
    max_num_tokens: int
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float


@dataclass(frozen=True)
class Grid:
    """batch_sizes, num_tokens  what is tried; None: the engine's limits and two smaller ones
    isl, osl      tokens of a prompt and of an answer
    num_requests  for each setting; None: three for each that is under way
    max_itl_ms    the best setting keeps this between two tokens, P99
    """

    batch_sizes: list[int] | None = None
    num_tokens: list[int] | None = None
    isl: int = 256
    osl: int = 64
    num_requests: int | None = None
    max_itl_ms: float | None = None
    num_workers: int | None = None

    def settings(self, limits: Limits) -> list[tuple[int, int]]:
        """(max_batch_size, max_num_tokens), each within the engine's. Raises RequestError."""
        for option, value in (("--isl", self.isl), ("--osl", self.osl), ("--num-requests", self.num_requests)):
            if value is not None and value < 1:
                raise RequestError(f"{option} is {value}; expected at least 1")
        if self.isl + self.osl > limits.max_seq_len:
            raise RequestError(f"--isl {self.isl} and --osl {self.osl} are {self.isl + self.osl} tokens; a sequence of "
                               f"this engine has {limits.max_seq_len} at most")
        batches = _tried("--batch-sizes", self.batch_sizes, limits.max_batch_size)
        tokens = _tried("--num-tokens", self.num_tokens, limits.max_num_tokens)
        found = [(batch, step) for batch in batches for step in tokens if step >= batch]
        if not found:
            raise RequestError(f"every number of --num-tokens ({', '.join(map(str, tokens))}) is below every one of "
                               f"--batch-sizes ({', '.join(map(str, batches))}): a step holds a token of each sequence")
        return found

    def best(self, settings: list[Setting]) -> Setting | None:
        """The most throughput of those that keep the limit; None if none does."""
        kept = [s for s in settings if self.max_itl_ms is None or s.inter_token_p99_ms <= self.max_itl_ms]
        return max(kept, key=lambda setting: setting.output_tokens_per_s, default=None)


def tune_serving(engine: EngineFile, grid: Grid, progress: Callable[[str], None] = lambda text: None) -> list[Setting]:
    """Measures every setting. Raises RequestError for settings that cannot be, WorkFailed if a request failed."""
    wanted = grid.settings(Limits.of(engine.manifest))
    under_way = max(batch for batch, _ in wanted)
    plan = Plan(Load(concurrency=under_way, num_requests=grid.num_requests or 3 * under_way),
                Workload(Lengths("fixed", grid.isl), Lengths("fixed", grid.osl)), token_seed=_TOKEN_SEED)
    found = []
    for number, (batch, tokens) in enumerate(wanted, 1):
        shown = f"{number} of {len(wanted)}: max_batch_size {batch}, max_num_tokens {tokens}"
        progress(shown)
        options = EngineOptions(max_batch_size=batch, max_num_tokens=tokens, num_workers=grid.num_workers,
                                max_queue_size=2 * under_way, prefix_reuse=False)
        report = asyncio.run(_measured(str(engine.path), options, plan, partial(_told, progress, shown)))
        if report["requests"]["finished"] != plan.load.num_requests:
            raise WorkFailed(f"{shown}: of {plan.load.num_requests} requests {report['requests']['finished']} were "
                             f"finished: {report['requests']['errors']}")
        first, between = (report["times"][name] for name in ("time to first token", "inter-token latency"))
        found.append(Setting(batch, tokens, report["throughput"]["output_tokens_per_s"], 1e3 * first["p50"],
                             1e3 * first["p99"], 1e3 * between["p50"], 1e3 * between["p99"]))
    return found


def _told(progress: Callable[[str], None], where: str, text: str) -> None:
    progress(f"{where}: {text}")


async def _measured(path: str, options: EngineOptions, plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    async with in_process(path, options) as driver:
        return (await bench(driver, plan, ingot_version(), progress)).report


def _tried(option: str, asked: list[int] | None, limit: int) -> list[int]:
    if asked is None:
        return sorted({max(1, limit >> step) for step in range(_STEPS)})
    for value in asked:
        if not 1 <= value <= limit:
            raise RequestError(f"{option} {value}: expected 1 to {limit}, for which the engine was built")
    return sorted(set(asked))

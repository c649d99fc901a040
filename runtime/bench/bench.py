"""One benchmark: warm-up, load, and a report of both sides."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import RequestError, WorkFailed
from ..host import available_cores, cpu_name
from .dataset import read_dataset
from .drivers.driver import Driver, Facts
from .load import Generator, Load
from .recorder import Recorder, RequestRecord
from .report import make_report
from .samples import Samples
from .workload import Session, Workload

_KV_PERIOD_S = 0.2
_KV_USAGE = "ingot_kv_cache_usage_ratio"


@dataclass(frozen=True)
class Plan:
    """What is sent, and how. Either workload or dataset (a path) is given.

    warm_up     requests before the measured ones
    vocab_size  of the prompts' random tokens, where the server does not tell its own
    token_seed  of these tokens; by default another one each time, for a server's cache still holds the last run's
    """

    load: Load
    workload: Workload | None = None
    dataset: str | None = None
    seed: int = 0
    warm_up: int = 4
    vocab_size: int | None = None
    token_seed: int = field(default_factory=lambda: secrets.randbits(32))

    def sessions(self, facts: Facts, is_warm_up: bool = False) -> Iterator[Session]:
        """Those of the warm-up have the same lengths and other tokens, of no use in the cache to those that follow.

        Raises RequestError if they cannot be drawn or read.
        """
        vocab_size = self.vocab_size or facts.vocab_size
        if self.dataset is not None:
            return iter(read_dataset(self.dataset, vocab_size, facts.max_seq_len))
        assert self.workload is not None
        if vocab_size is None:
            raise RequestError(f"{facts.where} does not tell the size of its vocabulary.\n  Give it: --vocab-size N")
        return self.workload.sessions(vocab_size, facts.max_seq_len or 1 << 31, self.seed,
                                      self.token_seed + (1 << 32 if is_warm_up else 0))

    def describe(self) -> dict[str, Any]:
        facts = {"dataset": self.dataset} if self.workload is None else self.workload.describe()
        tokens = {} if self.workload is None else {"token_seed": self.token_seed}
        return {"workload": facts, "load": str(self.load), "seed": self.seed, **tokens,
                "warm_up": f"{self.warm_up} requests"}


@dataclass(frozen=True)
class Result:
    report: dict[str, Any]
    records: list[RequestRecord]


async def bench(driver: Driver, plan: Plan, version: str,
                progress: Callable[[str], None] = lambda text: None) -> Result:
    """Runs the plan. Raises RequestError, or WorkFailed: the server is unreachable or the warm-up failed.

    version: of Ingot, to be told. The driver stays open.
    """
    facts = await driver.facts()
    sessions = plan.sessions(facts)
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    busy = os.getloadavg()[0]
    await _warm_up(driver, plan, facts, progress)
    recorder = Recorder(facts.block_size)
    generator = Generator(driver, plan.load, recorder, plan.seed, progress=lambda number: progress(
        f"{number} of {plan.load.num_requests} requests" if plan.load.num_requests else f"{number} requests"))
    before = await _samples(driver)
    usage: list[float] = []
    poll = asyncio.create_task(_poll(driver, usage)) if before is not None else None
    try:
        await generator.run(sessions)
    finally:
        if poll is not None:
            poll.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await poll
    after = await _samples(driver)
    server = None if before is None or after is None else after.since(before)
    report = {
        "run": {"model": facts.model, "engine": facts.engine_hash, "where": facts.where,
                "settings": {"max_seq_len": facts.max_seq_len, **facts.settings}, **plan.describe(),
                "machine": f"{cpu_name()}, {available_cores()} cores; load average {busy:.2f} before",
                "ingot": version, "started": started,
                "metrics": "read before and after" if server else None},
        **make_report(recorder.records, generator.begin_s, server, usage),
    }
    return Result(report, recorder.records)


async def _warm_up(driver: Driver, plan: Plan, facts: Facts, progress: Callable[[str], None]) -> None:
    """A few requests, so that first-time costs are paid; and a wrong set-up shows before the long run."""
    if not plan.warm_up:
        return
    recorder = Recorder()
    sessions = islice(plan.sessions(facts, is_warm_up=True), plan.warm_up)
    load = Load(concurrency=min(plan.warm_up, 4), num_requests=plan.warm_up)
    await Generator(driver, load, recorder, plan.seed, "warm-up",
                    lambda number: progress(f"warm-up: {number} of {plan.warm_up} requests")).run(sessions)
    for record in recorder.records:
        if record.status != "finished":
            raise WorkFailed(f"a request of the warm-up was {record.status}: {record.error}")


async def _samples(driver: Driver) -> Samples | None:
    """The server's metrics; None if they can't be reached or are not those of Ingot."""
    text = await driver.metrics()
    samples = None if text is None else Samples.parse(text)
    return samples if samples is not None and samples.total("ingot_engine_info") is not None else None


async def _poll(driver: Driver, usage: list[float]) -> None:
    while True:
        await asyncio.sleep(_KV_PERIOD_S)  # first: nothing has been sent yet
        samples = await _samples(driver)
        value = samples.total(_KV_USAGE) if samples else None
        if value is not None and not math.isnan(value):
            usage.append(value)

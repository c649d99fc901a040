"""Sends sessions to a driver: at a rate (open loop) or with a number of them at a time (closed loop)."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

import numpy as np

from .drivers.driver import CallFailed, Driver, Refused
from .recorder import Recorder, RequestRecord
from .workload import ARRIVAL, Session, Turn


@dataclass(frozen=True)
class Load:
    """How sessions are sent. Exactly one of request_rate and concurrency is given.

    request_rate  sessions that begin a second, as a Poisson process; infinite: all at once
    concurrency   sessions under way at a time; the next begins when one ends
    num_requests  of all sessions together
    duration_s    no request begins later; those under way are finished
    """

    request_rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            shape = f"closed loop, {self.concurrency} at a time"
        elif self.request_rate == math.inf:
            shape = "all at once"
        else:
            shape = f"open loop, Poisson arrivals, {self.request_rate:g} a second"
        bounds = [] if self.num_requests is None else [f"{self.num_requests} requests"]
        bounds += [] if self.duration_s is None else [f"{self.duration_s:g} s"]
        return f"{shape}; {' or '.join(bounds) or 'the whole data set'}"


class Generator:
    """One run of a load. progress(started) is called as requests begin."""

    def __init__(self, driver: Driver, load: Load, recorder: Recorder, seed: int, name: str = "bench",
                 progress: Callable[[int], None] = lambda started: None) -> None:
        self._driver = driver
        self._load = load
        self._recorder = recorder
        self._rng = np.random.default_rng([seed, ARRIVAL])
        self._name = name
        self._progress = progress
        self._started = 0
        self.begin_s = recorder.now()

    async def run(self, sessions: Iterator[Session]) -> None:
        """Until the load's bound is reached, the sessions are used up, or the task is cancelled."""
        self.begin_s = self._recorder.now()
        if self._load.concurrency is not None:
            workers = [self._work(sessions) for _ in range(self._load.concurrency)]
        elif self._load.request_rate == math.inf:
            # Endless sessions: as many as there are requests are enough.
            workers = [self._session(session, self.begin_s) for session in islice(sessions, self._load.num_requests)]
        else:
            workers = [self._arrivals(sessions)]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker)

    async def _work(self, sessions: Iterator[Session]) -> None:
        while self._may_begin() and (session := next(sessions, None)) is not None:
            await self._session(session, self._recorder.now())

    async def _arrivals(self, sessions: Iterator[Session]) -> None:
        """Arrivals keep their times whatever became of the requests before."""
        assert self._load.request_rate is not None
        moment = self.begin_s
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                moment += self._rng.exponential(1 / self._load.request_rate)
                if self._load.duration_s is not None and moment > self.begin_s + self._load.duration_s:
                    return
                await self._sleep_until(moment)
                if not self._may_begin():
                    return
                group.create_task(self._session(session, moment))

    async def _session(self, session: Session, scheduled_s: float) -> None:
        """Its turns one after the other. Ends early when one fails: what follows would have another history."""
        history: list[int] = []
        for number, turn in enumerate(session.turns):
            if turn.think_s:
                scheduled_s += turn.think_s
                await self._sleep_until(scheduled_s)
            if not self._may_begin():
                return
            prompt = history + turn.prompt if isinstance(turn.prompt, list) else turn.prompt
            record, answer = await self._call(session, number, turn, prompt, scheduled_s)
            if record.status != "finished":
                return
            if isinstance(prompt, list):
                history = prompt + answer
            scheduled_s = record.end_s

    async def _call(self, session: Session, number: int, turn: Turn, prompt: list[int] | str,
                    scheduled_s: float) -> tuple[RequestRecord, list[int]]:
        self._started += 1
        self._progress(self._started)
        recorder, answer = self._recorder, list[int]()
        record = recorder.begin(session.name, number, turn.output_tokens, scheduled_s)
        request_id = f"{self._name}-{self._started}"
        try:
            async with aclosing(self._driver.generate(request_id, prompt, turn.output_tokens)) as deliveries:
                async for delivery in deliveries:
                    recorder.output(record, delivery)
                    if delivery.token_ids is not None:
                        answer += delivery.token_ids
        except Refused as error:
            recorder.end(record, "refused", str(error))
        except CallFailed as error:
            recorder.end(record, "failed", str(error))
        else:
            if record.times_s:
                recorder.end(record, "finished")
            else:
                recorder.end(record, "failed", "the answer has no tokens")
        if len(answer) < record.num_output_tokens:
            # The server tells no token ids: the next turn goes on with others, as many.
            answer += [0] * (record.num_output_tokens - len(answer))
        return record, answer

    def _may_begin(self) -> bool:
        load = self._load
        if load.num_requests is not None and self._started >= load.num_requests:
            return False
        return load.duration_s is None or self._recorder.now() <= self.begin_s + load.duration_s

    async def _sleep_until(self, moment: float) -> None:
        if (pause := moment - self._recorder.now()) > 0:
            await asyncio.sleep(pause)

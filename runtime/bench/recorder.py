"""What happened to each request, by the client's clock."""

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from ..executor.recorder import CacheUse, cache_use
from .drivers.driver import Delivery


@dataclass(eq=False)
class RequestRecord:
    """One request. Times in seconds of the recorder's clock.

    scheduled_s     when it was to be sent; latencies count from here, so that a client or server that falls behind
                    shows (no coordinated omission)
    sent_s          when it was sent
    times_s         when output came; counts: how many tokens each time
    prompt_tokens, cached_tokens: as the server tells them, None if it does not
    block_size      tokens of a KV block there
    status          "running", then "finished", "refused" (the server had no room for it) or "failed"
    """

    session: str
    turn: int
    asked_tokens: int
    block_size: int
    scheduled_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    status: str = "running"
    error: str | None = None
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.scheduled_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def cache(self) -> CacheUse | None:
        """As the server's metrics tell them apart; None if it does not tell cached tokens."""
        if self.cached_tokens is None or self.prompt_tokens is None:
            return None
        return cache_use(self.prompt_tokens, self.cached_tokens, self.block_size)

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session, "turn": self.turn, "status": self.status, "error": self.error,
            "scheduled_s": round(self.scheduled_s, 6), "sent_s": round(self.sent_s, 6), "end_s": round(self.end_s, 6),
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "asked_tokens": self.asked_tokens, "output_tokens": self.num_output_tokens,
            "output_times_s": [round(moment, 6) for moment in self.times_s],
            "output_counts": list(self.counts),
        }


class Recorder:
    """Collects records; one thread. `now()` is 0 when it is made.

    block_size  tokens of a KV block of the server
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.records: list[RequestRecord] = []
        self.clock_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.clock_s

    def begin(self, session: str, turn: int, asked_tokens: int, scheduled_s: float) -> RequestRecord:
        record = RequestRecord(session, turn, asked_tokens, self.block_size, scheduled_s, sent_s=self.now())
        self.records.append(record)
        return record

    def output(self, record: RequestRecord, delivery: Delivery) -> None:
        if delivery.num_tokens:
            record.times_s.append(self.now())
            record.counts.append(delivery.num_tokens)
        if delivery.prompt_tokens is not None:
            record.prompt_tokens = delivery.prompt_tokens
        if delivery.cached_tokens is not None:
            record.cached_tokens = delivery.cached_tokens
        if delivery.total_tokens is not None and record.counts:
            # Tokens that never showed as output: half characters, or several that came as one.
            record.counts[-1] += max(delivery.total_tokens - record.num_output_tokens, 0)

    def end(self, record: RequestRecord, status: str, error: str | None = None) -> None:
        record.end_s = self.now()
        record.status = status
        record.error = error

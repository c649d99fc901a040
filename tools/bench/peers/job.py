"""What a driver is asked to measure, and what it answers. Drivers run in other environments: this module has no imports
but the standard library's, and is imported there by path."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass
class Job:
    """model: what the peer loads. prompts: token ids, the longest first used for `context`."""

    model: str
    threads: int
    generation_prompt: list[int]
    context_prompts: list[list[int]]
    request_prompts: list[list[int]]
    new_tokens: int = 128


@dataclass
class Result:
    """Rates are tokens a second; None: this peer cannot do it. answer: the ids of the generation task."""

    load_s: float = 0.0
    generation: float | None = None
    context: float | None = None
    requests: float | None = None
    peak_rss_bytes: int = 0
    answer: list[int] = field(default_factory=list)
    text: str = ""


def read_job() -> Job:
    return Job(**json.loads(sys.stdin.read()))


def give(result: Result) -> None:
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT " + json.dumps(asdict(result)), flush=True)


def rate_after_first(times: list[float]) -> float:
    """Tokens a second, from the moments in which they came."""
    return (len(times) - 1) / (times[-1] - times[0])


def context_rate(prompts: list[list[int]], first_token: Callable[[list[int]], object]) -> float:
    """The median over prompts of their tokens a second; the first one warms up."""
    rates = []
    for prompt in prompts:
        start = time.perf_counter()
        first_token(prompt)
        rates.append(len(prompt) / (time.perf_counter() - start))
    return statistics.median(rates[1:])

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


Run = Callable[[list[list[int]], int], tuple[list[float], list[int]]]
"""(prompts, new tokens of each) -> of a single prompt, the moments in which tokens came, and the tokens."""


def measure(job: Job, result: Result, run: Run) -> None:
    """Fills in the result and gives it."""
    run([job.request_prompts[0]], 8)
    times, result.answer = run([job.generation_prompt], job.new_tokens)
    result.generation = (len(times) - 1) / (times[-1] - times[0])
    rates = []
    for prompt in job.context_prompts:
        start = time.perf_counter()
        run([prompt], 1)
        rates.append(len(prompt) / (time.perf_counter() - start))
    result.context = statistics.median(rates[1:])  # the first one warms up
    start = time.perf_counter()
    run(job.request_prompts, job.new_tokens)
    result.requests = len(job.request_prompts) * job.new_tokens / (time.perf_counter() - start)
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT " + json.dumps(asdict(result)), flush=True)

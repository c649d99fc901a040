"""Many builds in one command, side by side as cores and memory allow; one that fails stops no other."""
from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from ingot.runtime.errors import IngotError
from ingot.runtime.host import available_cores, available_memory_bytes

from ..build import BuildRequest, BuildResult, build, import_into
from ..cache.build_cache import BuildCache

BUILD_BYTES = 2_000_000_000
"""Memory of a build: torch, the graph, a weight at a time."""
CALIBRATION_BYTES = 2_000_000_000
"""Besides, of one that calibrates: a layer in float32, what is known of its inputs, and the hidden states of the text.
Layers of more than this are rare, and told by the build's own failure."""


@dataclass(frozen=True)
class Outcome:
    """result: None where the build failed; error: then what it said, and its exit status."""

    request: BuildRequest
    seconds: float
    result: BuildResult | None = None
    error: str = ""
    status: int = 0


def build_all(requests: Sequence[BuildRequest], cache: BuildCache | None, jobs: int | None = None,
              told: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """The outcomes in the order of the requests; `told` gets each when it is there. jobs: builds at a time.

    With a cache, what several builds share is made first: each model's graph.
    """
    jobs = jobs or default_jobs(requests)
    if jobs == 1 or len(requests) == 1:
        return [_telling(told, _one(request, cache)) for request in requests]
    models = {(request.model, request.max_seq_len): request for request in requests}
    outcomes: dict[int, Outcome] = {}
    # Fresh processes: torch does not survive a fork while its threads run.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        if cache is not None:
            list(pool.map(_import, models.values(), [cache] * len(models)))
        running: dict[Future[Outcome], int] = {pool.submit(_one, request, cache): number
                                               for number, request in enumerate(requests)}
        try:
            for future in as_completed(running):
                outcomes[running[future]] = _telling(told, future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[number] for number in range(len(requests))]


def default_jobs(requests: Sequence[BuildRequest]) -> int:
    """As many as there are cores, and as the memory holds of the hungriest."""
    most = max(_memory_bytes(request) for request in requests)
    return max(1, min(len(requests), available_cores(), available_memory_bytes() // most))


def _memory_bytes(request: BuildRequest) -> int:
    calibrates = not request.dry_run and request.calibrate and request.precision not in ("fp32", "bf16", "fp16")
    return BUILD_BYTES + (CALIBRATION_BYTES if calibrates else 0)


def _one(request: BuildRequest, cache: BuildCache | None) -> Outcome:
    if cache is not None:
        cache.uses.clear()  # counted for each build
    begin = time.perf_counter()
    try:
        result = build(request, cache=cache)
    except IngotError as error:
        return Outcome(request, time.perf_counter() - begin, None, f"{type(error).__name__}: {error}",
                       error.exit_status)
    return Outcome(request, time.perf_counter() - begin, result)


def _import(request: BuildRequest, cache: BuildCache) -> None:
    with contextlib.suppress(IngotError):  # the build itself tells
        import_into(request, cache)


def _telling(told: Callable[[Outcome], None], outcome: Outcome) -> Outcome:
    told(outcome)
    return outcome

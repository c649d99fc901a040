"""Which candidate serves a problem best, by a model of the device: no measurement takes part.

A launch takes the longest of: its bytes at the device's bandwidth, less where too little is under way to hide the
memory's latency, or where too few multiprocessors ask; what its blocks read through the second-level cache; its
operations at the peak rate, and the instructions beside them at that of FP32, less where multiprocessors idle (too few
blocks, or a last wave that is not full). Operations and instructions add up: in a step of a block the one waits for the
other, and blocks beside it may hide that or not. Each launch costs its start; where GPUs exchange values, also the way
of the signals between them, and the bytes at the rate of their links.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod

from ingot.plugins.gpu.kernel import Candidate, Cost, GpuKernel, GpuLaunch

from ..targets import Architecture, Gpu
from .triton_compile import CompiledKernel, blocks_held

LAUNCH_S = 2.0e-6
"""Of a kernel in a recorded graph; an order of magnitude, the same for all candidates."""

LATENCY_S = 0.8e-6
"""From device memory under load: what is under way is bandwidth times this (Little's law)."""

LINK_LATENCY_S = 2.0e-6
"""From another GPU's memory, and until a signal that one sets is seen by the other; an order of magnitude."""

_DIRECT_BYTES_A_THREAD = 32
"""Under way in registers, where a kernel copies nothing to shared memory."""


_SHARES = 2.0
"""A multiprocessor can draw so many times its share of the memory's bandwidth."""

_CACHE_BYTES_A_CLOCK = 32
"""That reach a multiprocessor from the second-level cache: half of the width of its port."""

_REGISTERS = 128
"""Of a thread, as long as a kernel is not compiled."""


@dataclass(frozen=True)
class Choice:
    """seconds: what the model gives for each candidate that compiles well, in the order of preference."""

    candidate: Candidate
    seconds: tuple[tuple[Candidate, float], ...]
    refused: tuple[tuple[Candidate, str], ...]


def shortlist(candidates: tuple[Candidate, ...], gpu: Gpu, precision: str, most: int = 3) -> tuple[Candidate, ...]:
    """The candidates worth compiling: the best by what is known before, in the order of preference."""
    return tuple(sorted(candidates, key=lambda candidate: expected(candidate, gpu, precision))[:most])


def expected(candidate: Candidate, gpu: Gpu, precision: str) -> float:
    """Seconds, by what is known before a candidate is compiled."""
    return _seconds(candidate, gpu, precision, lambda launch: _guessed(candidate, launch, gpu.arch))


def choose(candidates: tuple[Candidate, ...], compiled: Mapping[GpuKernel, CompiledKernel], gpu: Gpu,
           precision: str) -> Choice:
    """The candidate with the least estimate; of equals the first. Those that spill registers are used only if all do.

    compiled holds the code of every candidate's kernels.
    """
    assert candidates
    spilling = {candidate: spilled for candidate in candidates if (spilled := sum(
        compiled[launch.kernel].spill_stores for launch in candidate.launches))}
    pool = [candidate for candidate in candidates if candidate not in spilling] or list(candidates)
    estimates = sorted(((candidate, estimate(candidate, compiled, gpu, precision)) for candidate in pool),
                       key=lambda pair: pair[1])
    refused = tuple((candidate, f"spills registers ({count} stores)") for candidate, count in spilling.items()
                    if candidate not in pool)
    return Choice(estimates[0][0], tuple(estimates), refused)


def estimate(candidate: Candidate, compiled: Mapping[GpuKernel, CompiledKernel], gpu: Gpu, precision: str) -> float:
    """Seconds."""
    def footprint(launch: GpuLaunch) -> _Footprint:
        code = compiled[launch.kernel]
        return _Footprint(code.shared_bytes, code.num_warps, code.occupancy(gpu.arch))
    return _seconds(candidate, gpu, precision, footprint)


@dataclass(frozen=True)
class _Footprint:
    """Of a block; occupancy: how many of them a multiprocessor holds."""

    shared_bytes: int
    num_warps: int
    occupancy: int


def _guessed(candidate: Candidate, launch: GpuLaunch, arch: Architecture) -> _Footprint:
    warps = launch.kernel.num_warps
    return _Footprint(candidate.shared_bytes, warps, blocks_held(arch, _REGISTERS, candidate.shared_bytes, warps))


def _seconds(candidate: Candidate, gpu: Gpu, precision: str, footprint: Callable[[GpuLaunch], _Footprint]) -> float:
    """The cost of several launches is divided equally."""
    count, whole = len(candidate.launches), candidate.cost
    each = Cost(whole.num_bytes / count, whole.flops / count, whole.cache_bytes / count, whole.instructions / count,
                whole.link_bytes / count, whole.link_waits / count)
    return sum(_launch_s(launch, footprint(launch), gpu, each, precision) for launch in candidate.launches)


def _launch_s(launch: GpuLaunch, block: _Footprint, gpu: Gpu, cost: Cost, precision: str) -> float:
    blocks = prod(launch.grid)
    at_a_time = gpu.num_sms * max(1, block.occupancy)
    in_flight = min(blocks, at_a_time) * max(block.shared_bytes, 32 * block.num_warps * _DIRECT_BYTES_A_THREAD)
    asking = min(blocks, gpu.num_sms) / gpu.num_sms
    bandwidth = gpu.bytes_per_s * min(1.0, in_flight / (gpu.bytes_per_s * LATENCY_S), _SHARES * asking)
    waves = ceil(blocks / at_a_time)
    busy = asking if waves == 1 else blocks / (waves * at_a_time)
    cache = gpu.num_sms * gpu.clock_hz * _CACHE_BYTES_A_CLOCK * busy
    arithmetic = cost.flops / gpu.flops_per_s(precision) + cost.instructions / gpu.instructions_per_s
    return LAUNCH_S + cost.link_waits * LINK_LATENCY_S + max(
        cost.num_bytes / bandwidth, cost.cache_bytes / cache, arithmetic / busy,
        cost.link_bytes / min(gpu.link_bytes_per_s, cache))

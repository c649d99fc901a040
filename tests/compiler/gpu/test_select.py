"""The cost model prefers what any measurement would: enough blocks, full waves, no spills."""
from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.compiler.gpu.select import LAUNCH_S, choose, estimate, expected, shortlist
from ingot.compiler.gpu.triton_compile import CompiledKernel
from ingot.compiler.targets import find_target
from ingot.plugins.gpu.kernel import Candidate, Cost, GpuKernel, GpuLaunch
from ingot.plugins.linear.tactics import Problem, candidates

H200 = find_target("h200").gpu
assert H200 is not None
CODE = CompiledKernel("k", "sm_90a", 64, 0, 0, 0, 48 << 10, 4, 1, 0, 1, (), {}, True, b"")


def candidate(name: str, blocks: int, num_bytes: float = 1e6, flops: float = 1e6, launches: int = 1) -> Candidate:
    kernel = GpuKernel(name, "m", "f", (), ())
    return Candidate(name, (GpuLaunch(kernel, (blocks, 1, 1)),) * launches, Cost(num_bytes, flops))


def code(*candidates: Candidate, **changes: int) -> dict[GpuKernel, CompiledKernel]:
    return {c.launches[0].kernel: replace(CODE, **changes) for c in candidates}  # type: ignore[arg-type]


def test_bandwidth_and_peak_bound_the_estimate() -> None:
    assert H200 is not None
    reading, computing = candidate("r", 1320, num_bytes=48e9), candidate("c", 1320 * 4, flops=1e15)
    held = code(reading, computing)
    assert abs(estimate(reading, held, H200, "fp8") - LAUNCH_S - 48e9 / 4.8e12) < 1e-9
    assert 1 <= (estimate(computing, held, H200, "bf16") - LAUNCH_S) / (1e15 / 989.5e12) < 1.2
    assert estimate(computing, held, H200, "fp8") < estimate(computing, held, H200, "bf16")


def test_more_blocks_hide_the_latency() -> None:
    assert H200 is not None
    few, many = candidate("few", 16, num_bytes=1e8), candidate("many", 264, num_bytes=1.02e8)
    chosen = choose((few, many), code(few, many), H200, "fp8")
    assert chosen.candidate is many and [c.name for c, _ in chosen.seconds] == ["many", "few"]


def test_a_wave_that_is_hardly_begun_costs_a_whole_one() -> None:
    assert H200 is not None
    at_a_time = 132 * CODE.occupancy(H200.arch)
    full, over = candidate("full", at_a_time, flops=1e12), candidate("over", at_a_time + 1, flops=1e12)
    held = code(full, over)
    assert estimate(over, held, H200, "fp8") > 1.9 * (estimate(full, held, H200, "fp8") - LAUNCH_S)


def test_launches_are_paid_for() -> None:
    assert H200 is not None
    one, two = candidate("one", 132), candidate("two", 132, launches=2)
    assert choose((two, one), code(one, two), H200, "bf16").candidate is one


def test_the_shortlist_knows_what_can_be_known_before() -> None:
    """A layer of one token: half of the multiprocessors can draw all of the bandwidth, fewer cannot. One of many
    tokens: large tiles, since small ones read too much."""
    assert H200 is not None
    p = Problem(1, 4096, 4096, "fp8", "fp8", token_scales=True)
    legal = candidates(p, H200.device).legal
    best = shortlist(legal, H200, "fp8", 3)
    assert len(best) == 3 and set(best) <= set(legal)
    assert all(c.launches[0].grid[0] * c.launches[0].grid[1] >= 64 for c in best)
    many = shortlist(candidates(replace(p, m=4096), H200.device).legal, H200, "fp8", 1)[0]
    assert dict(many.launches[0].kernel.constants)["BM"] in (128, 256)


def test_small_groups_take_time_in_context() -> None:
    """Each group's sum is scaled at the rate of FP32: in groups of 32 that takes as long as the fp8 products. Where a
    step waits for weights nobody notices."""
    assert H200 is not None

    def best(tokens: int, format: str) -> float:
        p = Problem(tokens, 8192, 8192, format, "fp8", token_scales=True)
        return min(expected(c, H200, p.precision) for c in candidates(p, H200.device).legal) - LAUNCH_S

    products = 2 * 8192**3 / 1979e12
    scalings = {group: 8192**3 / group / (66.9e12 / 2) for group in (32, 64, 128)}
    assert scalings[32] == pytest.approx(products, rel=0.1)
    many = {group: best(8192, format) for group, format in ((32, "int4_g32"), (64, "int4_g64"), (128, "int4"))}
    for group in (32, 64):
        assert many[group] - many[128] == pytest.approx(scalings[group] - scalings[128], rel=0.1)
    assert best(1, "int4_g32") < 1.05 * best(1, "int4") * (1 + 2 / 16)  # a scale for 32 weights: an eighth more bytes


def test_spills_are_the_last_resort() -> None:
    assert H200 is not None
    fast, slow = candidate("fast", 264), candidate("slow", 2)
    held = code(fast, spill_stores=3) | code(slow)
    chosen = choose((fast, slow), held, H200, "bf16")
    assert chosen.candidate is slow and chosen.refused == ((fast, "spills registers (3 stores)"),)
    assert choose((fast,), code(fast, spill_stores=3), H200, "bf16").candidate is fast

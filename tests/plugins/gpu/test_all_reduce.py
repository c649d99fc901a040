"""Exchanges between ranks: the kernels in Triton's interpreter, a thread for each rank, and as compiled code."""
from __future__ import annotations

import gc
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.gpu.disassemble import disassemble
from ingot.compiler.gpu.triton_compile import PtxCompiler, PtxKernel
from ingot.compiler.targets import architectures
from ingot.plugins.all_reduce import reference
from ingot.plugins.all_reduce.tactics import (
    MAX_BLOCKS,
    SIGNAL_BYTES,
    Problem,
    SumAndNorm,
    candidates,
    sums_and_norms,
)
from ingot.plugins.gpu.kernel import Candidate
from ingot.plugins.norm.tactics import Problem as Norm
from tools.ptx.instruction import PtxError
from tools.ptx.machine import Options

from . import support
from .ranks import Ranks, aligned, in_threads, on_machine

H200 = support.device("sm_90a")
OPS = ("all_reduce", "all_gather")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def ways(problem: Problem) -> list[Candidate]:
    """The first and the last of each kernel's."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates(problem, H200).legal:
        found.setdefault(candidate.name.partition(" ")[0], []).append(candidate)
    return [one for kind in found.values() for one in dict.fromkeys((kind[0], kind[-1]))]


def wanted(op: str, parts: list[np.ndarray], rows: int, kind: str) -> np.ndarray:
    given = [support.load(part, kind)[:rows].astype(np.float32) for part in parts]
    return support.store(getattr(reference, op)(given), kind)


@pytest.mark.parametrize(("op", "kind", "ranks", "in_place"), [
    ("all_reduce", "bf16", 2, True), ("all_reduce", "bf16", 4, False), ("all_reduce", "fp16", 8, True),
    ("all_reduce", "fp32", 2, False), ("all_gather", "fp32", 2, False), ("all_gather", "bf16", 4, False)])
def test_all_ranks_get_the_same(op: str, kind: str, ranks: int, in_place: bool) -> None:
    """To the bit what float32 gives in the order of the ranks; rows that the step does not have are left alone."""
    rows, most, width = 3, 4, 1200
    for way in ways(Problem(op, most, width, kind, "T", ranks)):
        team = Ranks(ranks, most, width, kind, op, in_place)
        parts = [team.source(rank).copy() for rank in range(ranks)]
        last = [team.destination(rank)[rows:].copy() for rank in range(ranks)]
        for _ in range(2):  # the second one counts on from the first
            team.fill(parts)
            in_threads(team, way, rows)
            for rank in range(ranks):
                np.testing.assert_array_equal(team.destination(rank)[:rows], wanted(op, parts, rows, kind))
                np.testing.assert_array_equal(team.destination(rank)[rows:], last[rank])


@pytest.mark.parametrize(("ranks", "form"), [(2, "bf16"), (4, "fp8"), (8, "bf16")])
def test_a_sum_and_the_norm_behind_it(ranks: int, form: str) -> None:
    """One launch gives what two give, to the bit."""
    rows, most, width = 3, 4, 520
    problem = sum_and_norm(most, width, ranks, form)
    legal = sums_and_norms(problem, H200).legal
    rng = np.random.default_rng(1)
    residual, weight = support.store(rng.standard_normal((most, width)), "bf16"), rng.random(width, np.float32)
    results = []
    for way in (legal[0], legal[-1], legal[-1]):
        team = Ranks(ranks, most, width, "bf16", "all_reduce", in_place=True)
        others = [{name: aligned(array) for name, array in {
            "residual": residual, "weight": weight, "total": support.unwritten((most, width), "bf16"),
            "y": np.full((most, width), 0xFF, np.uint8 if form == "fp8" else np.uint16),
            "y_scale": np.zeros(most, np.float32)}.items()} for _ in range(ranks)]
        in_threads(team, way, rows, others=others)
        results += [[others[rank][name][:rows] for name in ("total", "y", "y_scale")] for rank in range(ranks)]
    assert [len(way.launches) for way in (legal[0], legal[-1])] == [2, 1]
    parts = [support.load(team.source(rank), "bf16")[:rows].astype(np.float32) for rank in range(ranks)]
    summed = support.load(support.store(reference.all_reduce(parts), "bf16"), "bf16")
    total = support.store(summed + support.load(residual[:rows], "bf16"), "bf16")
    np.testing.assert_array_equal(results[0][0], total)
    for result in results:
        for got, right in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, right)


def sum_and_norm(m: int, width: int, ranks: int, form: str) -> SumAndNorm:
    return SumAndNorm(Problem("all_reduce", m, width, "bf16", "T", ranks),
                      Norm(m, width, 1e-6, "bf16", form, residual=True))


@pytest.mark.parametrize("op", OPS)
def test_numbers_of_meetings_wrap_around(op: str) -> None:
    way = candidates(Problem(op, 2, 64, "fp32", "T", 2), H200).legal[0]
    team = Ranks(2, 2, 64, "fp32", op)
    for signals in team.signals:
        signals[:, :2] = signals[:, 15:] = 2**31 - 2
    parts = [team.source(rank).copy() for rank in range(2)]
    for _ in range(3):
        in_threads(team, way, 2)
        np.testing.assert_array_equal(team.destination(1), wanted(op, parts, 2, "fp32"))
    assert team.signals[0][0, 15] < -(2**31) + 6


def test_who_waits_is_let_go_when_the_host_gives_up() -> None:
    """A rank that never comes."""
    way = candidates(Problem("all_reduce", 2, 64, "fp32", "T", 2), H200).legal[0]
    team = Ranks(2, 2, 64, "fp32", "all_reduce")
    with pytest.raises(TimeoutError, match="1 GPUs still wait"):
        in_threads(team, way, 2, ranks=1, limit_s=0.2)


def test_a_grid_is_no_larger_than_what_runs_at_a_time() -> None:
    for op in OPS:
        for m in (1, 64, 8192):
            for way in candidates(Problem(op, m, 8192, "bf16", "T", 8), H200).legal:
                (launch,) = way.launches
                blocks = launch.grid[0]
                assert launch.grid[1:] == (1, 1) and blocks <= min(H200.num_sms, MAX_BLOCKS)
                assert launch.signal_bytes == SIGNAL_BYTES * blocks
    found = candidates(Problem("all_reduce", 8192, 8192, "bf16", "T", 8), H200)
    assert {way.name.partition(" ")[0] for way in found.legal} == {"all_reduce.two_shot"}
    assert len(found.refused) == 4 and "132 run at a time" in found.refused[0].reason
    assert not candidates(Problem("all_reduce", 1, 64, "bf16", "T", 3), H200).legal


def test_little_is_summed_at_once_and_much_in_two_halves() -> None:
    from ingot.compiler.gpu.select import shortlist
    from ingot.compiler.targets import find_target

    gpu = find_target("h200").gpu
    assert gpu is not None

    def best(tokens: int) -> str:
        found = candidates(Problem("all_reduce", tokens, 8192, "bf16", "T", 8), gpu.device).legal
        return shortlist(found, gpu, "bf16")[0].name.partition(" ")[0]

    assert [best(tokens) for tokens in (1, 2, 512, 8192)] == ["all_reduce.one_shot"] * 2 + ["all_reduce.two_shot"] * 2


@pytest.mark.parametrize("arch", support.QUICK)
def test_signals_have_the_systems_order(arch: str) -> None:
    """Release and acquire at the scope of the system, and nothing spills."""
    ways_of = [way for op in OPS for way in ways(Problem(op, 64, 4096, "bf16", "T", 8))]
    ways_of += [sums_and_norms(sum_and_norm(64, 8192, 8, form), support.device(arch)).legal[-1]
                for form in ("bf16", "int8")]
    code = support.compiled([way.launches[0].kernel for way in ways_of], arch)
    assert not any(one.spill_stores for one in code.values())
    for one in code.values():
        sass = disassemble(one.cubin)
        assert "MEMBAR.ALL.SYS" in sass or "MEMBAR.SC.SYS" in sass, sass
        assert "ST.E.STRONG.SYS" in sass.replace("STG", "ST") and "LD.E.STRONG.SYS" in sass.replace("LDG", "LD")
    with PtxCompiler(architectures()[arch]) as compiler:
        for way in ways_of:
            ptx = compiler(way.launches[0].kernel).ptx
            meetings = 3 if "two_shot" in way.name else 2
            both = "fence.acq_rel.sys" if arch == "sm_80" else "fence.{}.sys"
            sent = [ptx.count(text) for text in ("st.relaxed.sys", "ld.relaxed.sys", both.format("release"))]
            assert sent == [meetings, meetings, 2 * meetings if arch == "sm_80" else meetings], way.name
            assert ptx.count(both.format("acquire")) == sent[2]




SMALL = Problem("all_reduce", 3, 1000, "bf16", "T", 2)
KERNELS = ("all_reduce.one_shot", "all_reduce.two_shot", "all_gather", "all_reduce.one_shot_norm")


def small(name: str, arch: str) -> tuple[Candidate, PtxKernel]:
    """Of few blocks, and code for the architecture."""
    problem, device = replace(SMALL, op=name.partition(".")[0]), support.device(arch)
    way = next(way for way in candidates(problem, device).legal if way.name == f"{name} 1024") \
        if name != KERNELS[-1] else sums_and_norms(sum_and_norm(SMALL.m, SMALL.width, 2, "bf16"), device).legal[-1]
    with PtxCompiler(architectures()[arch]) as compiler:
        return way, compiler(way.launches[0].kernel)


def step(name: str, way: Candidate, compiled: PtxKernel, ptx: str, options: Options) -> None:
    """Raises PtxError for a race, AssertionError for another result than the reference's."""
    op = name.partition(".")[0]
    team = Ranks(2, SMALL.m, SMALL.width, "bf16", op, op == "all_reduce")
    right = wanted(op, [team.source(rank) for rank in range(2)], SMALL.m, "bf16")
    shape, result = (SMALL.m, SMALL.width), "destination"
    others: dict[str, np.ndarray] = {}
    if name == KERNELS[-1]:  # nothing is added to the sum
        result = "total"
        others = {"residual": np.zeros(shape, np.uint16), "weight": np.ones(SMALL.width, np.float32),
                  "total": support.unwritten(shape, "bf16"), "y": support.unwritten(shape, "bf16")}
    for found in on_machine(team, way, SMALL.m, compiled, ptx, options, others, result):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("arch", support.QUICK)
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_code_has_no_race_in_any_order(name: str, arch: str) -> None:
    way, compiled = small(name, arch)
    for seed in range(4):
        step(name, way, compiled, compiled.ptx, Options(seed, "block" if seed % 2 else "warp"))


def without(ptx: str, what: str, number: int) -> str:
    """The code without its number-th fence, or without its number-th wait for the others."""
    if what != "wait":
        at = [match.span() for match in re.finditer(rf"fence\.{what}\.sys;", ptx)][number]
    else:
        loaded = [match.end() for match in re.finditer(r"ld\.relaxed\.sys", ptx)][number]
        found = re.compile(r"@!?%p\d+ bra[^;]*;").search(ptx, loaded)
        assert found is not None
        at = found.span()
    return ptx[:at[0]] + ptx[at[1]:]


@pytest.mark.parametrize(("name", "what", "number"), [
    *((name, "wait", number) for name in KERNELS for number in range(3 if "two_shot" in name else 2)),
    ("all_reduce.two_shot", "release", 1), ("all_reduce.two_shot", "acquire", 1)])
def test_what_is_missing_shows(name: str, what: str, number: int) -> None:
    """Each wait left out, and the fences between what a kernel itself writes and reads: some order of warps gives a
    race or a wrong result."""
    way, compiled = small(name, "sm_90a")
    ptx = without(compiled.ptx, what, number)
    with pytest.raises((PtxError, AssertionError)):
        for seed in range(20):
            step(name, way, compiled, ptx, Options(seed, "block"))


def test_who_waits_for_nobody_is_told() -> None:
    """A rank that does not say that it has come: its stores are left out."""
    way, compiled = small("all_gather", "sm_90a")
    ptx = re.sub(r"@%p\d+ st\.relaxed\.sys[^;]*;", "", compiled.ptx)
    with pytest.raises(PtxError, match="no end in sight"):
        step("all_gather", way, compiled, ptx, Options(0, "block"))


def test_threads_that_read_kernels_while_garbage_is_collected() -> None:
    """Functions that kernels call are rewritten when they are called first, by whichever rank's thread does."""
    import ingot.plugins.gpu.math as functions
    from ingot.plugins.gpu.interpreter_speed import install

    install(check_overflow=True)
    from triton.runtime.interpreter import InterpretedFunction

    found = [one for one in vars(functions).values() if isinstance(one, InterpretedFunction)]
    failures: list[Exception] = []

    def rewrite() -> None:
        try:
            for one in found * 20:
                InterpretedFunction.rewritten_fn.pop(one.fn, None)
                one.rewrite()
        except Exception as error:
            failures.append(error)

    def watch(phase: str, info: object) -> None:
        sum(range(50))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    threads = [threading.Thread(target=rewrite) for _ in range(4)]
    gc.callbacks.append(watch)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(watch)
    assert len(found) > 5 and not failures

"""Exchanges between ranks: the kernels in Triton's interpreter, a thread for each rank, and as compiled code."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.gpu.disassemble import disassemble
from ingot.compiler.gpu.triton_compile import PtxCompiler, PtxKernel
from ingot.compiler.targets import architectures
from ingot.plugins.all_reduce import reference
from ingot.plugins.all_reduce.tactics import MAX_BLOCKS, SIGNAL_BYTES, Problem, candidates
from ingot.plugins.gpu.kernel import Candidate
from tools.ptx.instruction import PtxError
from tools.ptx.machine import Options

from . import support
from .ranks import Ranks, in_threads, on_machine

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
KERNELS = ("all_reduce.one_shot", "all_reduce.two_shot", "all_gather")


def small(name: str, arch: str) -> tuple[Candidate, PtxKernel]:
    """Of few blocks, and code for the architecture."""
    problem = replace(SMALL, op=name.partition(".")[0])
    way = next(way for way in candidates(problem, support.device(arch)).legal if way.name == f"{name} 1024")
    with PtxCompiler(architectures()[arch]) as compiler:
        return way, compiler(way.launches[0].kernel)


def step(name: str, way: Candidate, compiled: PtxKernel, ptx: str, options: Options) -> None:
    """Raises PtxError for a race, AssertionError for another result than the reference's."""
    op = name.partition(".")[0]
    team = Ranks(2, SMALL.m, SMALL.width, "bf16", op, op == "all_reduce")
    right = wanted(op, [team.source(rank) for rank in range(2)], SMALL.m, "bf16")
    for found in on_machine(team, way, SMALL.m, compiled, ptx, options):
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

"""Measures on this machine which tactic is the fastest for each problem.

All candidates of a problem run in turn, round by round, so that whatever else the machine does meets all of them alike;
what counts is a candidate's time over that of the model's choice in the same round, and of these ratios the median. The
model's choice runs a second time among the candidates: as far as it differs from itself, differences are noise. A
candidate must win by more than that; a tie is the model's.
"""
from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ingot.plugins.linear import cpu as linear_cpu
from ingot.runtime.host import cpu_name

from ..cache.build_cache import BuildCache
from ..cpu.isa import ISAS, host_isas
from ..cpu.toolchain import Compiler
from ..errors import CannotCompile
from .machine import Machine
from .problems import Problem, Tactic, distinct, kernels_of, key_of, name_of, tactics_of, with_tactic
from .records import Record, Records, current_sources
from .workloads import Memory, attention_launches, linear_launches

MARGIN = 0.03
"""By so much at least a candidate must be faster than the model's choice, and by twice the noise."""

_COLD_BYTES = 96 << 20
_GENERATION_CONTEXT = 2048


@dataclass(frozen=True)
class Settings:
    """workers: threads; rounds: through all candidates; max_tokens: of a step."""

    workers: int
    rounds: int = 7
    max_tokens: int = 512
    compiler: Compiler = "zig"
    cold_bytes: int = _COLD_BYTES


def tune(problems: Iterable[Problem], isa: str, settings: Settings, cache: BuildCache | None = None,
         progress: Callable[[str], None] = lambda text: None) -> Records:
    """Raises CannotCompile if this machine does not run the instruction set, CompileError, NoCompiler."""
    if isa not in {found.name for found in host_isas()}:
        raise CannotCompile(f"kernels for {isa} cannot be measured here: this machine runs "
                            f"{', '.join(found.name for found in host_isas())}. Run ingot tune where they run")
    wanted = distinct(problems)
    kernels = [kernel for p in wanted for tactic in tactics_of(p) for kernel in kernels_of(with_tactic(p, tactic))]
    progress(f"compiling {len(set(kernels))} kernels for {len(wanted)} problems")
    records, memory = [], Memory(settings.cold_bytes)
    with tempfile.TemporaryDirectory(prefix="ingot-tune-") as folder:
        machine = Machine(kernels, ISAS[isa].name, settings.workers, folder, settings.compiler, cache)
        try:
            for number, problem in enumerate(wanted, 1):
                shown = " ".join(f"{name} {value}" for name, value in key_of(problem).items())
                progress(f"{number} of {len(wanted)}: {name_of(problem)} {shown}")
                records.append(_best(machine, problem, settings, memory))
        finally:
            machine.close()
    sources = current_sources(name_of(p) for p in wanted)
    return Records(f"cpu:{isa}", cpu_name(), settings.workers, sources, tuple(records))


def _best(machine: Machine, problem: Problem, settings: Settings, memory: Memory) -> Record:
    candidates, workloads = tactics_of(problem), _workloads(problem, settings)
    again = len(candidates)
    times = [_times(machine, problem, (*candidates, candidates[0]), workload, settings.rounds, memory)
             for workload in workloads]
    ratios = [statistics.geometric_mean([_ratio(rounds, number) for rounds in times]) for number in range(again + 1)]
    number = min(range(again), key=lambda i: ratios[i])
    if ratios[number] > 1 - max(MARGIN, 2 * abs(1 - ratios[again])):
        number = 0
    chosen = {name: value for name, value in vars(candidates[number]).items() if value}
    median, model = (1e6 * statistics.geometric_mean([statistics.median(r[i] for r in rounds) for rounds in times])
                     for i in (number, 0))
    return Record(name_of(problem), key_of(problem), chosen, round(median, 2), round(model, 2))


def _ratio(rounds: Sequence[Sequence[float]], number: int) -> float:
    return statistics.median(seconds[number] / seconds[0] for seconds in rounds)


def _workloads(problem: Problem, settings: Settings) -> list[tuple[int, int]]:
    """(tokens, context) of the steps that a tactic is judged by."""
    if isinstance(problem, linear_cpu.Problem):
        counts = {1: (1,), 8: (2, 8), 0: (16, 64, 512)}[problem.size_class]
        return [(tokens, tokens) for tokens in sorted({min(tokens, settings.max_tokens) for tokens in counts})]
    context = min(512, settings.max_tokens)
    return [(context, context), (1, _GENERATION_CONTEXT), (max(1, context // 4), _GENERATION_CONTEXT)]


def _times(machine: Machine, problem: Problem, candidates: Sequence[Tactic], workload: tuple[int, int], rounds: int,
           memory: Memory) -> list[list[float]]:
    """[round][candidate], seconds of one launch. Each round begins with another candidate."""
    tokens, context = workload
    found: list[list[float]] = []
    runs = []
    for tactic in candidates:
        p = with_tactic(problem, tactic)
        runs.append(linear_launches(p, tokens, memory) if isinstance(p, linear_cpu.Problem)
                    else attention_launches(p, context, tokens, memory.cold_bytes // 4))
    for number in range(rounds + 1):
        seconds = [0.0] * len(runs)
        for place in range(len(runs)):
            index = (place + number) % len(runs)
            step, launches = runs[index]
            seconds[index] = machine.seconds(launches, step, repeats=2) / len(launches)
        if number:  # the first round touches memory for the first time
            found.append(seconds)
    return found

"""The time of every launch of a step, measured where it runs (inside the workers' own loop; by events on a GPU), and
summed up by what it is for."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from ..devices import load_program
from ..engine_file import EngineFile
from ..program import Limits, Program
from ..sampling import SamplingParams
from ..sampling_state import SequenceSampling
from ..step import StepInputs
from .ceilings import Ceilings
from .work import Phase, Work, bucket_of, work_of

_MAX_STEPS = 200
_LEAST_STEPS = 5
_WARM_UP = 2
_UNDISTURBED = 0.1
"""Which quantile of a launch's times stands for it: what else the machine does can only lengthen them."""


class ProfiledProgram(Program, Protocol):
    """A device that can tell the time of each launch."""

    def profile(self, inputs: StepInputs) -> np.ndarray:
        """A whole step; i64 [launches], the ns that each launch of its bucket took."""


@dataclass(frozen=True)
class Measured:
    """One launch of a step: the time that it takes if nothing disturbs it, and what it has to do."""

    kernel: str
    op: str
    part: str
    seconds: float
    work: Work


@dataclass(frozen=True)
class Row:
    """Launches of one kind, summed up. roofline_s: the least time that their work can take on this machine."""

    name: str
    launches: int
    seconds: float
    num_bytes: int
    operations: int
    roofline_s: float


@dataclass(frozen=True)
class Profile:
    """num_steps, step_s, least_step_s: how many were timed, the median of their times, and the least."""

    phase: Phase
    launches: list[Measured]
    num_steps: int
    step_s: float
    least_step_s: float


def usual_phases(limits: Limits, context: int) -> list[Phase]:
    """Generation of one sequence and of 16, and a prompt, as far as the engine's limits go."""
    context = min(context, limits.max_seq_len)
    batch = min(16, limits.max_batch_size, limits.max_num_tokens)
    prompt = min(context, limits.max_num_tokens)
    phases = [Phase("generation, batch 1", 1, 1, context)]
    if batch > 1:
        phases.append(Phase(f"generation, batch {batch}", batch, 1, context))
    if prompt > 1:
        phases.append(Phase(f"context of {prompt}", 1, prompt, prompt))
    return phases


def profile(engine: EngineFile, phases: Iterable[Phase], num_workers: int | None, seconds: float,
            progress: Callable[[str], None] = lambda text: None, device: str | None = None) -> list[Profile]:
    """Runs steps of each phase for about so many seconds. device: as load_program takes it.

    Raises EngineMismatch if the engine does not run here or is of before profiles, RequestError, WorkFailed.
    """
    phases = list(phases)
    room = max(phase.num_seqs * (phase.context + 16) for phase in phases)
    buckets = [bucket_of(engine, phase.num_tokens)["launches"] for phase in phases]
    features = engine.manifest["target"].get("features", ())
    facts = [[(launch["kernel"], launch["op"], part_of(launch.get("origin", "")),
               work_of(engine.plan, launch, phase, features)) for launch in launches]
             for phase, launches in zip(phases, buckets, strict=True)]
    loaded = load_program(engine, room, num_workers, device=device)
    try:
        assert hasattr(loaded, "profile"), "the emulator has no times"
        program = cast("ProfiledProgram", loaded)
        found = []
        for phase, launches in zip(phases, facts, strict=True):
            progress(phase.name)
            times = _times(program, phase, Limits.of(engine.manifest), seconds)
            undisturbed, steps = np.quantile(times, _UNDISTURBED, axis=0) * 1e-9, times.sum(axis=1) * 1e-9
            measured = [Measured(kernel, op, part, float(duration), work)
                        for (kernel, op, part, work), duration in zip(launches, undisturbed, strict=True)]
            found.append(Profile(phase, measured, len(times), float(np.median(steps)), float(steps.min())))
        return found
    finally:
        loaded.close()


def _times(program: ProfiledProgram, phase: Phase, limits: Limits, seconds: float) -> np.ndarray:
    """ns [steps, launches]"""
    inputs = program.inputs[0]
    tables = [_tables(program, phase, seq) for seq in range(phase.num_seqs)]
    before = phase.context - phase.num_new
    for seq in range(phase.num_seqs):  # keys and values that generation looks back on
        for begin in range(0, before, limits.max_num_tokens):
            inputs.clear()
            tokens = _tokens(program, seq, begin, min(before - begin, limits.max_num_tokens))
            inputs.add(tokens, begin, tables[seq], 1)
            program.launch(inputs)
            program.wait()
    inputs.clear()
    for seq in range(phase.num_seqs):
        inputs.add(_tokens(program, seq, before, phase.num_new), before, tables[seq], 1)
    inputs.sampling.fill([SequenceSampling(SamplingParams(temperature=0.0), [0]) for _ in range(phase.num_seqs)])
    times: list[np.ndarray] = []
    deadline = time.perf_counter() + seconds
    while len(times) < _WARM_UP + _LEAST_STEPS or (
            len(times) < _WARM_UP + _MAX_STEPS and time.perf_counter() < deadline):
        times.append(program.profile(inputs))
    return np.stack(times[_WARM_UP:])


def _tokens(program: ProfiledProgram, seq: int, begin: int, count: int) -> list[int]:
    """Any, but not all the same."""
    return [(31 * (seq + 1) + 17 * position) % program.vocab_size for position in range(begin, begin + count)]


def _tables(program: ProfiledProgram, phase: Phase, seq: int) -> list[list[int]]:
    """Blocks of its own for each sequence, in each table."""
    count = -(-phase.context // program.block_size)
    num_tables = len(program.kv_windows)
    first = seq * num_tables * count
    return [list(range(first + table * count, first + (table + 1) * count)) for table in range(num_tables)]


def part_of(origin: str) -> str:
    """The same for all layers: "model.layers.3.mlp.up_proj (file.py:7)" -> "model.layers.*.mlp.up_proj"."""
    path = origin.partition(" ")[0]
    return re.sub(r"\.\d+(?=\.|$)", ".*", path) or "(none)"


def summed(launches: Iterable[Measured], key: Callable[[Measured], str], ceilings: Ceilings) -> list[Row]:
    """By kind, the one that takes the most time first."""
    groups: dict[str, list[Measured]] = defaultdict(list)
    for launch in launches:
        groups[key(launch)].append(launch)
    rows = [Row(name, len(group), sum(launch.seconds for launch in group), sum(m.work.num_bytes for m in group),
                sum(m.work.operations for m in group), sum(ceilings.seconds(m.work) for m in group))
            for name, group in groups.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def roofline(engine: EngineFile, phase: Phase, ceilings: Ceilings | None) -> dict[str, Any]:
    """What a step of this phase has to read and multiply; with ceilings, the least time that it can take."""
    features = engine.manifest["target"].get("features", ())
    work = [work_of(engine.plan, launch, phase, features) for launch in bucket_of(engine, phase.num_tokens)["launches"]]
    operations: dict[str, int] = defaultdict(int)
    for each in work:
        operations[each.arithmetic] += each.operations
    facts: dict[str, Any] = {
        "phase": phase.name, "sequences": phase.num_seqs, "new_tokens": phase.num_tokens, "context": phase.context,
        "bytes": sum(each.num_bytes for each in work),
        "operations": {kind: count for kind, count in operations.items() if count}}
    if ceilings is not None:
        seconds = sum(ceilings.seconds(each) for each in work)
        read_s = sum(each.num_bytes for each in work) / ceilings.read_bytes_s
        facts |= {"least_s": seconds, "reading_s": read_s, "most_tokens_s": phase.num_tokens / seconds}
    return facts

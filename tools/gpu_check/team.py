"""Section "team": engines that are divided among GPUs, against the emulator's logits and tokens, and how long their
exchanges take. On a machine with one GPU, or whose GPUs do not reach each other, its rows say why they were skipped."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.compiler.targets import Target
from ingot.runtime.devices.cuda_driver import Driver, list_gpus, teams
from ingot.runtime.errors import IngotError

from .code import CodeSource
from .emulate import NUM_NEW, TOKENS
from .engines import build_and_emulate, relative_error

RANKS = (2, 4, 8)
_SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
_BOUND = 2e-2
"""Relative error of the logits, as in engines.py."""
_STEPS = 20


@dataclass(frozen=True)
class TeamResult:
    """device: "cuda:0,1", or "" if it was skipped. emulator_error: of the logits. exchange_us: the median over steps of
    what all launches of a step of one token take together in which ranks exchange values, waiting included, and how
    many they are. problem: or ""; skipped: why, or ""."""

    ranks: int
    device: str
    emulator_error: float
    exchange_us: float
    num_exchanges: int
    problem: str = ""
    skipped: str = ""


def make(folder: Path, target: Target, progress: Callable[[str], None] = lambda text: None,
         ranks: Sequence[int] = RANKS) -> Iterator[tuple[Path, str]]:
    """Engines and what the emulator gives, as (file, name in the pack). What cannot be built is told and left out."""
    from ..small_models import save_random, small_config

    model = folder / "models" / "team"
    save_random(small_config("llama", **_SIZES), model)
    for count in ranks:
        yield from build_and_emulate(
            model, folder / f"team.{count}.engine", f"an engine of {count} ranks",
            ("--target", target.name, "--precision", "bf16", "--tensor-parallel", str(count)), progress)


def check_teams(source: CodeSource, folder: Path, driver: Driver, ordinal: int,
                progress: Callable[[str], None] = lambda text: None) -> list[TeamResult]:
    """With the GPUs that reach the one of that number, and each other."""
    found = [team for team in teams(driver, list_gpus(driver)) if ordinal in [gpu.ordinal for gpu in team]]
    ordinals = sorted((gpu.ordinal for team in found for gpu in team), key=lambda number: number != ordinal)
    results = []
    for ranks in RANKS:
        if len(ordinals) < ranks:
            have = f"{len(ordinals)} of this machine's do" if ordinals else "this one reaches no other"
            result = TeamResult(ranks, "", float("nan"), float("nan"), 0,
                                skipped=f"needs {ranks} GPUs that reach each other; {have}")
        else:
            result = _check(source, folder, ranks, "cuda:" + ",".join(map(str, ordinals[:ranks])))
        results.append(result)
        told = result.problem or result.skipped or f"{result.emulator_error:.1e} off the emulator"
        progress(f"{ranks} ranks: {told}")
    return results


def _check(source: CodeSource, folder: Path, ranks: int, device: str) -> TeamResult:
    from ingot.runtime.engine import Engine
    from ingot.runtime.sampling import SamplingParams

    path, expected = (source.member(f"engines/team.{ranks}.{kind}", folder) for kind in ("engine", "npz"))
    nan = float("nan")
    if path is None or expected is None:
        return TeamResult(ranks, device, nan, nan, 0, "not in the pack: it could not be built")
    try:
        with Engine.load(path, device=device, kv_cache_tokens=512) as engine:
            wanted = np.load(expected)
            error = relative_error(engine.logits(TOKENS), wanted["logits"])
            answer = engine.generate(list(TOKENS[:4]), SamplingParams(max_tokens=NUM_NEW, temperature=0.0))
        exchange_us, count = exchange_times(path, device)
    except IngotError as failure:
        return TeamResult(ranks, device, nan, nan, 0, " ".join(str(failure).split())[:300])
    problem = "" if error <= _BOUND else f"logits are {error:.2g} off the emulator's; allowed are {_BOUND}"
    if not problem and answer.token_ids[0] != wanted["greedy"][0]:
        problem = f"greedy tokens {answer.token_ids}, in the emulator {wanted['greedy'].tolist()}"
    return TeamResult(ranks, device, error, exchange_us, count, problem)


def exchange_times(path: Path, device: str) -> tuple[float, int]:
    """(µs of a step of one token, launches), as TeamResult says."""
    from ingot.runtime.devices import device_of
    from ingot.runtime.devices.cuda import CudaProgram
    from ingot.runtime.engine_file import EngineFile

    with EngineFile.open(path) as file:
        kernels, launches = file.plan["kernels"], file.plan["buckets"][0]["launches"]
        exchanges = [any(name == "peers" for name, _ in kernels[one["kernel"]]["parameters"]) for one in launches]
        program = CudaProgram(file, 64, ordinals=device_of(file, device)[1])
        try:
            inputs = program.inputs[0]
            inputs.clear()
            inputs.add([TOKENS[0]], 0, [list(range(len(program.kv_windows)))], 1)
            times = [program.profile(inputs)[np.array(exchanges)].sum() for _ in range(_STEPS)]
        finally:
            program.close()
    return float(np.median(times)) / 1e3, sum(exchanges)

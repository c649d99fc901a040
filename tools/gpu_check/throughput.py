"""Section "throughput": generation and context of a one-billion-parameter llama with random weights, as an engine and
in PyTorch.

The engine travels without its weights; checkpoint and weights are made on the machine with the GPU.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ingot.compiler.targets import Target
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_state import SequenceSampling

from ..large_build import Llama, write_checkpoint

if TYPE_CHECKING:
    from ingot.runtime.devices.cuda import CudaProgram

MODEL = Llama(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=32_000)
BATCHES = (1, 8, 64)
CONTEXT, PROMPT = 512, 2048
_STEPS = 48
_REPEATS = 5
_MAX_BATCH_SIZE, _MAX_NUM_TOKENS, _MAX_SEQ_LEN = 64, 2048, 2304


@dataclass(frozen=True)
class Speed:
    """who: "ingot bf16", "PyTorch eager", …; phase: "generation" or "context". seconds: median of a step;
    device_s: of the GPU alone, where it is known. problem: why there is no figure, or ""."""

    who: str
    phase: str
    batch: int
    tokens_per_step: int
    seconds: float
    device_s: float = float("nan")
    problem: str = ""

    @property
    def tokens_s(self) -> float:
        return self.tokens_per_step / self.seconds


def precisions(target: Target) -> list[str]:
    wanted: tuple[str, ...] = ("bf16", "fp8", "int8")
    return [name for name in wanted if name in target.precisions][:2]


def build(folder: Path, target: Target, precision: str) -> Path:
    """The engine without weights, at most some megabytes; its checkpoint lies in `folder` afterwards."""
    from ingot.compiler.build import BuildRequest
    from ingot.compiler.build import build as build_engine

    path = folder / f"throughput.{precision}.engine"
    build_engine(BuildRequest(model=str(checkpoint(folder)), target=target.name, precision=precision, output=path,
                              strip_weights=True, calibrate=False, max_batch_size=_MAX_BATCH_SIZE,
                              max_num_tokens=_MAX_NUM_TOKENS, max_seq_len=_MAX_SEQ_LEN))
    return path


def checkpoint(folder: Path) -> Path:
    """The folder of the model, written if it is not there: the same bits everywhere."""
    model = folder / "throughput-model"
    if not (model / "model.safetensors.index.json").exists():
        write_checkpoint(MODEL, model)
    return model


def with_weights(stripped: Path, folder: Path) -> Path:
    """The engine with the weights of the checkpoint."""
    from ingot.compiler.refit import RefitRequest, refit

    path = folder / f"whole.{stripped.name}"
    refit(RefitRequest(stripped, str(checkpoint(folder)), path, force=True))
    return path


def engine_speeds(path: Path, who: str, ordinal: int, batches: tuple[int, ...] = BATCHES, context: int = CONTEXT,
                  prompt: int = PROMPT, steps: int = _STEPS) -> list[Speed]:
    from ingot.runtime.devices.cuda import CudaProgram

    with EngineFile.open(path) as file:
        program = CudaProgram(file, max(batches) * (context + steps + 32) + prompt, ordinals=(ordinal,))
        try:
            found = [_generation(program, who, batch, context, steps) for batch in batches]
            return [*found, _context(program, who, prompt)]
        finally:
            program.close()


def _generation(program: CudaProgram, who: str, batch: int, context: int, steps: int) -> Speed:
    """Each step's token is what the step before has chosen, as when serving."""
    tables = _tables(program, batch, context + steps)
    for seq, table in enumerate(tables):
        _fill(program, [(seq * 31 + at * 7) % program.vocab_size for at in range(context)], table)
    tokens: np.ndarray = np.arange(batch) % program.vocab_size
    sampling = [SequenceSampling(SamplingParams(temperature=0.0), [0]) for _ in range(batch)]
    times = []
    for step in range(steps):
        inputs = program.inputs[step % 2]
        inputs.clear()
        begin = time.perf_counter()
        for seq, table in enumerate(tables):
            inputs.add([int(tokens[seq])], context + step, table, 1, seq)
        inputs.sampling.fill(sampling)
        program.launch(inputs)
        tokens = program.wait().tokens[:batch].copy()
        times.append(time.perf_counter() - begin)
    device_s = 1e-9 * float(np.median([program.profile(inputs).sum() for _ in range(3)]))
    return Speed(who, "generation", batch, batch, float(np.median(times[3:])), device_s)


def _context(program: CudaProgram, who: str, prompt: int) -> Speed:
    (table,) = _tables(program, 1, prompt)
    tokens = [(at * 13) % program.vocab_size for at in range(prompt)]
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        _fill(program, tokens, table)
        times.append(time.perf_counter() - begin)
    return Speed(who, "context", 1, prompt, float(np.median(times[1:])))


def _fill(program: CudaProgram, tokens: list[int], table: list[list[int]]) -> None:
    """One sequence's keys and values, as many tokens a step as the engine takes."""
    inputs = program.inputs[0]
    for begin in range(0, len(tokens), inputs.max_num_tokens):
        inputs.clear()
        inputs.add(tokens[begin : begin + inputs.max_num_tokens], begin, table, 1)
        inputs.sampling.fill([SequenceSampling(SamplingParams(temperature=0.0), [0])])
        program.launch(inputs)
        program.wait()


def _tables(program: CudaProgram, batch: int, length: int) -> list[list[list[int]]]:
    """Blocks of its own for each sequence, in each table."""
    count, kinds = -(-length // program.block_size), len(program.kv_windows)
    return [[list(range((seq * kinds + table) * count, (seq * kinds + table + 1) * count)) for table in range(kinds)]
            for seq in range(batch)]


def table_of(speeds: list[Speed], value: Callable[[Speed], str]) -> list[tuple[str, ...]]:
    """A row for each contestant: its name, then a value for each kind of step."""
    kinds = list(dict.fromkeys((speed.phase, speed.batch) for speed in speeds))
    return [(who, *(next((value(s) for s in speeds if (s.who, s.phase, s.batch) == (who, *kind)), "")
                    for kind in kinds)) for who in dict.fromkeys(speed.who for speed in speeds)]

"""Runs a checkpoint as an engine for this host's CPU: what tools.coverage compares with transformers."""
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.devices.cpu import CpuProgram
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.program import step_logits

GENERATED = 8
"""So many tokens of the text go through one at a time, as generation does; the others as one context."""


def compiled_logits(folder: Path, ids: np.ndarray, precision: str = "fp32") -> np.ndarray:
    """Build an engine and compute the logits f32[T, V] of every token: a context first, then token by token.

    The context is also computed in two chunks, in a step that holds a second sequence, and must come out the same.
    """
    tokens = [int(token) for token in ids]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.engine"
        build(BuildRequest(str(folder), "cpu", precision, path, max_batch_size=len(tokens),
                           max_num_tokens=2 * len(tokens), max_seq_len=len(tokens)))
        with EngineFile.open(path) as engine:
            program = CpuProgram(engine, 4 * len(tokens), num_workers=2)
            try:
                return _run(program, tokens)
            finally:
                program.close()


def _run(program: CpuProgram, tokens: list[int]) -> np.ndarray:
    context = len(tokens) - GENERATED
    mine, other = _Blocks(program, 0), _Blocks(program, 1)
    first, second = program.inputs
    rows = []
    first.add(tokens[:context], 0, mine.tables(0, context), context)
    rows.append(step_logits(program, first).copy())
    for position in range(context, len(tokens)):
        first.clear()
        first.add(tokens[position:position + 1], position, mine.tables(position, position + 1), 1)
        rows.append(step_logits(program, first).copy())
    whole = np.concatenate(rows)

    half = context // 2
    for begin, end in ((0, half), (half, context)):
        second.clear()
        second.add(tokens[::-1][begin:end], begin, mine.tables(begin, end), 0)
        second.add(tokens[begin:end], begin, other.tables(begin, end), end - begin)
        chunk = step_logits(program, second)
        if not np.allclose(chunk, whole[begin:end], rtol=0, atol=1e-4 * float(np.abs(whole).max())):
            raise AssertionError("a context in two chunks beside another sequence gives other logits than alone")
    return whole


class _Blocks:
    """The block tables of one of two sequences, blocks out of order; what has left a table's window is -1."""

    def __init__(self, program: CpuProgram, sequence: int) -> None:
        self._size, self._windows = program.block_size, program.kv_windows
        count = program.num_blocks // 2 // len(self._windows)
        order = np.random.default_rng(sequence).permutation(count * len(self._windows)).reshape(-1, count)
        self._tables = (2 * order + sequence).tolist()

    def tables(self, begin: int, end: int) -> list[list[int]]:
        """For a step that computes the tokens at the positions begin .. end - 1."""
        lows = [0 if window is None else max(0, begin - window + 1) // self._size for window in self._windows]
        return [[-1] * low + table[low:-(-end // self._size)] for table, low in zip(self._tables, lows, strict=True)]

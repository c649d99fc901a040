"""Runs a checkpoint as an engine for this host's CPU: what tools.coverage compares with transformers."""
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.devices.cpu import CpuProgram
from ingot.runtime.engine_file import EngineFile

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
    blocks = -(-len(tokens) // program.block_size)
    mine, other = list(range(blocks)), list(range(blocks, 2 * blocks))
    rows = []
    program.inputs.clear()
    program.inputs.add(tokens[:context], 0, mine, context)
    rows.append(program.step().copy())
    for position in range(context, len(tokens)):
        program.inputs.clear()
        program.inputs.add(tokens[position:position + 1], position, mine, 1)
        rows.append(program.step().copy())
    whole = np.concatenate(rows)

    half = context // 2
    for begin, end in ((0, half), (half, context)):
        program.inputs.clear()
        program.inputs.add(tokens[::-1][begin:end], begin, mine, 0)
        program.inputs.add(tokens[begin:end], begin, other, end - begin)
        chunk = program.step()
        if not np.allclose(chunk, whole[begin:end], rtol=0, atol=1e-4 * float(np.abs(whole).max())):
            raise AssertionError("a context in two chunks beside another sequence gives other logits than alone")
    return whole

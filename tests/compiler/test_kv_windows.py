"""Engines of models that mix windows and full attention: blocks that left a window are given up, and never read."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.devices.cpu import CpuProgram
from ingot.runtime.engine_file import EngineFile
from tools.small_models import NUM_TOKENS, save_random, small_config

MODELS: dict[str, tuple[dict[str, object], tuple[int | None, ...]]] = {
    "gemma3_text": ({"num_hidden_layers": 4, "layer_types": ["sliding_attention", "sliding_attention",
                                                            "full_attention", "sliding_attention"]},
                    (None, 8, 8, 8)),
    "gpt_oss": ({}, (None, 8)),
    "llama4_text": ({"num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"],
                     "no_rope_layers": [1, 0]}, (None, 8)),
}
CHUNKS = ([5, 1, 1, 14, 1, 1, 1, 8, 1, 7], [40], [1] * 40)


class Pool:
    """Hands out blocks in any order. Those that nobody holds are full of NaN: whoever reads one shows it."""

    def __init__(self, program: CpuProgram) -> None:
        size = program.num_blocks * program.block_bytes
        self._blocks = program._blocks._tiers[0][:size].reshape(program.num_blocks, -1)
        self._blocks[...] = 0xFF
        self._free = np.random.default_rng(0).permutation(program.num_blocks).tolist()
        self.program = program

    def take(self) -> int:
        return int(self._free.pop(0))

    def give_back(self, block: int) -> None:
        self._blocks[block] = 0xFF
        self._free.append(block)

    @property
    def num_taken(self) -> int:
        return self.program.num_blocks - len(self._free)


class Sequence:
    """Its block tables grow before a step, and lose what no later token sees before the next."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.num_computed = pool, 0
        self.tables: list[list[int]] = [[] for _ in pool.program.kv_windows]

    def add(self, number: int, tokens: list[int], key: int) -> None:
        size = self.pool.program.block_size
        for table, window in zip(self.tables, self.pool.program.kv_windows, strict=True):
            gone = max(0, self.num_computed - window + 1) // size if window else 0
            for entry in range(gone):
                if table[entry] >= 0:
                    self.pool.give_back(table[entry])
                    table[entry] = -1
            while len(table) * size < self.num_computed + len(tokens):
                table.append(self.pool.take())
        self.pool.program.inputs[number].add(tokens, self.num_computed, self.tables, len(tokens), key)
        self.num_computed += len(tokens)


@pytest.mark.parametrize(("model_type", "kv_precision", "tolerance"), [
    *((model_type, "fp32", 1e-5) for model_type in MODELS), ("gemma3_text", "bf16", 5e-3),
    ("gemma3_text", "int8", 2e-2)])  # (in a mixture of experts a rounding may choose another expert)
def test_logits_are_those_of_transformers(model_type: str, kv_precision: str, tolerance: float, tmp_path: Path) -> None:
    overrides, windows = MODELS[model_type]
    model = save_random(small_config(model_type, **overrides), tmp_path / "model")
    ids = torch.randint(8, 500, (3, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = np.stack([model(input_ids=row[None], use_cache=False).logits[0].numpy() for row in ids])
    path = tmp_path / "x.engine"
    build(BuildRequest(str(tmp_path / "model"), "cpu", "fp32", path, max_batch_size=48, max_num_tokens=48,
                       kv_precision=kv_precision))
    program = CpuProgram(EngineFile.open(path), 3 * NUM_TOKENS + 30, num_workers=2)
    assert program.kv_windows == windows
    pool, got = Pool(program), np.empty_like(want)
    sequences = [Sequence(pool) for _ in CHUNKS]
    for step in range(max(map(len, CHUNKS))):
        inputs = program.inputs[step % 2]
        inputs.clear()
        running = [number for number, chunks in enumerate(CHUNKS) if step < len(chunks)]
        begins = {}
        for number in running:
            begin = begins[number] = sequences[number].num_computed
            sequences[number].add(step % 2, ids[number, begin:begin + CHUNKS[number][step]].tolist(), number)
        program.launch(inputs)
        program.wait()
        rows = iter(program.logits())
        for number in running:
            for position in range(begins[number], sequences[number].num_computed):
                got[number, position] = next(rows)
    error = np.abs(got - want).max() / np.abs(want).max()
    assert np.isfinite(got).all() and error <= tolerance, error
    # Of 40 tokens a full table holds 3 blocks; the tokens of the last step, 7, all or one, reach 2, 3 or 1 by a window.
    full, narrow = windows.count(None), len(windows) - windows.count(None)
    assert pool.num_taken == 9 * full + (2 + 3 + 1) * narrow
    program.close()

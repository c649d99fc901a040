"""Sampling in the interpreter against its reference: the same tokens, whatever a request asks for."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.sampling import reference
from ingot.plugins.sampling.reference import Row
from ingot.plugins.sampling.tactics import Problem, candidates
from ingot.runtime.sampling_inputs import ROW

from .support import compiled, device

V, HISTORY, BIASES, MASKS, TOP = 150, 12, 8, 5, 20


def run(interpreter: Interpreter, logits: np.ndarray, asked: list[Row], targets: list[int] | None = None,
        num_logprobs: int = -1) -> dict[str, np.ndarray]:
    """Row i stands at position 3 i + 1."""
    count = len(asked)
    rows = np.zeros(count, ROW)
    history_ids, history_counts = (np.full((count, HISTORY), 7, np.int32) for _ in range(2))
    bias_ids, bias_values = np.full((count, BIASES), 7, np.int32), np.full((count, BIASES), 9, np.float32)
    masks = np.zeros((count, MASKS), np.uint32)
    for i, row in enumerate(asked):
        rows[i] = (-1 if targets is None else targets[i], num_logprobs, row.temperature, row.top_k, row.top_p,
                   row.min_p, row.repetition_penalty, row.presence_penalty, row.frequency_penalty, row.stream, row.seed,
                   len(row.history), len(row.biases), -1 if row.allowed is None else i, 0)
        history_ids[i, :len(row.history)], history_counts[i, :len(row.history)] = list(row.history), list(
            row.history.values())
        for j, (token, value) in enumerate(row.biases):
            bias_ids[i, j], bias_values[i, j] = token, value
        if row.allowed is not None:
            bits = np.zeros(32 * MASKS, bool)
            bits[:V] = row.allowed
            masks[i] = np.packbits(bits, bitorder="little").view(np.uint32)
    one = candidates(Problem(count + 1, V, HISTORY, BIASES, MASKS, TOP), device("sm_90a")).legal[0].launches[0]
    one = with_block(one)
    arrays: dict[str, Any] = {
        "logits": logits, "counts": np.array([count], np.int32), "rows": rows.view(np.int32),
        "history_ids": history_ids, "history_counts": history_counts, "bias_ids": bias_ids, "bias_values": bias_values,
        "masks": masks,
        "positions": 3 * np.arange(count, dtype=np.int32) + 1, "logit_rows": np.arange(count, dtype=np.int32),
        "tokens": np.full(count + 1, -99, np.int32), "ranks": np.full(count + 1, -99, np.int32),
        "logprobs": np.full(count + 1, 99, np.float32), "top_ids": np.full((count + 1, TOP), -99, np.int32),
        "top_logprobs": np.full((count + 1, TOP), 99, np.float32), "modified": np.zeros((count, V), np.float32),
        "listed": np.zeros((count, V), np.int32), "keys": np.zeros((count, V), np.int32),
        "weights": np.zeros((count, V), np.int64)}
    out = interpreter.run([(one, {})], arrays)
    assert out["tokens"][count] == -99
    return out


def with_block(launch: Any) -> Any:
    """Several steps over the vocabulary, the last one not full."""
    constants = tuple((name, 64 if name == "BLOCK" else value) for name, value in launch.kernel.constants)
    return replace(launch, kernel=replace(launch.kernel, constants=constants))


def random_row(rng: np.random.Generator) -> Row:
    some = rng.choice(V, 6, replace=False).tolist()
    return Row(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.8])), top_k=int(rng.choice([0, 1, 3, 20, 500])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.05, 0.0])), min_p=float(rng.choice([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.3])), presence_penalty=float(rng.choice([0.0, 0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.2])), seed=int(rng.integers(2**63)) * 2 + 1,
        stream=int(rng.integers(5)), history={token: int(rng.integers(3)) for token in some[:int(rng.integers(4))]},
        biases=[(token, float(rng.choice([-np.inf, 2.5, -1.0]))) for token in some[4:4 + int(rng.integers(3))]],
        allowed=rng.uniform(size=V) < 0.6 if rng.uniform() < 0.4 else None)


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_of_the_reference(interpreter: Interpreter, seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = [random_row(rng) for _ in range(12)]
    logits = (rng.standard_normal((12, V)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # many equals
    out = run(interpreter, logits, asked)
    wanted = [reference.choose(x, row, 3 * i + 1) for i, (x, row) in enumerate(zip(logits, asked, strict=True))]
    assert out["tokens"][:12].tolist() == wanted
    assert len(set(wanted)) > 4


def test_greedy(interpreter: Interpreter) -> None:
    rng = np.random.default_rng(9)
    logits = np.round(rng.standard_normal((4, V)) * 2).astype(np.float32)
    rows = [Row(), Row(biases=[(3, 50.0)]), Row(allowed=np.arange(V) == 149), Row(history={int(logits[3].argmax()): 1},
                                                                                  presence_penalty=90.0)]
    out = run(interpreter, logits, rows)
    assert out["tokens"][:4].tolist() == [reference.choose(x, row, 0) for x, row in zip(logits, rows, strict=True)]


def test_rows_that_are_no_numbers(interpreter: Interpreter) -> None:
    logits = np.zeros((5, V), np.float32)
    logits[0, 77], logits[1, 149], logits[2, :] = np.nan, np.inf, -np.inf
    rows = [Row(temperature=1.0)] * 3 + [Row(temperature=1.0, allowed=np.zeros(V, bool)), Row(temperature=0.5)]
    out = run(interpreter, logits, rows, num_logprobs=2)
    assert out["tokens"][:4].tolist() == [-1] * 4 and 0 <= out["tokens"][4] < V
    assert np.isnan(out["logprobs"][:4]).all() and (out["ranks"][:4] == 0).all()
    assert (out["top_ids"][:3, :2] == -1).all() and (out["top_ids"][3, :2] == [0, 1]).all()
    assert (out["top_ids"][:, 2:] == -99).all()


def test_log_probabilities(interpreter: Interpreter) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((4, V)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])
    targets = [-1, 30, 149, -2]
    out = run(interpreter, logits, [Row(temperature=2.0, seed=3)] * 4, targets, num_logprobs=5)
    assert out["tokens"][1:4].tolist() == [30, 149, -99], "nothing is written where nothing is asked for"
    assert out["ranks"][3] == -99
    for i in range(3):
        order, exact = reference.ranking(logits[i]), reference.log_probabilities(logits[i])
        token = out["tokens"][i]
        assert abs(out["logprobs"][i] - exact[token]) < 1e-5
        assert out["ranks"][i] == order.tolist().index(token) + 1
        assert out["top_ids"][i, :5].tolist() == order[:5].tolist()
        assert np.allclose(out["top_logprobs"][i, :5], exact[order[:5]], atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow),
                                  pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_compiles(arch: str) -> None:
    kernel = candidates(Problem(64, 128256, 4096, 64, 4008), device(arch)).legal[0].launches[0].kernel
    code = compiled([kernel], arch)[kernel]
    assert code.spill_stores == 0

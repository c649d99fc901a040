"""Rows that are filled step by step hold what rows filled at once would."""
from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import NOTHING, SAMPLE, SamplingInputs, SamplingStruct, Score
from ingot.runtime.sampling_state import SequenceSampling

VOCAB_SIZE = 50
PARAMS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0}, {"min_tokens": 3},
    {"logit_bias": {4: 1.0, 5: -2.0}},
    {"bad_token_ids": ((1, 2), (3,), (2, 1, 2))},
    {"min_tokens": 2, "bad_token_ids": ((1, 2),), "repetition_penalty": 1.3, "logit_bias": {7: 1.0}, "logprobs": 2})


def contents(inputs: SamplingInputs) -> list[tuple[Any, ...]]:
    """Of the rows in use, what the device reads; lists in no order."""
    found = []
    for row in range(inputs.num_rows):
        record = inputs.rows[row]
        history = zip(inputs.history_ids[row, :record["num_history"]].tolist(),
                      inputs.history_counts[row, :record["num_history"]].tolist(), strict=True)
        biases = zip(inputs.bias_ids[row, :record["num_biases"]].tolist(),
                     inputs.bias_values[row, :record["num_biases"]].tolist(), strict=True)
        found.append((record.tolist(), sorted(history), sorted(biases)))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_filled_step_by_step(data: st.DataObject) -> None:
    """Sequences come, go, change places and pause; two sets of inputs take turns."""
    states = [SequenceSampling(SamplingParams(**params), [0, 1, 1], [8, 9]) for params in PARAMS * 2]
    buffers = [SamplingInputs(6, VOCAB_SIZE, 40) for _ in range(2)]
    rows: list[SequenceSampling | Score | None] = []
    entries = st.sampled_from([None, Score(3), Score(3, 5), *states])
    for step in range(data.draw(st.integers(1, 12))):
        if step == 0 or data.draw(st.booleans()):
            drawn = data.draw(st.lists(entries, max_size=6))
            rows = [entry for i, entry in enumerate(drawn)
                    if not isinstance(entry, SequenceSampling) or entry not in drawn[:i]]
        inputs, fresh = buffers[step % 2], SamplingInputs(6, VOCAB_SIZE, 40)
        inputs.clear()
        assert inputs.num_rows == 0
        inputs.fill(rows)
        fresh.fill(rows)
        assert inputs.num_rows == len(rows)
        assert contents(inputs) == contents(fresh)
        for entry in rows:
            if isinstance(entry, SequenceSampling):
                entry.append(data.draw(st.integers(0, 3)))


def test_what_rows_ask_for() -> None:
    inputs = SamplingInputs(4, VOCAB_SIZE, 40)
    state = SequenceSampling(SamplingParams(logprobs=2), [1])
    inputs.fill([state, Score(7, 3), None])
    assert inputs.rows["target"].tolist() == [SAMPLE, 7, NOTHING, NOTHING]
    assert inputs.rows["num_logprobs"].tolist() == [2, 3, -1, -1]
    inputs.fill((None, state))
    assert inputs.rows["target"][:2].tolist() == [NOTHING, SAMPLE]


def test_plain_rows_are_left_alone() -> None:
    inputs = SamplingInputs(3, VOCAB_SIZE, 40)
    states = [SequenceSampling(SamplingParams(temperature=1.0, seed=1), [1]) for _ in range(3)]
    inputs.fill(states)
    inputs.rows["unused"] = 77  # a mark that writing the row would wipe
    for state in states:
        state.append(4)
    inputs.fill(states)
    assert inputs.rows["unused"].tolist() == [77] * 3
    inputs.fill([states[0], states[2]])
    assert inputs.rows["unused"].tolist() == [77, 0, 77]


def test_address_is_that_of_the_struct() -> None:
    inputs = SamplingInputs(3, VOCAB_SIZE, 40)
    struct = SamplingStruct.from_address(inputs.address)
    inputs.fill([None, None])
    assert (struct.num_rows, struct.history_stride, struct.mask_stride) == (2, 40, 2)
    assert struct.tokens == inputs.outputs.tokens.ctypes.data
    assert struct.rows == inputs.rows.ctypes.data
    work = np.zeros(16, np.float32)
    inputs.use_work(work)
    assert struct.work == work.ctypes.data
    assert ctypes.sizeof(SamplingStruct) == 16 + 8 * 15


def test_outputs_of_the_first_rows_are_views() -> None:
    outputs = SamplingInputs(3, VOCAB_SIZE, 40).outputs
    outputs.tokens[:] = [1, 2, 3]
    first = outputs.first(2)
    assert first.tokens.tolist() == [1, 2]
    assert first.top_ids.shape == (2, 20)
    assert np.shares_memory(first.tokens, outputs.tokens)

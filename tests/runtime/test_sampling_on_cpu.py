"""Sampling as part of a step: the tokens of an engine against the reference, on the logits of that very step."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.plugins.sampling import reference
from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.program import Program
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import Score
from ingot.runtime.sampling_state import SequenceSampling
from tests.runtime.mock_engine import EOS


@pytest.fixture(params=[1, 3])
def program(request: pytest.FixtureRequest, mock_path: Path) -> Iterator[Program]:
    program = load_program(EngineFile.open(mock_path), 64, request.param)
    yield program
    program.close()


def test_three_sequences_that_are_sampled_and_one_that_is_scored(program: Program) -> None:
    """Both sets of inputs in turn; penalties and a minimal length change what a row asks for from step to step."""
    asked = [SamplingParams(), SamplingParams(temperature=0.9, seed=4, top_p=0.8, logprobs=3),
             SamplingParams(temperature=2.0, seed=9, presence_penalty=1.5, repetition_penalty=1.2, min_tokens=4)]
    sequences = [[5, 9], [77, 13, 5], [20, 21, 20]]
    answers: list[list[int]] = [[], [], []]
    states = [SequenceSampling(params, tokens, [EOS]) for params, tokens in zip(asked, sequences, strict=True)]
    prompt = list(range(30, 40))
    for number in range(10):
        inputs = program.inputs[number % 2]
        inputs.clear()
        for seq, tokens in enumerate(sequences):
            new = tokens if number == 0 else tokens[-1:]
            inputs.add(new, len(tokens) - len(new), [[3 * seq, 3 * seq + 1, 3 * seq + 2, 15]], 1)
        inputs.add(prompt[number : number + 1], number, [[9, 10, 11]], 1)
        following = prompt[(number + 1) % 10]
        inputs.sampling.fill([*states, Score(following, 2)])
        program.launch(inputs)
        outputs, logits = program.wait(), program.logits()
        for seq, (params, tokens) in enumerate(zip(asked, sequences, strict=True)):
            history = {token: answers[seq].count(token) for token in tokens} if params.presence_penalty else {}
            row = reference.Row(
                params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
                params.presence_penalty, params.frequency_penalty, params.seed or 0, history=history,
                biases=[(EOS, -np.inf)] if len(answers[seq]) < params.min_tokens else [])
            token = int(outputs.tokens[seq])
            assert token == reference.choose(logits[seq], row, len(tokens) - 1)
            sequences[seq] = [*tokens, token]
            answers[seq].append(token)
            states[seq].append(token)
        assert outputs.tokens[3] == following
        for seq, count in ((1, 3), (3, 2)):
            want, token = reference.log_probabilities(logits[seq]), int(outputs.tokens[seq])
            assert outputs.logprobs[seq] == pytest.approx(want[token], abs=1e-5)
            assert outputs.top_ids[seq, :count].tolist() == reference.ranking(logits[seq])[:count].tolist()


def test_a_step_that_samples_nothing(program: Program) -> None:
    inputs = program.inputs[0]
    inputs.sampling.outputs.tokens.fill(-7)
    inputs.clear()
    inputs.add([1, 2, 3], 0, [[0]], 2)
    program.launch(inputs)
    assert program.wait().tokens.tolist() == [-7] * 4
    assert program.logits().shape == (2, 258)

"""What a sequence's next token depends on, kept token by token, against its definition."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import ROW
from ingot.runtime.sampling_state import History, SequenceSampling, spell
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import tokenizer_json

TOKENS = st.lists(st.integers(0, 5), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 14) | st.just(10**30))
def test_history_counts(prompt: list[int], answer: list[int], ignored: int) -> None:
    history = History(prompt, ignored)
    for number, token in enumerate(answer):
        history.append(token)
        slot, changed, count = history.changes[number]
        assert (history.ids[slot], history.counts[slot]) == (changed, count) == (token, count)
    counted = prompt[ignored:] + answer
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {
        token: counted.count(token) for token in [*prompt, *answer]}
    assert history.ids.dtype == history.counts.dtype == np.int32


def test_history_grows() -> None:
    history = History([], 0)
    for token in range(1000):
        history.append(token)
        history.append(token // 2)
    assert history.ids.tolist() == list(range(1000))
    assert history.counts.tolist() == [3] * 500 + [1] * 500


@pytest.mark.parametrize(("params", "expected"), [
    ({"presence_penalty": 0.5}, {1: 0, 2: 0, 7: 1}), ({"frequency_penalty": 0.5}, {1: 0, 2: 0, 7: 1}),
    ({"repetition_penalty": 1.5}, {1: 0, 2: 0, 7: 1}), ({"prompt_ignore_length": 1}, None),
    ({"presence_penalty": 0.5, "prompt_ignore_length": 1}, {1: 1, 2: 1, 7: 1}),
    ({"presence_penalty": 0.5, "prompt_ignore_length": 0}, {1: 2, 2: 1, 7: 1}), ({}, None)])
def test_history_is_kept_where_it_is_asked_for(params: dict[str, Any], expected: dict[int, int] | None) -> None:
    state = SequenceSampling(SamplingParams(**params), [1, 2, 1])
    state.append(7)
    found = state.history and dict(zip(state.history.ids.tolist(), state.history.counts.tolist(), strict=True))
    assert found == expected
    assert state.may_change == (expected is not None)


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 3)),
       st.integers(0, 6))
def test_bans_of_bad_words_and_early_ends(bad: list[list[int]], answer: list[int], min_tokens: int) -> None:
    """A token is banned exactly if it would complete a bad sequence within the answer, or end it too early."""
    state = SequenceSampling(SamplingParams(min_tokens=min_tokens, bad_token_ids=bad),  # type: ignore[arg-type]
                             [0, 1, 2, 3], [3, 9])
    for length in range(len(answer) + 1):
        if length:
            state.append(answer[length - 1])
        banned = {token for token in range(10) for tokens in bad if [*answer[:length], token][-len(tokens):] == tokens}
        banned |= {3, 9} if length < min_tokens else set()
        single = {token for token, value in state.biases.items() if value == -math.inf}
        assert single | set(state.bans) == banned
        assert not state.bans or state.may_change


def test_the_bans_stay_the_same_object_until_they_change() -> None:
    state = SequenceSampling(SamplingParams(min_tokens=3), [1], [2])
    first = state.bans
    state.append(5)
    assert state.bans is first
    assert state.may_change
    for token in (6, 7):
        state.append(token)
    assert state.bans == ()
    assert not state.may_change


def test_biases() -> None:
    bias = {1: 2.5, 2: -math.inf, 3: 1e300, 4: -1e300}
    state = SequenceSampling(SamplingParams(logit_bias=bias, bad_token_ids=((1,), (5,))), [])
    assert state.biases == {1: -math.inf, 2: -math.inf, 3: 1e30, 4: -1e30, 5: -math.inf}


def test_record() -> None:
    params = SamplingParams(temperature=0.5, top_k=10**12, top_p=0.9, min_p=0.1, seed=(1 << 64) - 1, logprobs=4,
                            repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25)
    row = np.frombuffer(SequenceSampling(params, [], index=6).record, ROW)[0]
    assert row.tolist() == (-1, 4, 0.5, 2**31 - 1, np.float32(0.9), np.float32(0.1), 1.5, -0.5, 0.25, 6, 2**64 - 1, 0,
                            0, -1, 0)
    greedy = np.frombuffer(SequenceSampling(SamplingParams(temperature=1e-9), []).record, ROW)[0]
    assert (greedy["temperature"], greedy["num_logprobs"], greedy["seed"]) == (0, -1, 0)


def test_words_are_spelled_with_and_without_a_blank() -> None:
    tokenizer = Tokenizer(tokenizer_json(), {})
    assert spell(["ab"], tokenizer) == [tokenizer.encode("ab", add_special_tokens=False)]

    class Merging:
        """Writes a word and the blank before it as one token."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return {"ab": [1, 2], " ab": [3]}[text]

    assert spell(["ab"], Merging()) == [[1, 2], [3]]  # type: ignore[arg-type]
    assert spell([" ab"], Merging()) == [[3]]  # type: ignore[arg-type]

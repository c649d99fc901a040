"""Sampling parameters: what is accepted, and that each refusal names its field."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ingot.runtime.sampling import Guide, SamplingError, SamplingParams

INF, NAN = math.inf, math.nan
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, True, None, "3", NAN],
    "temperature": [-0.1, NAN, INF, -INF, "1", None, True, 10**400, 1001],
    "top_k": [-1, 1.0, None, NAN],
    "top_p": [0, -0.5, 1.01, NAN, INF, None],
    "min_p": [-0.01, 1.01, NAN, None],
    "repetition_penalty": [0, -1.0, NAN, INF, 1e9, None],
    "presence_penalty": [-2.1, 2.1, NAN, INF, None],
    "frequency_penalty": [-2.1, 2.1, NAN, "0"],
    "seed": [-1, 1 << 64, 0.5, True, NAN],
    "prompt_ignore_length": [-1, 0.5, True],
    "min_tokens": [-1, 257, 1.0, None],
    "n": [0, 129, 1.0, True, None],
    "logprobs": [-1, 21, 1.0, True],
    "prompt_logprobs": [-1, 21, 1.0, True],
    "ignore_eos": [1, None, "yes"],
    "include_stop": [0, None],
    "skip_special_tokens": [1, None],
    "stop_token_ids": [[-1], ["x"], [1.0], [True], [1 << 31], 5, None, "12", {1: 2}, range(2000)],
    "stop": ["end", [""], [5], [None], None, b"end", ["x"] * 2000, ["x" * 1001]],
    "bad_words": ["end", [""], [5], None, ["x"] * 2000, ["x" * 1001], ["x" * 900] * 50],
    "bad_token_ids": [[5], [[]], [[-1]], ["ab"], None, [[1.0]], [[1]] * 2000],
    "logit_bias": [[1, 2], None, {-1: 0.0}, {"1": 0.0}, {1: NAN}, {1: INF}, {1: "2"}, {1: None}, {True: 1.0},
                   dict.fromkeys(range(1025), 0.5)],
    "guide": ["{}", {"kind": "regex"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_parameters_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=f"^{name} .*expected ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert caught.value.exit_status == 2
    assert len(str(caught.value)) < 300


def test_every_field_is_tested() -> None:
    assert set(WRONG) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "min_p"])
def test_numbers_too_long_to_print(name: str) -> None:
    with pytest.raises(SamplingError, match="thousands of digits") as caught:
        SamplingParams(**{name: -(10**5000)})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_limits_are_accepted() -> None:
    params = SamplingParams(
        max_tokens=1, temperature=1000, top_k=1 << 40, top_p=1, min_p=1.0, repetition_penalty=1000,
        presence_penalty=-2, frequency_penalty=2.0, seed=(1 << 64) - 1, min_tokens=1, n=128, logprobs=20,
        prompt_logprobs=0, prompt_ignore_length=0, logit_bias={0: -INF, (1 << 31) - 1: 1e300})
    assert params.logit_bias[0] == -INF
    assert SamplingParams(top_p=1e-300, temperature=0).is_greedy


def test_lists_become_tuples_of_its_own() -> None:
    tokens, bias = [5, 6], {3: 1.0}
    params = SamplingParams(stop_token_ids=tokens, stop=["a"], bad_token_ids=[tokens],  # type: ignore[arg-type]
                            bad_words=["b"], logit_bias=bias)  # type: ignore[arg-type]
    tokens.append(7)
    bias[4] = 2.0
    assert (params.stop_token_ids, params.stop, params.bad_words) == ((5, 6), ("a",), ("b",))
    assert params.bad_token_ids == ((5, 6),)
    assert params.logit_bias == {3: 1.0}
    assert {params: 1}[SamplingParams(**vars(params))] == 1


@pytest.mark.parametrize(("field", "params"), [
    ("stop_token_ids", {"stop_token_ids": (5, 10)}), ("logit_bias", {"logit_bias": {10: 1.0}}),
    ("bad_token_ids", {"bad_token_ids": ((1, 2), (3, 10))})])
def test_tokens_outside_the_vocabulary(field: str, params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    asked.check_vocabulary(11)
    with pytest.raises(SamplingError, match=f"{field} holds token 10; expected ids of 0 to 9") as caught:
        asked.check_vocabulary(10)
    assert caught.value.field == field


def test_a_seed_of_its_own() -> None:
    params = SamplingParams(temperature=1.0)
    assert params.seeded().seed is not None
    assert params.seeded().seed != params.seeded().seed
    assert SamplingParams(temperature=1.0, seed=3).seeded().seed == 3
    assert SamplingParams().seeded().seed is None


@pytest.mark.parametrize(("kind", "text", "choices"), [
    ("xml", "a", ()), ("regex", "", ()), ("json_schema", None, ()), ("choice", "", ()), ("choice", "", ("a", "")),
    ("choice", "", (1,)), ("choice", "", "yes"), ("grammar", 5, ()),
    ("choice", "", ("x",) * 2000)])
def test_guides_that_are_none(kind: str, text: Any, choices: Any) -> None:
    with pytest.raises(SamplingError, match=r"^guide (is|has) .*; expected ") as caught:
        Guide(kind, text, choices)
    assert caught.value.field == "guide"


def test_guides() -> None:
    assert Guide("choice", choices=["a", "b"]).choices == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(guide=Guide("json_object")).guide == Guide("json_object")

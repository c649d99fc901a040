"""The sampler against a plain definition, and what its parameters refuse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.errors import WorkFailed
from ingot.runtime.sampling import Sampler, SamplingError, SamplingParams

VOCAB_SIZE = 3000  # more than the candidates that top_p first looks at


def logits(seed: int = 0, spread: float = 3.0, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


def allowed(row: np.ndarray, params: SamplingParams) -> list[int]:
    """The tokens that may be chosen, best first: the definition, without any shortcut."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = order[: params.top_k or len(order)]
    weights = np.exp((row[order].astype(np.float64) - row.max()) / params.temperature)
    sums = np.cumsum(weights) / weights.sum()
    return order[: int(np.searchsorted(sums, params.top_p)) + 1]


def draws(row: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    sampler = Sampler(len(row))
    return np.array([sampler.sample(row, params, position) for position in range(count)])


def test_greedy_takes_the_first_of_the_best() -> None:
    row = logits()
    row[[70, 700]] = 99
    assert Sampler(VOCAB_SIZE).sample(row, SamplingParams(), 0) == 70
    assert Sampler(VOCAB_SIZE).sample(row, SamplingParams(temperature=1e-9, seed=1), 0) == 70


@pytest.mark.parametrize(("params", "spread"), [
    ({"temperature": 0.7}, 3), ({"temperature": 1.5, "top_k": 5}, 3), ({"temperature": 1.0, "top_p": 0.5}, 3),
    ({"temperature": 1.0, "top_k": 50, "top_p": 0.8}, 3), ({"temperature": 1.0, "top_p": 0.9}, 0.01),
    ({"temperature": 1.0, "top_k": 1}, 3), ({"temperature": 0.8, "top_k": VOCAB_SIZE + 5}, 3),
])  # fmt: skip
def test_only_allowed_tokens_in_their_proportion(params: dict[str, Any], spread: float) -> None:
    row, asked = logits(spread=spread), SamplingParams(seed=5, **params)
    expected = allowed(row, asked)
    drawn = draws(row, asked, 3000)
    assert set(drawn) <= set(expected)
    weights = np.exp((row[expected].astype(np.float64) - row.max()) / asked.temperature)
    best = weights[0] / weights.sum()
    assert abs((drawn == expected[0]).mean() - best) < 4 * np.sqrt(best * (1 - best) / 3000) + 1e-9
    # The least probable of the allowed ones comes too, where it should within so many draws.
    if weights[-1] / weights.sum() > 0.01:
        assert expected[-1] in drawn


def test_ties_at_the_edge_of_top_k_leave_exactly_k() -> None:
    row = np.zeros(100, np.float32)
    row[90] = 1
    assert set(draws(row, SamplingParams(temperature=1.0, top_k=3, seed=0), 500)) == {90, 0, 1}


def test_seed_and_position_decide_alone() -> None:
    row, sampler = logits(spread=0.1), Sampler(VOCAB_SIZE)
    params = SamplingParams(temperature=1.0, seed=9)
    first = [sampler.sample(row, params, position) for position in range(50)]
    other = Sampler(VOCAB_SIZE)
    for position in reversed(range(50)):
        other.sample(logits(1), SamplingParams(temperature=2.0, seed=4), position)  # another request of the batch
        assert other.sample(row, params, position) == first[position]
    assert len(set(first)) > 40
    assert first != [sampler.sample(row, SamplingParams(temperature=1.0, seed=10), p) for p in range(50)]


def test_a_seed_of_its_own() -> None:
    params = SamplingParams(temperature=1.0)
    assert params.seeded().seed is not None
    assert params.seeded().seed != params.seeded().seed
    assert SamplingParams(temperature=1.0, seed=3).seeded().seed == 3
    assert SamplingParams().seeded().seed is None


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.9}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers(params: dict[str, Any], value: float) -> None:
    row = logits()
    row[40] = value
    with pytest.raises(WorkFailed, match="logits at position 17 hold"):
        Sampler(VOCAB_SIZE).sample(row, SamplingParams(seed=1, **params), 17)


def test_tokens_ruled_out_are_never_chosen() -> None:
    row = np.full(VOCAB_SIZE, -np.inf, np.float32)
    row[[3, 4]] = 0
    for top_k, top_p in ((0, 1.0), (10, 1.0), (0, 0.999)):
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=2)
        assert set(draws(row, params, 200)) == {3, 4}


@pytest.mark.parametrize(("field", "value"), [
    ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1), ("temperature", float("nan")),
    ("temperature", float("inf")), ("temperature", "1"), ("top_k", -1), ("top_k", 1.0), ("top_p", 0), ("top_p", 1.01),
    ("seed", -1), ("seed", 1 << 64), ("seed", 0.5), ("stop_token_ids", [-1]), ("stop_token_ids", ["x"]),
])  # fmt: skip
def test_parameters_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=f"^{field} is .*; expected ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.exit_status == 2


@given(st.integers(0, 1000), st.floats(0.05, 5), st.integers(0, 40), st.floats(0.01, 1), st.floats(0.001, 20))
def test_any_parameters(seed: int, temperature: float, top_k: int, top_p: float, spread: float) -> None:
    row = logits(seed, spread, 30)
    asked = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # Rounding may move the edge of top_p by one token.
    lenient = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), seed=seed)
    assert set(draws(row, asked, 20)) <= set(allowed(row, lenient))

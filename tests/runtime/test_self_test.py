"""What an engine answered at its build, and whether it does so again."""

from __future__ import annotations

import math

import pytest

from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.executor.request import TokenLogprobs
from ingot.runtime.manifest import canonical_json, parse_object
from ingot.runtime.self_test import SelfTest, SelfTestFailed, prompt_of

PROMPT = [1, 2, 3]
ANSWER = [TokenLogprobs(7, -0.5, 1, [7, 8, 9, 3], [-0.5, -1.5, -2.5, -3.5]),
          TokenLogprobs(4, -0.7, 1, [4, 5, 6, 8], [-0.7, -0.705, -3.0, -4.0]),
          TokenLogprobs(9, -0.1, 1, [9, 1, 2, 3], [-0.1, -4.0, -5.0, -6.0])]


def answer(*changes: tuple[int, int, float]) -> list[TokenLogprobs]:
    """ANSWER with some log probabilities moved: (place, rank, by)."""
    tops = [list(token.top_logprobs) for token in ANSWER]
    for place, rank, by in changes:
        tops[place][rank] += by
    return [TokenLogprobs(token.token_id, top[0], 1, list(token.top_ids), top)
            for token, top in zip(ANSWER, tops, strict=True)]


@pytest.fixture
def record() -> SelfTest:
    return SelfTest.of(PROMPT, ANSWER, "cpu")


def test_the_same_answer(record: SelfTest) -> None:
    assert record.compare(ANSWER, "x") == 0
    assert record.compare(ANSWER[:1], "x") == 0  # lowered limits
    assert record.compare(answer((1, 2, 0.004)), "x") == pytest.approx(0.004)


@pytest.mark.parametrize("change", [(0, 0, -0.02), (1, 3, 0.2), (2, 1, math.nan), (2, 0, -math.inf)])
def test_another_logit(record: SelfTest, change: tuple[int, int, float]) -> None:
    with pytest.raises(SelfTestFailed, match=rf"token {change[0]} of the answer.*recorded.*tolerance 0\.01"):
        record.compare(answer(change), "x")


def test_another_token_between_equals_ends_the_comparison(record: SelfTest) -> None:
    """Tokens 4 and 5 were as good as equally probable; what follows the other is another text."""
    near = [ANSWER[0], TokenLogprobs(5, -0.702, 1, [5, 4, 6, 8], [-0.702, -0.703, -3.0, -4.0]),
            TokenLogprobs(30, -9.0, 1, [30, 31, 32, 33], [-1.0, -2.0, -3.0, -9.0])]
    assert record.compare(near, "x") == pytest.approx(0.003)


def test_another_token(record: SelfTest) -> None:
    wrong = [TokenLogprobs(8, -1.5, 1, [7, 8, 9, 3], [-0.5, -1.5, -2.5, -3.5]), *ANSWER[1:]]
    with pytest.raises(SelfTestFailed, match="chose token 8 at place 0"):
        record.compare(wrong, "x")


def test_a_token_that_left_the_best_few(record: SelfTest) -> None:
    """Pushed out by one as good: fine; by much better ones: not."""
    as_good = [TokenLogprobs(7, -0.5, 1, [7, 8, 9, 20], [-0.5, -1.5, -2.5, -3.495]), *ANSWER[1:]]
    assert record.compare(as_good, "x") == pytest.approx(0.005)
    better = [TokenLogprobs(7, -0.5, 1, [7, 20, 21, 22], [-0.5, -0.6, -0.6, -0.6]), *ANSWER[1:]]
    with pytest.raises(SelfTestFailed, match="token 8"):
        record.compare(better, "x")


def test_a_small_vocabulary() -> None:
    record = SelfTest.of(PROMPT, [TokenLogprobs(0, -0.1, 1, [0, 1, -1, -1], [-0.1, -2.0, -math.inf, -math.inf])], "cpu")
    assert record.top == (((0, 1), (-0.1, -2.0)),)
    assert all(0 <= token < 5 for token in prompt_of(5, None))
    assert prompt_of(100, lambda text: range(1000)) == list(range(64))


class Held:
    """The part of an engine file that is read."""

    path = "x.engine"

    def __init__(self, data: bytes | None) -> None:
        self.sizes = {} if data is None else {"selftest.json": len(data)}
        self._data = data or b""

    def read(self, name: str) -> bytes:
        return self._data


def read(data: bytes | None) -> SelfTest | None:
    return SelfTest.read(Held(data))  # type: ignore[arg-type]


def test_the_member(record: SelfTest) -> None:
    assert read(record.to_json()) == record
    assert read(None) is None
    assert SelfTest.of(PROMPT, ANSWER, "cuda").tolerance > record.tolerance


@pytest.mark.parametrize(("key", "value"), [
    ("version", 2), ("token_ids", []), ("token_ids", [1, 2]), ("prompt_token_ids", [-1]), ("prompt_token_ids", None),
    ("top_ids", [[1]]), ("top_logprobs", [["a"]] * 3), ("tolerance", -1), ("tolerance", None), ("top_ids", [[]] * 3),
])  # fmt: skip
def test_a_record_that_is_none(record: SelfTest, key: str, value: object) -> None:
    entries = parse_object(record.to_json(), "x") | {key: value}
    with pytest.raises(EngineFormatError, match=r"x\.engine: selftest\.json"):
        read(canonical_json(entries))

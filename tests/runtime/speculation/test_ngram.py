"""Prompt lookup against a search that looks at everything."""

from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.speculation import NgramDrafter


def expected(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        ending = tokens[len(tokens) - length :]
        for begin in range(len(tokens) - length - 1, -1, -1):
            if len(tokens) > length and tokens[begin : begin + length] == ending:
                found = list(tokens)
                for _ in range(count):
                    found.append(found[len(found) - len(tokens) + begin + length])
                return found[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=12), st.integers(0, 6),
       st.sampled_from([(4, 2), (3, 1), (2, 2), (5, 3)]))
def test_the_longest_ngram_and_of_its_places_the_latest(prompt: list[int], answer: list[int], count: int,
                                                        sizes: tuple[int, int]) -> None:
    drafter, tokens = NgramDrafter(*sizes), list(prompt)
    for token in [*answer, None]:
        assert drafter.propose(tokens, count) == expected(tokens, count, *sizes)
        if token is not None:
            tokens.append(token)


def test_a_repetition_goes_on() -> None:
    assert NgramDrafter().propose([9, 1, 2, 3, 1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_tokens_that_were_not_asked_about_are_noted_later() -> None:
    drafter = NgramDrafter()
    assert drafter.propose([1, 2, 3], 4) == []
    assert drafter.propose([1, 2, 3, 7, 8, 9, 7, 8], 2) == [9, 7]
    assert drafter.propose([1, 2, 3, 7, 8, 9, 7, 8, 1, 2], 1) == [3]


def test_a_long_prompt_is_noted_over_some_steps() -> None:
    drafter, tokens = NgramDrafter(), [5, 1, 2, *range(10, 9000), 5, 1]
    assert [drafter.propose(tokens, 1) for _ in range(3)] == [[], [], [2]]


def test_few_of_many_places_are_compared() -> None:
    """The work a token is bounded: an n-gram that stands everywhere is looked for among its latest places."""
    tokens = [5, 1, 2, 6, *[0, 1, 2, 3] * 100, 5, 1, 2]
    assert NgramDrafter().propose(tokens, 1) == [3]

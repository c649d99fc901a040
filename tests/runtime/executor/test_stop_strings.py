"""Stop strings: found wherever the pieces are cut, never given out by mistake."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.beginnings import Beginnings
from ingot.runtime.executor.stop_strings import StopStrings

LETTERS = st.text(st.sampled_from("ab<"), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("ab<"), min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include)
    text = ""
    for piece in pieces:
        given, stop = matcher.add(piece)
        text += given
        if stop is not None:
            return text, stop
    return text + matcher.end(), None


def test_a_stop_string_over_several_pieces() -> None:
    matcher = StopStrings(["</end>", "stop"], include=False)
    given = [matcher.add(piece) for piece in ("a <", "/e", "m> </", "", "end", "> more")]
    assert given == [("a ", None), ("", None), ("</em> ", None), ("", None), ("", None), ("", "</end>")]


def test_included_or_not() -> None:
    assert run(["b<"], ["aab", "<a"]) == ("aa", "b<")
    assert run(["b<"], ["aab", "<a"], include=True) == ("aab<", "b<")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["abc"], ["xab"]) == ("xab", None)


def test_the_first_to_be_complete_wins_and_of_these_the_longest() -> None:
    assert run(["aab", "b"], ["aab"]) == ("", "aab")
    assert run(["abba", "bb"], ["abba"]) == ("a", "bb")


def test_not_before_the_answer_is_long_enough() -> None:
    matcher = StopStrings(["ab", "abb"], include=False)
    assert matcher.add("xab", may_stop=False) == ("x", None)  # "ab" is passed over but may become "abb"
    assert matcher.add("a") == ("ab", None)
    assert matcher.add("b") == ("", "ab")


@given(STOPS, st.lists(LETTERS, max_size=5), st.booleans())
def test_how_the_text_is_cut_makes_no_difference(stops: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    by_letter = run(stops, list(text), include)
    assert run(stops, pieces, include) == by_letter
    assert run(stops, [text], include) == by_letter
    given, stop = by_letter
    if stop is None:
        assert given == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(given)
        assert given.endswith(stop) if include else not any(stop in given for stop in stops)


@given(STOPS, st.lists(LETTERS, max_size=5))
def test_no_more_is_held_back_than_needed(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops, include=False)
    seen = given = ""
    for piece in pieces:
        seen += piece
        more, stop = matcher.add(piece)
        given += more
        if stop is not None:
            break
        held = seen[len(given) :]
        assert seen == given + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_long_text_takes_no_more_memory_than_itself() -> None:
    """Its beginnings together are as large as its length squared."""
    tracemalloc.start()
    try:
        beginnings = Beginnings(["a" * 20_000])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert beginnings.at_end("b" + "a" * 19_999) == 19_999
    assert beginnings.at_end("a" * 20_000) == 19_999  # it is complete: its end may begin another one

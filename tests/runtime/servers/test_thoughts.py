"""What a model thinks aloud, told from the rest in whatever pieces it comes."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.servers.thoughts import Thoughts


def split(pieces: Iterable[str], begun: bool = False) -> tuple[str, str]:
    thoughts = Thoughts(begun)
    told = [*(thoughts.split(piece, False) for piece in pieces), thoughts.split("", True)]
    return "".join(thought for thought, _ in told), "".join(rest for _, rest in told)


CASES = [
    ("<think>\nWell, so.\n</think>\n\nYes. ", False, "Well, so.", "Yes. "),
    ("\n<think>a</think>b", False, "a", "b"),
    ("Well.\n\n</think>\nYes", True, "Well.", "Yes"),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    (" Yes", False, "", " Yes"),
    ("<thin", False, "", "<thin"),
    ("<think>a < b </thi", False, "a < b </thi", ""),
    ("It breaks off", True, "It breaks off", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "begun", "thought", "rest"), CASES)
def test_every_split(text: str, begun: bool, thought: str, rest: str) -> None:
    assert split([text], begun) == split(text, begun) == (thought, rest)
    for place in range(len(text)):
        assert split([text[:place], text[place:]], begun) == (thought, rest)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a", "é"]), max_size=10)
       .map("".join), st.booleans())
def test_any_text(text: str, begun: bool) -> None:
    thought, rest = split([text], begun)
    assert split(text, begun) == (thought, rest)
    kept = [char for char in thought + rest if not char.isspace()]
    assert [char for char in text if not char.isspace()] == kept or "think>" in text


def test_thoughts_are_told_as_they_come() -> None:
    thoughts = Thoughts(begun=False)
    pieces = ["<thi", "nk>\n", "So", " it", " </", "b ", "</think", ">", "\n", "Yes", " \n"]
    assert [thoughts.split(piece, False) for piece in pieces] == [
        ("", ""), ("", ""), ("So", ""), (" it", ""), ("", ""), (" </b", ""), ("", ""), ("", ""), ("", ""), ("", "Yes"),
        ("", " \n")]

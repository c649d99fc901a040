"""Patterns fit what Python's own matcher fits as PEFT uses it, and take no longer for being wicked."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.adapters.patterns import NamePattern

ATOMS = st.sampled_from(["a", "b", "1", "_", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9]"])
SIGNS = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0}"])
TEXTS = st.lists(st.builds("".join, st.tuples(ATOMS, SIGNS)), max_size=4).map("".join)
GROUPS = st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: f"({'|'.join(texts)})")
PATTERNS = st.builds("{}{}{}{}{}".format, st.sampled_from(["", "", "^"]), TEXTS, st.one_of(st.just(""), GROUPS), TEXTS,
                     st.sampled_from(["", "", "$"]))
NAMES = st.text("ab1_.", max_size=8)


@given(st.one_of(PATTERNS, st.lists(PATTERNS, min_size=2, max_size=3).map("|".join)), st.lists(NAMES, max_size=10))
def test_as_pythons_matcher(pattern: str, names: list[str]) -> None:
    served = NamePattern(pattern)
    for name in names:
        assert served.fits(name) == (re.match(rf"(.*\.)?({pattern})$", name) is not None), name


@pytest.mark.parametrize("pattern", [".*.*.*.*.*.*.*.*.*.*x", r"\w*" * 300 + "x", "a?" * 300 + "a" * 300,
                                     "(a|a)" * 6 + "x", "(.*)(.*)(.*)(.*)(.*)x"])
def test_wicked_patterns_take_no_time(pattern: str) -> None:
    served, begin = NamePattern(pattern), time.process_time()
    assert not served.fits("a" * 299)
    assert time.process_time() - begin < 5  # Python's own matcher takes years for most of them


@pytest.mark.parametrize("pattern", ["(a+)+x", "(a*)*", "(a|b)*c", "([a)(b])", r"(a)\1", "(?=a)", "a{17}", "(a|a)" * 20,
                                     "a" * 1001, "((a))", "a(", "*a", r"\S", "(?P<n>a)", "[a", "a$b", "a^"])
def test_what_is_not_served(pattern: str) -> None:
    with pytest.raises((ValueError, re.error)):
        NamePattern(pattern)

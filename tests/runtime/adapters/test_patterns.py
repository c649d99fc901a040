"""Patterns fit what Python's own matcher fits as PEFT uses it, and take no longer for being wicked."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.adapters.config import parse_config
from ingot.runtime.adapters.errors import AdapterError
from ingot.runtime.adapters.patterns import NamePattern, Work

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


WIDE = "(.|.)" * 6 + ".{0,16}" * 130


@pytest.mark.parametrize("patterns", [[WIDE + "x"], [".{0,16}" * 4 + f"x{number}" for number in range(1000)],
                                      [WIDE + str(number) for number in range(999)]])
def test_patterns_of_an_adapter_take_no_time_together(patterns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each is slow, and where there are many; some show as they are read. Without a limit they take hours."""
    monkeypatch.setattr("ingot.runtime.adapters.patterns._MAX_STEPS", 1 << 16)
    with pytest.raises(AdapterError, match=r"config: rank_pattern and alpha_pattern take more than .* steps to match"):
        config = parse_config(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_rslora": False,
                                          "rank_pattern": dict.fromkeys(patterns, 2)}).encode(), "config")
        for layer in range(100):
            config.rank_of(f"model.layers.{layer}.self_attn.q_proj")


def test_patterns_that_adapters_have_are_within_the_limit() -> None:
    work = Work()
    patterns = [NamePattern(rf"model\.layers\.{layer}\..*(q|v)_proj", work) for layer in range(28)]
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(28) for name in "qkvo"]
    assert sum(pattern.fits(name) for name in names for pattern in patterns) == 2 * 28
    work.take((1 << 24) - (1 << 18))


@pytest.mark.parametrize("pattern", ["(a+)+x", "(a*)*", "(a|b)*c", "([a)(b])", r"(a)\1", "(?=a)", "a{17}", "(a|a)" * 20,
                                     "a" * 1001, "((a))", "a(", "*a", r"\S", "(?P<n>a)", "[a", "a$b", "a^"])
def test_what_is_not_served(pattern: str) -> None:
    with pytest.raises((ValueError, re.error)):
        NamePattern(pattern)

from __future__ import annotations

import pytest

from ingot.compiler.precision import PRECISIONS, Precision, Rule, find_precision
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.errors import RequestError

ROLES = ("head", "router", "experts", "linear", "embedding")


def test_the_first_rule_that_matches_decides() -> None:
    mixed = Precision("mixed", (Rule("head", "int8"), Rule("*", "w4a8"), Rule("linear", "fp32")), "bf16", "")
    assert [mixed.scheme(role) for role in ROLES] == ["int8", "w4a8", "w4a8", "w4a8", "w4a8"]


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_role_has_a_scheme_that_exists(name: str) -> None:
    precision = PRECISIONS[name]
    assert precision.name == name and precision.note and precision.kv in ("fp32", "bf16")
    assert {precision.scheme(role) for role in ROLES} <= set(SCHEMES)


@pytest.mark.parametrize("name", PRECISIONS)
def test_routers_are_never_rounded(name: str) -> None:
    assert PRECISIONS[name].scheme("router") == "fp32"


def test_w4a8_keeps_eight_bits_at_both_ends() -> None:
    assert [PRECISIONS["w4a8"].scheme(role) for role in ROLES] == ["int8g32", "fp32", "w4a8", "w4a8", "int8g32"]


def test_unknown_precision_names_those_that_are_known() -> None:
    assert find_precision("int8") is PRECISIONS["int8"]
    with pytest.raises(RequestError, match="unknown precision 'fp9'; known: fp32, bf16, int8, w4a8"):
        find_precision("fp9")

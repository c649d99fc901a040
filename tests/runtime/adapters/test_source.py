"""How users name adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.errors import AdapterError
from ingot.runtime.adapters.source import AdapterSource, parse_named
from tests.runtime.adapters.samples import room, seeded_adapter

HASH = "0123456789abcdef" * 4


def test_forms() -> None:
    assert parse_named("a=x/y") == ("a", AdapterSource("x/y"))
    assert parse_named(f"org/a=./x=y@z@sha256:{HASH}") == ("org/a", AdapterSource("./x=y@z", HASH))
    assert AdapterSource.parse("x") == AdapterSource("x", None)


@pytest.mark.parametrize(("text", "words"), [
    ("path", "expected NAME=PATH"), ("a=", "expected NAME=PATH"), ("=path", "cannot be the name"),
    ("a b=path", "cannot be the name"), ("a=path@sha256:12", "expected 64 hexadecimal digits"),
    (f"a=path@sha256:{HASH.upper()}", "in lower case"), (f"a=path@sha256:{HASH} ", "expected 64"),
])
def test_what_is_none(text: str, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        parse_named(text)


def test_a_pinned_source_reads_that_content_only(tmp_path: Path) -> None:
    found = Adapter.read(seeded_adapter(tmp_path, 1)).sha256
    assert AdapterSource(str(tmp_path), found).read(room()).sha256 == found
    with pytest.raises(AdapterError, match=f"expected {HASH}"):
        AdapterSource(str(tmp_path), HASH).read(room())

"""The text of a calibration, and the windows in which it is read."""
from __future__ import annotations

from pathlib import Path

import pytest

from ingot.compiler.calibration.text import default_text, read_text, windows
from ingot.compiler.quality import documentation_text
from ingot.compiler.quality_gate import held_out_text
from ingot.runtime.errors import RequestError


def test_the_text_is_large_and_no_part_of_it_is_held_out() -> None:
    def pieces(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[i:i + 8]) for i in range(len(words) - 7)}

    text, = default_text().documents
    assert len(text) > 250_000 and len(held_out_text()) > 120_000
    assert not pieces(text) & (pieces(held_out_text()) | pieces(documentation_text()))


def test_text_and_jsonl(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one text\n")
    lines.write_text('{"text": "one"}\n\n{"text": "two", "source": "x"}\n')
    assert read_text(plain).documents == ("one text\n",)
    assert read_text(lines).documents == ("one", "two")
    assert read_text(plain).sha256 != read_text(lines).sha256 and read_text(lines).name == "b.jsonl"


@pytest.mark.parametrize(("content", "message"), [
    ('{"text": "a"}\nno json', "b.jsonl:2 is no JSON"),
    ('{"content": "a"}', 'b.jsonl:1: expected an object with a string "text", got an object with content'),
    ("[1]", 'b.jsonl:1: expected an object with a string "text"'),
    ("\n", "holds no text"),
])
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "b.jsonl").write_text(content)
    with pytest.raises(RequestError, match=message.replace(".", r"\.").replace("[", r"\[")):
        read_text(tmp_path / "b.jsonl")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read the calibration text"):
        read_text(tmp_path / "none.txt")


def test_windows_are_spread_over_the_text() -> None:
    found = windows(range(100), 12, 30, [7, 7])
    assert [window[:3] for window in found] == [[7, 7, 0], [7, 7, 45], [7, 7, 90]]
    assert {len(window) for window in found} == {12} and found[-1][-1] == 99
    assert windows(range(5), 12, 30, [7]) == [[7, 0, 1, 2, 3, 4]]

"""The text that a calibration reads: the set that ships with the compiler, or a file of the user's."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.runtime.errors import RequestError

MAX_CHARACTERS = 4_000_000
"""More of a user's file is not read: a calibration takes some ten thousand tokens."""


@dataclass(frozen=True)
class CalibrationText:
    """name for people, the documents, SHA-256 over them."""

    name: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()


def default_text() -> CalibrationText:
    """Prose, law, technical writing, Python and C, a little German, French and Spanish: sources.md."""
    text = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
    return CalibrationText("Ingot's own text", (text,))


def read_text(path: Path) -> CalibrationText:
    """A text file, or JSONL whose objects have a "text". Raises RequestError with file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            documents = tuple(_jsonl(path, file)) if path.suffix == ".jsonl" else (file.read(MAX_CHARACTERS),)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"cannot read the calibration text {path}: {reason}") from None
    if not any(document.strip() for document in documents):
        raise RequestError(f"{path} holds no text to calibrate with")
    return CalibrationText(path.name, documents)


def _jsonl(path: Path, lines: Iterator[str]) -> Iterator[str]:
    total = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{path}:{number} is no JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            found = f"an object with {', '.join(sorted(entry)) or 'nothing'}" if isinstance(entry, dict) else line[:40]
            raise RequestError(f'{path}:{number}: expected an object with a string "text", got {found}')
        yield entry["text"]
        total += len(entry["text"])
        if total > MAX_CHARACTERS:
            return


def windows(tokens: Sequence[int], size: int, num_tokens: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Windows of equal length, spread evenly over the tokens, each opened by `prefix`; about num_tokens in all.

    Fewer tokens than a window gives one short window.
    """
    body = max(size - len(prefix), 1)
    if len(tokens) <= body:
        return [[*prefix, *tokens]]
    count = max(1, min(len(tokens) // body, num_tokens // body))
    begins = [number * (len(tokens) - body) // max(count - 1, 1) for number in range(count)]
    return [[*prefix, *tokens[begin:begin + body]] for begin in begins]

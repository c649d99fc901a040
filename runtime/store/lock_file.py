"""engines.lock: which engine each name means, and what it meant before. Made for people to read and git to merge.

TOML. A name is an array of tables, one for each time that it was moved; the last one tells what it means now. Nothing
but another table is ever added to it, so that the difference of two versions of the file is what happened between
them, changes of two names merge by themselves, and two changes of one name are a conflict, as they should be.

    [[prod]]
    hash = "3f1c…"
    model = "SmolLM2-135M-Instruct"
    target = "cpu:x86-64-v4-vnni"
    precision = "w4a8"
    recipe = "…"
    quality = "…"
    time = 2026-11-29T20:40:00Z
    by = "ada"
    action = "add"
    why = "first build with the new tokenizer"
"""

from __future__ import annotations

import getpass
import itertools
import json
import os
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .blobs import alone, write_atomic

HEADER = """\
# Which engine each name means: the last of its tables; those above tell what it meant before.
# Written by `ingot engines`. Comments are not kept.
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HASH = re.compile(r"[0-9a-f]{64}")
MIN_PREFIX = 6
"""Digits of a hash that may stand for it."""
_PREFIX = re.compile(f"[0-9a-f]{{{MIN_PREFIX},64}}")
_SAID = ("name", "target", "precision")
"""Keys of a recipe that the move tells by itself."""
ACTIONS = ("add", "pin", "rollback", "rm")


class LockError(RequestError):
    """engines.lock is not a lock file, or does not allow what was asked for."""


@dataclass(frozen=True)
class Move:
    """One move of a name.

    hash                              of the engine; "" where the name was removed
    model, target, precision, recipe  what the engine is, for people
    quality                           likewise; "" if it was not measured
    time, by, action, why             UTC, who, one of ACTIONS, a message that may be empty
    """

    hash: str
    model: str
    target: str
    precision: str
    recipe: str
    quality: str
    time: datetime
    by: str
    action: str
    why: str


_FIELDS = {field.name: datetime if field.name == "time" else str for field in fields(Move)}


class LockFile:
    """The names of a store. What it says is read anew each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, list[Move]]:
        """name -> its moves, the oldest first. Raises LockError."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise LockError(f"cannot read {self.path}: {error}") from None
        try:
            return parse(text)
        except LockError as error:
            raise LockError(f"{self.path}: {error}") from None

    def now(self) -> dict[str, Move]:
        """name -> what it means now; removed names are left out."""
        return {name: moves[-1] for name, moves in self.read().items() if moves[-1].hash}

    def move(self, name: str, move: Move) -> None:
        """Adds a move; `add` only for a name that means nothing now. Raises LockError."""
        check_name(name)
        with alone(self.path.with_name(f".{self.path.name}.lock")):  # not the file itself, which is replaced
            names = self.read()
            moves = names.setdefault(name, [])
            if move.action == "add" and moves and moves[-1].hash:
                raise LockError(f"{name} is the name of engine {moves[-1].hash} already; a name moves only by\n"
                                f"  ingot engines pin {name} {move.hash[:12]}")
            if move.action != "add" and not (moves and moves[-1].hash):
                raise LockError(f"no engine is named {name}{_known(names)}")
            moves.append(move)
            write_atomic(self.path, render(names).encode())

    def history(self, name: str) -> list[Move]:
        """All moves of a name, the oldest first. Raises LockError for a name that never was."""
        names = self.read()
        if name not in names:
            raise LockError(f"no engine is or was named {name}{_known(names)}")
        return names[name]

    def named(self, keep_history: int | None = None) -> set[str]:
        """The hashes that names mean now or, in their last `keep_history` moves (None: all), have meant."""
        hashes = set()
        for moves in self.read().values():
            begin = 0 if keep_history is None else max(0, len(moves) - 1 - keep_history)
            hashes |= {move.hash for move in moves[begin:] if move.hash}
        return hashes


def before(moves: list[Move], steps: int = 1) -> Move:
    """The move `steps` changes of meaning before the last one. Raises LockError."""
    different = [move for move, _ in itertools.groupby((m for m in moves if m.hash), key=lambda move: move.hash)]
    last = {hash: next(m for m in reversed(moves) if m.hash == hash) for hash in different}
    if not 1 <= steps < len(different):
        raise LockError(f"cannot go back by {steps}: the name's engine has changed {len(different) - 1} times")
    return last[different[-1 - steps]]


def move_of(manifest: dict[str, Any], hash: str, action: str, why: str) -> Move:
    """A move made now, by this user, to the engine of `manifest`."""
    return Move(hash, manifest["model"]["name"], manifest["target"]["name"], manifest["precision"],
                _compact(manifest.get("recipe")), _compact(manifest.get("quality")), _now(), _user(), action, why)


def again(earlier: Move, action: str, why: str) -> Move:
    """A move made now, by this user, to the engine of an earlier one."""
    return replace(earlier, time=_now(), by=_user(), action=action, why=why)


def removal(last: Move, why: str) -> Move:
    return Move("", last.model, last.target, last.precision, last.recipe, last.quality, _now(), _user(), "rm", why)


def check_name(name: str) -> None:
    """Raises LockError for what could be taken for something else."""
    if not _NAME.fullmatch(name):
        raise LockError(f"{name!r} is no name: expected at most 100 letters, digits and '._-', a letter or digit first")
    if name.endswith(".engine") or _PREFIX.fullmatch(name):
        raise LockError(f"{name!r} is no name: it looks like {'a hash' if _PREFIX.fullmatch(name) else 'a file'}")


def parse(text: str) -> dict[str, list[Move]]:
    try:
        names = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        merge = "\n  Two branches moved the same name: keep the tables of both, in the order in which they shall count."
        raise LockError(f"not TOML: {error}{merge if '<<<<<<<' in text else ''}") from None
    for name, tables in names.items():
        check_name(name)
        if not isinstance(tables, list) or not tables:
            raise LockError(f"{name}: expected [[{name}]], a table for each move")
    return {name: [_move(f"{name}, table {number}", table) for number, table in enumerate(tables, 1)]
            for name, tables in names.items()}


def render(names: dict[str, list[Move]]) -> str:
    parts = [HEADER]
    for name, moves in sorted(names.items()):
        for move in moves:
            lines = [f"{key} = {_toml(value)}" for key, value in asdict(move).items()]
            parts.append("\n".join([f"[[{name if _BARE_KEY.fullmatch(name) else _toml(name)}]]", *lines, ""]))
    return "\n".join(parts)


def _move(where: str, table: Any) -> Move:
    if not isinstance(table, dict) or set(table) != set(_FIELDS):
        found = ", ".join(table) if isinstance(table, dict) else repr(table)
        raise LockError(f"{where}: expected the keys {', '.join(_FIELDS)}; got {found}")
    for key, kind in _FIELDS.items():
        if type(table[key]) is not kind:
            raise LockError(f"{where}: {key} is {table[key]!r}; expected {'a time' if kind is datetime else 'a text'}")
    move = Move(**table)
    if move.action not in ACTIONS:
        raise LockError(f"{where}: action is {move.action!r}; expected one of {', '.join(ACTIONS)}")
    if (move.hash != "" or move.action != "rm") and not _HASH.fullmatch(move.hash):
        raise LockError(f"{where}: hash is {move.hash!r}; expected 64 hexadecimal digits")
    return move


def _toml(value: str | datetime) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = value.encode("utf-8", "replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's strings are JSON's, but for DEL


def _compact(value: Any) -> str:
    """What a manifest says of recipe or quality, in one line."""
    if isinstance(value, dict):
        pairs = ((key, _compact(item)) for key, item in value.items() if key not in _SAID)
        return " ".join(f"{key}={text}" for key, text in pairs if text)
    if isinstance(value, list):
        return ",".join(map(_compact, value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _known(names: dict[str, list[Move]]) -> str:
    known = [name for name, moves in names.items() if moves and moves[-1].hash]
    return f"; the names are: {', '.join(sorted(known))}" if known else "; there are no names yet"


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _user() -> str:
    try:
        return os.environ.get("INGOT_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return f"uid {os.getuid()}"

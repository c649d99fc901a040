"""Patterns of module names in adapter_config.json: the regular expressions that adapters have in practice, matched in
time that no pattern can make long. Adapters come from outside, and Python's own matcher can take years for one.

Served are names; `.`, `\\d`, `\\w` and sets of characters; any of these with `*`, `+`, `?` or a count; alternatives
`a|b`, in parentheses within a pattern; `^` and `$` at the ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

_MAX_LENGTH = 1000
_MAX_ALTERNATIVES = 64
_MAX_COUNT = 16
_GROUP = re.compile(r"(\((?:\?:)?[^()]*\))")
_ATOM = re.compile(r"(\[\^?[\w.\-]+\]|\\[.dw\-]|[\w.\-])(?:([*+?])|\{(\d{1,2})(?:,(\d{1,2}))?\})?\??", re.ASCII)


class _Place(NamedTuple):
    """A character of a name that `fits`, or none if it is optional; repeats: any number of such."""

    fits: Callable[[str], object]
    is_optional: bool = False
    repeats: bool = False


class NamePattern:
    """What PEFT matches as `(.*\\.)?(pattern)$`: it must fit the end of a name, from its beginning or a dot on."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError, with the reason, for an expression that is none, or not served."""
        if len(pattern) > _MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} characters, at most {_MAX_LENGTH} are read")
        re.compile(pattern)
        self._alternatives = [found for parts in _split(pattern) for found in _without_groups(parts)]
        if len(self._alternatives) > _MAX_ALTERNATIVES:
            raise ValueError(f"it has more than {_MAX_ALTERNATIVES} alternatives")
        # The common case, a plain name, cannot take long: no need to walk through it.
        self._plain: re.Pattern[str] | None = None
        if not any(place.is_optional or place.repeats for _, places in self._alternatives for place in places):
            self._plain = re.compile(rf"(?:.*\.)?(?:{pattern})$")

    def fits(self, name: str) -> bool:
        if self._plain is not None:
            return self._plain.match(name) is not None
        return any(_fits(places, name, is_anchored) for is_anchored, places in self._alternatives)


def _split(pattern: str) -> list[list[str]]:
    """Its alternatives, each as parts of which some are groups."""
    alternatives: list[list[str]] = [[]]
    for part in _GROUP.split(pattern):
        if part.startswith("("):
            alternatives[-1].append(part)
            continue
        first, *others = part.split("|")
        alternatives[-1].append(first)
        alternatives += [[other] for other in others]
    return alternatives


def _without_groups(parts: list[str]) -> list[tuple[bool, list[_Place]]]:
    """Every way to choose from the groups; whether it begins with `^`, and its places."""
    is_anchored = parts[0].startswith("^")
    parts = [parts[0].removeprefix("^"), *parts[1:]]
    parts[-1] = parts[-1].removesuffix("$")
    options = [[_places(option) for option in (part[1:-1].removeprefix("?:").split("|") if part.startswith("(")
                                               else [part])] for part in parts]
    return [(is_anchored, list(itertools.chain(*chosen)))
            for chosen in itertools.islice(itertools.product(*options), _MAX_ALTERNATIVES + 1)]


def _places(text: str) -> list[_Place]:
    places: list[_Place] = []
    end = 0
    while end < len(text):
        found = _ATOM.match(text, end)
        if found is None:
            raise ValueError(f"{text[end : end + 20]!r} is not served; names, . \\d \\w [...] with * + ? or a count, "
                             "and (a|b) are")
        atom, sign, least, most = found.groups()
        fits = re.compile(atom).fullmatch
        if least is not None:
            low, high = int(least), int(most or least)
            if high > _MAX_COUNT:
                raise ValueError(f"a count of {high}, at most {_MAX_COUNT} is served")
            places += [_Place(fits)] * low + [_Place(fits, is_optional=True)] * (high - low)
        else:
            places += [_Place(fits)] * (sign != "?" and sign != "*")
            places += [_Place(fits, True, sign != "?")] * (sign is not None)
        end = found.end()
    return places


def _fits(places: list[_Place], name: str, is_anchored: bool) -> bool:
    """All ways through the places at once: a step a character and place."""
    reached: set[int] = set()
    for position, character in enumerate(name):
        if position == 0 or (not is_anchored and name[position - 1] == "."):
            _reach(places, 0, reached)
        before, reached = reached, set()
        for number in before:
            if number < len(places) and places[number].fits(character):
                _reach(places, number if places[number].repeats else number + 1, reached)
    if not name or (not is_anchored and name.endswith(".")):
        _reach(places, 0, reached)
    return len(places) in reached


def _reach(places: list[_Place], number: int, reached: set[int]) -> None:
    """The place, and those behind it that can be reached by leaving out what is optional."""
    while number not in reached:
        reached.add(number)
        if number == len(places) or not places[number].is_optional:
            return
        number += 1

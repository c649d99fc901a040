"""Patterns of module names in adapter_config.json: the regular expressions that adapters have in practice, matched in
time that no pattern can make long. Adapters come from outside, and Python's own matcher can take years for one.

Served are names; `.`, `\\d`, `\\w` and sets of characters; any of these with `*`, `+`, `?` or a count; alternatives
`a|b`, in parentheses within a pattern; `^` and `$` at the ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from .errors import AdapterError

Value = TypeVar("Value")

_MAX_LENGTH = 1000
_MAX_ALTERNATIVES = 64
_MAX_COUNT = 16
# Of all patterns of an adapter together: some seconds, enough for a thousand patterns and 200 modules.
_MAX_STEPS = 1 << 24
_BITS_A_STEP = 1024
_GROUP = re.compile(r"(\((?:\?:)?[^()]*\))")
_ATOM = re.compile(r"(\[\^?[\w.\-]+\]|\\[.dw\-]|[\w.\-])(?:([*+?])|\{(\d{1,2})(?:,(\d{1,2}))?\})?\??", re.ASCII)


class _Place(NamedTuple):
    """A character of a name that `fits`, or none if it is optional; repeats: any number of such."""

    fits: Callable[[str], object]
    is_optional: bool = False
    repeats: bool = False


class Work:
    """The steps that the patterns of one adapter may still take."""

    def __init__(self, what: str = "patterns") -> None:
        """what: whose they are, for the error."""
        self._what, self._left = what, _MAX_STEPS

    def take(self, steps: int) -> None:
        """Raises AdapterError if there are no more."""
        self._left -= steps
        if self._left < 0:
            raise AdapterError(f"{self._what}: rank_pattern and alpha_pattern take more than {_MAX_STEPS:,} steps to "
                               "match.\n  Write plain names in them.")


class NamePattern:
    """What PEFT matches as `(.*\\.)?(pattern)$`: it must fit the end of a name, from its beginning or a dot on."""

    def __init__(self, pattern: str, work: Work | None = None) -> None:
        """work: of the adapter; by default of this pattern alone. Raises ValueError, with the reason, for an expression
        that is none, or not served, AdapterError for one that is too large."""
        if len(pattern) > _MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} characters, at most {_MAX_LENGTH} are read")
        re.compile(pattern)
        alternatives = [found for parts in _split(pattern) for found in _without_groups(parts)]
        if len(alternatives) > _MAX_ALTERNATIVES:
            raise ValueError(f"it has more than {_MAX_ALTERNATIVES} alternatives")
        # The common case, a plain name, cannot take long: no need to walk through it.
        self._plain: re.Pattern[str] | None = None
        if any(place.is_optional or place.repeats for _, places in alternatives for place in places):
            self._walk = _Walk(alternatives, Work() if work is None else work)
        else:
            self._plain = re.compile(rf"(?:.*\.)?(?:{pattern})$")

    def fits(self, name: str) -> bool:
        """Raises AdapterError if the adapter's patterns have taken too many steps."""
        if self._plain is not None:
            return self._plain.match(name) is not None
        return self._walk.fits(name)


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


class _Walk:
    """All ways through the places of all alternatives at once: a bit for each place that a name has come to, and one
    behind an alternative's last (Navarro and Raffinot, Flexible Pattern Matching in Strings, 2002, chapter 4)."""

    def __init__(self, alternatives: list[tuple[bool, list[_Place]]], work: Work) -> None:
        self._work = work
        self._places: list[_Place | None] = []
        self._optional = self._repeats = self._ends = self._begins = self._begins_behind_dots = 0
        self._fitting: dict[str, int] = {}
        for is_anchored, places in alternatives:
            work.take(len(places))
            begin = len(self._places)
            self._places += [*places, None]
            self._optional |= _bits(places, lambda place: place.is_optional) << begin
            self._repeats |= _bits(places, lambda place: place.repeats) << begin
            self._ends |= 1 << begin + len(places)
            self._begins |= 1 << begin
            self._begins_behind_dots |= 0 if is_anchored else 1 << begin

    def fits(self, name: str) -> bool:
        self._work.take((len(name) + 1) * (1 + len(self._places) // _BITS_A_STEP))
        at, begins = 0, self._begins
        for character in name:
            at = self._with_optional(at | begins) & self._places_of(character)
            at = at & self._repeats | (at & ~self._repeats) << 1
            begins = self._begins_behind_dots if character == "." else 0
        return self._with_optional(at | begins) & self._ends != 0

    def _with_optional(self, at: int) -> int:
        """Also the places that are come to by leaving out what is optional: a sum carries over all of them."""
        optional = self._optional
        return at | ((optional + (at & optional)) ^ optional)

    def _places_of(self, character: str) -> int:
        """That it fits."""
        if (found := self._fitting.get(character)) is None:
            self._work.take(len(self._places))
            found = self._fitting[character] = _bits(
                self._places, lambda place: place is not None and place.fits(character))
        return found


def _bits(values: Sequence[Value], holds: Callable[[Value], object]) -> int:
    """A bit for each value, the first the lowest."""
    return int("".join("1" if holds(value) else "0" for value in reversed(values)) or "0", 2)

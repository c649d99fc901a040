"""Prompt lookup: what followed the last few tokens where they stood before (Saxena 2023).

Answers that quote, edit or sum up what the prompt holds repeat long pieces of it, and so does code.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_NONE = -1
# Earlier places that are compared, at most: it bounds the work a token, whatever repeats.
_MAX_PLACES = 32
# Tokens that are noted in one step, at most: a long prompt holds nobody up.
_MAX_NOTED = 4096


class NgramDrafter:
    """Finds the longest n-gram that ends the sequence, of max_ngram tokens at most and min_ngram at least, in the
    sequence itself; of places that match equally far the latest.

    Each token's place is noted once: a dictionary holds the last place of each n-gram of min_ngram tokens, and each
    place the one before it. Memory: some 150 bytes for each n-gram that is new, 4 for one that repeats.

    certainty  tokens of the n-gram
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
        self.certainty = 0
        self._max = max_ngram
        self._min = min_ngram
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> where its last token stands
        self._before = array("i")  # place -> the place before it with the same n-gram

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        self._note(tokens)
        if max_tokens <= 0 or not tokens or len(self._before) < len(tokens):
            return []
        place = self._best(tokens)
        return [] if place == _NONE else _continued(tokens, place + 1, max_tokens)

    def accepted(self, count: int) -> None:
        """Tells nothing new: what was accepted stands in the sequence."""

    def _note(self, tokens: Sequence[int]) -> None:
        before, last, size = self._before, self._last, self._min
        for place in range(len(before), min(len(before) + _MAX_NOTED, len(tokens))):
            if place + 1 < size:
                before.append(_NONE)
                continue
            key = tuple(tokens[place + 1 - size : place + 1])
            before.append(last.get(key, _NONE))
            last[key] = place

    def _best(self, tokens: Sequence[int]) -> int:
        """Where the last token of the longest match stands."""
        end = len(tokens) - 1
        best, longest = _NONE, 0
        place = self._before[end]
        for _ in range(_MAX_PLACES):
            if place == _NONE:
                break
            length = self._min
            while length < self._max and place >= length and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == self._max:
                    break
            place = self._before[place]
        self.certainty = longest
        return best


def _continued(tokens: Sequence[int], begin: int, count: int) -> list[int]:
    """The tokens from `begin` on; where they end, as a repetition goes on: what is copied is copied again."""
    found = list(tokens[begin : begin + count])
    period = len(found)
    while len(found) < count:
        found.append(found[len(found) - period])
    return found

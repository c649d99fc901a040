"""How likely a drafted token of one sequence is accepted: learnt from its drafts, verified or not."""

from __future__ import annotations

from collections.abc import Sequence

# What is assumed before anything is known, worth so many tokens.
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
# What one more token leaves of the weight of those before: the last thirty or so matter.
_KEPT = 0.97


class Acceptance:
    """The chance that a token of a draft is right if all before it are, and the draft that is to be compared next.

    A draft that was not worth its time is compared as well, with the tokens that come without it: so a sequence that
    begins to repeat itself is noticed without a step spent on it.
    """

    def __init__(self) -> None:
        self._right = _PRIOR * _PRIOR_WEIGHT
        self._weight = _PRIOR_WEIGHT
        self._begin = 0
        self._draft: Sequence[int] = ()

    @property
    def chance(self) -> float:
        return self._right / self._weight

    @property
    def waits(self) -> bool:
        """Whether a draft is not compared to its end yet."""
        return bool(self._draft)

    def watch(self, begin: int, draft: Sequence[int]) -> None:
        """A draft whose first token would stand at `begin`."""
        self._begin, self._draft = begin, draft

    def compare(self, tokens: Sequence[int]) -> int | None:
        """With the sequence as it is now: how many tokens were right, once that is known; else None."""
        draft, begin = self._draft, self._begin
        known = tokens[begin : begin + len(draft)]
        right = 0
        for token, drafted in zip(known, draft, strict=False):
            if token != drafted:
                break
            right += 1
        is_wrong = right < len(known)
        if not is_wrong and len(known) < len(draft):
            return None
        self._draft = ()
        for is_right in [True] * right + [False] * is_wrong:
            self._right = _KEPT * self._right + is_right
            self._weight = _KEPT * self._weight + 1
        return right

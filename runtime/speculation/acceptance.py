"""How likely a drafted token is accepted: learnt from drafts, verified or not."""

from __future__ import annotations

from collections.abc import Sequence

# What is assumed before anything is known.
_PRIOR = 0.5
# For how many tokens the experience with all sequences counts beside that with one.
_PRIOR_WEIGHT = 3.0
# What one more token leaves of the weight of those before: the last thirty or so matter.
_KEPT = 0.97


class AcceptanceRates:
    """The chance that a token of a draft is right if all before it are, for each certainty that drafters tell.

    others: the rates of all sequences together, which stand in for what this one has not shown yet
    """

    def __init__(self, others: AcceptanceRates | None = None) -> None:
        self._others = others
        self._counts: dict[int, tuple[float, float]] = {}  # certainty -> right tokens, and all that were compared

    def chance(self, certainty: int) -> float:
        right, weight = self._counts.get(certainty, (0.0, 0.0))
        prior = _PRIOR if self._others is None else self._others.chance(certainty)
        return (right + _PRIOR_WEIGHT * prior) / (weight + _PRIOR_WEIGHT)

    def add(self, certainty: int, is_right: bool) -> None:
        right, weight = self._counts.get(certainty, (0.0, 0.0))
        self._counts[certainty] = _KEPT * right + is_right, _KEPT * weight + 1
        if self._others is not None:
            self._others.add(certainty, is_right)


class WatchedDraft:
    """A draft that is compared with what comes. One that was not worth its time is compared as well: so a sequence that
    begins to repeat itself is noticed without a step spent on it.

    begin  where the draft's first token would stand; certainty: that of the drafter
    """

    __slots__ = ("begin", "certainty", "draft")

    def __init__(self, begin: int, draft: Sequence[int], certainty: int) -> None:
        self.begin = begin
        self.draft = draft
        self.certainty = certainty

    def compare(self, tokens: Sequence[int], rates: AcceptanceRates) -> int | None:
        """With the sequence as it is now: how many tokens were right, once that is known; else None."""
        known = tokens[self.begin : self.begin + len(self.draft)]
        right = 0
        for token, drafted in zip(known, self.draft, strict=False):
            if token != drafted:
                break
            right += 1
        is_wrong = right < len(known)
        if not is_wrong and len(known) < len(self.draft):
            return None
        for _ in range(right):
            rates.add(self.certainty, True)
        if is_wrong:
            rates.add(self.certainty, False)
        return right

"""What makes drafts: anything that guesses how a sequence goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Of one sequence, which only grows. Called between two steps, on the thread that launches them: what it takes is
    time that the device waits.

    certainty  of the draft that was proposed last, a number of a few: what drafts of each are worth is learnt apart
    """

    certainty: int

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """What may follow on `tokens`, prompt and answer until now: max_tokens at most, the likeliest first; [] if it
        has no idea. What was proposed before need not have been looked at."""

    def accepted(self, count: int) -> None:
        """So many tokens of the draft that was proposed last turned out to be what the model says."""

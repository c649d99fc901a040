"""Which sequences of a step get a draft, and how long: whatever makes all of them fastest by what was measured."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Generic

from ..scheduler.sequence import S
from .acceptance import AcceptanceRates, WatchedDraft
from .drafter import Drafter
from .ngram import NgramDrafter
from .step_times import StepTimes, estimate

# What a draft must make of its sequence's tokens a second at least, after all that others lose: less is within what
# measurements err by.
_LEAST_GAIN = log(1.05)
# Steps with drafts, at most, before one without any is measured again.
_MAX_BASE_AGE = 64
# After so many steps in a row without a draft that was worth its time, many sequences are looked at less often.
_MAX_DECLINED = 8
_SEQUENCES_PER_SKIP = 8


class _State:
    """Of one sequence."""

    __slots__ = ("drafter", "rates", "watched")

    def __init__(self, drafter: Drafter, rates: AcceptanceRates) -> None:
        self.drafter = drafter
        self.rates = rates
        self.watched: WatchedDraft | None = None


class Speculator(Generic[S]):
    """Makes and weighs drafts for the sequences of one engine. One thread at a time.

    times  of steps in which all sequences generate; the caller adds them
    """

    def __init__(self, usable: Callable[[S, list[int]], int],
                 make_drafter: Callable[[], Drafter] = NgramDrafter) -> None:
        """usable: how many first tokens of a draft its sequence could have at all (no end, nothing that a guide
        forbids). make_drafter: one for each sequence."""
        self.times = StepTimes()
        self._usable = usable
        self._make_drafter = make_drafter
        self._states: dict[S, _State] = {}
        self._rates = AcceptanceRates()
        self._num_declined = 0
        self._num_skipped = 0

    def choose(self, sequences: list[S], limits: list[int], room: int, num_tokens: int) -> dict[S, list[int]]:
        """The drafts that are worth verifying, see Scheduler.draft.

        limits: tokens of a draft, for each sequence; room: for all; num_tokens: of the step without drafts.
        """
        if self._num_declined >= _MAX_DECLINED and self._num_skipped < len(sequences) // _SEQUENCES_PER_SKIP:
            self._num_skipped += 1
            return {}
        self._num_skipped = 0
        self._num_declined += 1
        states = self._states
        self._states = {sequence: states.get(sequence) or _State(self._make_drafter(), AcceptanceRates(self._rates))
                        for sequence in sequences}
        drafts = {}
        for (sequence, state), limit in zip(self._states.items(), limits, strict=True):
            if draft := self._propose(sequence, state, limit):
                drafts[sequence] = draft
        if not drafts:
            return {}
        if num_tokens > len(sequences):
            # Prompts are in this step: the next larger token bucket could cost more than all drafts are worth.
            room = min(room, (1 << (num_tokens - 1).bit_length()) - num_tokens)
        counts = self._worth(drafts, len(sequences), room)
        if counts:
            self._num_declined = 0
        return self._watch(drafts, counts)

    def forget(self, sequence: S) -> None:
        """It has ended. It may refer to much, such as an adapter's matrices, which are to go with it."""
        self._states.pop(sequence, None)

    def _propose(self, sequence: S, state: _State, limit: int) -> list[int]:
        if state.watched is not None and (right := state.watched.compare(sequence.tokens, state.rates)) is not None:
            state.drafter.accepted(right)
            state.watched = None
        if limit <= 0:
            return []
        draft = state.drafter.propose(sequence.tokens, limit)
        return draft and draft[: self._usable(sequence, draft)]

    def _worth(self, drafts: dict[S, list[int]], num_sequences: int, room: int) -> dict[S, int]:
        """How many tokens of each draft make the product of all sequences' tokens a second largest; without those that
        get none. The product, not the sum, for each draft makes the step longer for those that have none.
        """
        points = self.times.known()
        seconds = estimate(points, num_sequences)
        # The step without drafts is measured first, and now and then again: all others are compared with it.
        if seconds is None or self.times.age(num_sequences) > _MAX_BASE_AGE:
            return {}
        gains = [entry for sequence, draft in drafts.items() for entry in self._gains(sequence, len(draft))]
        gains.sort(key=lambda entry: -entry[0])  # stable: a draft's tokens stay in their order
        best, best_gain, gain = 0, 0.0, 0.0
        for count, (more, _) in enumerate(gains[:room], 1):
            gain += more
            taken = estimate(points, num_sequences + count)
            if taken is None:  # nothing like it was tried yet: half as many come first
                break
            if gain - num_sequences * log(taken / seconds) > best_gain:
                best, best_gain = count, gain - num_sequences * log(taken / seconds)
        counts: dict[S, int] = {}
        for _, sequence in gains[:best]:
            counts[sequence] = counts.get(sequence, 0) + 1
        return counts if best_gain > len(counts) * _LEAST_GAIN else {}

    def _gains(self, sequence: S, length: int) -> list[tuple[float, S]]:
        """By how much the logarithm of its tokens a step grows with each token of a draft."""
        state = self._states[sequence]
        chance = product = state.rates.chance(state.drafter.certainty)
        expected, gains = 1.0, []
        for _ in range(length):
            gains.append((log(1 + product / expected), sequence))
            expected += product
            product *= chance
        return gains

    def _watch(self, drafts: dict[S, list[int]], counts: dict[S, int]) -> dict[S, list[int]]:
        """The drafts as long as they count. All are compared with what comes, whether verified or not."""
        chosen = {}
        for sequence, draft in drafts.items():
            state = self._states[sequence]
            if sequence in counts:
                chosen[sequence] = draft = draft[: counts[sequence]]
            elif state.watched is not None:
                continue
            state.watched = WatchedDraft(len(sequence.tokens), draft, state.drafter.certainty)
        return chosen

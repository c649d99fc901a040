"""What the choice of a sequence's next token depends on, kept up to date token by token. Pure bookkeeping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .sampling import SamplingParams
from .sampling_inputs import SAMPLE, Int32Array, row_record

if TYPE_CHECKING:
    from .guides import Matcher
    from .tokenizer import Tokenizer

# Of a bias, beyond what any logit is: it leaves room for sums in float32.
_MAX_BIAS = 1e30


class History:
    """How often each token of a sequence counts for its penalties.

    ids, counts  i32 [size], in the order of first appearance; 0: the token stands in the prompt alone
    changes      the entry, its token and its new count, for each appended token
    """

    def __init__(self, prompt: Sequence[int], num_ignored: int) -> None:
        """num_ignored: how many first tokens of the prompt do not count."""
        ids, first, places = np.unique(np.asarray(prompt, np.int32), return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._ids: Int32Array = ids[order]
        self._counts: Int32Array = np.bincount(places[num_ignored:], minlength=len(ids))[order].astype(np.int32)
        self._slots = {token: slot for slot, token in enumerate(self._ids.tolist())}
        self.size = len(self._slots)
        self.changes: list[tuple[int, int, int]] = []
        self._view()

    def _view(self) -> None:
        # Single elements are written through these: a third of the time of a numpy assignment.
        self._id_view = memoryview(self._ids)  # type: ignore[arg-type]  # an array has the buffer interface
        self._count_view = memoryview(self._counts)  # type: ignore[arg-type]

    @property
    def ids(self) -> Int32Array:
        return self._ids[: self.size]

    @property
    def counts(self) -> Int32Array:
        return self._counts[: self.size]

    def append(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self.size
            if slot == len(self._ids):
                self._ids, self._counts = (np.concatenate([array, np.zeros(max(slot, 64), np.int32)])
                                           for array in (self._ids, self._counts))
                self._view()
            self._id_view[slot] = token
            self.size += 1
        count = self._count_view[slot] = self._count_view[slot] + 1
        self.changes.append((slot, token, count))

    def take_back(self, num_tokens: int, size: int) -> None:
        """Forgets the tokens appended last; size: what it was before them."""
        for slot, token, _ in self.changes[len(self.changes) - num_tokens :]:
            self._count_view[slot] -= 1
            if slot >= size:
                self._slots.pop(token, None)
        del self.changes[len(self.changes) - num_tokens :]
        self.size = size

    def copy(self) -> HistoryAhead:
        return HistoryAhead(self.ids.copy(), self.counts.copy())


class HistoryAhead:
    """A History as it would be behind some tokens of a draft."""

    changes: tuple[tuple[int, int, int], ...] = ()

    def __init__(self, ids: Int32Array, counts: Int32Array) -> None:
        self.ids = ids
        self.counts = counts
        self.size = len(ids)


@dataclass(frozen=True, eq=False, slots=True)
class SamplingAhead:
    """A SequenceSampling as it would be behind some tokens of a draft; of one step."""

    record: bytes
    history: HistoryAhead | None
    biases: dict[int, float]
    bans: tuple[int, ...]
    guide: Matcher | None
    may_change: bool = False


class SequenceSampling:
    """One sequence that generates. `append` each token of its answer before the step that follows is filled.

    record      the row of SamplingInputs, but for its lists
    history     None if no penalty is asked for
    biases      token id -> what is added to its logit in every step
    bans        tokens banned in the next step alone; a new tuple when they change
    guide       the form that its text must have, or None
    may_change  whether appending a token can change any of these
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], end_token_ids: Collection[int] = (),
                 bad_sequences: Iterable[Sequence[int]] = (), index: int = 0,
                 guide: Matcher | None = None) -> None:
        """params         seeded, if not greedy
        end_token_ids  what ends the answer: none of it comes before min_tokens
        bad_sequences  what bad_words are spelled as, see `spell`; those of bad_token_ids come by themselves
        index          which of the params.n answers: each has random numbers of its own
        guide          params.guide, compiled; for this sequence alone
        """
        assert params.is_greedy or params.seed is not None, "params.seeded() first"
        self.record = _record(params, index)
        self.biases = {token: min(max(value, -_MAX_BIAS), _MAX_BIAS) if value != -math.inf else value
                       for token, value in params.logit_bias.items()}
        self._endings: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for tokens in dict.fromkeys((*params.bad_token_ids, *map(tuple, bad_sequences))):
            if len(tokens) == 1:
                self.biases[tokens[0]] = -math.inf
            else:
                self._endings[tokens[-2]].append(tokens)
        self._longest = max((len(tokens) - 1 for found in self._endings.values() for tokens in found), default=0)
        self._tail: list[int] = []
        self._num_before_end = params.min_tokens
        self._end_token_ids = tuple(end_token_ids)
        self.bans: tuple[int, ...] = self._end_token_ids if self._num_before_end > 0 else ()
        self.guide = guide
        self.history = None
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
            ignored = len(prompt) if params.prompt_ignore_length is None else params.prompt_ignore_length
            self.history = History(prompt, ignored)

    @property
    def may_change(self) -> bool:
        return (self.history is not None or self.guide is not None or self._longest > 0 or self._num_before_end > 0
                or bool(self.bans))

    @property
    def forbids_all(self) -> bool:
        """Whether the guide and what is banned leave no token, whatever the model says."""
        banned = {*self.bans, *(token for token, value in self.biases.items() if value == -math.inf)}
        return self.guide is not None and not self.guide.allows_but(banned)

    def append(self, token: int) -> None:
        """A token of the answer. Raises SamplingError or WorkFailed if the guide cannot follow it."""
        if self.guide is not None:
            self.guide.advance(token)
        self._note(token)

    def _note(self, token: int) -> None:
        if self.history is not None:
            self.history.append(token)
        if self._longest or self._num_before_end > 0:
            self._num_before_end -= 1
            self._ban(token)

    def ahead(self, draft: Sequence[int]) -> list[SequenceSampling | SamplingAhead]:
        """What the choice behind each token of a draft depends on, if all before it are right. A guide allows them."""
        if not self.may_change:
            return [self] * len(draft)
        history, size = self.history, self.history.size if self.history is not None else 0
        before = self._num_before_end, self._tail, self.bans
        self._tail = list(self._tail)
        found: list[SequenceSampling | SamplingAhead] = []
        for count, token in enumerate(draft, 1):
            self._note(token)
            found.append(SamplingAhead(self.record, history.copy() if history is not None else None, self.biases,
                                       self.bans, None if self.guide is None else self.guide.ahead(draft[:count])))
        if history is not None:
            history.take_back(len(draft), size)
        self._num_before_end, self._tail, self.bans = before
        return found

    def _ban(self, token: int) -> None:
        bans = self._end_token_ids if self._num_before_end > 0 else ()
        if self._longest:
            self._tail.append(token)
            del self._tail[: -self._longest]
            found = [tokens[-1] for tokens in self._endings.get(token, ()) if self._ends_with(tokens[:-1])]
            bans = (*bans, *found) if found else bans
        if bans != self.bans:
            self.bans = bans

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(tokens) :]) == tokens


def spell(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids that each word is written with, at the beginning of a text and after a blank.

    A word can be written with other tokens too, where it continues one; these do not count as it.
    """
    found = []
    for word in words:
        plain = tokenizer.encode(word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        # A tokenizer that writes the blank as a token of its own says nothing new about the word.
        found += [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
    return [tokens for tokens in found if tokens]


def _record(params: SamplingParams, index: int) -> bytes:
    greedy = params.is_greedy
    return row_record(
        target=SAMPLE, num_logprobs=-1 if params.logprobs is None else params.logprobs,
        temperature=0 if greedy else params.temperature, top_k=min(params.top_k, 0x7FFFFFFF), top_p=params.top_p,
        min_p=params.min_p, repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, stream=index, seed=0 if greedy else params.seed)

"""How the next token is chosen from a row of logits."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RequestError, WorkFailed

if TYPE_CHECKING:
    from .program import Float32Array

# Of so many best tokens the probability nearly always suffices for a top_p; only if not is the vocabulary sorted.
_TOP_P_CANDIDATES = 1024

# Below it only the best token has a chance that float32 can tell from 0.
_LEAST_TEMPERATURE = 1e-6


class SamplingError(RequestError):
    """A sampling parameter is out of its range."""


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of its answer. Checked when made: raises SamplingError.

    max_tokens      length of the answer; it ends earlier when the engine's max_seq_len is reached
    temperature     0: the most probable token, always; else logits are divided by it
    top_k           choose among the k most probable tokens; 0: among all
    top_p           then among the fewest tokens whose probabilities add up to top_p at least
    seed            equal seeds give equal answers to equal prompts, whatever else runs; None: a new one each time
    stop_token_ids  tokens that end the answer, beside those that the model ends with
    ignore_eos      do not end where the model ends
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, "at least 1")
        _require("temperature", self.temperature, _is_number(self.temperature) and self.temperature >= 0, "0 or more")
        _require("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "0 (off) or more")
        _require("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("seed", self.seed, self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 1 << 64),
                 "an integer of 0 to 2^64 - 1")
        stops = tuple(self.stop_token_ids)
        _require("stop_token_ids", stops, all(_is_int(token) and token >= 0 for token in stops), "token ids")
        object.__setattr__(self, "stop_token_ids", stops)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    def seeded(self) -> SamplingParams:
        """Itself, with a seed of its own if it has none and needs one."""
        if self.seed is not None or self.is_greedy:
            return self
        return dataclasses.replace(self, seed=int.from_bytes(os.urandom(8), "little"))


def _require(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise SamplingError(f"{name} is {value!r}; expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Sampler:
    """Chooses tokens; holds the scratch memory that this takes, so that it is allocated once."""

    def __init__(self, vocab_size: int) -> None:
        self._scores = np.empty(vocab_size, np.float32)
        self._scratch = np.empty(vocab_size, np.float32)

    def sample(self, logits: Float32Array, params: SamplingParams, position: int) -> int:
        """The token to follow, from the logits [vocab_size] that the model gives at `position` of its sequence.

        Equal logits, parameters and position give the same token. Raises WorkFailed if the logits are not numbers.
        """
        best = int(logits.argmax())
        highest = float(logits[best])
        if not math.isfinite(highest):
            raise WorkFailed(f"the logits at position {position} hold {highest}; find the layer with: ingot compare")
        if params.is_greedy:
            return best
        assert params.seed is not None, "params.seeded() first"
        np.subtract(logits, highest, out=self._scores)
        np.divide(self._scores, np.float32(params.temperature), out=self._scores)
        chance = _uniform(params.seed, position)
        if params.top_k == 0 and params.top_p == 1:
            return _pick(np.exp(self._scores, out=self._scratch), chance)
        candidates = self._candidates(params)
        weights = np.exp(self._scores[candidates])
        return int(candidates[_pick(weights, chance)])

    def _candidates(self, params: SamplingParams) -> np.ndarray[tuple[int], np.dtype[Any]]:
        """The token ids among which to choose, the most probable first; of equals the smaller id first."""
        vocab_size = self._scores.size
        limit = min(params.top_k or vocab_size, vocab_size)
        if params.top_p == 1:
            return self._best(limit)
        if params.top_k:
            ids = self._best(limit)
            total = float(np.exp(self._scores[ids]).sum(dtype=np.float64))
            return ids[: _nucleus(self._scores[ids], params.top_p * total)]
        total = float(np.exp(self._scores, out=self._scratch).sum(dtype=np.float64))
        for count in (min(_TOP_P_CANDIDATES, vocab_size), vocab_size):
            ids = self._best(count)
            kept = _nucleus(self._scores[ids], params.top_p * total)
            if kept < count:
                break
        return ids[:kept]

    def _best(self, count: int) -> np.ndarray[tuple[int], np.dtype[Any]]:
        """The ids of the `count` highest scores, in falling order."""
        scores = self._scores
        if count < scores.size:
            np.copyto(self._scratch, scores)
            self._scratch.partition(scores.size - count)
            ids = np.flatnonzero(scores >= self._scratch[scores.size - count])
        else:
            ids = np.arange(scores.size)
        return ids[np.argsort(-scores[ids], kind="stable")][:count]


def _nucleus(scores: Float32Array, mass: float) -> int:
    """How many of the falling `scores` it takes until their exponentials add up to `mass`; all if they never do."""
    sums = np.cumsum(np.exp(scores), dtype=np.float64)
    return min(int(np.searchsorted(sums, mass)) + 1, scores.size)


def _pick(weights: Float32Array, chance: float) -> int:
    """The index that `chance`, of [0, 1), falls on when each has a share of the interval as wide as its weight."""
    sums = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(sums, chance * sums[-1], side="right"))


def _uniform(seed: int, position: int) -> float:
    """A number of [0, 1) that depends on nothing but its arguments: a counter-based generator, not a stream."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53

"""What an engine answered when it was built, kept in it as selftest.json, so that another machine can ask again.

A record is a prompt and the greedy answer to it: at each place the most probable tokens with their log probabilities.
Whoever loads the engine gives it the prompt and compares (`SelfTest.compare`). On a CPU the two are equal to the bit; a
GPU of the target's kind may add up in another order, hence the tolerance, which is part of the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from .engine_format import SELF_TEST, EngineFormatError
from .errors import WorkFailed
from .executor.request import TokenLogprobs
from .manifest import canonical_json, parse_object

if TYPE_CHECKING:
    from .engine_file import EngineFile

VERSION = 1
NUM_TOKENS = 16
"""Of the answer."""
NUM_TOP = 4
"""Log probabilities at each of them."""
MAX_PROMPT = 64
TOLERANCES = {"cpu": 0.01}
OTHER_TOLERANCE = 0.25
"""Of log probabilities, in nats. Sums in another order move a bfloat16 logit of 16 by 0.06; what a broken kernel gives
is nats away."""
_DECIMALS = 5
TEXT = ("The engine answers this before it answers anybody else. In 1835 the lighthouse keeper wrote: 'Wind NW, sea "
        "calm, three ships.' What did")


class SelfTestFailed(WorkFailed):
    """The engine loads, but does not answer as it should."""


@dataclass(frozen=True)
class SelfTest:
    """prompt_token_ids  what is asked
    token_ids         the greedy answer, whatever its tokens mean to the model
    top               for each of them the NUM_TOP most probable tokens: (ids, log probabilities)
    tolerance         that log probabilities may differ by, in nats
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    top: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
    tolerance: float

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[TokenLogprobs], target_kind: str) -> Self:
        """Of an answer that asked for NUM_TOP log probabilities."""
        return cls(tuple(prompt), tuple(token.token_id for token in answer), tuple(map(_finite, answer)),
                   TOLERANCES.get(target_kind, OTHER_TOLERANCE))

    def to_json(self) -> bytes:
        """The member selftest.json."""
        return canonical_json({
            "version": VERSION, "prompt_token_ids": list(self.prompt_token_ids), "token_ids": list(self.token_ids),
            "top_ids": [list(ids) for ids, _ in self.top], "top_logprobs": [list(values) for _, values in self.top],
            "tolerance": self.tolerance})

    @classmethod
    def read(cls, engine: EngineFile) -> Self | None:
        """None if the engine has no record. Raises EngineFormatError."""
        if SELF_TEST not in engine.sizes:
            return None
        where = f"{engine.path}: {SELF_TEST}"
        entries = parse_object(engine.read(SELF_TEST), where)
        if entries.get("version") != VERSION:
            raise EngineFormatError(f"{where} has version {entries.get('version')!r}, this runtime reads {VERSION}")
        try:
            return cls._parse(entries)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFormatError(f"{where} is no record of a self-test: {error!r}") from None

    @classmethod
    def _parse(cls, entries: dict[str, Any]) -> Self:
        tokens = _ids(entries["token_ids"])
        top = tuple((_ids(ids), tuple(float(value) for value in values))
                    for ids, values in zip(entries["top_ids"], entries["top_logprobs"], strict=True))
        prompt, tolerance = _ids(entries["prompt_token_ids"]), float(entries["tolerance"])
        if not prompt or not tokens or len(top) != len(tokens) or not tolerance >= 0:
            raise ValueError("expected a prompt, tokens, and as many lists of the most probable ones")
        if any(len(ids) != len(values) or not ids for ids, values in top):
            raise ValueError("top_ids and top_logprobs do not belong together")
        return cls(prompt, tokens, top, tolerance)

    def compare(self, answer: Sequence[TokenLogprobs], engine: str) -> float:
        """The largest difference of a log probability, in nats. Raises SelfTestFailed beyond the tolerance.

        answer: as many tokens as were recorded, or the first of them. Where two tokens were as good as equally
        probable, another may follow than did; what comes behind is then another text, and is not compared.
        """
        largest = 0.0
        for place, (token, (ids, values)) in enumerate(zip(answer, self.top, strict=False)):
            found = dict(zip(token.top_ids, token.top_logprobs, strict=True))
            for token_id, value in zip(ids, values, strict=True):
                if token_id not in found:
                    # Out of the best few: it must have been about as probable as the last of them.
                    found[token_id] = min(token.top_logprobs)
                difference = abs(found[token_id] - value)
                if not difference <= self.tolerance:
                    raise SelfTestFailed(
                        f"{engine}: the self-test gives other logits than were recorded: at token {place} of the "
                        f"answer the log probability of token {token_id} is {found[token_id]:.4f}, recorded "
                        f"{value:.4f}, tolerance {self.tolerance:g}")
                largest = max(largest, difference)
            if token.token_id != self.token_ids[place]:
                if values[0] - found.get(token.token_id, -math.inf) > 2 * self.tolerance:
                    raise SelfTestFailed(f"{engine}: the self-test chose token {token.token_id} at place {place} of "
                                         f"the answer, recorded {self.token_ids[place]}")
                return largest
        return largest


def prompt_of(vocab_size: int, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
    """What to ask an engine when its answer is recorded. encode: its tokenizer's."""
    if encode is not None:
        return list(encode(TEXT))[:MAX_PROMPT]
    return [(11 + 7919 * place) % vocab_size for place in range(24)]


def _finite(token: TokenLogprobs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A vocabulary may have fewer tokens than were asked for, and a token may be impossible."""
    kept = [(token_id, round(value, _DECIMALS))
            for token_id, value in zip(token.top_ids, token.top_logprobs, strict=True)
            if token_id >= 0 and math.isfinite(value)]
    return tuple(token_id for token_id, _ in kept), tuple(value for _, value in kept)


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"expected a list of token ids, got {values!r:.60}")
    return tuple(values)

"""Whether an answer came from the engine that it names, and from that alone.

Equal tokens are not to be had: integer engines quantize the inputs of a layer anew in every step, so that what a prefix
that was found in the cache gives, or one that was computed in other steps, differs by some digits. Where two tokens are
nearly as probable as each other, either may follow. So an answer is held against its engine token by token: the engine
reads prompt and answer as one text, computed from the first token on, and says how probable each token was. In an
answer of its own these log probabilities are those that came with it, and each token is the most probable one, but for
a tolerance. What that is, the engine itself says: it answers the same prompts computed and found in the cache, with
nothing else about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams

LEAST_TOLERANCE = 1e-3
"""Nats. What rounds the same in every step differs by less than this."""

Verdict = Literal["as computed alone", "a near tie fell otherwise", "mixed"]


@dataclass(frozen=True)
class Answer:
    """Greedy. logprobs: of its tokens, as the engine told them when it chose them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Distance:
    """How far an answer is from what an engine says of its tokens, in nats.

    most, rms   difference of a token's log probability: the largest, and over all tokens
    gap         by how much a token was less probable than the most probable one: the largest
    """

    most: float
    rms: float
    gap: float

    def within(self, tolerance: Distance) -> bool:
        return self.most <= tolerance.most and self.rms <= tolerance.rms and self.gap <= tolerance.gap


class AnswerCheck:
    """One engine, loaded for this alone. Answers of `max_tokens` to these prompts are looked at.

    alone      its answers, nothing found in the cache
    measured   the largest distances of its own answers to these prompts, computed and found in the cache
    tolerance  what an answer may be away: three times the largest difference of a token, twice the largest of an
               answer; two tokens of a near tie may both be off
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._engine, self._prompts, self._max_tokens = engine, prompts, max_tokens
        self._told: dict[tuple[int, tuple[int, ...]], list[tuple[float, float]]] = {}
        self.alone = [self.answer(prompt) for prompt in prompts]
        found = [self.distance(number, answer) for number, answer in enumerate(self.alone)]
        for number, prompt in enumerate(prompts):
            found.append(self.distance(number, self.answer(prompt)))  # all of the prompt but one token is in the cache
            # Of the answer too, some of it.
            begin = self.alone[number].tokens[:max_tokens // 2]
            rest = self.answer([*prompt, *begin], max_tokens - len(begin))
            found.append(self.distance(number, Answer(begin + rest.tokens,
                                                      self.alone[number].logprobs[:len(begin)] + rest.logprobs)))
        self.measured = Distance(max(each.most for each in found), max(each.rms for each in found),
                                 max(each.gap for each in found))
        most = max(LEAST_TOLERANCE, 3 * self.measured.most)
        self.tolerance = Distance(most, max(LEAST_TOLERANCE, 2 * self.measured.rms), 2 * most)

    def answer(self, prompt: Sequence[int], max_tokens: int | None = None) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens or self._max_tokens, ignore_eos=True, logprobs=0)
        given = self._engine.generate(list(prompt), params)
        return Answer(tuple(given.token_ids), tuple(row.logprob for row in given.logprobs or ()))

    def verdict(self, number: int, answer: Answer) -> Verdict:
        """Of an answer to prompt `number` that names this engine."""
        if not answer.tokens or not self.distance(number, answer).within(self.tolerance):
            return "mixed"
        return "as computed alone" if answer.tokens == self.alone[number].tokens else "a near tie fell otherwise"

    def distance(self, number: int, answer: Answer) -> Distance:
        if len(answer.logprobs) != len(answer.tokens):
            return Distance(math.inf, math.inf, math.inf)
        said = self._said(number, answer.tokens)
        differences = [abs(told - logprob) for told, (logprob, _) in zip(answer.logprobs, said, strict=True)]
        return Distance(max(differences), math.sqrt(sum(each * each for each in differences) / len(differences)),
                        max(best - logprob for logprob, best in said))

    def _said(self, number: int, tokens: tuple[int, ...]) -> list[tuple[float, float]]:
        """Of each token of an answer: (its log probability, that of the most probable one). Log probabilities of a
        prompt are always computed, whatever the cache holds."""
        if (number, tokens) not in self._told:
            prompt = self._prompts[number]
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
            rows = self._engine.generate([*prompt, *tokens], params).prompt_logprobs
            assert rows is not None and len(rows) == len(prompt) + len(tokens), (number, tokens)
            self._told[number, tokens] = [(row.logprob, row.top_logprobs[0]) for row in rows[len(prompt):]
                                          if row is not None]
        return self._told[number, tokens]


def spliced(first: AnswerCheck, second: AnswerCheck, prompt: Sequence[int], number: int) -> Answer:
    """A truly mixed answer: the first half from one engine, the rest from the other."""
    begin = first.alone[number]
    half = max(1, len(begin.tokens) // 2)
    rest = second.answer([*prompt, *begin.tokens[:half]], len(begin.tokens) - half)
    return Answer(begin.tokens[:half] + rest.tokens, begin.logprobs[:half] + rest.logprobs)

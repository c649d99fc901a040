"""What a benchmark sends: sessions of one or more turns, whose lengths and tokens follow from a seed.

A session with one turn is a single request. In a longer one each prompt is all that was said before, answers included,
and what the turn adds: a user's message, or the result of a tool.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import numpy as np

from ..errors import RequestError

DISTRIBUTIONS = ("fixed", "uniform", "normal", "lognormal")
# Streams of random numbers: what one draws leaves the others as they are.
_PREFIX, _SESSION, ARRIVAL = 1, 2, 3


@dataclass(frozen=True)
class Turn:
    """One request. prompt: what it adds to the session, token ids or (single requests only) a text.

    think_s is the pause before it, counted from the end of the answer before.
    """

    prompt: list[int] | str
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Session:
    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts. fixed: low; uniform: low to high, both included; else mean `low`, and `stdev`."""

    kind: str
    low: int
    high: int = 0
    stdev: float = 0.0

    @classmethod
    def parse(cls, option: str, kind: str, text: str, stdev: float | None = None) -> Self:
        """`text` is N, or LOW:HIGH for uniform lengths; stdev is N/2 unless given.

        Raises RequestError that names `option`.
        """
        low, colon, high = text.partition(":")
        try:
            numbers = [int(low), int(high)] if colon else [int(low)]
        except ValueError:
            raise RequestError(f"{option} {text}: expected a number of tokens, or LOW:HIGH") from None
        if min(numbers) < 1 or numbers[-1] < numbers[0]:
            raise RequestError(f"{option} {text}: expected at least 1 token, and LOW not above HIGH")
        if colon and kind != "uniform":
            raise RequestError(f"{option} {text}: LOW:HIGH is for uniform lengths, these are {kind}; give the mean")
        if stdev is not None and (kind not in ("normal", "lognormal") or not 0 <= stdev < math.inf):
            raise RequestError(f"{option}-stdev {stdev}: expected 0 or more, with normal or lognormal lengths; "
                               f"these are {kind}")
        if kind == "uniform":
            return cls(kind, numbers[0], numbers[-1])
        mean = numbers[0]
        return cls(kind, mean, stdev=0.0 if kind == "fixed" else mean / 2 if stdev is None else stdev)

    def draw(self, rng: np.random.Generator) -> int:
        """A length of at least 1."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return int(rng.integers(self.low, self.high + 1))
        if self.kind == "normal":
            return max(round(rng.normal(self.low, self.stdev)), 1)
        # The lognormal with this mean and this standard deviation.
        variance = math.log1p((self.stdev / self.low) ** 2)
        return max(round(rng.lognormal(math.log(self.low) - variance / 2, math.sqrt(variance))), 1)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.low} tokens"
        if self.kind == "uniform":
            return f"{self.low} to {self.high} tokens, uniform"
        return f"{self.low} ± {self.stdev:.4g} tokens, {self.kind}"


@dataclass(frozen=True)
class Workload:
    """isl            tokens of a session's first prompt, after the prefix
    osl            tokens of each answer
    prefix_len     tokens that the sessions of a group share; they stand before everything else
    prefix_groups  each session belongs to one of them, drawn evenly
    turns          requests of a session
    turn_isl       tokens that each later turn adds
    think_s        mean pause between an answer and the next turn, exponential
    """

    isl: Lengths
    osl: Lengths
    prefix_len: int = 0
    prefix_groups: int = 1
    turns: int = 1
    turn_isl: Lengths = Lengths("fixed", 1)
    think_s: float = 0.0

    def sessions(self, vocab_size: int, max_seq_len: int, seed: int, token_seed: int) -> Iterator[Session]:
        """Without end; session i depends on its arguments and i alone.

        seed        decides lengths, pauses and who shares a prefix
        token_seed  decides the tokens: with another one, prompts have nothing in common with these
        A first prompt that leaves no room for its answer is cut; a session ends before a turn that has no room.
        Raises RequestError if the prefix leaves none.
        """
        if self.prefix_len + 2 > max_seq_len:
            raise RequestError(f"--prefix-len {self.prefix_len}: sequences have {max_seq_len} tokens at most")
        return self._sessions(vocab_size, max_seq_len, seed, token_seed)

    def _sessions(self, vocab_size: int, max_seq_len: int, seed: int, token_seed: int) -> Iterator[Session]:
        prefixes = [_tokens(np.random.default_rng([token_seed, _PREFIX, group]), vocab_size, self.prefix_len)
                    for group in range(self.prefix_groups if self.prefix_len else 1)]
        for index in count():
            rng = np.random.default_rng([seed, _SESSION, index])
            token_rng = np.random.default_rng([token_seed, _SESSION, index])
            group = int(rng.integers(len(prefixes)))
            turns: list[Turn] = []
            used = self.prefix_len
            for turn in range(self.turns):
                added = (self.turn_isl if turn else self.isl).draw(rng)
                output = self.osl.draw(rng)
                think_s = float(rng.exponential(self.think_s)) if turn and self.think_s else 0.0
                if used + added + output > max_seq_len:
                    if turn:
                        break
                    output = min(output, max_seq_len - used - 1)
                    added = min(added, max_seq_len - used - output)
                tokens = _tokens(token_rng, vocab_size, added)
                turns.append(Turn(tokens if turn else prefixes[group] + tokens, output, think_s))
                used += added + output
            yield Session(str(index), tuple(turns))

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"input": str(self.isl), "output": str(self.osl)}
        if self.prefix_len:
            facts["prefix"] = f"{self.prefix_len} tokens, {self.prefix_groups} different"
        if self.turns > 1:
            facts["turns"] = f"{self.turns}, each adds {self.turn_isl}; pause of {self.think_s:g} s in the mean"
        return facts


def _tokens(rng: np.random.Generator, vocab_size: int, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, vocab_size, length)]


@dataclass(frozen=True)
class Preset:
    """What an option of `ingot bench` is, when it is not given."""

    distribution: str
    isl: str = "512"
    osl: str = "128"
    prefix_len: int = 0
    prefix_groups: int = 1
    turns: int = 1
    turn_isl: str = "256"
    think_s: float = 0.0


PRESETS = {
    **{name: Preset(name) for name in DISTRIBUTIONS},
    "uniform": Preset("uniform", isl="256:768", osl="64:192", turn_isl="128:384"),
    "shared-prefix": Preset("fixed", isl="128", prefix_len=1024, prefix_groups=8),
    # A system prompt with the tools' descriptions that all share, short calls, and results of very unequal length.
    "agent": Preset("lognormal", isl="128", osl="64", prefix_len=1024, turns=6, think_s=0.5),
}


def make_workload(name: str, stdevs: dict[str, float | None], **options: Any) -> Workload:
    """The preset `name`, changed by the options that are not None. Raises RequestError.

    options  the fields of Preset; stdevs: standard deviations by the name of a length: isl, osl, turn_isl
    """
    given = {key: value for key, value in options.items() if value is not None}
    preset = dataclasses.replace(PRESETS[name], **given)
    for option, value, least in (("--prefix-len", preset.prefix_len, 0), ("--prefix-groups", preset.prefix_groups, 1),
                                 ("--turns", preset.turns, 1), ("--think-time", preset.think_s, 0)):
        if not least <= value < math.inf:
            raise RequestError(f"{option} {value}: expected at least {least}")

    def lengths(field: str) -> Lengths:
        option = f"--{field.replace('_', '-')}"
        return Lengths.parse(option, preset.distribution, getattr(preset, field), stdevs.get(field))

    return Workload(lengths("isl"), lengths("osl"), preset.prefix_len, preset.prefix_groups, preset.turns,
                    lengths("turn_isl"), preset.think_s)


def statistics(sessions: list[Session], count_tokens: Callable[[str], int] | None = None) -> dict[str, Any]:
    """What these sessions ask for. reusable_tokens: those of prompts that an endless prefix cache would have, if the
    sessions ran one after the other (answers counted as computed; prompts of one token less, as the last one's logits
    are needed). Texts are counted by `count_tokens`; without it their lengths are None."""
    prompts: list[int | None] = []
    outputs: list[int] = []
    reusable = total = 0
    seen = _Trie()
    for session in sessions:
        history: list[int] = []
        for turn in session.turns:
            outputs.append(turn.output_tokens)
            if isinstance(turn.prompt, str):
                prompts.append(count_tokens(turn.prompt) if count_tokens else None)
                continue
            # The first turn may share a prefix with other sessions; later ones begin with what this session has.
            reusable += min(seen.add(turn.prompt), len(turn.prompt) - 1) if not history else len(history)
            # An answer's tokens are unknown before it is given: only how many there are matters here.
            history += turn.prompt
            prompts.append(len(history))
            total += len(history)
            history += [-1] * turn.output_tokens
    known = [length for length in prompts if length is not None]
    return {
        "sessions": len(sessions),
        "requests": len(outputs),
        "input_tokens": _spread(known) if len(known) == len(prompts) else None,
        "output_tokens": _spread(outputs),
        "reusable_tokens": reusable if total else None,
        "reusable_share": round(reusable / total, 4) if total else None,
    }


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(values, [50, 90, 99]))
    return {"total": sum(values), "mean": round(sum(values) / len(values), 2), "min": min(values), "p50": p50,
            "p90": p90, "p99": p99, "max": max(values)}


class _Trie:
    """How much of a sequence others before it began with, in pieces of 16 tokens and then token by token."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], list[list[int]]] = {}

    def add(self, tokens: list[int]) -> int:
        """The longest prefix that `tokens` share with one added before."""
        best, parent = 0, 0
        for begin in range(0, len(tokens), 16):
            piece = tokens[begin : begin + 16]
            others = self._seen.setdefault((begin, parent), [])
            if best == begin:
                best += max((_common(piece, other) for other in others), default=0)
            if piece not in others:
                others.append(piece)
            parent = hash((parent, *piece))
        return best


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

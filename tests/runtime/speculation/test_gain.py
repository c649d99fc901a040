"""What speculation gains and loses, on a clock that is made up: steps whose times follow a curve, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ingot.runtime.kv import KvSequence
from ingot.runtime.scheduler import Sequence
from ingot.runtime.speculation import Speculator

NUM_TOKENS = 2000
Curve = Callable[[int], float]
# Times of a step by its tokens, relative to one.
CURVES: dict[str, Curve] = {
    "free": lambda tokens: 1.0,
    "memory-bound": lambda tokens: 1 + 0.02 * (tokens - 1),
    "cpu": lambda tokens: 1.0 if tokens == 1 else 1.05 + 0.2 * (tokens - 1),
    "stairs": lambda tokens: 1.0 if tokens == 1 else 2.5 if tokens <= 8 else 5.0,
    "compute-bound": lambda tokens: float(tokens),
}


def free_text(rng: random.Random) -> list[int]:
    """Words of a few hundred that are common and many that are not: pairs come again, what follows them seldom does."""
    return [int(rng.paretovariate(0.7)) % 5000 for _ in range(NUM_TOKENS)]


def copied(rng: random.Random) -> list[int]:
    """Pieces of forty tokens or so of what stood before, and a few others between them."""
    tokens = free_text(rng)[:500]
    while len(tokens) < NUM_TOKENS:
        begin = rng.randrange(len(tokens) - 60)
        tokens += [*tokens[begin : begin + rng.randrange(20, 60)], rng.randrange(5000, 6000)]
    return tokens[:NUM_TOKENS]


def alternating(rng: random.Random) -> list[int]:
    """One token in two drafted is wrong."""
    return [rng.randrange(3) for _ in range(NUM_TOKENS)]


def time_of(text: list[int], curve: Curve, drafts: int, rng: random.Random, held_up: float = 0.03) -> float:
    """Of generating all of a text behind its first 100 tokens. held_up: the share of steps that are measured as eight
    times as long as they take."""
    speculator: Speculator[Sequence] = Speculator(lambda sequence, draft: len(draft))
    tokens = text[:100]
    sequence = Sequence("a", tokens, len(text), KvSequence(tokens))
    total = 0.0
    while len(tokens) < len(text):
        limit = min(drafts, len(text) - len(tokens) - 1)
        draft = speculator.choose([sequence], [limit], 64, 1).get(sequence, [])
        seconds = curve(1 + len(draft))
        total += seconds
        noise = rng.lognormvariate(0, 0.1) * (8 if rng.random() < held_up else 1)
        speculator.times.add(1 + len(draft), seconds * noise)
        for drafted in [*draft, None]:
            tokens.append(text[len(tokens)])
            if tokens[-1] != drafted:
                break
    return total


@pytest.mark.parametrize("drafts", [2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("make_text", [free_text, copied, alternating])
def test_it_never_loses_much(make_text: Callable[[random.Random], list[int]], curve: str, drafts: int) -> None:
    text = make_text(random.Random(3))
    plain = float(len(text) - 100)
    assert time_of(text, CURVES[curve], drafts, random.Random(4)) <= 1.03 * plain


@pytest.mark.parametrize(("curve", "least"), [("free", 2.3), ("memory-bound", 2.1), ("cpu", 1.5), ("stairs", 1.4)])
def test_it_gains_where_text_repeats(curve: str, least: float) -> None:
    text = copied(random.Random(3))
    assert least * time_of(text, CURVES[curve], 8, random.Random(4)) <= len(text) - 100


def test_steps_that_are_held_up_do_not_end_it() -> None:
    text = copied(random.Random(3))
    times = [time_of(text, CURVES["cpu"], 4, random.Random(seed), held_up=0.2) for seed in range(12)]
    assert max(times) <= (len(text) - 100) / 1.15

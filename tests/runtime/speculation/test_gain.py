"""What speculation gains and loses, on a clock that is made up: steps whose times follow a curve, with noise."""

from __future__ import annotations

import math
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


def times_of(texts: list[list[int]], curve: Curve, drafts: int, rng: random.Random, held_up: float = 0.03,
            ) -> list[float]:
    """When each of some texts is generated behind its first 100 tokens, all at once. held_up: the share of steps that
    are measured as up to four times as long as they take."""
    speculator: Speculator[Sequence] = Speculator(lambda sequence, draft: len(draft))
    running = {Sequence("a", tokens, len(text), KvSequence(tokens)): text
               for text in texts for tokens in [text[:100]]}
    total, ends = 0.0, dict.fromkeys(running, 0.0)
    while running:
        limits = [min(drafts, len(text) - len(sequence.tokens) - 1) for sequence, text in running.items()]
        chosen = speculator.choose(list(running), limits, 64, len(running))
        num_tokens = len(running) + sum(map(len, chosen.values()))
        seconds = curve(num_tokens)
        total += seconds
        noise = rng.lognormvariate(0, 0.1) * (rng.uniform(1, 4) if rng.random() < held_up else 1)
        speculator.times.add(num_tokens, seconds * noise)
        for sequence, text in list(running.items()):
            tokens = sequence.tokens
            for drafted in [*chosen.get(sequence, []), None]:
                tokens.append(text[len(tokens)])
                if tokens[-1] != drafted:
                    break
            if len(tokens) == len(text):
                del running[sequence]
                ends[sequence] = total
    return list(ends.values())


@pytest.mark.parametrize("drafts", [2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("make_text", [free_text, copied, alternating])
def test_it_never_loses_much(make_text: Callable[[random.Random], list[int]], curve: str, drafts: int) -> None:
    text = make_text(random.Random(3))
    plain = float(len(text) - 100)
    assert times_of([text], CURVES[curve], drafts, random.Random(4))[0] <= 1.03 * plain


@pytest.mark.parametrize(("curve", "least"), [("free", 2.3), ("memory-bound", 2.1), ("cpu", 1.5), ("stairs", 1.4)])
def test_it_gains_where_text_repeats(curve: str, least: float) -> None:
    text = copied(random.Random(3))
    assert least * times_of([text], CURVES[curve], 8, random.Random(4))[0] <= len(text) - 100


@pytest.mark.parametrize("held_up", [0.2, 0.6])
def test_steps_that_are_held_up_do_not_end_it(held_up: float) -> None:
    text = copied(random.Random(3))
    times = [times_of([text], CURVES["cpu"], 4, random.Random(seed), held_up)[0] for seed in range(8)]
    assert max(times) <= (len(text) - 100) / 1.3


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("held_up", [0.03, 0.5])
def test_of_many_at_once_none_loses_much(slope: float, held_up: float) -> None:
    """Three of six texts can be foreseen. What their steps take more, the others pay."""
    def curve(tokens: int) -> float:
        return 1 + slope * tokens

    texts = [make_text(random.Random(seed))[:700] for seed in range(3) for make_text in (free_text, alternating)]
    plain = times_of(texts, curve, 0, random.Random(4))
    for seed in range(3):
        rates = [before / after for before, after in
                 zip(plain, times_of(texts, curve, 4, random.Random(seed), held_up), strict=True)]
        assert min(rates) >= 0.9 and math.prod(rates) ** (1 / len(rates)) >= 0.96

"""What is sent follows from the options and the seed."""

import itertools

import numpy as np
import pytest

from ingot.runtime.bench.workload import PRESETS, Lengths, Session, Turn, Workload, make_workload, statistics
from ingot.runtime.errors import RequestError


def some(workload: Workload, count: int, seed: int = 0, max_seq_len: int = 1 << 31,
         token_seed: int = 0) -> list[Session]:
    return list(itertools.islice(workload.sessions(1000, max_seq_len, seed, token_seed), count))


def shape(sessions: list[Session]) -> list[list[tuple[int, int]]]:
    return [[(len(turn.prompt), turn.output_tokens) for turn in session.turns] for session in sessions]


def lengths(kind: str, text: str, stdev: float | None = None) -> Lengths:
    return Lengths.parse("--isl", kind, text, stdev)


@pytest.mark.parametrize(("made", "mean", "stdev"), [
    (lengths("fixed", "100"), 100, 0),
    (lengths("uniform", "50:150"), 100, 101 / 12**0.5),
    (lengths("uniform", "100"), 100, 0),
    (lengths("normal", "100", 20), 100, 20),
    (lengths("lognormal", "100", 50), 100, 50),
    (lengths("lognormal", "100"), 100, 50),
])
def test_distributions(made: Lengths, mean: float, stdev: float) -> None:
    rng = np.random.default_rng(0)
    drawn = [made.draw(rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert np.std(drawn) == pytest.approx(stdev, rel=0.05, abs=0.01)
    assert min(drawn) >= 1


@pytest.mark.parametrize(("kind", "text", "stdev"), [
    ("fixed", "0", None), ("fixed", "x", None), ("fixed", "1:2", None), ("uniform", "5:2", None),
    ("uniform", "1:2:3", None), ("fixed", "5", 1.0), ("normal", "5", -1.0), ("normal", "5", float("nan"))])
def test_wrong_lengths(kind: str, text: str, stdev: float | None) -> None:
    with pytest.raises(RequestError, match="--isl"):
        lengths(kind, text, stdev)


def test_the_seed_decides() -> None:
    workload = make_workload("lognormal", {})
    assert some(workload, 20) == some(workload, 20)
    assert some(workload, 20) != some(workload, 20, seed=1)
    # Other tokens, of the same lengths, for a cache that remembers the last run.
    other = some(workload, 20, token_seed=1)
    assert shape(other) == shape(some(workload, 20)) != shape(some(workload, 20, seed=1))
    assert all(a.turns[0].prompt[:5] != b.turns[0].prompt[:5] for a, b in zip(other, some(workload, 20), strict=True))
    # A session is what it is, however many are drawn.
    assert some(workload, 20)[:5] == some(workload, 5)


def test_shared_prefixes() -> None:
    sessions = some(make_workload("shared-prefix", {}, prefix_len=50, prefix_groups=3, isl="20", osl="5"), 300)
    prompts = [session.turns[0].prompt for session in sessions]
    assert all(isinstance(prompt, list) and len(prompt) == 70 for prompt in prompts)
    begins = [tuple(prompt[:50]) for prompt in prompts]
    counts = [begins.count(begin) for begin in set(begins)]
    assert len(counts) == 3 and min(counts) > 60
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 300


def test_agents_take_turns() -> None:
    sessions = some(make_workload("agent", {}, prefix_len=10, isl="5", turn_isl="30", turns=4, think_s=1.0), 200)
    assert {len(session.turns) for session in sessions} == {4}
    assert len({tuple(session.turns[0].prompt[:10]) for session in sessions}) == 1  # all have the same system prompt
    pauses = [turn.think_s for session in sessions for turn in session.turns[1:]]
    assert np.mean(pauses) == pytest.approx(1, rel=0.2)
    assert all(session.turns[0].think_s == 0 for session in sessions)
    later = [len(turn.prompt) for session in sessions for turn in session.turns[1:]]
    assert np.mean(later) == pytest.approx(30, rel=0.15)


def test_nothing_is_longer_than_the_engine_takes() -> None:
    workload = make_workload("agent", {}, prefix_len=10, isl="40", osl="20", turn_isl="30", turns=9)
    sizes = []
    for session in some(workload, 200, max_seq_len=100):
        used = 0
        for turn in session.turns:
            used += len(turn.prompt) + turn.output_tokens
            assert turn.output_tokens >= 1 and len(turn.prompt) >= 1
            sizes.append(used)
    assert max(sizes) == 100 and {len(session.turns) for session in some(workload, 50, max_seq_len=100)} > {1}
    with pytest.raises(RequestError, match="--prefix-len"):
        some(make_workload("fixed", {}, prefix_len=99), 1, max_seq_len=100)


@pytest.mark.parametrize("options", [{"prefix_len": -1}, {"prefix_groups": 0}, {"turns": 0}, {"think_s": -0.1},
                                     {"think_s": float("inf")}, {"isl": "none"}])
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"--{next(iter(options)).removesuffix('_s').replace('_', '-')}"):
        make_workload("fixed", {}, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_drawn(name: str) -> None:
    workload = make_workload(name, {})
    assert some(workload, 3) and workload.describe()["input"]


def test_statistics() -> None:
    sessions = [
        Session("a", (Turn([1, 2, 3, 4], 2), Turn([5], 2))),  # the second turn begins with all of the first
        Session("b", (Turn([1, 2, 9], 1),)),                  # two tokens as in a
        Session("c", (Turn([1, 2, 9], 1),)),                  # all as in b, but the last token's logits are needed
    ]
    figures = statistics(sessions)
    assert (figures["sessions"], figures["requests"]) == (3, 4)
    assert figures["input_tokens"]["total"] == 4 + 7 + 3 + 3 and figures["output_tokens"]["total"] == 6
    assert figures["reusable_tokens"] == 6 + 2 + 2


def test_reuse_is_counted_beyond_the_first_pieces() -> None:
    prompt = list(range(100))
    sessions = [Session("a", (Turn(prompt, 1),)), Session("b", (Turn([*prompt[:70], 999, *prompt[71:]], 1),))]
    assert statistics(sessions)["reusable_tokens"] == 70


def test_statistics_of_texts() -> None:
    sessions = [Session("a", (Turn("three words here", 1),))]
    assert statistics(sessions)["input_tokens"] is None
    assert statistics(sessions, lambda text: len(text.split()))["input_tokens"]["total"] == 3

"""Choosing tokens and log probabilities against their reference: token for token, on every instruction set."""
from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ingot.plugins.kernel import CpuKernel
from ingot.plugins.sampling import reference
from ingot.plugins.sampling.reference import Row
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import CHUNK_TOKENS, SamplingInputs, Score
from ingot.runtime.sampling_state import SequenceSampling

from .native import ALL_ISAS, HOST_ISAS, Library, Step, aligned, placed
from .sampling_runner import kernels, run

VOCABS = (1, 37, 2 * CHUNK_TOKENS + 1000)
INF = np.float32(np.inf)
WEIGH = CpuKernel("test_weigh", "sampling/weights.h", "const int32_t *n = args[2];\nconst float *t = args[3];\n"
                  "*(double *)args[4] = ingot_weigh_into(args[1], args[0], *n, ingot_peak(args[0], *n), 1.0f / *t);")
PARAMS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.0}, {"temperature": 1.0, "logprobs": 0}, {"temperature": 0.01}, {"temperature": 1000.0},
    {"temperature": 2e-6},
    {"temperature": 1.0, "top_k": 1}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_k": 2000},
    {"temperature": 1.0, "top_k": 1 << 40}, {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_p": 1e-60},
    {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 9.0, "top_p": 0.999999},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.0, "min_p": 1.0}, {"temperature": 1.0, "min_p": 1e-9},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.7, "min_p": 0.02}, {"temperature": 1.0, "top_k": 3, "top_p": 0.6},
)
"""What a row may ask for without lists of tokens."""


@pytest.fixture(scope="module", params=[*ALL_ISAS, "cc"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """cc: the host's compiler, which vectorises in another way."""
    every = [WEIGH, *(kernel for size in VOCABS for kernel in kernels(size))]
    folder = tmp_path_factory.mktemp("sampling")
    if request.param != "cc":
        return Library(every, request.param, folder)
    if shutil.which("cc") is None:
        pytest.skip("no host cc")
    return Library(every, HOST_ISAS[-1], folder, "cc")


def adversarial_rows(size: int) -> list[np.ndarray]:
    """Rows of logits that an implementation may trip over."""
    rng = np.random.default_rng(size)
    rows: list[np.ndarray] = [rng.normal(size=size) * spread for spread in (0.01, 1, 3, 30)]
    rows += [rng.integers(-2, 3, size), np.zeros(size), np.full(size, -7.5), np.arange(size) * 0.01,
             np.arange(size)[::-1] * 0.01, np.where(np.arange(size) % 2, -0.0, 0.0), rng.normal(size=size) * 1e-40,
             np.float32(1) + rng.integers(0, 40, size) * np.float32(2**-23), rng.uniform(-3, 3, size) * 1e38,
             np.where(rng.random(size) < 0.5, -np.inf, rng.normal(size=size)), np.full(size, -3e38),
             np.full(size, 3e38), np.where(np.arange(size) == size // 2, 4.0, -np.inf),
             np.where(np.arange(size) == size - 1, 50.0, 0.0),
             np.concatenate([[10.0], np.full(size - 1, -15.5)])]
    return [row.astype(np.float32) for row in rows]


def of(params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = (), index: int = 0,
       ) -> SequenceSampling:
    state = SequenceSampling(params.seeded(), prompt, index=index)
    for token in answer:
        state.append(token)
    return state


def row_of(params: SamplingParams, **more: Any) -> Row:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return Row(**{name: getattr(params, name) for name in names}, seed=params.seed or 0, **more)


def test_weights_to_the_last_bit(library: Library) -> None:
    rng = np.random.default_rng(0)
    x = placed(np.concatenate([-rng.random(4000) * 30, rng.normal(size=900) * 1e-3, [0, -0.0, -np.inf, -1e30]],
                              dtype=np.float32))
    for temperature in (1.0, 0.37, 6.0):
        w, total = aligned((len(x) + 16,)), np.zeros(1)
        library.run(WEIGH, Step.of_tokens(1), x, w, np.array([len(x)], np.int32), np.array([temperature], np.float32),
                    total)
        want = reference.weights(x, temperature)
        assert np.array_equal(w[:len(x)], want)
        assert total[0] == want.sum() == want[::-1].sum()


def test_the_exponential_is_one() -> None:
    x = np.linspace(-30, 30, 100001).astype(np.float32)
    assert np.abs(reference.exp(x) / np.exp(x.astype(np.float64)) - 1).max() < 1.2e-7


def test_philox_known_answers() -> None:
    """From the test vectors of Random123."""
    ones = 0xFFFFFFFF
    assert reference.philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference.philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert reference.philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("workers", [1, 3])
def test_tokens_of_any_row(library: Library, vocab_size: int, workers: int) -> None:
    rows = adversarial_rows(vocab_size)
    cases = [(row, SamplingParams(seed=i * 977 + j, **params))
             for i, row in enumerate(rows) for j, params in enumerate(PARAMS)]
    inputs = SamplingInputs(len(cases), vocab_size, 16)
    inputs.fill([of(params) for _, params in cases])
    tokens = run(library, inputs, placed(np.array([row for row, _ in cases])), workers=workers).tokens
    for i, (row, params) in enumerate(cases):
        assert tokens[i] == reference.choose(row, row_of(params), i), (i // len(PARAMS), params)


def modified_cases(size: int) -> list[tuple[SequenceSampling, Row]]:
    rng = np.random.default_rng(4)
    cases = []
    for i in range(40):
        prompt, answer = (rng.integers(0, size, n).tolist() for n in (30, 12))
        bias = {int(t): float(rng.normal() * 3) if rng.random() < 0.7 else -np.inf for t in rng.integers(0, size, 9)}
        asked: dict[str, Any] = {"temperature": float(rng.choice([0, 0.7, 1.5])), "seed": i}
        if i % 2:
            asked |= {"repetition_penalty": float(rng.choice([0.6, 1.3])), "presence_penalty": float(rng.normal() / 2),
                      "frequency_penalty": float(rng.normal() / 2)}
        if i % 3:
            asked["logit_bias"] = bias
        if i % 4 == 3:
            asked |= {"top_k": 20, "top_p": 0.8}
        if i % 5 == 4:
            asked["prompt_ignore_length"] = 10
        params = SamplingParams(**asked)
        counted = answer + (prompt[10:] if i % 5 == 4 else [])
        history = {token: counted.count(token) for token in prompt + answer} if i % 2 else {}
        cases.append((of(params, prompt, answer),
                      row_of(params, history=history, biases=tuple(params.logit_bias.items()))))
    return cases


@pytest.mark.parametrize("vocab_size", VOCABS[1:])
def test_tokens_of_rows_with_biases_penalties_and_masks(library: Library, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    cases = modified_cases(vocab_size)
    logits = placed((rng.normal(size=(len(cases), vocab_size)) * 2).astype(np.float32))
    inputs = SamplingInputs(len(cases), vocab_size, 64)
    inputs.fill([state for state, _ in cases])
    changed = 0
    for masked in (False, True):
        allowed = rng.random((len(cases), vocab_size)) < 0.4
        if masked:
            bits = np.packbits(allowed, axis=1, bitorder="little")
            inputs.masks.view(np.uint8)[:, :bits.shape[1]] = bits[::-1]
            inputs.rows["mask_row"] = np.arange(len(cases))[::-1]
        tokens = run(library, inputs, logits, workers=2).tokens
        for i, (_, row) in enumerate(cases):
            full = Row(**{**vars(row), "allowed": allowed[i] if masked else None})
            assert tokens[i] == reference.choose(logits[i], full, i), (i, full)
            assert not masked or allowed[i, tokens[i]]
            changed += tokens[i] != reference.choose(logits[i], Row(row.temperature, seed=row.seed), i)
    assert changed > len(cases) // 2  # the lists do matter


def test_logits_that_are_no_distribution(library: Library) -> None:
    size = VOCABS[2]
    rng = np.random.default_rng(1)
    logits = placed(rng.normal(size=(12, size)).astype(np.float32))
    for row, (place, value) in enumerate([(0, np.nan), (size - 1, np.nan), (CHUNK_TOKENS + 3, np.inf), (7, np.inf)]):
        logits[row, place] = value
        logits[row + 4, place] = value
    logits[8:10] = -np.inf
    inputs = SamplingInputs(12, size, 16)
    ban_all = [of(SamplingParams(temperature=t, seed=1, logprobs=2)) for t in (0.0, 1.0)]
    inputs.fill([of(SamplingParams(temperature=t, seed=1, top_p=0.9, logprobs=2)) for t in [0.0] * 4 + [1.0] * 6]
                + ban_all)
    inputs.rows["mask_row"][10:] = [0, 1]  # masks without a bit
    outputs = run(library, inputs, logits, workers=2)
    assert outputs.tokens.tolist() == [-1] * 12
    assert np.isnan(outputs.logprobs).all()
    assert (outputs.ranks == 0).all()
    assert (outputs.top_ids[:10, :2] == -1).all()
    assert np.array_equal(outputs.top_ids[10:, :2], [reference.ranking(row)[:2] for row in logits[10:]])


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("workers", [1, 4])
def test_log_probabilities_and_ranks(library: Library, vocab_size: int, workers: int) -> None:
    rows = [row for row in adversarial_rows(vocab_size) if row.max() > -INF]
    rng = np.random.default_rng(3)
    asked: list[SequenceSampling | Score | None] = []
    for i, row in enumerate(rows):
        if i % 2:
            asked.append(Score(int(rng.integers(vocab_size)), i % 21))
        else:
            bias = {int(np.argmax(row)): -50.0}  # what is reported is the model's own, not what is chosen from
            asked.append(of(SamplingParams(temperature=1.5, seed=i, logprobs=i, logit_bias=bias)))
    inputs = SamplingInputs(len(rows), vocab_size, 16)
    inputs.fill(asked)
    outputs = run(library, inputs, placed(np.array(rows)), workers=workers)
    for i, (row, entry) in enumerate(zip(rows, asked, strict=True)):
        count = entry.num_logprobs if isinstance(entry, Score) else i
        want, order = reference.log_probabilities(row), reference.ranking(row)
        token = int(outputs.tokens[i])
        assert not isinstance(entry, Score) or token == entry.token
        tolerance = 3e-6 * max(1.0, float(np.abs(want[np.isfinite(want)]).max()))
        assert outputs.logprobs[i] == want[token] or abs(outputs.logprobs[i] - want[token]) < tolerance, (i, token)
        assert outputs.ranks[i] == np.flatnonzero(order == token)[0] + 1
        found = min(count, vocab_size)
        assert np.array_equal(outputs.top_ids[i, :count], [*order[:found], *[-1] * (count - found)])
        np.testing.assert_allclose(outputs.top_logprobs[i, :found], want[order[:found]], rtol=0, atol=tolerance)
        assert (outputs.top_logprobs[i, found:count] == -INF).all()
        assert (outputs.top_ids[i, count:] == -99).all()


def test_neither_workers_nor_batch_mates_matter(library: Library) -> None:
    size = VOCABS[2]
    rng = np.random.default_rng(8)
    logits = placed((rng.normal(size=(30, size)) * 2).astype(np.float32))
    states = [of(SamplingParams(**{"seed": i, "logprobs": 3, **PARAMS[i % len(PARAMS)]})) for i in range(30)]
    everything = SamplingInputs(30, size, 16)
    everything.fill(states)
    want = run(library, everything, logits)
    want_values = [np.copy(array) for array in vars(want).values()]
    for workers in (2, 7, 64):
        found = run(library, everything, logits, workers=workers)
        for array, values in zip(vars(found).values(), want_values, strict=True):
            assert array.tobytes() == values.tobytes()
    few = rng.permutation(30)[:4]
    inputs = SamplingInputs(6, size, 16)
    inputs.fill([None, *(states[i] for i in few)])
    outputs = run(library, inputs, placed(np.concatenate([logits[:1], logits[few]])), [0, *few], workers=5)
    assert outputs.tokens[0] == -99  # nothing was asked of it
    for array, values in zip(vars(outputs).values(), want_values, strict=True):
        assert array[1:5].tobytes() == values[few].tobytes()


def test_no_row_at_all(library: Library) -> None:
    inputs = SamplingInputs(3, 37, 16)
    inputs.fill([of(SamplingParams())] * 2)
    inputs.clear()
    assert (run(library, inputs, placed(np.zeros((3, 37), np.float32))).tokens == -99).all()


@pytest.mark.parametrize(("params", "index"), [
    ({"temperature": 1.0}, 0), ({"temperature": 0.6}, 3), ({"temperature": 2.0, "top_k": 7}, 0),
    ({"temperature": 1.0, "top_p": 0.8}, 0), ({"temperature": 1.0, "min_p": 0.1}, 1)])
def test_tokens_come_in_their_proportion(library: Library, params: dict[str, Any], index: int) -> None:
    """Pearson's chi-square over 8,000 positions of one seed, against its 99.99 % quantile (Wilson and Hilferty)."""
    row = np.random.default_rng(2).normal(size=37).astype(np.float32)
    asked = SamplingParams(seed=11, **params)
    inputs = SamplingInputs(500, 37, 16)
    inputs.fill([of(asked, index=index)] * 500)
    logits = placed(np.tile(row, (500, 1)))
    drawn = [run(library, inputs, logits, range(begin, begin + 500)).tokens.copy() for begin in range(0, 8000, 500)]
    counts = np.bincount(np.concatenate(drawn), minlength=37)
    w = reference.truncate(row, np.exp((row.astype(np.float64) - row.max()) / asked.temperature), row_of(asked))
    expected = w / w.sum() * 8000
    assert (counts[expected == 0] == 0).all()
    used = expected > 0
    statistic, freedom = float(((counts - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.719 * np.sqrt(spread)) ** 3
    assert (counts[used] > 0).sum() > 0.8 * used.sum()


def test_seed_stream_and_position_each_matter(library: Library) -> None:
    logits = placed(np.zeros((64, 37), np.float32))

    def drawn(seed: int, index: int, begin: int) -> list[int]:
        inputs = SamplingInputs(64, 37, 16)
        inputs.fill([of(SamplingParams(temperature=1.0, seed=seed), index=index)] * 64)
        return run(library, inputs, logits, range(begin, begin + 64)).tokens.tolist()

    first = drawn(5, 0, 0)
    assert drawn(5, 0, 0) == first
    assert drawn(5, 0, 32)[:32] == first[32:]
    others = [drawn(6, 0, 0), drawn(5, 1, 0), drawn(5 + (1 << 32), 0, 0), drawn(5, 0, 1000)]
    assert all(np.mean(np.equal(other, first)) < 0.3 for other in others)

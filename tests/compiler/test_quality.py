"""Perplexity: against the definition, however windows and rows are cut."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ingot.compiler.quality import Scorer, documentation_text, perplexity
from ingot.runtime.errors import RequestError

VOCAB_SIZE = 50
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 103).tolist()


def logits(tokens: Sequence[int]) -> np.ndarray:
    """A model whose prediction depends on the last two tokens."""
    rows = [np.random.default_rng([token, before]).standard_normal(VOCAB_SIZE) * 3 + 500
            for before, token in zip([0, *tokens], tokens, strict=False)]
    return np.array(rows, np.float32)


def scorer(rows: int) -> Scorer:
    """In arrays of `rows` rows, each of which is overwritten when the next is asked for."""
    def score(tokens: Sequence[int]) -> Iterator[np.ndarray]:
        buffer = np.empty((rows, VOCAB_SIZE), np.float32)
        whole = logits(tokens)
        for begin in range(0, len(tokens), rows):
            part = whole[begin : begin + rows]
            buffer[: len(part)] = part
            yield buffer[: len(part)]
            buffer[:] = np.nan
    return score


def expected(window: int, prefix: list[int]) -> tuple[float, int]:
    nlls = []
    size = window - len(prefix)
    for begin in range(0, len(TOKENS), size):
        ids = prefix + TOKENS[begin : begin + size]
        rows = logits(ids).astype(np.float64)
        for i in range(max(len(prefix), 1), len(ids)):
            row = rows[i - 1]
            nlls.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[i]])
    return float(np.mean(nlls)), len(nlls)


@pytest.mark.parametrize("rows", [1, 3, 16, 200])
@pytest.mark.parametrize(("window", "prefix"), [(10, []), (17, []), (103, []), (500, []), (10, [1]), (17, [1, 2, 3])])
def test_the_definition(window: int, prefix: list[int], rows: int) -> None:
    found = perplexity(scorer(rows), TOKENS, window, prefix)
    mean, count = expected(window, prefix)
    assert found.num_tokens == count
    assert found.mean_nll == pytest.approx(mean, rel=1e-5)
    assert found.value == pytest.approx(np.exp(mean), rel=1e-4)


def test_how_many_tokens_are_predicted() -> None:
    assert perplexity(scorer(4), TOKENS, 10).num_tokens == 103 - 11
    assert perplexity(scorer(4), TOKENS[:101], 10).num_tokens == 100 - 10  # the last window has one token
    assert perplexity(scorer(4), TOKENS, 10, [1]).num_tokens == 103


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    perplexity(scorer(4), TOKENS, 50, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(50, 103), (100, 103), (103, 103)]


def test_too_short() -> None:
    with pytest.raises(RequestError, match="a text of 1 tokens predicts none"):
        perplexity(scorer(4), [5], 10)
    with pytest.raises(RequestError, match="windows of 3 tokens hold 1 of the text"):
        perplexity(scorer(4), TOKENS, 3, [1, 2])


def test_the_documentation_is_a_long_text_and_always_the_same() -> None:
    text = documentation_text()
    assert len(text) > 300_000
    assert text == documentation_text()
    assert "assert_stmt" not in text[:100]  # topics' texts, not their names

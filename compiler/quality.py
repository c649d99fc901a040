"""Perplexity on a held-out text, of engines and of the reference alike."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.runtime.engine import Engine
from ingot.runtime.errors import RequestError

from .reference_model import ReferenceModel

Scorer = Callable[[Sequence[int]], Iterable[np.ndarray]]
"""Token ids of a window -> its logits [T, vocab_size], a few rows at a time, each valid until the next."""

DEFAULT_WINDOW = 512


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood (in nats) of num_tokens predicted tokens."""

    mean_nll: float
    num_tokens: int

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)


def engine_scorer(engine: Engine) -> Scorer:
    return engine.iter_logits


def reference_scorer(model: ReferenceModel) -> Scorer:
    return lambda tokens: [model.logits(tokens)]


def perplexity(score: Scorer, tokens: Sequence[int], window: int = DEFAULT_WINDOW, prefix: Sequence[int] = (),
               progress: Callable[[int, int], None] = lambda done, total: None) -> Perplexity:
    """Over windows of `window` tokens that do not overlap; all but the first token of a window are predicted.

    prefix: tokens that open every window (BOS, for models that expect it); part of its length, never predicted but
    for their last, which predicts the first token of the text. A last window of one token is left out.
    """
    size = window - len(prefix)
    if size < 2:
        raise RequestError(f"windows of {window} tokens hold {max(size, 0)} of the text; expected at least 2")
    total, count = 0.0, 0
    skipped = max(len(prefix), 1)
    for begin in range(0, len(tokens), size):
        ids = [*prefix, *tokens[begin : begin + size]]
        if len(ids) > skipped:
            total += _nll(score(ids), ids, skipped)
            count += len(ids) - skipped
        progress(min(begin + size, len(tokens)), len(tokens))
    if count == 0:
        raise RequestError(f"a text of {len(tokens)} tokens predicts none; expected at least 2")
    return Perplexity(total / count, count)


def _nll(chunks: Iterable[np.ndarray], ids: Sequence[int], skipped: int) -> float:
    """Sum of the negative log-likelihoods of ids[skipped:]."""
    total, begin = 0.0, 0
    for logits in chunks:
        # Row i predicts token i + 1; of the first `skipped` tokens none counts, and the last row predicts nothing.
        first, last = max(skipped - 1 - begin, 0), min(len(logits), len(ids) - 1 - begin)
        for row in range(first, last):
            scores, target = logits[row], ids[begin + row + 1]
            highest = scores.max()
            total += math.log(np.exp(scores - highest).sum(dtype=np.float64)) + float(highest) - float(scores[target])
        begin += len(logits)
    return total


def documentation_text() -> str:
    """A free text that is there wherever Python is: the topics of its documentation, in the order of their names.

    PSF licence; some 470,000 characters. It changes with Python's version, so that figures name that.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RequestError("this Python lacks its documentation (pydoc_data); give a text of your own") from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))

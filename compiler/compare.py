"""An engine against its checkpoint in Hugging Face's implementation: layer by layer, logits, and greedy answers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.runtime.engine import Engine
from ingot.runtime.errors import RequestError
from ingot.runtime.sampling import SamplingParams

from .reference_model import ReferenceModel

# What rounding in float32 explains; of other precisions the user says what is good enough.
DEFAULT_BOUNDS = {"fp32": 1e-4}
NEAR_TIE = 1e-3
"""Where the reference's two best logits are this close, either token is right."""


@dataclass(frozen=True)
class Difference:
    """How far `got` is from `expected`, over all tokens.

    relative: ||got - expected|| / ||expected||. cosine: of the angle between them.
    own: of a layer, the error that it adds itself: ||got - expected|| / ||expected - input||, the engine's own input
    given to both; None where that is not what another traced part gives
    """

    name: str
    relative: float
    max_abs: float
    cosine: float
    own: float | None = None


@dataclass(frozen=True)
class GreedyDifference:
    """A token of a greedy answer that differs. gap: of the reference's two best logits there."""

    prompt: int
    position: int
    gap: float


@dataclass(frozen=True)
class Greedy:
    """num_tokens were generated in all; after a difference the engine goes on from the reference's token."""

    num_tokens: int
    differences: tuple[GreedyDifference, ...]

    @property
    def largest_gap(self) -> float:
        return max((difference.gap for difference in self.differences), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """top1_agreement: share of tokens with the same best next token. kl_divergence: mean over tokens, in nats.

    bound is None if nothing was asked: then the comparison only reports.
    """

    num_tokens: int
    layers: tuple[Difference, ...]
    untraced: tuple[str, ...]
    logits: Difference
    top1_agreement: float
    kl_divergence: float
    greedy: Greedy
    bound: float | None

    @property
    def largest(self) -> Difference:
        return max((*self.layers, self.logits), key=lambda difference: difference.relative)

    @property
    def worst_layers(self) -> list[Difference]:
        """Those that add most to the error, first."""
        return sorted((layer for layer in self.layers if layer.own is not None), key=lambda layer: -(layer.own or 0))

    @property
    def failures(self) -> list[str]:
        """What exceeds the bound; empty if the engine is as good as asked."""
        if self.bound is None:
            return []
        worst, found = self.largest, []
        if not worst.relative <= self.bound:  # not >: a NaN fails too
            found.append(f"relative error {worst.relative:.2e} of {worst.name} exceeds {self.bound:.2e}")
        if self.bound <= DEFAULT_BOUNDS["fp32"] and self.greedy.largest_gap > NEAR_TIE:
            found.append(f"a greedy token differs where the reference's two best logits differ by "
                         f"{self.greedy.largest_gap:.2e}, more than {NEAR_TIE:.0e}")
        return found


def difference(name: str, got: np.ndarray, expected: np.ndarray) -> Difference:
    """Of two arrays with equally many elements; computed in float64."""
    a, b = (np.asarray(array, np.float64).ravel() for array in (got, expected))
    norm_a, norm_b, distance = np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(a - b)
    if norm_b == 0:
        relative, cosine = (0.0, 1.0) if norm_a == 0 else (float("inf"), 0.0)
    else:
        relative, cosine = float(distance / norm_b), float(a @ b / (norm_a * norm_b)) if norm_a else 0.0
    return Difference(name, relative, float(np.abs(a - b).max()), cosine)


def compare(engine: Engine, reference: ReferenceModel, prompts: Sequence[Sequence[int]], num_new_tokens: int,
            max_relative_error: float | None = None) -> Comparison:
    """Compare on the first prompt layer by layer, on all of them by greedy answers of num_new_tokens.

    max_relative_error: None takes the engine's precision's own bound, if it has one.
    Raises RequestError if the two have different vocabularies.
    """
    tokens = prompts[0]
    probes = engine.file.plan["probes"]
    values = engine.trace(tokens, set(probes.values()))
    expected_logits, expected = reference.traced(tokens, probes)
    logits = engine.logits(tokens)
    if logits.shape != expected_logits.shape:
        raise RequestError(f"the engine has {logits.shape[1]} logits a token, the checkpoint "
                           f"{expected_logits.shape[1]}; is it the one that the engine was built from?")
    if max_relative_error is None:
        max_relative_error = DEFAULT_BOUNDS.get(engine.file.manifest["precision"])
    labels = {value: label for label, value in probes.items()}
    traced = {labels[name]: value for name, value in values.items()}
    layers = tuple(_layer(name, value, expected[name], len(tokens)) for name, value in traced.items())
    own = own_errors(reference, tokens, traced)
    layers = tuple(replace(layer, own=own.get(layer.name)) for layer in layers)
    return Comparison(
        num_tokens=len(tokens), layers=layers,
        untraced=tuple(label for label, value in probes.items() if value not in values),
        logits=difference("logits", logits, expected_logits),
        top1_agreement=float((logits.argmax(1) == expected_logits.argmax(1)).mean()),
        kl_divergence=kl_divergence(expected_logits, logits),
        greedy=compare_greedy(engine, reference, prompts, num_new_tokens),
        bound=max_relative_error,
    )


def _layer(name: str, got: np.ndarray, expected: np.ndarray, num_tokens: int) -> Difference:
    """What only the logits need is computed for the last tokens only."""
    width = expected.size // num_tokens
    rows, rest = divmod(got.size, width)
    if rest or rows > num_tokens:
        raise RequestError(f"{name} gives {expected.shape} in the checkpoint and {got.shape} in the engine; "
                           "is it the one that the engine was built from?")
    return difference(name, got, expected.reshape(num_tokens, width)[num_tokens - rows :])


def own_errors(reference: ReferenceModel, tokens: Sequence[int], traced: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Layer -> the error that it adds to what the layers before it gave, as a part of what it changes.

    traced: what the engine computed for the layers' outputs, in the order of execution. The first has no layer before
    it and is left out, as is what is fused into others.
    """
    found = {}
    for name, (given, expected) in reference.responses(tokens, traced).items():
        got = traced[name].reshape(-1, expected.shape[1])
        rows = len(got)
        change = np.linalg.norm((expected - given.reshape(expected.shape))[-rows:].astype(np.float64))
        error = np.linalg.norm((got - expected[-rows:]).astype(np.float64))
        found[name] = float(error / change) if change else float(error > 0)
    return found


def kl_divergence(expected_logits: np.ndarray, logits: np.ndarray) -> float:
    """Of the distributions [T, V] that the engine gives from those of the reference; mean over T, in nats."""
    total = 0.0
    for row, other in zip(expected_logits, logits, strict=True):
        p, q = _log_softmax(row), _log_softmax(other)
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(logits)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def compare_greedy(engine: Engine, reference: ReferenceModel, prompts: Sequence[Sequence[int]],
                   num_new_tokens: int) -> Greedy:
    """Every token of the greedy answers to all prompts; num_new_tokens may be 0."""
    if num_new_tokens == 0:
        return Greedy(0, ())
    params = SamplingParams(max_tokens=num_new_tokens, ignore_eos=True)
    answers = [answer.token_ids for answer in engine.generate(list(prompts), params)]
    found: list[GreedyDifference] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        chosen = list(reference.greedy(prompt, num_new_tokens))
        expected = [token for token, _ in chosen]
        begin = 0
        while (begin := _first_difference(answer, expected, begin)) is not None:
            found.append(GreedyDifference(number, begin, chosen[begin][1]))
            begin += 1
            if begin == num_new_tokens:
                break
            rest = SamplingParams(max_tokens=num_new_tokens - begin, ignore_eos=True)
            answer = expected[:begin] + engine.generate([*prompt, *expected[:begin]], rest).token_ids
    return Greedy(num_new_tokens * len(prompts), tuple(found))


def _first_difference(a: Sequence[int], b: Sequence[int], begin: int) -> Any:
    return next((i for i in range(begin, len(b)) if a[i] != b[i]), None)

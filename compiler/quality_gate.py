"""The quality of an engine against the model that it was built from: measured, recorded in the manifest, asked for."""
from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.engine import Engine
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.host import available_memory_bytes, cpu_features

from .checkpoint.checkpoint import Checkpoint
from .compare import own_errors
from .quality import Scorer, engine_scorer, reference_scorer
from .reference_model import ReferenceModel
from .tokenizer import TOKENIZER

NUM_TOKENS = 6_000
WINDOW = 256
"""Tokens that a model reads at a time: the logits of a window are in memory together."""

NUM_WORST = 3


def held_out_text() -> str:
    """English prose, a letter, code, and much technical writing; no part of the text that calibration reads."""
    return (Path(__file__).parent / "calibration" / "held_out.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Gate:
    """max_perplexity_increase: 0.01 for one per cent. min_top1_agreement: 0 to 1. max_kl_divergence: nats. None: not
    asked."""

    max_perplexity_increase: float | None = None
    min_top1_agreement: float | None = None
    max_kl_divergence: float | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for figures that mean nothing."""
        if self.max_perplexity_increase is not None and not 0 <= self.max_perplexity_increase < math.inf:
            raise RequestError(f"the largest increase of perplexity is {self.max_perplexity_increase}; expected 0 or "
                               "more, such as 1%")
        if self.min_top1_agreement is not None and not 0 <= self.min_top1_agreement <= 1:
            raise RequestError(f"the least agreement of best tokens is {self.min_top1_agreement}; expected 0 to 1, "
                               "such as 0.97")
        if self.max_kl_divergence is not None and not 0 <= self.max_kl_divergence < math.inf:
            raise RequestError(f"the largest KL divergence is {self.max_kl_divergence}; expected 0 or more nats, such "
                               "as 0.005")

    @property
    def is_set(self) -> bool:
        return (self.max_perplexity_increase, self.min_top1_agreement, self.max_kl_divergence) != (None, None, None)


@dataclass(frozen=True)
class LayerError:
    """error: what the layer adds itself, as a part of what it changes; see compare.own_errors."""

    name: str
    error: float


@dataclass(frozen=True)
class Quality:
    """Of an engine against transformers in float32, over `num_tokens` predicted tokens of a held-out text.

    perplexity_increase  of the engine's over the reference's, 0.01 for one per cent
    standard_error       of that increase, from the differences between the two token by token
    top1_agreement       share of tokens with the same most probable next token
    kl_divergence        of the engine's distributions from the reference's; mean, in nats
    worst_layers         those that add most to the error, first
    text_sha256          of the text; window: tokens that were read at a time
    """

    perplexity: float
    reference_perplexity: float
    perplexity_increase: float
    standard_error: float
    top1_agreement: float
    kl_divergence: float
    worst_layers: tuple[LayerError, ...]
    num_tokens: int
    window: int
    text_sha256: str

    def to_json(self) -> dict[str, Any]:
        """For the manifest; rounded to what a repetition gives again."""
        entries = {name: _rounded(value) for name, value in asdict(self).items()}
        layers = [{"name": layer.name, "error": _rounded(layer.error)} for layer in self.worst_layers]
        return entries | {"worst_layers": layers, "reference": "transformers, float32",
                          "command": "ingot compare ENGINE CHECKPOINT --quality"}

    def describe(self) -> list[tuple[str, str]]:
        """For people: a name and a text each."""
        layers = ", ".join(f"{layer.name} {layer.error:.1e}" for layer in self.worst_layers)
        return [
            ("perplexity", f"{self.perplexity:.4f}, the checkpoint's in float32 {self.reference_perplexity:.4f} "
                           f"({increase_text(self.perplexity_increase, self.standard_error)})"),
            ("agreement", f"best next token equal for {self.top1_agreement:.2%} of {self.num_tokens} tokens, "
                          f"KL divergence {self.kl_divergence:.2e} nats"),
            ("worst layers", layers or "(none traced)"),
        ]

    def require(self, gate: Gate, what: str) -> None:
        """Raises WorkFailed that names the layers which err most, if the engine is worse than the gate allows."""
        found = []
        most, least = gate.max_perplexity_increase, gate.min_top1_agreement
        if most is not None and not self.perplexity_increase <= most:
            found.append(f"its perplexity of {self.perplexity:.4f} is {self.perplexity_increase:.2%} above the "
                         f"checkpoint's {self.reference_perplexity:.4f}; at most {most:.2%} was asked for")
        if least is not None and not self.top1_agreement >= least:
            found.append(f"its best next token is the checkpoint's for {self.top1_agreement:.2%} of the tokens; at "
                         f"least {least:.2%} was asked for")
        if gate.max_kl_divergence is not None and not self.kl_divergence <= gate.max_kl_divergence:
            found.append(f"the KL divergence of its predictions is {self.kl_divergence:.3g} nats; at most "
                         f"{gate.max_kl_divergence:.3g} was asked for")
        if found:
            layers = ", ".join(f"{layer.name} ({layer.error:.2%})" for layer in self.worst_layers)
            raise WorkFailed(f"{what} is not good enough: {'; '.join(found)}.\n  No engine was written. The layers "
                             f"that err most (error, as a part of what the layer changes): {layers or 'unknown'}.\n"
                             "  A precision of more bits errs less: ingot targets lists them.")


def increase_text(increase: float, standard_error: float) -> str:
    """Such as "+0.36% ± 0.11%". An increase of -1e-9 is none."""
    return f"{round(increase, 6) + 0.0:+.2%} ± {standard_error:.2%}"


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def require_measurable(machine: str, features: Sequence[str], checkpoint: Checkpoint, tokenizer: Collection[str],
                       ) -> None:
    """Told before the work: raises RequestError where an engine for that machine cannot be run here, where its
    checkpoint has no tokenizer, and where the reference model does not fit the memory."""
    missing = sorted(set(features) - cpu_features())
    if machine != platform.machine() or missing:
        needs = f"{machine} with {', '.join(missing)}" if missing else machine
        raise RequestError("quality is measured by running the engine, which this machine cannot: it is for "
                           f"{needs}. Build for this machine's instructions, or leave the measurement out")
    if TOKENIZER not in tokenizer:
        raise RequestError(f"{checkpoint.path} has no tokenizer, so that no text can be read: the quality of its "
                           "engine cannot be measured")
    size = 4 * sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    available = available_memory_bytes()
    if size > available > 0:
        raise RequestError(f"quality is measured against the model in float32, which takes {size / 1e9:.1f} GB; "
                           f"{available / 1e9:.1f} GB are available")


def quality_of(engine: str | os.PathLike[str], checkpoint: str,
               progress: Callable[[int, int], None] = lambda done, total: None, *,
               device: str | None = None, store: str | os.PathLike[str] | None = None) -> Quality:
    """Of an engine against its checkpoint. engine, device, store: as Engine.load has them."""
    with Engine.load(engine, device=device, store=store, kv_cache_tokens=WINDOW) as loaded:
        return measure_quality(loaded, ReferenceModel(checkpoint), progress)


def measure_quality(engine: Engine, reference: ReferenceModel,
                    progress: Callable[[int, int], None] = lambda done, total: None) -> Quality:
    """Runs both over the held-out text. Memory: the logits of a window, once; the reference model besides.

    Raises RequestError for an engine without a tokenizer, or one whose sequences are too short to tell anything.
    """
    if engine.tokenizer is None:
        raise RequestError("the engine has no tokenizer, so that no text can be read: its quality cannot be measured")
    text = held_out_text()
    prefix = engine.tokenizer.encode("")
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)[:NUM_TOKENS]
    window = min(WINDOW, engine.limits.max_seq_len)
    size = window - len(prefix)
    if size < 2:
        raise RequestError(f"sequences of {window} tokens are too short to measure quality by")
    sums = QualitySums()
    score, expect = engine_scorer(engine), reference_scorer(reference)
    for begin in range(0, len(tokens), size):
        progress(begin, len(tokens))
        ids = [*prefix, *tokens[begin:begin + size]]
        sums.add(score, expect, ids, max(len(prefix), 1))
    traced = min(window, engine.limits.max_num_tokens)
    layers = _layer_errors(engine, reference, [*prefix, *tokens[:traced - len(prefix)]])
    perplexity = _perplexity(sums.nll / sums.count, "engine")
    own = _perplexity(sums.reference_nll / sums.count, "model")
    return Quality(perplexity, own, perplexity / own - 1, sums.standard_error(), sums.agreeing / sums.count,
                   sums.kl / sums.count, tuple(layers[:NUM_WORST]), sums.count, window,
                   hashlib.sha256(text.encode()).hexdigest())


def _perplexity(mean_nll: float, what: str) -> float:
    """Raises WorkFailed where it is no number."""
    if not mean_nll < 700:  # exp(710) is infinite; a NaN is not smaller either
        raise WorkFailed(f"the {what} gives a mean negative log-likelihood of {mean_nll} on the held-out text: it is "
                         "broken")
    return math.exp(mean_nll)


def _layer_errors(engine: Engine, reference: ReferenceModel, ids: Sequence[int]) -> list[LayerError]:
    """Largest first; equal ones in the order of the layers."""
    probes = engine.file.plan["probes"]
    labels = {value: label for label, value in probes.items()}
    traced = {labels[name]: value for name, value in engine.trace(ids, set(probes.values())).items()}
    own = own_errors(reference, ids, traced)
    return sorted((LayerError(name, error) for name, error in own.items()), key=lambda layer: -layer.error)


@dataclass
class QualitySums:
    """Over the tokens that were predicted: negative log-likelihoods, the squares of their differences, KL divergences,
    equal best tokens."""

    nll: float = 0.0
    reference_nll: float = 0.0
    squares: float = 0.0
    kl: float = 0.0
    agreeing: int = 0
    count: int = 0

    def add(self, score: Scorer, expect: Scorer, ids: Sequence[int], skipped: int) -> None:
        """Of a window; the first `skipped` tokens are not predicted."""
        expected = _rows(expect(ids))
        for position, row in enumerate(_rows(score(ids))):
            other = next(expected)
            if skipped - 1 <= position < len(ids) - 1:
                self._add_row(row, other, ids[position + 1])

    def _add_row(self, row: np.ndarray, expected: np.ndarray, target: int) -> None:
        q, p = _log_softmax(row), _log_softmax(expected)
        nll, reference_nll = -float(q[target]), -float(p[target])
        self.nll += nll
        self.reference_nll += reference_nll
        self.squares += (nll - reference_nll) ** 2
        self.kl += float(np.dot(np.exp(p), p - q))
        self.agreeing += int(row.argmax() == expected.argmax())
        self.count += 1

    def standard_error(self) -> float:
        """Of the perplexity's increase: the same texts are read by both, so that only their differences count."""
        mean = (self.nll - self.reference_nll) / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0)
        return math.exp(min(mean, 700.0)) * math.sqrt(variance / self.count)


def _rows(chunks: Iterable[np.ndarray]) -> Any:
    for chunk in chunks:
        yield from chunk


def _log_softmax(row: np.ndarray) -> np.ndarray:
    """f32, its sum in float64."""
    shifted = row - row.max()
    return np.asarray(shifted - np.float32(math.log(np.exp(shifted).sum(dtype=np.float64))))

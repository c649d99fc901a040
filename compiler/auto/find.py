"""The search for a choice of precisions: what it needs of checkpoint, model, texts and cache."""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.runtime.errors import RequestError
from ingot.runtime.host import available_memory_bytes
from ingot.runtime.tokenizer import Tokenizer

from ..cache.build_cache import BuildCache
from ..cache.calibration import Calibration, InputsOfModel, calibrated
from ..cache.packed_weights import packed
from ..cache.tensor_digests import tensor_digests
from ..calibration.text import CalibrationText, default_text, read_text
from ..clock import Clock
from ..model_source import CheckpointSource
from ..passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ..precision import Precision, find_precision, weight_bits, with_layers
from ..quality import Scorer, perplexity, reference_scorer
from ..quality_gate import NUM_TOKENS, WINDOW, held_out_text
from ..reference_model import ReferenceModel
from ..targets import Target
from ..tokenizer import CONFIG, TOKENIZER
from .layers import layers_of
from .rounded import RoundingErrors, weights_to_calibrate
from .search import Found, allowed, candidate_schemes, options_of, search
from .sensitivity import sensitivities
from .simulate import rounded, windows_of
from .units import Unit, find_units

if TYPE_CHECKING:
    from ..build import BuildRequest

NUM_WINDOWS = 8
WINDOW_TOKENS = 128
"""Of the calibration text, by which sensitivities are told."""

BYTES_A_PARAMETER = 12
"""Of the model in float32, a window's activations, and the rounding errors of two schemes."""


@dataclass(frozen=True)
class Choice:
    """base: the precision of the layers that are not named in `layers` (pattern -> precision)."""

    base: str
    layers: dict[str, str]
    found: Found
    warnings: tuple[str, ...]


@dataclass
class Finder:
    """Loads and measures what several searches of one build share."""

    request: BuildRequest
    source: CheckpointSource
    target: Target
    clock: Clock
    cache: BuildCache | None
    warnings: list[str] = field(default_factory=list)

    def find(self, max_increase: float, margin: float) -> Choice:
        """Raises RequestError, WorkFailed; see search."""
        self._require_room()
        options = options_of(self._units, self._losses, self._candidates, self.target)
        with self.clock.stage("search", f"{len(self._units)} groups of layers, {', '.join(self.schemes)}"):
            found = search(options, max_increase, margin, self._measure,
                           lambda line: self.clock.progress("search", line))
        layers = layers_of(self._units, found.schemes, self.base, self.target,
                           self.request.layers or {})
        return Choice(self.base.name, layers, found, tuple(self.warnings))

    @cached_property
    def base(self) -> Precision:
        """That of the fewest bits."""
        known = [find_precision(name, self.target.gpu) for name in self.target.precisions]
        return min(known, key=lambda precision: weight_bits(precision.scheme("linear")))

    @cached_property
    def schemes(self) -> list[str]:
        return candidate_schemes(self.target)

    @cached_property
    def _units(self) -> list[Unit]:
        facts = self.source.facts(self.cache)
        with self.clock.stage("import", f"{self.source.name}: {facts.architecture}"):
            graph, _ = self.source.graph(facts, self._longest, self.cache)
        passes = (cpu_pipeline if self.target.gpu is None else gpu_pipeline)(self.base, self.base.kv)
        before = [name for name, _ in passes].index("assign_precision")
        return find_units(run_passes(graph, passes[:before]))

    @cached_property
    def _longest(self) -> int:
        """Tokens of a sequence."""
        return self.request.max_seq_len or self.source.facts(self.cache).max_positions or WINDOW

    @cached_property
    def _candidates(self) -> list[list[str]]:
        """Schemes of each unit."""
        base = with_layers(self.base, self.request.layers or {}, self.target.gpu)
        return [allowed(unit, self.schemes, base) if unit.role != "experts" else [base.layer_scheme(
            unit.names, unit.role)] for unit in self._units]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        files = self.source.facts(self.cache).tokenizer
        if TOKENIZER not in files:
            raise RequestError(f"{self.source.place} has no tokenizer, so that no text can be read: precision auto "
                               "cannot be found")
        return Tokenizer(files[TOKENIZER], json.loads(files[CONFIG]))

    @cached_property
    def _text(self) -> CalibrationText:
        given = self.request.calibration
        return default_text() if given is None else read_text(given)

    @cached_property
    def _reference(self) -> ReferenceModel:
        return ReferenceModel(str(self.source.checkpoint.path))

    @cached_property
    def _errors(self) -> RoundingErrors:
        checkpoint, calibration = self.source.checkpoint, Calibration()
        digests = tensor_digests(checkpoint, self.cache)
        if self.request.rounding.method != "rtn":
            with self.clock.stage("calibrate", "rounding errors of the weights"):
                inputs = InputsOfModel(checkpoint, digests, self.source.facts(self.cache).tokenizer, self._text,
                                       self.cache, lambda detail: self.clock.progress("calibrate", detail))
                calibration = calibrated(checkpoint, weights_to_calibrate(self._units, self._candidates), inputs)
        self.warnings += calibration.warnings
        return RoundingErrors(checkpoint, self.target, lambda weight: packed(weight, checkpoint, digests, calibration,
                                                                             self.cache))

    @cached_property
    def _losses(self) -> list[dict[str, float]]:
        errors = self._errors
        with self.clock.stage("round", f"{len(self._units)} groups of layers in {', '.join(self.schemes)}"):
            for number, unit in enumerate(self._units):
                self.clock.progress("round", f"{number}/{len(self._units)} {unit.names[0]}")
                for scheme in self._candidates[number]:
                    errors.get(unit, scheme)
        prefix = list(self._tokenizer.encode(""))
        tokens = [token for document in self._text.documents
                  for token in self._tokenizer.encode(document, add_special_tokens=False)]
        windows = windows_of(tokens, prefix, min(WINDOW_TOKENS, self._longest), NUM_WINDOWS)
        with self.clock.stage("sensitivity", f"{windows.size} tokens"):
            losses = sensitivities(self._reference, self._units, self._candidates, self.target, errors, windows,
                                   len(prefix), lambda done, total: self.clock.progress(
                                       "sensitivity", f"{done} of {total} tokens"))
        unknown = [unit for unit, known in zip(self._units, losses, strict=True) if not known]
        if unknown:
            self.warnings.append(f"{len(unknown)} groups of layers, such as {unknown[0].names[0]}, are no matrices of "
                                 f"their own in the model: they get what {self.base.name} gives them")
        return losses

    def _measure(self, schemes: Sequence[str]) -> float:
        """The increase of the perplexity on the held-out text that engines are measured by."""
        prefix = list(self._tokenizer.encode(""))
        tokens = self._tokenizer.encode(held_out_text(), add_special_tokens=False)[:NUM_TOKENS]

        def score(scorer: Scorer, what: str) -> float:
            return perplexity(scorer, tokens, min(WINDOW, self._longest), prefix, lambda done, total: (
                self.clock.progress("search", f"{what}: {done} of {total} tokens"))).mean_nll

        if self._reference_nll is None:
            self._reference_nll = score(reference_scorer(self._reference), "the model itself")
        with rounded(self._reference, self._units, schemes, self.target, self._errors) as scorer:
            return math.expm1(score(scorer, "a choice") - self._reference_nll)

    _reference_nll: float | None = None

    def _require_room(self) -> None:
        size = sum(math.prod(self.source.checkpoint.shape(name)) for name in self.source.checkpoint.names())
        available = available_memory_bytes()
        if BYTES_A_PARAMETER * size > available > 0:
            raise RequestError(f"precision auto is found by running the model in float32, which takes some "
                               f"{BYTES_A_PARAMETER * size / 1e9:.1f} GB; {available / 1e9:.1f} GB are available.\n"
                               "  Name the precisions of layers yourself: --layer, or layers in a recipe")

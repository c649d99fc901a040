"""The search for a choice of precisions: what it needs of checkpoint, model, texts and cache."""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.plugins.linear.gpu_formats import GROUPS
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES, regrouped
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.host import available_memory_bytes
from ingot.runtime.tokenizer import Tokenizer

from ..cache.build_cache import BuildCache
from ..cache.calibration import Calibration, InputsOfModel, calibrated
from ..cache.packed_weights import packed
from ..cache.tensor_digests import tensor_digests
from ..calibration.text import CalibrationText, default_text, read_text
from ..clock import Clock
from ..ir.graph import Graph
from ..model_source import CheckpointSource
from ..passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ..precision import Precision, default_groups, find_precision, weight_bits, with_groups, with_layers
from ..quality import Scorer, perplexity, reference_scorer
from ..quality_gate import NUM_TOKENS, WINDOW, held_out_text
from ..quality_graph import QuantizedGraph
from ..reference_model import ReferenceModel
from ..targets import Target
from ..tokenizer import CONFIG, TOKENIZER
from .gpu_rounding import GpuRounding, SchemeWeights
from .layers import layers_of, precision_names
from .rounded import RoundingErrors, weights_to_calibrate
from .search import Found, allowed, candidate_schemes, options_of, search
from .sensitivity import sensitivities
from .simulate import rounded, windows_of
from .units import Unit, find_units

if TYPE_CHECKING:
    from ..build_request import BuildRequest

NUM_WINDOWS = 8
WINDOW_TOKENS = 128
"""Of the calibration text, by which sensitivities are told."""

BYTES_A_PARAMETER = 12
"""Of the model in float32, a window's activations, and the rounding errors of two schemes."""


Groups = tuple[int, bool]
"""Of four-bit integers on GPUs, all layers alike: channels, and whether there are minimums."""


@dataclass(frozen=True)
class Choice:
    """base: the precision of the layers that are not named in `layers` (pattern -> precision). groups: of four-bit
    integers, where they are not the default."""

    base: str
    layers: dict[str, str]
    found: Found
    warnings: tuple[str, ...]
    groups: Groups | None = None


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
        found: list[tuple[Groups | None, Found]] = []
        refused: list[WorkFailed] = []
        for groups in self._variants:
            try:
                found.append((groups, self._search(groups, max_increase, margin)))
            except WorkFailed as error:
                refused.append(error)
        if not found:
            raise refused[0]
        groups, best = min(found, key=lambda one: one[1].cost.size_bytes)
        layers = layers_of(self._units, [self._plain.get(scheme, scheme) for scheme in best.schemes], self.base,
                           self.target, self.request.layers or {})
        regroups = any(self._plain.get(scheme, scheme) != scheme for scheme in best.schemes)
        return Choice(self.base.name, layers, best, tuple(self.warnings), groups if regroups else None)

    def _search(self, groups: Groups | None, max_increase: float, margin: float) -> Found:
        names = [[name for name in known if groups is None or regrouped(name, *groups) == name]
                 for known in self._candidates]
        losses = [{name: loss for name, loss in known.items() if name in chosen}
                  for known, chosen in zip(self._losses, names, strict=True)]
        options = options_of(self._units, losses, names, self.target)
        schemes = dict.fromkeys(name for chosen in names for name in chosen)
        with self.clock.stage("search", f"{len(self._units)} groups of layers, {', '.join(schemes)}"):
            return search(options, max_increase, margin, self._measure,
                          lambda line: self.clock.progress("search", line))

    @cached_property
    def _variants(self) -> list[Groups | None]:
        """Groups of four-bit integers to search with, the whole model alike: as many channels as there can be, and as
        few, with minimums."""
        gpu = self.target.gpu
        if gpu is None or not any(GPU_SCHEMES[scheme].weights.is_int4 for scheme in self.schemes):
            return [None]
        return [default_groups(), default_groups(min(GROUPS))]

    @cached_property
    def _plain(self) -> dict[str, str]:
        """Scheme with other groups than the default -> scheme of the precision that it belongs to."""
        return {regrouped(scheme, *groups): scheme for groups in self._variants if groups is not None
                for scheme in self.schemes}

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
        passes = (cpu_pipeline if self.target.gpu is None else gpu_pipeline)(self.base, self.base.kv)
        before = [name for name, _ in passes].index("assign_precision")
        return find_units(run_passes(self._graph, passes[:before]))

    @cached_property
    def _graph(self) -> Graph:
        """As it is imported."""
        facts = self.source.facts(self.cache)
        with self.clock.stage("import", f"{self.source.name}: {facts.architecture}"):
            return self.source.graph(facts, self._longest, self.cache)[0]

    @cached_property
    def _longest(self) -> int:
        """Tokens of a sequence."""
        return self.request.max_seq_len or self.source.facts(self.cache).max_positions or WINDOW

    @cached_property
    def _candidates(self) -> list[list[str]]:
        """Schemes of each unit, in all variants."""
        base = with_layers(self.base, self.request.layers or {}, self.target.gpu)
        plain = [allowed(unit, self.schemes, base) for unit in self._units]
        return [list(dict.fromkeys(scheme if groups is None else regrouped(scheme, *groups)
                                   for groups in self._variants for scheme in names)) for names in plain]

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
        checkpoint, calibration, on_gpu = self.source.checkpoint, Calibration(), None
        digests, method = tensor_digests(checkpoint, self.cache), self.request.rounding.method
        if method != "rtn":
            with self.clock.stage("calibrate", "rounding errors of the weights"):
                inputs = InputsOfModel(checkpoint, digests, self.source.facts(self.cache).tokenizer, self._text,
                                       self.cache, lambda detail: self.clock.progress("calibrate", detail))
                if self.target.gpu is None:
                    calibration = calibrated(checkpoint, weights_to_calibrate(self._units, self._candidates), inputs,
                                             method)
                    self.warnings += calibration.warnings
                else:
                    on_gpu = self._on_gpu(inputs, method)
        return RoundingErrors(checkpoint, self.target, lambda weight: packed(weight, checkpoint, digests, calibration,
                                                                             self.cache), on_gpu)

    def _on_gpu(self, inputs: InputsOfModel, method: str) -> GpuRounding:
        """Of every scheme of the target that rounds to fewer than sixteen bits: all layers as an engine of its
        precision has them."""
        found: dict[str, SchemeWeights] = {}
        names = precision_names(self.target)
        for scheme in dict.fromkeys(scheme for known in self._candidates for scheme in known):
            name = names.get(self._plain.get(scheme, scheme), "")
            if weight_bits(scheme) >= 16 or not name:
                continue
            precision = find_precision(name, self.target.gpu)
            if GPU_SCHEMES[scheme].weights.is_int4:
                form = GPU_SCHEMES[scheme].weights
                precision = with_groups(precision, form.channels_per_scale, form.minimum)
            # Errors are told of the model's own matrices: shared experts apart, rows in their order.
            passes = [step for step in gpu_pipeline(precision, precision.kv)
                      if step[0] not in ("join_shared_experts", "part_heads")]
            graph = run_passes(self._graph, passes)
            weights = QuantizedGraph(graph, True).weights
            calibration = calibrated(self.source.checkpoint, weights, inputs, method,
                                     lambda detail, scheme=scheme: self.clock.progress(  # type: ignore[misc]
                                         "calibrate", f"{scheme}, {detail}"))
            self.warnings += [warning for warning in calibration.warnings if warning not in self.warnings]
            found[scheme] = SchemeWeights(weights, calibration)
        return GpuRounding(self.source.checkpoint, found, self._units)

    @cached_property
    def _losses(self) -> list[dict[str, float]]:
        errors = self._errors
        with self.clock.stage("round", f"{len(self._units)} groups of layers in {', '.join(self.schemes)}"):
            for number, unit in enumerate(self._units):
                self.clock.progress("round", f"{number}/{len(self._units)} {unit.names[0]}")
                for scheme in self._candidates[number]:
                    for part in unit.stored:
                        errors.get(part, scheme)
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

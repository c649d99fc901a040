"""Calibration through the cache: what is known of the inputs of each matrix of a checkpoint, for builds of every
precision and target.

One entry says which statistics each parameter has; each of these is an entry of its own, read when it is needed. Both
are named for the checkpoint, its tokenizer and the text, not for what the build does with its weights.
"""
from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from ingot.runtime.errors import WorkFailed

from ..calibration.calibrate import Reading, config_entries, is_rounded, reading, run
from ..calibration.scaled_source import ScaledSource
from ..calibration.scales import spread
from ..calibration.smooth import Choice, choose, column_scale
from ..calibration.statistics import InputStatistics
from ..calibration.text import CalibrationText
from ..checkpoint.checkpoint import Checkpoint
from ..weights.evaluate import TensorSource
from ..weights.expr import input_scales
from ..weights.packed import Moments, PackedWeight
from ..weights.sharding import at_rank
from .build_cache import BuildCache
from .keys import key, library_versions, source_digest
from .tensor_digests import checkpoint_digest

_SOURCES = ("compiler/calibration/calibrate.py", "compiler/calibration/gather.py",
            "compiler/calibration/statistics.py", "compiler/calibration/streamed.py", "compiler/checkpoint",
            "compiler/importer/importer.py",
            "compiler/importer/export.py", "compiler/importer/parameters.py", "compiler/weights/evaluate.py")


class InputsOfModel:
    """Statistics of the inputs of a checkpoint's matrices; gathered when they are first asked for and not in the cache.

    Without a cache they lie in a temporary folder as long as this object.
    """

    def __init__(self, checkpoint: Checkpoint, digests: Mapping[str, str], tokenizer: Mapping[str, bytes],
                 text: CalibrationText, cache: BuildCache | None, progress: Callable[[str], None]) -> None:
        self.checkpoint, self.progress, self.text = checkpoint, progress, text
        self._digests, self._tokenizer = digests, tokenizer
        self._lock = RLock()  # weights are packed side by side
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._cache = cache or self._temporary()
        self._where: dict[str, str] | None = None
        self._last: tuple[str, InputStatistics] | None = None
        self._failure = ""

    # Neither is made for nothing: where no weight is rounded, nobody asks.
    @cached_property
    def read(self) -> Reading | None:
        return reading(self.checkpoint, self._tokenizer, self.text)

    @cached_property
    def key(self) -> str:
        return "" if self.read is None else key(
            tensors=checkpoint_digest(self._digests), config=config_entries(self.checkpoint),
            windows=self.read.windows, prefix=self.read.prefix,
            versions=library_versions("numpy", "torch", "transformers", "gguf"), sources=source_digest(*_SOURCES))

    @property
    def num_tokens(self) -> int:
        return self.read.num_tokens if self.read is not None else 0

    @property
    def failure(self) -> str:
        """Why there are none; "" while nothing went wrong."""
        return "there is no tokenizer" if self.read is None else self._failure

    def parameters(self) -> dict[str, str]:
        """Every parameter whose inputs are known -> which statistics are theirs; equal ones read the same."""
        return dict(self._index())

    def knows(self, parameter: str) -> bool:
        """Whether anything is known of its inputs, of some expert's at least."""
        return parameter in self._index() or any(name.startswith(f"{parameter}[") for name in self._index())

    def statistics(self, parameter: str) -> InputStatistics | None:
        """Of the inputs of the matrix that the model calls so, "name[e]" for expert e; None if they are not known.

        Raises what the checkpoint raises.
        """
        with self._lock:
            where = self._index()
            name = where.get(parameter) or where.get(parameter.partition("[")[0])
            if name is None:
                return None
            if self._last is None or self._last[0] != name:
                found = self._load(name)
                if found is None:  # trimmed away: once more, to where nothing is trimmed
                    self._cache = self._temporary()
                    self._gather()
                    found = self._load(name)
                    assert found is not None, name
                self._last = name, found
            return self._last[1] if self._last[1].is_finite else None

    def _temporary(self) -> BuildCache:
        self._folder = tempfile.TemporaryDirectory(prefix="ingot-calibration-")
        return BuildCache(Path(self._folder.name), limit_bytes=1 << 62)

    def _index(self) -> dict[str, str]:
        if self._where is None and self.read is None:
            self._where = {}
        elif self._where is None and (data := self._cache.get("calibration", self.key)) is not None:
            self._where, self._failure = json.loads(data)
        elif self._where is None:
            self._gather()
        assert self._where is not None
        return self._where

    def _gather(self) -> None:
        assert self.read is not None
        where: dict[str, str] = {}

        def sink(name: str, found: InputStatistics, parameters: list[str]) -> None:
            self._cache.put("calibration", key(of=self.key, entry=name), found.to_bytes())
            where.update(dict.fromkeys(parameters, name))

        try:
            run(self.checkpoint, self.read, sink, self.progress)
        except WorkFailed as error:
            self._failure = str(error)
        self._where = where
        self._cache.put("calibration", self.key, json.dumps([where, self._failure]).encode())

    def _load(self, name: str) -> InputStatistics | None:
        data = self._cache.get("calibration", key(of=self.key, entry=name))
        return None if data is None else InputStatistics.from_bytes(data)


@dataclass
class Calibration:
    """How the weights of an engine are rounded.

    inputs    None if no weight is rounded for its inputs
    choices   name of a packed weight -> its method and scales; a weight that is not there is rounded to nearest
    parameters  name of a packed weight -> the parameter whose statistics are those of its inputs
    scales    see scaled_source.ScaledSource
    warnings  what is rounded to nearest although it was asked otherwise, and why
    """

    inputs: InputsOfModel | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def method(self, weight: PackedWeight) -> str:
        return self.choices[weight.name].method if weight.name in self.choices else "rtn"

    def source(self, checkpoint: Checkpoint) -> TensorSource:
        """What weights are evaluated from."""
        return ScaledSource(checkpoint, self.scales) if self.scales else checkpoint

    def key(self, weight: PackedWeight) -> Any:
        """What a packed weight depends on besides its recipe and the checkpoint; None if on nothing."""
        scales = {part.attr("name"): hashlib.sha256(self.scales[part.attr("name")].tobytes()).hexdigest()
                  for part in input_scales(weight.expr) if part.attr("name") in self.scales}
        method = self.method(weight) if self.inputs is not None else "rtn"
        if method == "rtn" and not scales:
            return None
        return [method, scales, self.inputs.key if method != "rtn" and self.inputs is not None else ""]

    def moments(self, weight: PackedWeight) -> Moments | None:
        """Of a packed weight's inputs; None if it is rounded to nearest."""
        if self.inputs is None or self.method(weight) == "rtn":
            return None
        inputs, parameter, method = self.inputs, self.parameters[weight.name], self.method(weight)
        if weight.shared:
            return _of_stack(inputs, weight, "gptq" in method)
        scale = column_scale(weight)
        values = self.scales.get(scale.attr("name")) if scale is not None else None

        def of(expert: int) -> Sequence[np.ndarray] | None:
            found = inputs.statistics(f"{parameter}[{expert}]")
            if found is not None and scale is not None and values is not None:
                found = found.scaled(1 / spread(values, scale, found.width))
            if found is None:
                return None
            return found.blocks if "gptq" in method else (found.mean_square,)
        return of


def calibrated(checkpoint: Checkpoint, weights: Sequence[PackedWeight], inputs: InputsOfModel, method: str = "best",
               progress: Callable[[str], None] = lambda detail: None) -> Calibration:
    """Weights that rounding changes are rounded for their inputs, where these are known. The model runs only if there
    are such, and the cache does not know. method: key of record.METHODS. Where ranks hold different parts, what is
    chosen for the first one's holds for all."""
    asked = [replace(weight, expr=at_rank(weight.expr, 0)) for weight in weights
             if weight.group or (column_scale(weight) and method in ("awq", "best"))]
    rounded = [weight for weight in asked if is_rounded(weight, checkpoint)]
    choices: dict[str, Choice] = {}
    parameters: dict[str, str] = {}
    scales: dict[str, np.ndarray] = {}
    missing = []
    groups: dict[str, list[PackedWeight]] = {}
    for weight in rounded:
        # Merged matrices read the same input.
        known = next((p for p in weight.parameters if _usable(inputs, p, weight)), None)
        if known is None:
            missing.append(weight.label)
            continue
        scale = column_scale(weight)
        parameters[weight.name] = known
        groups.setdefault(weight.name if scale is None else scale.attr("name"), []).append(weight)
    for number, (name, members) in enumerate(groups.items(), 1):
        progress(f"rounding of {number} of {len(groups)} groups of matrices")
        choice = _choice(members, parameters[members[0].name], checkpoint, inputs, method)
        if choice.scale is not None:
            scales[name] = choice.scale
        choices |= {member.name: choice if member.group or choice.scale is not None else Choice("rtn")
                    for member in members}
    warnings = [f"not calibrated: {len(missing)} of {len(rounded)} weights, such as {missing[0]}; they are "
                "rounded to nearest" + (f": {inputs.failure}" if inputs.failure else "")] if missing else []
    return Calibration(inputs if rounded else None, choices, parameters, scales, tuple(warnings))


def _of_stack(inputs: InputsOfModel, weight: PackedWeight, compensates: bool) -> Moments:
    """Of experts with a shared one behind them, whose parts read all of its inputs, or each its channels of them."""
    width, first = weight.expr.shape[2], weight.expr.shape[0] - weight.shared

    def of(expert: int) -> Sequence[np.ndarray] | None:
        part = expert - first
        found = inputs.statistics(f"{weight.parameters[0]}[{expert}]" if part < 0 else weight.parameters[1])
        if found is None or found.width not in (width, weight.shared * width if part >= 0 else width):
            return None  # a rank's part of the channels is not known apart
        begin = part * width if found.width > width else 0
        return found.between(begin, begin + width, weight.group if compensates else 0)
    return of


def _usable(inputs: InputsOfModel, parameter: str, weight: PackedWeight) -> bool:
    """Of experts each is looked at when it is rounded: some may not have met a token. A rank's part of the channels is
    not known apart."""
    if not inputs.knows(parameter):
        return False
    if len(weight.expr.shape) == 3:
        return True
    found = inputs.statistics(parameter)
    return found is not None and found.width == weight.expr.shape[1]


def _choice(members: Sequence[PackedWeight], parameter: str, checkpoint: Checkpoint, inputs: InputsOfModel, method: str,
            ) -> Choice:
    if len(members[0].expr.shape) == 3:  # experts: each has inputs of its own, and no scale
        return Choice("awq" if method == "awq" else "gptq")
    found = inputs.statistics(parameter)
    assert found is not None
    return choose(members, column_scale(members[0]), checkpoint, found, method)

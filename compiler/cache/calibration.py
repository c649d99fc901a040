"""Calibration through the cache: which weights have a moment is one entry, each moment another, read when needed."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..calibration.calibrate import calibrate
from ..calibration.gather import calibration_text
from ..checkpoint.checkpoint import Checkpoint
from ..weights.packed import PackedWeight
from .build_cache import BuildCache
from .keys import key, library_versions, source_digest
from .packed_weights import PACKING_SOURCES
from .tensor_digests import checkpoint_digest

_SOURCES = ("compiler/calibration", "compiler/reference_model.py", *PACKING_SOURCES)


@dataclass
class Calibration:
    """key       names everything that the moments depend on; "" if no weight is calibrated
    numbers   name of a packed weight -> number of its moment: weights that read the same input share one
    warnings  what was not calibrated, and why
    """

    key: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    load: Callable[[int], np.ndarray] | None = None

    def moment(self, name: str) -> np.ndarray | None:
        """f32 [K, K] of a weight's inputs; None if it is rounded for itself."""
        if name not in self.numbers:
            return None
        assert self.load is not None
        return self.load(self.numbers[name])


def calibrated(checkpoint: Checkpoint, digests: Mapping[str, str], weights: Sequence[PackedWeight],
               tokenizer: Mapping[str, bytes], cache: BuildCache | None, progress: Callable[[str], None],
               ) -> Calibration:
    """The calibration of the weights of four bits among `weights`. The model runs only if the cache does not know."""
    asked = [weight for weight in weights if weight.packing.scheme == "w4a8"]
    if not asked:
        return Calibration()
    name = key(tensors=checkpoint_digest(digests), text=hashlib.sha256(calibration_text().encode()).hexdigest(),
               weights=[[weight.expr.to_json(), weight.label, weight.parameters] for weight in asked],
               tokenizer={file: hashlib.sha256(data).hexdigest() for file, data in tokenizer.items()},
               versions=library_versions("numpy", "tokenizers", "torch", "transformers"),
               sources=source_digest(*_SOURCES))
    moments: list[np.ndarray] = []

    def run() -> tuple[dict[str, int], list[str]]:
        found, warnings = calibrate(checkpoint, asked, tokenizer, progress)
        distinct = {id(moment): moment for moment in found.values()}
        place = {identity: number for number, identity in enumerate(distinct)}
        moments[:] = distinct.values()
        return {weight: place[id(moment)] for weight, moment in found.items()}, warnings

    def load(number: int) -> np.ndarray:
        if not moments and cache is not None and (data := cache.get("calibration", key(of=name, number=number))):
            moment = np.frombuffer(data, np.float32)
            return moment.reshape(int(len(moment) ** 0.5), -1)
        if not moments:
            run()
        return moments[number]

    if cache is not None and (data := cache.get("calibration", name)) is not None:
        positions, warnings = json.loads(data)
        return Calibration(name, {asked[int(at)].name: number for at, number in positions.items()}, tuple(warnings),
                           load)
    numbers, warnings = run()
    if cache is not None:
        place = {weight.name: at for at, weight in enumerate(asked)}
        for number, moment in enumerate(moments):
            cache.put("calibration", key(of=name, number=number), np.ascontiguousarray(moment).data.cast("B"))
        cache.put("calibration", name, json.dumps([{place[w]: n for w, n in numbers.items()}, warnings]).encode())
    return Calibration(name, numbers, tuple(warnings), load)

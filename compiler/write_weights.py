"""Weights from a checkpoint into an engine: what a build and a refit have in common."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import weight_name

from .cache.build_cache import BuildCache
from .cache.calibration import Calibration, InputsOfModel, calibrated
from .cache.packed_weights import packed
from .cache.tensor_digests import checkpoint_digest, tensor_digests
from .calibration.record import METHODS, calibration_record
from .calibration.smooth import column_scale
from .calibration.text import default_text, read_text
from .checkpoint.checkpoint import Checkpoint
from .clock import Clock
from .engine_writer import EngineWriter
from .plan.plan import Weight
from .weights.packed import PackedWeight


@dataclass(frozen=True)
class WrittenWeights:
    """weights            name in the plan -> its blob
    checkpoint_sha256  over all tensors of the checkpoint, used or not
    num_calibrated     weights that were rounded for the inputs they meet
    calibration        for the manifest
    """

    weights: dict[str, Weight]
    checkpoint_sha256: str
    num_calibrated: int
    calibration: dict[str, Any]
    warnings: tuple[str, ...]


def write_weights(writer: EngineWriter, weights: Sequence[PackedWeight], checkpoint: Checkpoint,
                  tokenizer: Mapping[str, bytes], rounding: Rounding, clock: Clock, cache: BuildCache | None,
                  ) -> WrittenWeights:
    """Pack every weight and hand it to the writer, one at a time. Raises what the checkpoint raises."""
    from threadpoolctl import threadpool_limits

    size = sum(weight.size_bytes for weight in weights)
    with clock.stage("read", f"digests of {len(checkpoint.names())} tensors"):
        digests = tensor_digests(checkpoint, cache)
    calibration = Calibration()
    grids = [weight for weight in weights if weight.group or column_scale(weight) is not None]
    if rounding.method != "rtn" and grids:
        with clock.stage("calibrate", "rounding errors of the weights"):
            inputs = InputsOfModel(checkpoint, digests, tokenizer, text, cache,
                                   lambda detail: clock.progress("calibrate", detail))
            calibration = calibrated(checkpoint, weights, inputs, rounding.method,
                                     lambda detail: clock.progress("calibrate", detail))
    # Weights that would push everything else out of the cache are not kept in it.
    keeping = cache if cache is not None and size <= cache.limit_bytes // 2 else None
    written = {}
    # Sums of a matrix product that threads share come out differently by their number: the same bytes need one.
    with clock.stage("weights", f"{len(weights)} tensors, {size / 1e6:.0f} MB"), threadpool_limits(1, "blas"):
        for number, weight in enumerate(weights, 1):
            clock.progress("weights", f"{number}/{len(weights)} {weight.label}")
            data = packed(weight, checkpoint, digests, calibration, keeping)
            member = writer.add_weight(data)
            blob = member.removeprefix("weights/").removesuffix(".bin")
            assert member == weight_name(blob)
            written[weight.name] = Weight(blob, data.nbytes, weight.label, weight.expr.shape, weight.packing.scheme)
    num_calibrated, small = len(calibration.numbers), [w for w in weights if w.packing.scheme == "w4a8"]
    record = calibration_record(num_calibrated, len(small) - num_calibrated, tokenizer)
    return WrittenWeights(written, checkpoint_digest(digests), num_calibrated, record,
                          (*calibration.warnings, *_experts_warning(small)))

    text = default_text() if rounding.text is None else read_text(rounding.text)

    text = default_text() if rounding.text is None else read_text(rounding.text)
def _experts_warning(weights: Sequence[PackedWeight]) -> list[str]:
    experts = [weight for weight in weights if len(weight.expr.shape) == 3]
    return [f"the experts' weights ({len(experts)} tensors, such as {experts[0].label}) are rounded to nearest: "
            "calibration does not cover them"] if experts else []

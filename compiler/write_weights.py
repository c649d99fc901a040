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
from .weights.sharding import at_rank, num_ranks_of


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


@dataclass(frozen=True)
class Rounding:
    """How weights of four bits are rounded.

    method  key of calibration.record.METHODS
    text    that the model reads if its inputs are asked for; None: the one that ships with the compiler
    """

    method: str = "best"
    text: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(f"unknown quantization method {self.method!r}; known: {', '.join(METHODS)}")
        if self.method == "rtn" and self.text is not None:
            raise RequestError(f"weights that are rounded to nearest need no calibration text; leave {self.text} out")


def by_rank(weight: PackedWeight) -> list[PackedWeight]:
    """The weight as each rank holds it; one where all hold the same."""
    ranks = num_ranks_of(weight.expr)
    return [replace(weight, expr=at_rank(weight.expr, rank)) for rank in range(ranks)] if ranks > 1 else [weight]


def write_weights(writer: EngineWriter, weights: Sequence[PackedWeight], checkpoint: Checkpoint,
                  tokenizer: Mapping[str, bytes], rounding: Rounding, clock: Clock, cache: BuildCache | None,
                  ) -> WrittenWeights:
    """Pack every weight and hand it to the writer, one at a time. Raises what the checkpoint raises."""
    from threadpoolctl import threadpool_limits

    size = sum(weight.size_bytes for weight in weights)
    text = default_text() if rounding.text is None else read_text(rounding.text)
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
            blobs = []
            for of_rank in by_rank(weight):
                data = packed(of_rank, checkpoint, digests, calibration, keeping)
                member = writer.add_weight(data)
                blobs.append(member.removeprefix("weights/").removesuffix(".bin"))
                assert member == weight_name(blobs[-1])
            written[weight.name] = Weight(blobs[0], weight.size_bytes, weight.label, weight.expr.shape,
                                          weight.packing.scheme, tuple(blobs) if len(blobs) > 1 else ())
    record = calibration_record([calibration.method(weight) for weight in grids], text.name,
                                text.sha256, calibration.inputs.num_tokens if calibration.inputs else 0)
    return WrittenWeights(written, checkpoint_digest(digests), record["num_weights"], record, calibration.warnings)

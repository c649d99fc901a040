"""Weights from a checkpoint into an engine: what a build and a refit have in common."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.host import available_cores
from ingot.runtime.manifest import weight_name

from .cache.build_cache import BuildCache
from .cache.calibration import Calibration, InputsOfModel, calibrated
from .cache.packed_weights import kept, weight_key
from .cache.tensor_digests import Digests, checkpoint_digest, tensor_digests
from .calibration.record import METHODS, calibration_record
from .calibration.smooth import column_scale
from .calibration.text import default_text, read_text
from .checkpoint.checkpoint import Checkpoint
from .clock import Clock
from .engine_writer import EngineWriter
from .pack_pool import Job, blobs_in_order, num_threads, workers
from .plan.plan import Weight
from .weights.native import load_native
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
        if self.text is not None and not self.text.is_file():  # told now, not behind the import of a large model
            raise RequestError(f"cannot read the calibration text {self.text}: "
                               f"{'not a file' if self.text.exists() else 'there is no such file'}")


def by_rank(weight: PackedWeight) -> list[PackedWeight]:
    """The weight as each rank holds it; one where all hold the same."""
    ranks = num_ranks_of(weight.expr)
    return [replace(weight, expr=at_rank(weight.expr, rank)) for rank in range(ranks)] if ranks > 1 else [weight]


def write_weights(writer: EngineWriter, weights: Sequence[PackedWeight], checkpoint: Checkpoint,
                  tokenizer: Mapping[str, bytes], rounding: Rounding, clock: Clock, cache: BuildCache | None,
                  ) -> WrittenWeights:
    """Pack the weights with as many threads as there are cores and hand them to the writer one by one, in their order.

    Raises what the checkpoint raises.
    """
    from threadpoolctl import threadpool_limits

    load_native()
    size = sum(weight.size_bytes for weight in weights)
    text = default_text() if rounding.text is None else read_text(rounding.text)
    grids = [weight for weight in weights if weight.group or column_scale(weight) is not None]
    threads = num_threads(max((weight.piece_bytes(rounding.method != "rtn") for weight in weights), default=0),
                          available_cores())
    with workers(threads) as pool:
        digests: Mapping[str, str] = (early := Digests(checkpoint, pool))
        if cache is None:
            early.start_some()
        else:
            with clock.stage("read", f"digests of {len(checkpoint.names())} tensors"):
                digests = tensor_digests(checkpoint, cache)
        calibration = Calibration()
        if rounding.method != "rtn" and grids:
            with clock.stage("calibrate", "rounding errors of the weights"):
                inputs = InputsOfModel(checkpoint, digests, tokenizer, text, cache,
                                       lambda detail: clock.progress("calibrate", detail))
                calibration = calibrated(checkpoint, weights, inputs, rounding.method,
                                         lambda detail: clock.progress("calibrate", detail))
        # Weights that would push everything else out of the cache are not kept in it.
        keeping = cache if cache is not None and size <= cache.limit_bytes // 2 else None
        blobs: dict[str, list[str]] = {}  # name of a weight -> its blob, or those of the ranks
        # Sums of a matrix product that threads share come out differently by their number: the same bytes need one.
        with clock.stage("weights", f"{len(weights)} tensors, {size / 1e6:.0f} MB"), threadpool_limits(1, "blas"):
            for (weight, name), blob in blobs_in_order(_jobs(weights, checkpoint, digests, calibration, keeping), pool):
                if weight.name not in blobs:
                    clock.progress("weights", f"{len(blobs) + 1}/{len(weights)} {weight.label}")
                if keeping is not None and name:
                    keeping.put("weights", name, blob.data.data)
                member = writer.add_weight(blob.data, blob.sha256, blob.crc32)
                assert member == weight_name(blob.sha256)
                blobs.setdefault(weight.name, []).append(blob.sha256)
            sha256 = checkpoint_digest(digests)
    written = {weight.name: Weight(of_ranks[0], weight.size_bytes, weight.label, weight.expr.shape,
                                   weight.packing.scheme, tuple(of_ranks) if len(of_ranks) > 1 else ())
               for weight in weights for of_ranks in (blobs[weight.name],)}
    record = calibration_record([calibration.method(weight) for weight in grids], text.name,
                                text.sha256, calibration.inputs.num_tokens if calibration.inputs else 0)
    return WrittenWeights(written, sha256, record["num_weights"], record, calibration.warnings)


def _jobs(weights: Sequence[PackedWeight], checkpoint: Checkpoint, digests: Mapping[str, str],
          calibration: Calibration, cache: BuildCache | None) -> Iterator[Job[tuple[PackedWeight, str]]]:
    """A job for each weight, and for each rank that holds another: (weight, its key in the cache if it goes there)."""
    source = calibration.source(checkpoint)
    for weight in weights:
        if isinstance(digests, Digests):  # read once, for both
            digests.start(weight.expr.tensor_names())
        for of_rank in by_rank(weight):
            name = "" if cache is None else weight_key(of_rank, digests, calibration)
            found = None if cache is None else kept(of_rank, name, cache)
            if found is not None:
                yield Job((weight, ""), of_rank.size_bytes, found=found)
            else:
                yield Job((weight, name), of_rank.size_bytes,
                          of_rank.pieces(source, calibration.moments(of_rank)))

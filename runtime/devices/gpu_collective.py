"""Launches in which the ranks of a tensor-parallel engine exchange values: checked, and done by one process for all."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..program import Limits
from .gpu_kernels import ELEMENT_BYTES
from .gpu_plan import Argument, BoundLaunch, GpuPlan, Place
from .traced_values import decode

MAX_RANKS = 64

_ROWS = {0: "tokens", 2: "rows of logits"}
"""Where a step's array `sizes` has them."""


def num_ranks(engine: EngineFile) -> int:
    """GPUs that an engine is divided among. Raises EngineFormatError."""
    ranks = engine.manifest.get("tensor_parallel", 1)
    if not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise EngineFormatError(f"{engine.path}: manifest.json: tensor_parallel: expected 1 to {MAX_RANKS}, "
                                f"got {ranks!r}")
    return ranks


def check_collectives(plan: GpuPlan, limits: Limits, num_ranks: int) -> None:
    """Raises EngineFormatError unless every exchange stays within what its launch names, and weights are given for
    each of the ranks."""
    for name, weight in plan.weights.items():
        if len(weight.blobs) not in (1, num_ranks):
            raise EngineFormatError(f"plan.weights.{name}: {len(weight.blobs)} blobs; expected one, or one for each of "
                                    f"{num_ranks} ranks")
    for index, bucket in enumerate(plan.buckets):
        most = {0: bucket.tokens, 2: min(bucket.tokens, limits.max_batch_size)}
        for number, launch in enumerate(bucket.launches):
            if not launch.kernel.collective:
                continue
            where = f"plan.buckets[{index}].launches[{number}] ({launch.kernel.symbol})"
            source, destination, sizes, rows, width = launch.arguments
            assert isinstance(source, Place) and isinstance(destination, Place) and isinstance(sizes, Place)
            if rows not in _ROWS or not isinstance(width, int) or width < 1 or sizes.key != "sizes":
                raise EngineFormatError(f"{where}: expected the step's sizes, rows {sorted(_ROWS)} and a width")
            need = most[int(rows)] * width * _element_bytes(launch.kernel.parameters[0][1])
            times = num_ranks if launch.kernel.collective == "all_gather" else 1
            if source.left < need or destination.left < need * times:
                raise EngineFormatError(f"{where}: {need} bytes from each rank do not fit their places")


def meet(launches: Sequence[BoundLaunch]) -> None:
    """The same launch of all ranks, in their order. Sums are made in float32 and rounded once."""
    kernel = launches[0].kernel
    element = str(kernel.parameters[0][1])[1:]
    stored = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[element]
    parts = []
    for launch in launches:
        source, _, sizes, rows, width = map(_number, launch.arguments)
        count = int(_array(sizes, 3, "i32")[rows])
        held = _array(source, count * width, element).view(np.uint8)
        parts.append(decode(held, (count, width), stored).astype(np.float32))
    whole = np.concatenate(parts, axis=1) if kernel.collective == "all_gather" else np.sum(parts, axis=0)
    for launch in launches:
        _array(_number(launch.arguments[1]), whole.size, element)[:] = _narrow(whole.reshape(-1), element)


def _number(argument: Argument) -> int:
    assert isinstance(argument, int), argument
    return argument


def _array(address: int, count: int, element: str) -> np.ndarray:
    kind = {"i32": np.int32, "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[element]
    size = count * np.dtype(kind).itemsize
    memory: Any = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, kind)


def _narrow(values: np.ndarray, element: str) -> np.ndarray:
    if element != "bf16":
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _element_bytes(kind: object) -> int:
    return ELEMENT_BYTES[str(kind)[1:]]

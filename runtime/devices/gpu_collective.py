"""What the ranks of a tensor-parallel engine share: how many they are, the table by which kernels find each other's
memory, and launches that read it, checked.

The table is i64 [1 + 2 * ranks]: the rank itself, the address of each rank's arena, and of each one's signals, which
are i32 [blocks, 16] (plugins/all_reduce/gpu.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError
from .gpu_plan import GpuPlan, Launch, Place, peers_bytes

MAX_RANKS = 8

SIGNAL_BYTES = 64
"""Of each block of a launch that exchanges values."""

GIVEN_UP = 0x01
"""Every byte of the signals, once the host no longer waits for a rank: whoever does goes on."""


def num_ranks(engine: EngineFile) -> int:
    """GPUs that an engine is divided among. Raises EngineFormatError."""
    ranks = engine.manifest.get("tensor_parallel", 1)
    if not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise EngineFormatError(f"{engine.path}: manifest.json: tensor_parallel: expected 1 to {MAX_RANKS}, "
                                f"got {ranks!r}")
    return ranks


def ranks_on(engine: EngineFile, ordinals: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the GPUs, one for each rank: those that are named, else the first ones. Raises RequestError."""
    ranks = num_ranks(engine)
    if not ordinals:
        return tuple(range(ranks))
    named = "cuda:" + ",".join(map(str, ordinals))
    if len(ordinals) != ranks or len(set(ordinals)) != ranks:
        wanted = "one GPU" if ranks == 1 else f"{ranks} different ones: its model is divided among them"
        example = "cuda:" + ",".join(map(str, range(ranks)))
        raise RequestError(f"--device {named} names {len(ordinals)} GPU{'' if len(ordinals) == 1 else 's'}; "
                           f"{engine.path} runs on {wanted}.\n  For example: --device {example}")
    return tuple(ordinals)


def peer_table(rank: int, arenas: Sequence[int], signals: Sequence[int]) -> np.ndarray:
    """i64: what a rank's kernels find the others by. arenas, signals: the addresses of all ranks."""
    table = np.array([rank, *arenas, *signals], np.int64)
    assert table.nbytes == peers_bytes(len(arenas))
    return table


def most_blocks(plan: GpuPlan) -> int:
    """Of a launch that exchanges values: so many must run at a time, since they wait for those of other GPUs."""
    return max((launch.grid[0] * launch.kernel.cluster for bucket in plan.buckets for launch in bucket.launches
                if launch.kernel.exchanges), default=0)


def check_exchanges(plan: GpuPlan, num_ranks: int) -> None:
    """Raises EngineFormatError unless every exchange is between so many ranks, of values that lie at the same place in
    all of them, and weights are given for each of the ranks."""
    for name, weight in plan.weights.items():
        if len(weight.blobs) not in (1, num_ranks):
            raise EngineFormatError(f"plan.weights.{name}: {len(weight.blobs)} blobs; expected one, or one for each of "
                                    f"{num_ranks} ranks")
    for index, bucket in enumerate(plan.buckets):
        for number, launch in enumerate(bucket.launches):
            if launch.kernel.exchanges:
                where = f"plan.buckets[{index}].launches[{number}] ({launch.kernel.symbol})"
                _check(launch, where, num_ranks, plan.signal_bytes)


def _check(launch: Launch, where: str, num_ranks: int, signal_bytes: int) -> None:
    kernel = launch.kernel
    places = {name: argument for (name, _), argument in zip(kernel.parameters, launch.arguments, strict=True)}
    for name, space in (("source", "arena"), ("destination", "arena"), ("peers", "peers")):
        if name == "destination" and name not in places:
            continue  # what it makes is for this rank alone
        place = places.get(name)
        if not isinstance(place, Place) or place.space != space:
            raise EngineFormatError(f"{where}: {name}: where ranks exchange values it must be a place in {space}")
    if (ranks := dict(kernel.constants).get("RANKS")) != num_ranks:
        raise EngineFormatError(f"{where}: its kernel is for {ranks} ranks; the engine has {num_ranks}")
    blocks = launch.grid[0] * kernel.cluster
    if launch.grid[1:] != (1, 1) or blocks * SIGNAL_BYTES > signal_bytes:
        raise EngineFormatError(f"{where}: grid {list(launch.grid)}: there are signals of {signal_bytes} bytes, "
                                f"{SIGNAL_BYTES} for each block")

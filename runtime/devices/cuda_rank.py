"""One GPU's part of a loaded engine: code, memory and graphs. A step of the whole engine is one of each of its ranks
(cuda.py); most engines have one.

What is loaded comes in the order in which it is told here: code, fixed memory, the KV cache, weights, graphs. Every
method but `is_pending` makes the GPU's context current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import WorkFailed
from ..lora import LoraRoom
from ..program import Limits
from ..step import StepLayout
from .cuda_driver import CudaError
from .cuda_graph import StepGraph
from .cuda_kernels import CudaKernels
from .cuda_memory import ALIGNMENT, Bytes, CudaContext, MemoryNeeds, upload
from .gpu_plan import BoundBucket, GpuPlan, Places
from .plan_fields import mapped_weight

# What graphs take of the GPU's memory, which the driver does not tell before they are built. 10 KiB a node is what
# NVIDIA's own cache of graphs reckons with (CUDASTF in CCCL, executable_graph_cache.cuh); a graph may begin a piece of
# memory of its own, and the driver hands those out in 2 MiB (cuMemGetAllocationGranularity). Not measured here.
_GRAPH_BYTES, _NODE_BYTES = 2 << 20, 10 << 10


class CudaRank:
    """buckets, graphs: of each token bucket; plain_graphs: without what adapters alone need.

    weights_bytes, arena, step, num_blocks: sizes and addresses in the GPU's memory.
    """

    buckets: tuple[BoundBucket, ...]
    graphs: list[StepGraph]
    plain_graphs: list[StepGraph]

    def __init__(self, context: CudaContext, engine: EngineFile, plan: GpuPlan, layout: StepLayout, rank: int,
                 lora: LoraRoom | None) -> None:
        """Loads the code. Raises EngineFormatError, CudaError."""
        self.context, self.rank = context, rank
        self._engine, self._plan, self._layout, self._lora = engine, plan, layout, lora
        self.blobs: dict[str, int] = {}
        for name, weight in plan.weights.items():
            blob = weight.blob_of(rank)
            if self.blobs.setdefault(blob, weight.size) != weight.size:
                raise EngineFormatError(f"plan.weights.{name}: size {weight.size}; elsewhere the same blob has "
                                        f"{self.blobs[blob]}")
        self._offsets, self.weights_bytes = _packed(self.blobs)
        self.lora_bytes = lora.num_bytes if lora else 0
        context.enter()
        self.kernels = CudaKernels(context, engine.read)
        self.kernels.load(plan.kernels.values())

    @property
    def graph_bytes(self) -> int:
        """An estimate."""
        plan = self._plan
        launches = sum(len(bucket.launches) for bucket in plan.buckets)
        return (len(plan.buckets) * _GRAPH_BYTES + launches * _NODE_BYTES) * (2 if self._lora else 1)

    # --- loading ---

    def check_room(self, limits: Limits, kv_cache_tokens: int | None) -> None:
        """Raises WorkFailed with every part unless the engine fits, with that much KV cache, in what is free now."""
        kv, least = self._plan.kv, max(1, kv_cache_tokens or 1)
        self._needs = MemoryNeeds((
            ("weights", self.weights_bytes), ("arena", self._plan.arena_bytes),
            ("workspace", self._plan.workspace_bytes), ("arrays of a step", self._layout.num_bytes),
            *([("slots for adapters", self.lora_bytes)] if self._lora else []), ("graphs, estimated", self.graph_bytes),
            (f"KV cache of {least} tokens", kv.num_blocks(least) * kv.block_bytes)),
            kv.num_blocks(limits.max_seq_len) * kv.block_bytes)
        self.context.enter()
        self._free = self.context.free_bytes()
        if self._needs.total > self._free:
            raise self.too_little("the engine does not fit")

    def too_little(self, why: str) -> WorkFailed:
        return self._needs.error(self.context.gpu, self._free, why)

    @contextmanager
    def telling_memory(self) -> Iterator[None]:
        """For what is taken of this GPU: if there is too little memory, every part is told."""
        self.context.enter()
        try:
            yield
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise self.too_little(str(error)) from None

    def allocate(self) -> None:
        """All memory of the GPU but the KV cache."""
        context, plan = self.context, self._plan
        with self.telling_memory():
            self._weights = context.allocate(self.weights_bytes)
            self.arena = context.allocate(plan.arena_bytes)
            self._workspace = context.allocate(plan.workspace_bytes)
            self.step = context.allocate(self._layout.num_bytes)
            self._adapters = context.allocate(self.lora_bytes) if self._lora else 0

    def room(self, fraction: float) -> int:
        """Blocks of the KV cache that this fraction of what is left holds beside the graphs."""
        with self.telling_memory():
            return int(fraction * (self.context.free_bytes() - self.graph_bytes)) // self._plan.kv.block_bytes

    def allocate_kv(self, num_blocks: int, num_host_blocks: int, told: str) -> None:
        """The KV cache on the GPU and its tier on the host; all memory is cleared. told: what the host's part is."""
        context, plan = self.context, self._plan
        self.num_blocks = num_blocks
        with self.telling_memory():
            size = num_blocks * plan.kv.block_bytes
            self._kv = context.allocate(size)
            # Kernels may read what they do not use: the cells of a block behind a sequence's last token, for one.
            for address, part in ((self.arena, plan.arena_bytes), (self._workspace, plan.workspace_bytes),
                                  (self.step, self._layout.num_bytes), (self._kv, size),
                                  (self._adapters, self.lora_bytes)):
                context.clear(address, part)
            self._host_kv = context.pinned(num_host_blocks * plan.kv.block_bytes, told)

    def finish(self, peers: int, progress: Callable[[int], None]) -> None:
        """Weights and graphs. peers: the address of the table of all ranks, 0 where there is one."""
        plan, layout = self._plan, self._layout
        with self.telling_memory():
            upload(self.context, self._pieces(), progress)
            weights = {name: self._weights + self._offsets[weight.blob_of(self.rank)]
                       for name, weight in plan.weights.items()}
            inputs = {name: self.step + place.offset for name, place in layout.places.items()}
            self.buckets = plan.bind(Places(self.arena, self._workspace, weights, self._kv, inputs, self._adapters,
                                            peers))
            self.graphs = [StepGraph(self.context, self.kernels, bucket.launches) for bucket in self.buckets]
            self.plain_graphs = self.graphs if self._lora is None else [
                StepGraph(self.context, self.kernels, tuple(one for one in bucket.launches if not one.adapters))
                for bucket in self.buckets]
            self._image = self.context.pinned(self._lora.bytes_per_adapter, "an adapter") if self._lora else None
            self._image_sent = self.context.event()
            self._done = self.context.event()
            self._timed: dict[int, StepGraph] = {}
            self.context.synchronize()

    def _pieces(self) -> Iterator[tuple[int, Bytes]]:
        """The weights and where they go."""
        for blob, size in self.blobs.items():
            yield self._weights + self._offsets[blob], mapped_weight(self._engine, blob, size)

    # --- steps ---

    def send(self, host: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Starts the copies of what a step's kernels read, which lies at that address of the host."""
        self.context.enter()
        for offset, size in pieces:
            self.context.to_device(self.step + offset, host + offset, size)

    def launch(self, index: int, adapters: bool) -> None:
        """Starts the step of a bucket."""
        self.context.enter()
        (self.graphs if adapters else self.plain_graphs)[index].launch()

    def end(self, host: int | None) -> None:
        """Behind the step: what was sampled is copied to the host, if that is wanted, and the end can be waited for."""
        self.context.enter()
        if host is not None:
            begin, end = self._layout.input_bytes, self._layout.num_bytes
            self.context.to_host(host + begin, self.step + begin, end - begin)
        self.context.record(self._done)

    def is_pending(self) -> bool:
        """Whether the step may still run. Raises CudaError if it has failed."""
        self.context.enter()
        driver = self.context.driver
        status = driver.api.cuEventQuery(self._done)[0]
        if int(status) and int(status) != int(driver.enum("CUresult", "CUDA_ERROR_NOT_READY")):
            raise driver.error("cuEventQuery", status)
        return bool(int(status))

    def wait(self) -> None:
        """Until the step has ended: the driver spins, without Python's lock."""
        self.context.enter()
        self.context.driver.call("cuEventSynchronize", self._done)

    def timed(self, index: int) -> StepGraph:
        """The bucket's graph with events between its launches."""
        if index not in self._timed:
            self.context.enter()
            self._timed[index] = StepGraph(self.context, self.kernels, self.buckets[index].launches, timed=True)
        return self._timed[index]

    # --- KV blocks and adapters ---

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """In the stream they come after the step in flight and before the next one; nobody waits for them."""
        self.context.enter()
        block_bytes = self._plan.kv.block_bytes
        for source, destination, count in runs(pairs, self.num_blocks):
            size = count * block_bytes
            from_gpu, to_gpu = source < self.num_blocks, destination < self.num_blocks
            origin, target = self.block_address(source), self.block_address(destination)
            if from_gpu and to_gpu:
                self.context.driver.call("cuMemcpyDtoDAsync", target, origin, size, self.context.stream)
            elif from_gpu:
                self.context.to_host(target, origin, size)
            elif to_gpu:
                self.context.to_device(target, origin, size)
            else:
                self.context.synchronize()  # what was copied to the source must be there
                self._host_block(destination, count)[:] = self._host_block(source, count)

    def block_address(self, number: int) -> int:
        if number < self.num_blocks:
            return self._kv + number * self._plan.kv.block_bytes
        return int(self._host_kv.ctypes.data) + (number - self.num_blocks) * self._plan.kv.block_bytes

    def _host_block(self, number: int, count: int) -> Bytes:
        block_bytes = self._plan.kv.block_bytes
        begin = (number - self.num_blocks) * block_bytes
        return self._host_kv[begin : begin + count * block_bytes]

    def write_adapter(self, slot: int, image: np.ndarray[Any, Any]) -> None:
        assert self._lora is not None and self._image is not None, "the engine has no room for adapters"
        self._lora.check_slot(slot, image.size)
        self.context.enter()
        # The buffer may still be on its way with the adapter before; in the stream the copy follows the step in flight.
        self.context.driver.call("cuEventSynchronize", self._image_sent)
        np.copyto(self._image, image)
        self.context.to_device(self._adapters + slot * self._lora.bytes_per_adapter, int(self._image.ctypes.data),
                               self._image.size)
        self.context.record(self._image_sent)


def _packed(blobs: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each lies in one piece of memory, and the size of it."""
    offsets, end = {}, 0
    for blob, size in blobs.items():
        offsets[blob] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def runs(pairs: Sequence[tuple[int, int]], num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """(source, destination, count): pairs in their order, neighbours that lie side by side in one piece as one copy.
    A piece neither leaves its tier nor overlaps itself, so that its blocks may be copied in any order."""
    begin = 0
    for at, (one, other) in enumerate(pairwise([*pairs, (-2, -2)]), 1):
        source, destination = pairs[begin]
        follows = other == (one[0] + 1, one[1] + 1) and num_blocks not in other
        if follows and abs(source - destination) > at - begin:
            continue
        yield source, destination, at - begin
        begin = at

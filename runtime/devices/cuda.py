"""The cuda device: a GPU engine through the CUDA driver API, one graph launch a step.

    load      code, weights (through two pinned buffers), arena, workspace, a step's arrays, KV pool; then one graph for
              each token bucket, bound to those addresses once and for all
    launch    one copy of the step's arrays to the GPU, the bucket's graph, one copy of what was sampled back, an event
    wait      for the event

A step allocates nothing. Its two sets of inputs share one place on the GPU: the copy of the next one waits, in the
stream, for the step before.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from time import perf_counter, sleep

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError, WorkFailed
from ..kv_memory import KvCacheSizeError
from ..lora import LoraRoom
from ..program import EngineMismatch, Limits, check_plan_version
from ..sampling_inputs import Float32Array, StepOutputs
from ..step import StepInputs, StepLayout
from .cuda_driver import CudaError, Driver, GpuInfo, find_gpu, load_driver
from .cuda_graph import StepGraph, launch_alone
from .cuda_kernels import CudaKernels
from .cuda_memory import ALIGNMENT, Bytes, CudaContext, MemoryNeeds, upload
from .gpu_collective import num_ranks
from .gpu_kernels import check_members
from .gpu_plan import BoundBucket, GpuPlan, Places
from .plan_fields import mapped_weight
from .traced_values import decode, value_bytes, value_shape

DEFAULT_FRACTION = 0.9
"""Of the memory that is free once everything else is in place: the driver, and others on the GPU, take some later."""

# What graphs take of the GPU's memory, which the driver does not tell before they are built. 10 KiB a node is what
# NVIDIA's own cache of graphs reckons with (CUDASTF in CCCL, executable_graph_cache.cuh); a graph may begin a piece of
# memory of its own, and the driver hands those out in 2 MiB (cuMemGetAllocationGranularity). Not measured here.
_GRAPH_BYTES, _NODE_BYTES = 2 << 20, 10 << 10

_SHORT_S = 2e-4
"""Shorter steps are not slept through: to be woken up takes part of that."""


class CudaProgram:
    """A GPU engine, loaded. See the Program protocol for what callers may use.

    gpu: the device that it runs on
    weights_bytes, arena_bytes, workspace_bytes, kv_bytes, lora_bytes: the GPU memory that it occupies
    """

    def __init__(self, engine: EngineFile, kv_cache_tokens: int | None = None, host_kv_tokens: int = 0, *,
                 kv_cache_fraction: float = DEFAULT_FRACTION, most_kv_tokens: int | None = None, ordinal: int = 0,
                 driver: Driver | None = None,
                 progress: Callable[[int], None] = lambda size: None) -> None:
        """kv_cache_tokens: room of the KV cache; None: kv_cache_fraction of what is free beside everything else, but
        no more than most_kv_tokens.
        progress: is told the bytes of each piece of the weights that has been read.

        Raises NoGpu, EngineMismatch, EngineFormatError, KvCacheSizeError, RequestError, WorkFailed; then nothing is
        held.
        """
        limits = Limits.of(engine.manifest)
        if not 0 < kv_cache_fraction <= 1:
            raise KvCacheSizeError(f"--kv-cache-fraction is {kv_cache_fraction!r}; expected above 0 and at most 1")
        if (kv_cache_tokens is not None and kv_cache_tokens < 1) or host_kv_tokens < 0:
            raise RequestError(f"kv_cache_tokens is {kv_cache_tokens}, host_kv_tokens {host_kv_tokens}; expected at "
                               "least 1 and 0")
        check_plan_version(engine)
        driver = load_driver() if driver is None else driver
        self.gpu = find_gpu(driver, ordinal)
        check_target(engine, self.gpu)
        self._engine = engine
        self._context = context = CudaContext(driver, self.gpu)
        self._finalizer = weakref.finalize(self, context.close)
        try:
            self.lora = LoraRoom.of(engine.manifest)
            self.lora_bytes = self.lora.num_bytes if self.lora else 0
            plan = GpuPlan.read(engine.plan, limits, self.lora)
            check_members(plan.kernels, engine.sizes)
            check_shared_memory(engine, plan, self.gpu)
            self._kernels = CudaKernels(context, engine.read)
            self._kernels.load(plan.kernels.values())
            self._lay_out(plan, limits, kv_cache_tokens, host_kv_tokens, kv_cache_fraction, most_kv_tokens, progress)
        except EngineFormatError as error:
            self.close()
            prefix = f"{engine.path}: "
            raise type(error)(f"{prefix}{str(error).removeprefix(prefix)}") from None
        except BaseException:
            self.close()
            raise
        self._expected_s = [0.0] * len(self._buckets)
        self._launched_at = 0.0
        self._in_flight: tuple[StepInputs, int] | None = None
        self._last: tuple[BoundBucket, int] | None = None
        self._logits: Bytes | None = None
        self._timed: dict[int, StepGraph] = {}
        del engine.plan  # megabytes of parsed JSON

    def _lay_out(self, plan: GpuPlan, limits: Limits, kv_cache_tokens: int | None, host_kv_tokens: int,
                 fraction: float, most_kv_tokens: int | None, progress: Callable[[int], None]) -> None:
        context, kv = self._context, plan.kv
        self.block_size, self.block_bytes, self.kv_windows = kv.block_size, kv.block_bytes, kv.windows
        self.vocab_size = plan.vocab_size
        tables = len(kv.windows)
        layout = self._layout = StepLayout(limits, plan.vocab_size, kv.block_size, tables)
        blobs: dict[str, int] = {}
        for name, weight in plan.weights.items():
            if blobs.setdefault(weight.blobs[0], weight.size) != weight.size:
                raise EngineFormatError(f"plan.weights.{name}: size {weight.size}; elsewhere the same blob has "
                                        f"{blobs[weight.blobs[0]]}")
        offsets, self.weights_bytes = _packed(blobs)
        self.arena_bytes, self.workspace_bytes = plan.arena_bytes, plan.workspace_bytes
        launches = sum(len(bucket.launches) for bucket in plan.buckets)
        graphs = (len(plan.buckets) * _GRAPH_BYTES + launches * _NODE_BYTES) * (2 if self.lora else 1)

        def blocks(tokens: int) -> int:
            return -(-tokens // kv.block_size) * tables

        least = max(1, kv_cache_tokens or 1)
        needs = MemoryNeeds((("weights", self.weights_bytes), ("arena", self.arena_bytes),
                             ("workspace", self.workspace_bytes), ("arrays of a step", layout.num_bytes),
                             *([("slots for adapters", self.lora_bytes)] if self.lora else []),
                             ("graphs, estimated", graphs),
                             (f"KV cache of {least} tokens", blocks(least) * kv.block_bytes)),
                            blocks(limits.max_seq_len) * kv.block_bytes)
        free = context.free_bytes()
        if needs.total > free:
            raise needs.error(self.gpu, free, "the engine does not fit")
        try:
            most = None if most_kv_tokens is None else blocks(most_kv_tokens)
            self._allocate(plan, limits, kv_cache_tokens, fraction, most, graphs,
                           lambda why: needs.error(self.gpu, free, why))
            self.num_host_blocks = blocks(host_kv_tokens)
            self._host_kv = context.pinned(self.num_host_blocks * kv.block_bytes, f"{host_kv_tokens} tokens of KV")
            first, second = (StepInputs(limits, plan.vocab_size, kv.block_size, tables, context.pinned(
                layout.num_bytes, "the arrays of a step")) for _ in range(2))
            self.inputs = (first, second)
            self._host_addresses = [int(inputs.memory.ctypes.data) for inputs in self.inputs]
            upload(context, self._pieces(blobs, offsets), progress)
            self._buckets = plan.bind(self._places(plan, offsets))
            self._bucket_tokens = [bucket.tokens for bucket in self._buckets]
            self._graphs = [StepGraph(context, self._kernels, bucket.launches) for bucket in self._buckets]
            self._plain_graphs = self._graphs if self.lora is None else [
                StepGraph(context, self._kernels, tuple(launch for launch in bucket.launches if not launch.adapters))
                for bucket in self._buckets]
            self._image = context.pinned(self.lora.bytes_per_adapter, "an adapter") if self.lora else None
            self._image_sent = context.event()
            self._done = context.event()
            context.synchronize()
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise needs.error(self.gpu, free, str(error)) from None

    def _allocate(self, plan: GpuPlan, limits: Limits, kv_cache_tokens: int | None, fraction: float,
                  most_blocks: int | None, graphs: int, too_little: Callable[[str], WorkFailed]) -> None:
        """All memory of the GPU, cleared; most_blocks: of the KV cache, where a fraction is taken; graphs: bytes to
        leave for them."""
        context, kv, tables = self._context, plan.kv, len(plan.kv.windows)
        self._weights_address = context.allocate(self.weights_bytes)
        self._arena_address = context.allocate(self.arena_bytes)
        self._workspace_address = context.allocate(self.workspace_bytes)
        self._step_address = context.allocate(self._layout.num_bytes)
        self._lora_address = context.allocate(self.lora_bytes) if self.lora else 0
        if kv_cache_tokens is not None or not kv.block_bytes:  # a model without attention has blocks of nothing
            tokens = kv_cache_tokens or limits.max_batch_size * limits.max_seq_len
            self.num_blocks = -(-tokens // kv.block_size) * tables
        else:
            room = int(fraction * (context.free_bytes() - graphs))
            self.num_blocks = room // kv.block_bytes // tables * tables
            if most_blocks is not None:
                self.num_blocks = min(self.num_blocks, most_blocks)
        if self.num_blocks < 1:
            raise too_little(f"no block of the KV cache fits {fraction:.0%} of what is left")
        self.kv_bytes = self.num_blocks * kv.block_bytes
        self._kv_address = context.allocate(self.kv_bytes)
        # Kernels may read what they do not use: the cells of a block behind a sequence's last token, for one.
        for address, size in ((self._arena_address, self.arena_bytes), (self._workspace_address, self.workspace_bytes),
                              (self._step_address, self._layout.num_bytes), (self._kv_address, self.kv_bytes),
                              (self._lora_address, self.lora_bytes)):
            context.clear(address, size)

    def _places(self, plan: GpuPlan, offsets: dict[str, int]) -> Places:
        weights = {name: self._weights_address + offsets[weight.blobs[0]] for name, weight in plan.weights.items()}
        inputs = {name: self._step_address + place.offset for name, place in self._layout.places.items()}
        return Places(self._arena_address, self._workspace_address, weights, self._kv_address, inputs,
                      self._lora_address)

    def _pieces(self, blobs: dict[str, int], offsets: dict[str, int]) -> Iterator[tuple[int, Bytes]]:
        """The weights and where they go."""
        for blob, size in blobs.items():
            yield self._weights_address + offsets[blob], mapped_weight(self._engine, blob, size)

    def launch(self, inputs: StepInputs) -> None:
        index = self._prepare(inputs)
        bucket, context = self._buckets[index], self._context
        self._send(inputs)
        (self._graphs if inputs.num_adapted else self._plain_graphs)[index].launch()
        if inputs.sampling.num_rows:
            layout, host = self._layout, self._host_addresses[self.inputs.index(inputs)]
            context.to_host(host + layout.input_bytes, self._step_address + layout.input_bytes,
                            layout.num_bytes - layout.input_bytes)
        context.record(self._done)
        self._launched_at = perf_counter()
        self._in_flight, self._last = (inputs, index), (bucket, inputs.num_logits)

    def wait(self) -> StepOutputs:
        assert self._in_flight is not None, "no step is in flight"
        (inputs, index), self._in_flight = self._in_flight, None
        context, driver = self._context, self._context.driver
        context.enter()
        # Most of a long step is slept through; the driver then spins, without Python's lock, until the end.
        pending = self._is_pending()
        if pending:
            left = self._launched_at + 0.9 * self._expected_s[index] - _SHORT_S - perf_counter()
            if left > 0:
                sleep(left)
                pending = self._is_pending()
        driver.call("cuEventSynchronize", self._done)
        took = perf_counter() - self._launched_at
        # How long it took is known only if it ended while it was watched; else it was shorter.
        self._expected_s[index] = took if pending else min(took, self._expected_s[index])
        return inputs.sampling.outputs

    def _is_pending(self) -> bool:
        """Whether the step may still run; an error is told by what comes next."""
        return bool(int(self._context.driver.api.cuEventQuery(self._done)[0]))

    def logits(self) -> Float32Array:
        assert self._in_flight is None, "a step is in flight"
        assert self._last is not None, "no step has been waited for"
        bucket, num_logits = self._last
        self._context.enter()
        if self._logits is None:
            rows = max(bucket.logits_rows for bucket in self._buckets)
            self._logits = self._context.pinned(rows * self.vocab_size * 4, "logits")
        size = num_logits * self.vocab_size * 4
        if size:
            self._context.to_host(int(self._logits.ctypes.data), bucket.logits, size)
        self._context.synchronize()
        return self._logits[:size].view(np.float32).reshape(num_logits, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        last = self.num_blocks + self.num_host_blocks
        assert all(0 <= source < last and 0 <= destination < last for source, destination in pairs), pairs
        assert self._finalizer.alive, "the program is closed"
        self._context.enter()
        # In the stream they come after the step in flight and before the next one; nobody waits for them.
        for source, destination, count in _runs(pairs, self.num_blocks):
            size = count * self.block_bytes
            from_gpu, to_gpu = source < self.num_blocks, destination < self.num_blocks
            origin, target = self._block_address(source), self._block_address(destination)
            if from_gpu and to_gpu:
                self._context.driver.call("cuMemcpyDtoDAsync", target, origin, size, self._context.stream)
            elif from_gpu:
                self._context.to_host(target, origin, size)
            elif to_gpu:
                self._context.to_device(target, origin, size)
            else:
                self._context.synchronize()  # what was copied to the source must be there
                self._host_block(destination, count)[:] = self._host_block(source, count)

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        assert self.lora is not None and self._image is not None, "the engine has no room for adapters"
        assert self._finalizer.alive, "the program is closed"
        self.lora.check_slot(slot, image.size)
        self._context.enter()
        # The buffer may still be on its way with the adapter before; in the stream the copy follows the step in flight.
        self._context.driver.call("cuEventSynchronize", self._image_sent)
        np.copyto(self._image, image)
        self._context.to_device(self._lora_address + slot * self.lora.bytes_per_adapter,
                                int(self._image.ctypes.data), self._image.size)
        self._context.record(self._image_sent)

    def _block_address(self, number: int) -> int:
        if number < self.num_blocks:
            return self._kv_address + number * self.block_bytes
        return int(self._host_kv.ctypes.data) + (number - self.num_blocks) * self.block_bytes

    def _host_block(self, number: int, count: int) -> Bytes:
        begin = (number - self.num_blocks) * self.block_bytes
        return self._host_kv[begin : begin + count * self.block_bytes]

    def profile(self, inputs: StepInputs) -> np.ndarray:
        """A whole step; i64 [launches], the ns that each launch of its bucket took on the GPU."""
        index = self._prepare(inputs)
        if index not in self._timed:
            self._timed[index] = StepGraph(self._context, self._kernels, self._buckets[index].launches, timed=True)
        self._send(inputs)
        self._timed[index].launch()
        self._context.synchronize()
        return self._timed[index].durations()

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        index = self._prepare(inputs)
        self._send(inputs)
        found = {}
        for launch in self._buckets[index].launches:
            launch_alone(self._context, self._kernels, launch)
            for name, (argument, dims, dtype) in launch.writes.items():
                if name in values:
                    address, shape = launch.arguments[argument], value_shape(dims, inputs)
                    assert isinstance(address, int), f"{name} is written through a tensor map"
                    found[name] = decode(self._context.read(address, value_bytes(shape, dtype)), shape, dtype)
        self._context.synchronize()
        return found

    def _prepare(self, inputs: StepInputs) -> int:
        """Makes ready for a step; the index of the bucket that takes it."""
        assert self._finalizer.alive, "the program is closed"
        assert self._in_flight is None, "a step is in flight"
        assert inputs in self.inputs and inputs.num_tokens > 0
        self._context.enter()
        return bisect_left(self._bucket_tokens, inputs.num_tokens)

    def _send(self, inputs: StepInputs) -> None:
        """Starts the copies of what this step's kernels read: one, unless a row uses one of the long lists."""
        host = self._host_addresses[self.inputs.index(inputs)]
        for offset, size in inputs.pieces():
            self._context.to_device(self._step_address + offset, host + offset, size)

    def close(self) -> None:
        self._finalizer()


def check_target(engine: EngineFile, gpu: GpuInfo) -> None:
    """Raises EngineMismatch unless the engine's code runs on this GPU, or if it is for several."""
    manifest = engine.manifest
    if (ranks := num_ranks(engine)) != 1:
        raise EngineMismatch(f"{engine.path} is divided over {ranks} GPUs, which the cuda device cannot run yet.\n"
                             "  Build it for one GPU, or try it on the CPU: --device emulator")
    target, isa = manifest["target"]["name"], manifest["target"]["isa"]
    if not runs_on(isa, gpu.capability):
        raise EngineMismatch(
            f"{engine.path} was built for {target} ({isa}); cuda:{gpu.ordinal} is {gpu.name} ({gpu.arch}).\n"
            f"  Build one for it: ingot build {manifest['model']['name']} --target NAME --precision "
            f"{manifest['precision']}, where `ingot targets` lists the names and precisions of {gpu.arch}.")


def check_shared_memory(engine: EngineFile, plan: GpuPlan, gpu: GpuInfo) -> None:
    """Devices on which the same code runs differ in it: 163 KiB on sm_80, 99 on sm_86. Raises EngineMismatch."""
    for kernel in plan.kernels.values():
        if kernel.shared_bytes > gpu.shared_per_block:
            raise EngineMismatch(
                f"{engine.path} was built for {engine.manifest['target']['name']}: its kernel {kernel.symbol} takes "
                f"{kernel.shared_bytes} bytes of shared memory, a block of cuda:{gpu.ordinal} ({gpu.name}, {gpu.arch}) "
                f"has {gpu.shared_per_block}.\n  Build one for this GPU; `ingot targets` lists them.")


def runs_on(isa: str, capability: tuple[int, int]) -> bool:
    """Whether code for `isa` ("sm_80", "sm_90a") runs on a device. Code with the features of one architecture ("a")
    runs there alone, else also on later ones of the same major number."""
    number = isa.removeprefix("sm_").rstrip("af")
    if not isa.startswith("sm_") or not number.isdigit():
        return False
    major, minor = divmod(int(number), 10)
    if isa.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def _packed(blobs: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each lies in one piece of memory, and the size of it."""
    offsets, end = {}, 0
    for blob, size in blobs.items():
        offsets[blob] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _runs(pairs: Sequence[tuple[int, int]], num_blocks: int) -> Iterator[tuple[int, int, int]]:
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

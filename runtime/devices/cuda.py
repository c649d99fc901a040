"""The cuda device: a GPU engine through the CUDA driver API, one graph launch a step and GPU.

    load      code, weights (through two pinned buffers), arena, workspace, a step's arrays, KV pool; then one graph for
              each token bucket, bound to those addresses once and for all
    launch    one copy of the step's arrays to each GPU, the bucket's graph, one copy of what was sampled back, an event
    wait      for the event

A step allocates nothing. Its two sets of inputs share one place on the GPU: the copy of the next one waits, in the
stream, for the step before. An engine that is divided among GPUs has a CudaRank on each; what is sampled is the same on
all of them, and taken from the first.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from time import perf_counter, sleep

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError
from ..kv_memory import KvCacheSizeError
from ..lora import LoraRoom
from ..program import EngineMismatch, Limits, check_plan_version
from ..sampling_inputs import Float32Array, StepOutputs
from ..step import StepInputs, StepLayout
from .cuda_driver import CudaError, Driver, GpuInfo, NoGpu, find_gpu, load_driver
from .cuda_graph import launch_alone
from .cuda_group import CudaGroup, check_peers
from .cuda_memory import Bytes
from .cuda_rank import CudaRank
from .gpu_collective import check_exchanges, most_blocks, ranks_on
from .gpu_kernels import check_members
from .gpu_plan import BoundBucket, GpuPlan
from .traced_values import decode, value_bytes, value_shape

DEFAULT_FRACTION = 0.9
"""Of the memory that is free once everything else is in place: the driver, and others on the GPU, take some later."""

_SHORT_S = 2e-4
"""Shorter steps are not slept through: to be woken up takes part of that."""


class CudaProgram:
    """A GPU engine, loaded. See the Program protocol for what callers may use.

    gpus: the devices that it runs on, in the order of the ranks; gpu: the first
    weights_bytes, arena_bytes, workspace_bytes, kv_bytes, lora_bytes: the memory that it occupies of each GPU
    """

    def __init__(self, engine: EngineFile, kv_cache_tokens: int | None = None, host_kv_tokens: int = 0, *,
                 kv_cache_fraction: float = DEFAULT_FRACTION, most_kv_tokens: int | None = None,
                 ordinals: Sequence[int] = (), driver: Driver | None = None,
                 progress: Callable[[int], None] = lambda size: None) -> None:
        """kv_cache_tokens: room of the KV cache; None: kv_cache_fraction of what is free beside everything else on the
        GPU that has least, but no more than most_kv_tokens.
        ordinals: numbers of the GPUs, one for each rank of the engine; () for the first ones.
        progress: is told the bytes of each piece of the weights that has been read, of all GPUs.

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
        self.gpus = check_gpus(engine, driver, ordinals)
        self.gpu = self.gpus[0]
        self._engine = engine
        self._group = CudaGroup(driver, self.gpus)
        self._finalizer = weakref.finalize(self, self._group.close)
        try:
            self.lora = LoraRoom.of(engine.manifest)
            self.lora_bytes = self.lora.num_bytes if self.lora else 0
            plan = GpuPlan.read(engine.plan, limits, self.lora, len(self.gpus))
            check_members(plan.kernels, engine.sizes)
            check_exchanges(plan, len(self.gpus))
            for gpu in self.gpus:
                check_shared_memory(engine, plan, gpu)
                check_multiprocessors(engine, plan, gpu)
            self._load(plan, limits, kv_cache_tokens, host_kv_tokens, kv_cache_fraction, most_kv_tokens, progress)
        except EngineFormatError as error:
            self.close()
            prefix = f"{engine.path}: "
            raise type(error)(f"{prefix}{str(error).removeprefix(prefix)}") from None
        except BaseException:
            self.close()
            raise
        self._expected_s = [0.0] * len(self._bucket_tokens)
        self._launched_at = 0.0
        self._in_flight: tuple[StepInputs, int] | None = None
        self._last: tuple[BoundBucket, int] | None = None
        self._logits: Bytes | None = None
        del engine.plan  # megabytes of parsed JSON

    def _load(self, plan: GpuPlan, limits: Limits, kv_cache_tokens: int | None, host_kv_tokens: int, fraction: float,
              most_kv_tokens: int | None, progress: Callable[[int], None]) -> None:
        kv, tables = plan.kv, len(plan.kv.windows)
        self.block_size, self.block_bytes, self.kv_windows = kv.block_size, kv.block_bytes, kv.windows
        self.vocab_size = plan.vocab_size
        layout = StepLayout(limits, plan.vocab_size, kv.block_size, tables)
        self._ranks = ranks = [CudaRank(context, self._engine, plan, layout, number, self.lora)
                               for number, context in enumerate(self._group.contexts)]
        self._group.ranks = ranks
        first = ranks[0]
        self.weights_bytes = max(rank.weights_bytes for rank in ranks)
        self.arena_bytes, self.workspace_bytes = plan.arena_bytes, plan.workspace_bytes
        for rank in ranks:
            rank.check_room(limits, kv_cache_tokens)
        for rank in ranks:
            rank.allocate()
        self.num_blocks = self._num_blocks(plan, limits, kv_cache_tokens, fraction, most_kv_tokens)
        self.num_host_blocks = kv.num_blocks(host_kv_tokens)
        self.kv_bytes = self.num_blocks * kv.block_bytes
        for rank in ranks:
            rank.allocate_kv(self.num_blocks, self.num_host_blocks, f"{host_kv_tokens} tokens of KV")
        first.context.enter()
        one, other = (StepInputs(limits, plan.vocab_size, kv.block_size, tables, first.context.pinned(
            layout.num_bytes, "the arrays of a step")) for _ in range(2))
        self.inputs = (one, other)
        self._host_addresses = [int(inputs.memory.ctypes.data) for inputs in self.inputs]
        peers = [0]
        if len(ranks) > 1:
            peers = self._group.connect([rank.arena for rank in ranks], plan.signal_bytes)
        for rank, table in zip(ranks, peers, strict=True):
            rank.finish(table, progress)
        self._bucket_tokens = [bucket.tokens for bucket in first.buckets]

    def _num_blocks(self, plan: GpuPlan, limits: Limits, kv_cache_tokens: int | None, fraction: float,
                    most_kv_tokens: int | None) -> int:
        """Of the KV cache: the same on every GPU."""
        kv, tables = plan.kv, len(plan.kv.windows)
        if kv_cache_tokens is not None or not kv.block_bytes:  # a model without attention has blocks of nothing
            return kv.num_blocks(kv_cache_tokens or limits.max_batch_size * limits.max_seq_len)
        rooms = [rank.room(fraction) for rank in self._ranks]
        blocks = min(rooms) // tables * tables
        if most_kv_tokens is not None:
            blocks = min(blocks, kv.num_blocks(most_kv_tokens))
        if blocks < 1:
            raise self._ranks[rooms.index(min(rooms))].too_little(
                f"no block of the KV cache fits {fraction:.0%} of what is left")
        return blocks

    def launch(self, inputs: StepInputs) -> None:
        index = self._prepare(inputs)
        host = self._host_addresses[self.inputs.index(inputs)]
        with self._group.launching(), self._group.together():
            self._send(inputs)
            for rank in self._ranks:
                rank.launch(index, bool(inputs.num_adapted))
            for rank in self._ranks:
                rank.end(host if rank.rank == 0 and inputs.sampling.num_rows else None)
        self._launched_at = perf_counter()
        self._in_flight, self._last = (inputs, index), (self._ranks[0].buckets[index], inputs.num_logits)

    def wait(self) -> StepOutputs:
        assert self._in_flight is not None, "no step is in flight"
        (inputs, index), self._in_flight = self._in_flight, None
        with self._group.together():
            # Most of a long step is slept through.
            pending = self._group.is_pending()
            if pending:
                left = self._launched_at + 0.9 * self._expected_s[index] - _SHORT_S - perf_counter()
                if left > 0:
                    sleep(left)
                    pending = self._group.is_pending()
            self._group.watch()
        took = perf_counter() - self._launched_at
        # How long it took is known only if it ended while it was watched; else it was shorter.
        self._expected_s[index] = took if pending else min(took, self._expected_s[index])
        return inputs.sampling.outputs

    def _rest(self) -> None:
        """Until all GPUs have done what they were given."""
        for rank in self._ranks:
            rank.end(None)
        self._group.watch()

    def logits(self) -> Float32Array:
        assert self._in_flight is None, "a step is in flight"
        assert self._last is not None, "no step has been waited for"
        bucket, num_logits = self._last
        first = self._ranks[0]
        first.context.enter()
        if self._logits is None:
            rows = max(bucket.logits_rows for bucket in first.buckets)
            self._logits = first.context.pinned(rows * self.vocab_size * 4, "logits")
        size = num_logits * self.vocab_size * 4
        if size:
            first.context.to_host(int(self._logits.ctypes.data), bucket.logits, size)
        first.context.synchronize()
        return self._logits[:size].view(np.float32).reshape(num_logits, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        last = self.num_blocks + self.num_host_blocks
        assert all(0 <= source < last and 0 <= destination < last for source, destination in pairs), pairs
        assert self._finalizer.alive, "the program is closed"
        for rank in self._ranks:
            rank.copy_blocks(pairs)

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        assert self._finalizer.alive, "the program is closed"
        for rank in self._ranks:
            rank.write_adapter(slot, image)

    def profile(self, inputs: StepInputs) -> np.ndarray:
        """A whole step; i64 [launches], the ns that each launch of its bucket took on the first GPU: where it waits for
        others, with that."""
        index = self._prepare(inputs)
        graphs = [rank.timed(index) for rank in self._ranks]
        with self._group.launching(), self._group.together():
            self._send(inputs)
            for rank, graph in zip(self._ranks, graphs, strict=True):
                rank.context.enter()
                graph.launch()
            self._rest()
        self._ranks[0].context.enter()
        return graphs[0].durations()

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        index = self._prepare(inputs)
        first, found = self._ranks[0], {}
        with self._group.launching(), self._group.together():
            self._send(inputs)
            for number, launch in enumerate(first.buckets[index].launches):
                for rank in self._ranks:
                    rank.context.enter()
                    launch_alone(rank.context, rank.kernels, rank.buckets[index].launches[number])
                for name, (argument, dims, dtype) in launch.writes.items():
                    if name in values:
                        self._rest()
                        address, shape = launch.arguments[argument], value_shape(dims, inputs)
                        assert isinstance(address, int), f"{name} is written through a tensor map"
                        first.context.enter()
                        found[name] = decode(first.context.read(address, value_bytes(shape, dtype)), shape, dtype)
            self._rest()
        return found

    def _prepare(self, inputs: StepInputs) -> int:
        """Makes ready for a step; the index of the bucket that takes it."""
        assert self._finalizer.alive, "the program is closed"
        assert self._in_flight is None, "a step is in flight"
        assert inputs in self.inputs and inputs.num_tokens > 0
        return bisect_left(self._bucket_tokens, inputs.num_tokens)

    def _send(self, inputs: StepInputs) -> None:
        """Starts the copies of what this step's kernels read: one, unless a row uses one of the long lists."""
        host, pieces = self._host_addresses[self.inputs.index(inputs)], inputs.pieces()
        for rank in self._ranks:
            rank.send(host, pieces)

    def close(self) -> None:
        if self._finalizer.alive and getattr(self, "_in_flight", None) is not None:
            with suppress(CudaError), self._group.together():
                self._group.watch()
        self._finalizer()


def check_gpus(engine: EngineFile, driver: Driver, ordinals: Sequence[int] = ()) -> tuple[GpuInfo, ...]:
    """The GPUs that run an engine: those that are named, else the first ones. Raises RequestError, NoGpu,
    EngineMismatch, NoPeerAccess, CudaError."""
    numbers = ranks_on(engine, ordinals)
    try:
        gpus = tuple(find_gpu(driver, number) for number in numbers)
    except NoGpu as error:
        raise error if len(numbers) == 1 else NoGpu(f"it is divided among {len(numbers)} GPUs, and {error}") from None
    for gpu in gpus:
        check_target(engine, gpu)
    check_peers(driver, gpus)
    return gpus


def check_target(engine: EngineFile, gpu: GpuInfo) -> None:
    """Raises EngineMismatch unless the engine's code runs on this GPU."""
    manifest = engine.manifest
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


def check_multiprocessors(engine: EngineFile, plan: GpuPlan, gpu: GpuInfo) -> None:
    """Raises EngineMismatch unless the blocks of launches that exchange values all run at a time."""
    if (blocks := most_blocks(plan)) > gpu.multiprocessors:
        raise EngineMismatch(
            f"{engine.path} was built for {engine.manifest['target']['name']}: {blocks} blocks wait for those of other "
            f"GPUs, and cuda:{gpu.ordinal} ({gpu.name}) has {gpu.multiprocessors} multiprocessors.\n"
            "  Build one for this GPU; `ingot targets` lists them.")


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

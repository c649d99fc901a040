"""The emulator device: a GPU engine on this CPU, its kernels' sources in Triton's interpreter, one block at a time.

Plan, addresses, buckets, arrays of a step and the order of launches are those of the cuda device; so scheduler, KV
cache and servers run on it unchanged. It is slower than a GPU by many orders of magnitude: for tests, and for questions
to an engine.

Memory is told apart as on a GPU: a step's arrays are copied to the device's own when it is launched, and what was
sampled comes back when it is done. Before each step the arena holds 0xff, NaN in every floating type, so that a value
which is read before it is written shows.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError, WorkFailed
from ..lora import LoraRoom
from ..program import EngineMismatch, Limits, check_plan_version
from ..sampling_inputs import Float32Array, StepOutputs
from ..step import StepInputs, StepLayout
from .gpu_collective import GIVEN_UP, check_exchanges, num_ranks, peer_table
from .gpu_kernels import Kernel, TensorMapType, check_members
from .gpu_plan import BoundBucket, BoundLaunch, BoundTensorMap, GpuPlan, Places, peers_bytes
from .host_memory import AdapterMemory, Bytes, KvBlocks, anonymous
from .plan_fields import mapped_weight
from .traced_values import decode, value_bytes, value_shape

if TYPE_CHECKING:
    from ingot.plugins.gpu.interpret import Prepared

TRITON_VERSION = "3.9.0"
"""The one whose interpreter the kernels are written for (plugins/gpu/math.py)."""

_POISON = 0xFF
_EXCHANGE_S = 600.0
"""In which the ranks of a tensor-parallel engine, each in a thread, have exchanged a value."""


class EmulatorProgram:
    """A GPU engine, loaded. See the Program protocol for what callers may use.

    weights_bytes, arena_bytes, workspace_bytes, kv_bytes, lora_bytes: what it would take of a GPU's memory
    """

    def __init__(self, engine: EngineFile, kv_cache_tokens: int, host_kv_tokens: int = 0) -> None:
        """Raises EngineFormatError, EngineMismatch if the installed kernels are not those that the engine was built
        from, RequestError without Triton, WorkFailed."""
        check_plan_version(engine)
        if kv_cache_tokens < 1 or host_kv_tokens < 0:
            raise RequestError(f"kv_cache_tokens is {kv_cache_tokens}, host_kv_tokens {host_kv_tokens}; expected at "
                               "least 1 and 0")
        self._engine = engine
        self.num_ranks = num_ranks(engine)
        self._interpret = _interpreter()
        limits = Limits.of(engine.manifest)
        try:
            self.lora = LoraRoom.of(engine.manifest)
            plan = GpuPlan.read(engine.plan, limits, self.lora, self.num_ranks)
            check_members(plan.kernels, engine.sizes)
            check_exchanges(plan, self.num_ranks)
            self._sources = _sources(engine, plan.kernels.values())
            self._lay_out(plan, limits, kv_cache_tokens, host_kv_tokens)
        except EngineFormatError as error:
            prefix = f"{engine.path}: "
            raise type(error)(f"{prefix}{str(error).removeprefix(prefix)}") from None
        self._bucket_tokens = [bucket.tokens for bucket in plan.buckets]
        self._in_flight: tuple[StepInputs, int] | None = None
        self._last: tuple[BoundBucket, int] | None = None
        self._closed = False
        del engine.plan  # megabytes of parsed JSON

    def _lay_out(self, plan: GpuPlan, limits: Limits, kv_cache_tokens: int, host_kv_tokens: int) -> None:
        kv = plan.kv
        self.block_size, self.block_bytes, self.kv_windows = kv.block_size, kv.block_bytes, kv.windows
        self.vocab_size = plan.vocab_size
        first, second = (StepInputs(limits, plan.vocab_size, kv.block_size, len(kv.windows)) for _ in range(2))
        self.inputs = (first, second)
        self._layout = StepLayout(limits, plan.vocab_size, kv.block_size, len(kv.windows))
        self._ranks = [_Rank(self._engine, plan, self._layout, rank, self.num_ranks, kv_cache_tokens, host_kv_tokens,
                             self.lora)
                       for rank in range(self.num_ranks)]
        for number, rank in enumerate(self._ranks):
            rank.peers[:] = peer_table(number, [_address(one.arena) for one in self._ranks],
                                       [_address(one.signals) for one in self._ranks]).view(np.uint8)
        blocks = self._ranks[0].blocks
        self.num_blocks, self.num_host_blocks = blocks.num_blocks, blocks.num_host_blocks
        self.kv_bytes = self.num_blocks * kv.block_bytes
        self.weights_bytes = sum({weight.blobs[0]: weight.size for weight in plan.weights.values()}.values())
        self.arena_bytes, self.workspace_bytes = plan.arena_bytes, plan.workspace_bytes
        self.lora_bytes = self.lora.num_bytes if self.lora else 0

    def launch(self, inputs: StepInputs) -> None:
        index = self._begin(inputs)
        self._in_flight, self._last = (inputs, index), (self._ranks[0].buckets[index], inputs.num_logits)

    def wait(self) -> StepOutputs:
        """Computes the step: nothing runs beside the caller's thread."""
        assert self._in_flight is not None, "no step is in flight"
        (inputs, index), self._in_flight = self._in_flight, None
        for number, launch in enumerate(self._ranks[0].buckets[index].launches):
            if inputs.num_adapted or not launch.adapters:
                self._run(index, number)
        self._end(inputs)
        return inputs.sampling.outputs

    def logits(self) -> Float32Array:
        assert self._in_flight is None, "a step is in flight"
        assert self._last is not None, "no step has been waited for"
        bucket, num_logits = self._last
        arena = self._ranks[0].arena
        begin = bucket.logits - _address(arena)
        return arena[begin : begin + 4 * num_logits * self.vocab_size].view(np.float32).reshape(
            num_logits, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for rank in self._ranks:
            rank.blocks.copy_later(pairs)

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        for rank in self._ranks:
            rank.slots.write(slot, image, later=self._in_flight is not None)

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        index = self._begin(inputs)
        found = {}
        for number, launch in enumerate(self._ranks[0].buckets[index].launches):
            self._run(index, number)
            for name, (argument, dims, dtype) in launch.writes.items():
                if name in values:
                    place = launch.arguments[argument]
                    address = place.address if isinstance(place, BoundTensorMap) else int(place)
                    shape = value_shape(dims, inputs)
                    data = np.frombuffer(ctypes.string_at(address, value_bytes(shape, dtype)), np.uint8)
                    found[name] = decode(data, shape, dtype)
        self._end(inputs)
        return found

    def close(self) -> None:
        """Weights are no longer mapped once nobody holds an array of this program."""
        self._closed = True
        self._in_flight = None
        self._ranks.clear()

    def _begin(self, inputs: StepInputs) -> int:
        """Brings a step's arrays to the device; the index of the bucket that takes it."""
        assert not self._closed, "the program is closed"
        assert self._in_flight is None, "a step is in flight"
        assert any(inputs is mine for mine in self.inputs) and inputs.num_tokens > 0
        pieces = inputs.pieces()
        for rank in self._ranks:
            rank.blocks.copy_now()
            rank.slots.write_now()
            for begin, size in pieces:
                rank.step[begin : begin + size] = inputs.memory[begin : begin + size]
            rank.arena.fill(_POISON)
        return bisect_left(self._bucket_tokens, inputs.num_tokens)

    def _run(self, index: int, number: int) -> None:
        launches = [rank.buckets[index].launches[number] for rank in self._ranks]
        try:
            for rank, launch in zip(self._ranks, launches, strict=True):
                if (index, number) not in rank.prepared:
                    rank.prepared[index, number] = self._prepare(launch)
            prepared = [rank.prepared[index, number] for rank in self._ranks]
            if launches[0].kernel.exchanges:
                self._interpret.run_together(prepared, self._give_up, _EXCHANGE_S)
            else:
                for one in prepared:
                    one.run()
        except Exception as error:
            launch, tokens = launches[0], self._bucket_tokens[index]
            told = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            raise WorkFailed(f"{self._engine.path}: launch {number} of steps of up to {tokens} tokens, {launch.op} of "
                             f"{launch.origin}, failed: {told}") from error

    def _give_up(self) -> None:
        for rank in self._ranks:
            rank.signals.fill(GIVEN_UP)

    def _prepare(self, launch: BoundLaunch) -> Prepared:
        kernel = launch.kernel
        gpu = importlib.import_module("ingot.plugins.gpu.kernel")
        parameters: list[tuple[str, Any]] = []
        arguments: dict[str, int | float] = {}
        for (name, kind), argument in zip(kernel.parameters, launch.arguments, strict=True):
            if isinstance(kind, TensorMapType):
                assert isinstance(argument, BoundTensorMap)
                parameters.append((name, gpu.TensorMap(kind.dtype, argument.shape, argument.stride, kind.block)))
                arguments[name] = argument.address
            else:
                assert not isinstance(argument, BoundTensorMap)
                parameters.append((name, kind))
                arguments[name] = argument
        told = gpu.GpuKernel(kernel.symbol, kernel.module, kernel.function, tuple(parameters), kernel.constants,
                             kernel.num_warps, kernel.num_stages, source=self._sources.get(kernel.module, ""))
        prepared: Prepared = self._interpret.prepare(told, launch.grid, arguments)
        return prepared

    def _end(self, inputs: StepInputs) -> None:
        """Brings the outputs back. Raises WorkFailed if a launch left counters that the next step would trip over."""
        begin, first = self._layout.input_bytes, self._ranks[0]
        inputs.memory[begin:] = first.step[begin:]
        for rank in self._ranks:
            if rank.arrivals.any():
                at = int(np.flatnonzero(rank.arrivals)[0])
                raise WorkFailed(f"{self._engine.path}: a launch left byte {at} of the workspace not zero; of its "
                                 f"first {rank.arrivals.size} bytes every launch leaves zeros")
            if self._sampled(rank, inputs).tobytes() != self._sampled(first, inputs).tobytes():
                raise WorkFailed(f"{self._engine.path}: ranks of a step chose different tokens")

    def _sampled(self, rank: _Rank, inputs: StepInputs) -> Bytes:
        """The tokens that a rank chose, as bytes."""
        place = self._layout.places["sampling.tokens"]
        return rank.step[place.offset : place.offset + 4 * inputs.sampling.num_rows]


class _Rank:
    """The memory of one GPU: of the only one, or of one rank of a tensor-parallel engine."""

    def __init__(self, engine: EngineFile, plan: GpuPlan, layout: StepLayout, rank: int, num_ranks: int,
                 kv_cache_tokens: int, host_kv_tokens: int, lora: LoraRoom | None) -> None:
        kv = plan.kv
        self.slots = AdapterMemory(lora)
        self.blocks = KvBlocks(kv_cache_tokens, host_kv_tokens, kv.block_size, kv.block_bytes, len(kv.windows))
        self.step = anonymous(layout.num_bytes, "the arrays of a step")
        self.step.fill(_POISON)
        self.arena = anonymous(max(plan.arena_bytes, 1), "the arena")
        workspace = anonymous(max(plan.workspace_bytes, 1), "the workspace")
        self.arrivals = workspace[: plan.zeroed_bytes]
        workspace[plan.zeroed_bytes :].fill(_POISON)
        # Mapped arrays must live as long as kernels may read them.
        self._held = {name: mapped_weight(engine, weight.blob_of(rank), weight.size)
                      for name, weight in plan.weights.items()}
        self.signals = anonymous(max(plan.signal_bytes, 1), "signals between ranks")
        self.peers = anonymous(peers_bytes(num_ranks), "addresses of ranks")
        self.prepared: dict[tuple[int, int], Prepared] = {}
        step = _address(self.step)
        self.buckets = plan.bind(Places(
            _address(self.arena), _address(workspace), {name: _address(data) for name, data in self._held.items()},
            self.blocks.address, {name: step + place.offset for name, place in layout.places.items()},
            self.slots.place[0], _address(self.peers)))


def _address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


def _interpreter() -> Any:
    """The module plugins/gpu/interpret.py, in a process that interprets. Raises RequestError."""
    install = f"pip install --no-deps triton=={TRITON_VERSION}"
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise RequestError("the emulator runs kernels in Triton's interpreter, and triton is not installed here.\n"
                           f"  Install it: {install}") from None
    if found != TRITON_VERSION:
        raise RequestError(f"the emulator needs triton {TRITON_VERSION}, whose interpreter the kernels know; here "
                           f"is {found}.\n  Install it: {install}")
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    speed = importlib.import_module("ingot.plugins.gpu.interpreter_speed")
    if not speed.is_interpreting():
        raise RequestError("the emulator runs kernels in Triton's interpreter, but in this process triton was imported "
                           "before, to compile; it cannot do both.\n  Set TRITON_INTERPRET=1 in the environment, or "
                           "load the engine before anything imports triton.")
    speed.install(check_overflow=False)
    return importlib.import_module("ingot.plugins.gpu.interpret")


def _sources(engine: EngineFile, kernels: Collection[Kernel]) -> dict[str, str]:
    """Module -> text, of the generated ones. Raises EngineMismatch unless every kernel's source is the one that its
    code was compiled from."""
    digest = importlib.import_module("ingot.plugins.gpu.sources").source_digest
    generated = importlib.import_module("ingot.plugins.gpu.generated")
    texts: dict[str, str] = {}
    for kernel in kernels:
        module, text = kernel.module, ""
        if kernel.source is not None:
            if module not in texts:
                texts[module] = engine.read(kernel.source).decode("utf-8", "replace")
            text = texts[module]
            if generated.module_name(text) != module:
                raise EngineFormatError(f"plan.kernels.{kernel.symbol}: {kernel.source} is another text than {module}")
        try:
            found = digest(module, text)
        except ModuleNotFoundError:
            found = ""
        if found != kernel.source_sha256:
            manifest = engine.manifest
            what = "what it imports" if text else "the installed source of it, or what it imports,"
            raise EngineMismatch(
                f"{engine.path}: kernel {kernel.symbol} was compiled from {module}; {what} has changed since, so that "
                f"the emulator would run something else than the engine.\n  Build it again: ingot build "
                f"{manifest['model']['name']} --target {manifest['target']['name']} --precision "
                f"{manifest['precision']}, or install Ingot {manifest['ingot_version']}, which built it.")
    return texts

"""The cpu device: native code that its own threads run, one call a step.

All memory is laid out when the engine is loaded: weights are read to large pages or mapped from the file, the arena and
the KV cache are anonymous memory that the system provides page by page as it is first touched. A step allocates
nothing.
"""

import ctypes
import weakref
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError, WorkFailed
from ..host import available_cores
from ..lora import LoraRoom
from ..program import Limits, check_plan_version
from ..sampling_inputs import Float32Array, StepOutputs, work_bytes
from ..step import StepInputs
from .cpu_plan import BoundBucket, Places, bind_bucket
from .host_memory import AdapterMemory, KvBlocks, anonymous
from .host_weights import weights_in_memory
from .native_code import STEP_ARRAYS, NativeCode, Step
from .plan_fields import arena_bytes, check_buckets, kv_layout, vocab_size
from .traced_values import decode, value_bytes, value_shape

MAX_WORKERS = 1024


class CpuProgram:
    """A CPU engine, loaded. See the Program protocol for what callers may use.

    weights_bytes, arena_bytes, kv_bytes, lora_bytes: the memory that it occupies, KV counted as if every block were in
    use.
    """

    def __init__(self, engine: EngineFile, kv_cache_tokens: int, num_workers: int | None = None,
                 host_kv_tokens: int = 0) -> None:
        num_workers = available_cores() if num_workers is None else num_workers
        if not 1 <= num_workers <= MAX_WORKERS:
            raise RequestError(f"num_workers is {num_workers}; expected 1 to {MAX_WORKERS}")
        self.num_workers = num_workers
        self._engine = engine
        limits, plan = Limits.of(engine.manifest), engine.plan
        check_plan_version(engine)
        code = NativeCode(engine)
        try:
            check_buckets(plan, limits)
            self._lay_out(plan, limits, kv_cache_tokens, host_kv_tokens)
            places = Places(self._arena, self._weights, self._kv, self._slots.place, self.inputs)
            self._buckets = [bind_bucket(bucket, i, places, code) for i, bucket in enumerate(plan["buckets"])]
            pool = code.pool_create(num_workers)
            if not pool:
                raise WorkFailed(f"the system refuses {num_workers} threads; use fewer with num_workers")
        except EngineFormatError as error:
            code.close()
            prefix = f"{engine.path}: "
            raise type(error)(f"{prefix}{str(error).removeprefix(prefix)}") from None
        except BaseException:
            code.close()
            raise
        self._bucket_tokens = [bucket.tokens for bucket in self._buckets]
        self._code, self._pool = code, pool
        self._steps = [_step(inputs) for inputs in self.inputs]
        self._in_flight: StepInputs | None = None
        self._last: tuple[BoundBucket, int] | None = None
        self._finalizer = weakref.finalize(self, _release, code, pool)
        del engine.plan  # megabytes of parsed JSON that nothing but `trace` needs again

    def _lay_out(self, plan: dict[str, Any], limits: Limits, kv_cache_tokens: int, host_kv_tokens: int) -> None:
        kv = kv_layout(plan)
        self.block_size, self.block_bytes, self.kv_windows = kv.block_size, kv.block_bytes, kv.windows
        if kv_cache_tokens < 1 or host_kv_tokens < 0:
            raise RequestError(f"kv_cache_tokens is {kv_cache_tokens}, host_kv_tokens {host_kv_tokens}; expected "
                               f"at least {self.block_size}, one block, and 0")
        self._blocks = KvBlocks(kv_cache_tokens, host_kv_tokens, kv.block_size, kv.block_bytes, len(kv.windows))
        self.num_blocks, self.num_host_blocks = self._blocks.num_blocks, self._blocks.num_host_blocks
        self.kv_bytes = self.num_blocks * kv.block_bytes
        base = self._blocks.address
        self._kv = {part: (base + begin, size) for part, (begin, size) in kv.parts.items()}
        self.lora = LoraRoom.of(self._engine.manifest)
        self._slots = AdapterMemory(self.lora)
        self.lora_bytes = self._slots.num_bytes

        self.vocab_size = vocab_size(plan)
        first, second = (StepInputs(limits, self.vocab_size, self.block_size, len(kv.windows)) for _ in range(2))
        self.inputs = (first, second)
        work = anonymous(work_bytes(self.vocab_size, self.num_workers), "sampling")
        for inputs in self.inputs:
            inputs.sampling.use_work(work)

        self._held = weights_in_memory(self._engine, {name: (entry["blob"], entry["size"])
                                                      for name, entry in plan["weights"].items()})
        self._weights = {name: (int(data.ctypes.data), data.size) for name, data in self._held.items()}
        self.weights_bytes = sum({entry["blob"]: entry["size"] for entry in plan["weights"].values()}.values())
        self.arena_bytes = arena_bytes(plan)
        self._arena = anonymous(self.arena_bytes + 64, "the arena")

    def launch(self, inputs: StepInputs) -> None:
        number, index = self._prepare(inputs)
        bucket = self._buckets[index]
        launches = (bucket.launches if inputs.num_adapted else bucket.plain)[number]
        self._in_flight, self._last = inputs, (bucket, inputs.num_logits)
        self._code.start(self._pool, self._steps[number], launches.ctypes.data, 0, len(launches))

    def wait(self) -> StepOutputs:
        inputs = self._in_flight
        assert inputs is not None, "no step is in flight"
        self._code.wait(self._pool)
        self._in_flight = None
        return inputs.sampling.outputs

    def logits(self) -> Float32Array:
        assert self._in_flight is None, "a step is in flight"
        assert self._last is not None, "no step has been waited for"
        bucket, num_logits = self._last
        return bucket.logits[:num_logits]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._blocks.copy_later(pairs)

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        self._slots.write(slot, image, later=self._in_flight is not None)

    def profile(self, inputs: StepInputs) -> np.ndarray:
        """A whole step; i64 [launches], the ns that each launch of its bucket took. Raises EngineMismatch if the
        engine's code cannot tell them."""
        number, index = self._prepare(inputs)
        launches = self._buckets[index].launches[number]
        durations = np.zeros(len(launches), np.int64)
        self._code.profile(self._pool, self._steps[number], launches.ctypes.data, 0, len(launches),
                           durations.ctypes.data)
        return durations

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        number, index = self._prepare(inputs)
        bucket, entries = self._buckets[index], self._engine.plan["buckets"][index]["launches"]
        launches, args = bucket.launches[number], bucket.args[number]
        found = {}
        for launch, entry in enumerate(entries):
            self._code.start(self._pool, self._steps[number], launches.ctypes.data, launch, launch + 1)
            self._code.wait(self._pool)
            for name, write in entry.get("writes", {}).items():
                if name in values:
                    address = int(args[bucket.begins[launch] + write["arg"]])
                    shape, dtype = value_shape(write["shape"], inputs), write["dtype"]
                    data = np.frombuffer(ctypes.string_at(address, value_bytes(shape, dtype)), np.uint8)
                    found[name] = decode(data, shape, dtype)
        return found

    def _prepare(self, inputs: StepInputs) -> tuple[int, int]:
        """Makes ready for a step: which of the two inputs they are, and the index of the bucket that takes them."""
        assert self._finalizer.alive, "the program is closed"
        assert self._in_flight is None, "a step is in flight"
        assert inputs.num_tokens > 0
        self._blocks.copy_now()
        self._slots.write_now()
        number = self.inputs.index(inputs)
        step = self._steps[number]
        step.num_tokens, step.num_seqs, step.num_logits = inputs.num_tokens, inputs.num_seqs, inputs.num_logits
        return number, bisect_left(self._bucket_tokens, inputs.num_tokens)

    def close(self) -> None:
        self._finalizer()


def _step(inputs: StepInputs) -> Step:
    """The ingot_step of these inputs; the counts follow with each step."""
    addresses = {name: getattr(inputs, name).ctypes.data for name in STEP_ARRAYS}
    return Step(max_blocks=inputs.table_width, sampling=inputs.sampling.address, **addresses)


def _release(code: NativeCode, pool: int) -> None:
    code.wait(pool)
    code.pool_destroy(pool)
    code.close()

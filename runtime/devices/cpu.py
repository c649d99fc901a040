"""The cpu device: one call into the engine's native code a step.

All memory is laid out when the engine is loaded: weights are mapped from the file, the arena and the KV cache are
anonymous memory that the system provides page by page as it is first touched. A step allocates nothing.
"""

import ctypes
import mmap
import weakref
from bisect import bisect_left
from collections.abc import Collection
from typing import Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError, WorkFailed
from ..host import available_cores
from ..manifest import weight_name
from ..program import EngineMismatch, Float32Array, Limits
from ..step import StepInputs
from .cpu_plan import DTYPES, Places, align, arena_bytes, bind_bucket, check_buckets, kv_slots
from .native_code import NativeCode, Step

PLAN_VERSION = 1
MAX_WORKERS = 1024


class CpuProgram:
    """A CPU engine, loaded. See the Program protocol for what callers may use.

    weights_bytes, arena_bytes, kv_bytes: the memory that it occupies, KV counted as if every block were in use.
    """

    def __init__(self, engine: EngineFile, kv_cache_tokens: int, num_workers: int | None = None) -> None:
        num_workers = available_cores() if num_workers is None else num_workers
        if not 1 <= num_workers <= MAX_WORKERS:
            raise RequestError(f"num_workers is {num_workers}; expected 1 to {MAX_WORKERS}")
        self.num_workers = num_workers
        self._engine = engine
        limits = Limits.of(engine.manifest)
        code = NativeCode(engine)
        try:
            plan = engine.plan
            if plan.get("version") != PLAN_VERSION:
                raise EngineMismatch(
                    f"{engine.path}: plan version {plan.get('version')!r}, this runtime reads {PLAN_VERSION}"
                )
            check_buckets(plan, limits)
            self._lay_out(plan, limits, kv_cache_tokens)
            places = Places(self._arena, self._weights, self._kv, self.inputs)
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
        self.vocab_size = int(self._buckets[0].logits.shape[1])
        self._bucket_tokens = [bucket.tokens for bucket in self._buckets]
        self._pool = pool
        self._run = code.run
        self._step = Step(
            max_blocks=self.inputs.max_blocks,
            **{name: getattr(self.inputs, name).ctypes.data for name in StepInputs.ARRAYS},
        )
        self._step_reference = ctypes.byref(self._step)
        self._finalizer = weakref.finalize(self, _release, code, pool)
        del engine.plan  # megabytes of parsed JSON that nothing but `trace` needs again

    def _lay_out(self, plan: dict[str, Any], limits: Limits, kv_cache_tokens: int) -> None:
        self.block_size = int(plan["block_size"])
        self.num_blocks = -(-kv_cache_tokens // self.block_size)
        if self.num_blocks < 1:
            raise RequestError(f"kv_cache_tokens is {kv_cache_tokens}; expected at least {self.block_size}, one block")
        max_blocks = -(-limits.max_seq_len // self.block_size)
        self.inputs = StepInputs(limits.max_num_tokens, limits.max_batch_size, max_blocks)

        # Mapped arrays must live as long as kernels may read them.
        self._mapped = {name: self._map(entry["blob"], entry["size"]) for name, entry in plan["weights"].items()}
        self._weights = {name: (int(data.ctypes.data), data.size) for name, data in self._mapped.items()}
        self.weights_bytes = sum({entry["blob"]: entry["size"] for entry in plan["weights"].values()}.values())
        self.arena_bytes = arena_bytes(plan)
        # Vector loads of a row's last elements may reach 64 bytes past the end of the last buffer.
        self._arena = _anonymous(self.arena_bytes + 64, "the arena")

        parts: dict[tuple[int, str], int] = {}
        for slot in kv_slots(plan):
            key_bytes, value_bytes = slot.block_bytes(self.block_size)
            parts[slot.slot, "k"] = self.num_blocks * key_bytes
            parts[slot.slot, "v"] = self.num_blocks * value_bytes
        self.kv_bytes = sum(map(align, parts.values()))
        self._kv_memory = _anonymous(self.kv_bytes + 64, f"a KV cache of {kv_cache_tokens} tokens")
        self._kv: dict[tuple[int, str], tuple[int, int]] = {}
        address = int(self._kv_memory.ctypes.data)
        for key, size in parts.items():
            self._kv[key] = (address, size)
            address += align(size)

    def _map(self, blob: str, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        data = self._engine.map(weight_name(blob))
        if data.size != size:
            raise EngineFormatError(f"plan.weights: {weight_name(blob)} has {data.size} bytes, expected {size}")
        return data

    def step(self) -> Float32Array:
        bucket = self._buckets[self._prepare()]
        self._run(self._pool, self._step_reference, bucket.launches, 0, len(bucket.launches))
        return bucket.logits[: self.inputs.num_logits]

    def trace(self, values: Collection[str]) -> dict[str, np.ndarray]:
        index = self._prepare()
        bucket, entries = self._buckets[index], self._engine.plan["buckets"][index]["launches"]
        found = {}
        for number, entry in enumerate(entries):
            self._run(self._pool, self._step_reference, bucket.launches, number, number + 1)
            args = ctypes.cast(bucket.launches[number].args, ctypes.POINTER(ctypes.c_void_p))
            for name, write in entry.get("writes", {}).items():
                if name in values:
                    found[name] = self._copy(args[write["arg"]], write["shape"], write["dtype"])
        return found

    def _prepare(self) -> int:
        """Copies the counts of the inputs into ingot_step; the index of the bucket that takes them."""
        inputs, step = self.inputs, self._step
        assert self._finalizer.alive, "the program is closed"
        assert inputs.num_tokens > 0
        step.num_tokens, step.num_seqs, step.num_logits = inputs.num_tokens, inputs.num_seqs, inputs.num_logits
        return bisect_left(self._bucket_tokens, inputs.num_tokens)

    def _copy(self, address: int | None, dims: list[int | str], dtype: str) -> np.ndarray:
        """A value of the step that has just run; bf16 as float32."""
        symbols = {"T": self.inputs.num_tokens, "L": self.inputs.num_logits}
        shape = []
        for dim in dims:
            factor, _, symbol = str(dim).rpartition("*")
            shape.append(int(factor or 1) * symbols[symbol] if symbol in symbols else int(symbol))
        kind = np.dtype(DTYPES[dtype])
        size = int(np.prod(shape)) * kind.itemsize
        array = np.frombuffer(ctypes.string_at(address or 0, size), kind).reshape(shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else array

    def close(self) -> None:
        self._finalizer()


def _release(code: NativeCode, pool: int) -> None:
    code.pool_destroy(pool)
    code.close()


def _anonymous(size: int, what: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeroed memory, aligned to a page, that takes no room before it is touched."""
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise WorkFailed(f"no memory for {what}: {size} bytes are refused ({error})") from None

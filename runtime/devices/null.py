"""A device that computes nothing: the whole interface of a program, for tests, overhead measurements and simulation."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ..lora import LoraRoom
from ..program import Limits
from ..sampling_inputs import Float32Array, SamplingInputs, StepOutputs
from ..step import StepInputs
from .null_memory import NullMemory, mix


class NullProgram:
    """Each row of logits gives a token, sampled or not, that follows from the row's token and position alone.

    next_token  (position, token) -> the token that follows; by default a hash of both
    simulate_kv a "model" whose next token depends on every token of the context, read through the block tables:
                wrong blocks give wrong tokens, and are told by an AssertionError where a step can know. The token
                that follows is `NullMemory.next_token(all tokens, vocab_size)`
    step_s      seconds that a step takes at least
    lora        room for adapters; `adapters` holds what was written: slot -> a copy of the image. Unless next_token
                says it, the token that follows depends on the adapter's bytes too, and with simulate_kv a context that
                was computed with one adapter is no other's
    """

    def __init__(self, limits: Limits, vocab_size: int, num_blocks: int,
                 kv_windows: tuple[int | None, ...] = (None,), *, num_host_blocks: int = 0, block_size: int = 16,
                 block_bytes: int = 0, next_token: Callable[[int, int], int] | None = None, simulate_kv: bool = False,
                 step_s: float = 0.0, lora: LoraRoom | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.kv_windows = kv_windows
        self.vocab_size = vocab_size
        self.lora = lora
        self.adapters: dict[int, np.ndarray] = {}
        self._hashes = {-1: 0}
        first, second = (StepInputs(limits, vocab_size, block_size, len(kv_windows)) for _ in range(2))
        self.inputs = (first, second)
        self.num_steps = 0
        self._next_token = next_token
        self._memory = NullMemory(num_blocks, num_host_blocks, block_size, kv_windows) if simulate_kv else None
        self._step_s = step_s
        self._in_flight: StepInputs | None = None
        self._last: StepInputs | None = None
        self._done_at = 0.0

    def launch(self, inputs: StepInputs) -> None:
        """The tokens are there at once; `wait` takes its time."""
        assert self._in_flight is None, "a step is in flight"
        assert any(inputs is mine for mine in self.inputs) and inputs.num_tokens > 0
        self._done_at = time.perf_counter() + self._step_s
        rows = inputs.logit_rows[: inputs.num_logits]
        following: np.ndarray | list[int]
        if self._memory is not None:
            following = self._memory.step(inputs, self._starts(inputs))[rows] % self.vocab_size
        elif self._next_token is not None:
            following = [self._next_token(int(inputs.positions[token]), int(inputs.token_ids[token])) for token in rows]
        else:
            following = mix(inputs.positions[rows].astype(np.uint64), inputs.token_ids[rows].astype(np.uint64))
            following += self._starts(inputs)[inputs.token_seq[rows]]
            following %= self.vocab_size
        inputs.sampling.outputs.tokens[: inputs.num_logits] = following
        self._follow_guides(inputs.sampling)
        self._in_flight = inputs

    def _starts(self, inputs: StepInputs) -> np.ndarray:
        """u64 [num_seqs], a hash of each sequence's adapter; 0 without one."""
        slots = inputs.adapters[: inputs.num_seqs].tolist()
        missing = set(slots) - self._hashes.keys()
        assert not missing, f"nothing was written to slots {missing}"
        return np.array([self._hashes[slot] for slot in slots], np.uint64)

    def _follow_guides(self, sampling: SamplingInputs) -> None:
        """Of what a guide allows, the first from the token that would follow without it."""
        mask_rows = sampling.rows["mask_row"][: sampling.num_rows]
        for row in np.flatnonzero(mask_rows >= 0):
            mask = sampling.masks[mask_rows[row]].view(np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, count=self.vocab_size, bitorder="little"))
            place = np.searchsorted(allowed, sampling.outputs.tokens[row])
            sampling.outputs.tokens[row] = allowed[place % allowed.size] if allowed.size else -1

    def wait(self) -> StepOutputs:
        inputs = self._in_flight
        assert inputs is not None, "no step is in flight"
        while (left := self._done_at - time.perf_counter()) > 0:
            time.sleep(left)
        self._in_flight, self._last = None, inputs
        self.num_steps += 1
        return inputs.sampling.outputs

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        last = self.num_blocks + self.num_host_blocks
        assert all(0 <= source < last and 0 <= destination < last for source, destination in pairs), pairs
        if self._memory is not None:
            self._memory.copy(pairs)

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        """At once: steps are done when they are launched."""
        assert self.lora is not None, "the program has no room for adapters"
        self.lora.check_slot(slot, image.size)
        self.adapters[slot] = np.array(image)
        self._hashes[slot] = zlib.crc32(self.adapters[slot].tobytes()) if image.any() else 0

    def logits(self) -> Float32Array:
        """1 for the token that follows, 0 for the others."""
        assert self._in_flight is None, "a step is in flight"
        assert self._last is not None, "no step has been waited for"
        tokens = self._last.sampling.outputs.tokens[: self._last.num_logits]
        logits = np.zeros((tokens.size, self.vocab_size), np.float32)
        logits[np.arange(tokens.size), tokens] = 1.0
        return logits

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        """It has no values."""
        self.launch(inputs)
        self.wait()
        return {}

    def close(self) -> None:
        pass

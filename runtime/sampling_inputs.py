"""How the tokens of one step are to be chosen, and what was chosen: memory that the device reads and writes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .guides import write_masks
from .sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOPS

if TYPE_CHECKING:
    from .guides import Matcher
    from .sampling_state import SamplingAhead, SequenceSampling

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Float32Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

SAMPLE = -1
"""`target` of a row whose next token is to be chosen."""
NOTHING = -2
"""`target` of a row whose logits alone are wanted."""

CHUNK_TOKENS = 4096
"""INGOT_SAMPLING_CHUNK of plugins/sampling/sampling.h: the piece of a row of logits that one worker takes at a time."""

# A bad word is spelled in two ways at most, with and without a blank before it; while an answer is too short, its own
# stop tokens and the model's are banned.
MAX_BIASES = MAX_LOGIT_BIASES + 3 * MAX_BAD_WORDS + 2 * MAX_STOPS

ROW = np.dtype([
    ("target", "<i4"), ("num_logprobs", "<i4"), ("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"),
    ("min_p", "<f4"), ("repetition_penalty", "<f4"), ("presence_penalty", "<f4"), ("frequency_penalty", "<f4"),
    ("stream", "<i4"), ("seed", "<u8"), ("num_history", "<i4"), ("num_biases", "<i4"), ("mask_row", "<i4"),
    ("unused", "<i4"),
])
"""ingot_sampling_row of plugins/sampling/sampling.h, which says what each field means."""


def row_record(**fields: Any) -> bytes:
    """A row of the given fields; by default its logits alone are wanted, and everything is off."""
    record = np.zeros(1, ROW)
    defaults = {"target": NOTHING, "num_logprobs": -1, "top_p": 1, "repetition_penalty": 1, "mask_row": -1}
    for name, value in (defaults | fields).items():
        record[name] = value
    return record.tobytes()


class SamplingStruct(ctypes.Structure):
    """ingot_sampling of plugins/sampling/sampling.h."""

    COUNTS = ("num_rows", "history_stride", "bias_stride", "mask_stride")
    INPUTS = ("rows", "history_ids", "history_counts", "bias_ids", "bias_values", "masks")
    OUTPUTS = ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs")
    SCRATCH = ("peaks", "raw_sums", "sums", "work")
    _fields_ = [*((name, ctypes.c_int32) for name in COUNTS),
                *((name, ctypes.c_void_p) for name in (*INPUTS, *OUTPUTS, *SCRATCH))]


@dataclass(frozen=True)
class StepOutputs:
    """What a step gave, a row for each row of SamplingInputs; valid until a step of the same inputs is launched again.

    tokens        i32 [rows]      the token chosen, or scored; -1: the logits are no numbers, or no token is allowed
    logprobs      f32 [rows]      its log probability, if the row asks for log probabilities
    ranks         i32 [rows]      its place among all tokens by probability, from 1, likewise; of equals the smaller id
                                  comes first
    top_ids       i32 [rows, 20]  the num_logprobs most probable tokens, in this order; -1 beyond the vocabulary
    top_logprobs  f32 [rows, 20]
    """

    tokens: Int32Array
    logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array

    def first(self, num_rows: int) -> StepOutputs:
        """Views of the first rows."""
        return StepOutputs(self.tokens[:num_rows], self.logprobs[:num_rows], self.ranks[:num_rows],
                           self.top_ids[:num_rows], self.top_logprobs[:num_rows])


class ArraySpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def sampling_arrays(max_rows: int, vocab_size: int, max_seq_len: int) -> dict[str, ArraySpec]:
    """What SamplingInputs consists of, by name: what every step needs, then the long lists, then the outputs."""
    history, mask_words = min(vocab_size, max_seq_len), -(-vocab_size // 32)
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    return {
        "counts": ArraySpec((4,), int32),
        "rows": ArraySpec((max_rows,), ROW),
        "bias_ids": ArraySpec((max_rows, MAX_BIASES), int32),
        "bias_values": ArraySpec((max_rows, MAX_BIASES), float32),
        "history_ids": ArraySpec((max_rows, history), int32),
        "history_counts": ArraySpec((max_rows, history), int32),
        "masks": ArraySpec((max_rows, mask_words), np.dtype(np.uint32)),
        "tokens": ArraySpec((max_rows,), int32),
        "logprobs": ArraySpec((max_rows,), float32),
        "ranks": ArraySpec((max_rows,), int32),
        "top_ids": ArraySpec((max_rows, MAX_LOGPROBS), int32),
        "top_logprobs": ArraySpec((max_rows, MAX_LOGPROBS), float32),
    }


@dataclass(frozen=True)
class Score:
    """A row that is not sampled: the log probability of `token`, which follows in the prompt, is asked for."""

    token: int
    num_logprobs: int = 0


Owner: TypeAlias = "SequenceSampling | SamplingAhead | Score | None"
"""What decides about a row of logits."""


class SamplingInputs:
    """What plugins/sampling reads: row i is about row i of the step's logits. Allocated once; pages of the long lists
    take memory only when they are used. counts: i32 [4], the number of rows first.

    A row keeps what it holds until another sequence takes it, so that a sequence that generates costs next to nothing
    from step to step. The random number of a row depends on its seed, its stream and the position of its token alone.

    outputs      where the results of the step are written
    address      of the C struct, for ingot_step
    mask_wait_s  how long the last `fill` computed the masks of guides: it depends on the tokens of the step before, so
                 the device waits meanwhile
    """

    def __init__(self, max_rows: int, vocab_size: int, max_seq_len: int,
                 arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """arrays: those of sampling_arrays, zeroed; by default they are allocated here."""
        if arrays is None:
            specs = sampling_arrays(max_rows, vocab_size, max_seq_len)
            arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
        self.counts: Int32Array = arrays["counts"]
        self.rows = arrays["rows"]
        self.history_ids: Int32Array = arrays["history_ids"]
        self.history_counts: Int32Array = arrays["history_counts"]
        self.bias_ids: Int32Array = arrays["bias_ids"]
        self.bias_values: Float32Array = arrays["bias_values"]
        self.masks = arrays["masks"]
        self.outputs = StepOutputs(*(arrays[name] for name in SamplingStruct.OUTPUTS))
        chunks = -(-vocab_size // CHUNK_TOKENS)
        self._scratch = [np.zeros((max_rows, chunks), dtype) for dtype in (np.float32, np.float64, np.float64)]
        pointers = {name: arrays[name] for name in (*SamplingStruct.INPUTS, *SamplingStruct.OUTPUTS)}
        pointers |= dict(zip(SamplingStruct.SCRATCH, self._scratch, strict=False))
        self._struct = SamplingStruct(0, self.history_ids.shape[1], MAX_BIASES, self.masks.shape[1],
                                      **{name: array.ctypes.data for name, array in pointers.items()})
        self.address = ctypes.addressof(self._struct)
        self.mask_wait_s = 0.0

        self._records = memoryview(self.rows).cast("B")  # type: ignore[arg-type]  # an array has the buffer interface
        self._num_history, self._num_biases = self.rows["num_history"], self.rows["num_biases"]
        self._mask_row = self.rows["mask_row"]
        # Single elements are written through these: a third of the time of a numpy assignment.
        self._history_ids = memoryview(self.history_ids)  # type: ignore[arg-type]
        self._history_counts = memoryview(self.history_counts)  # type: ignore[arg-type]
        self._owners: list[Owner] = [None] * max_rows
        self._num_applied = [0] * max_rows  # of the owner's changes of its history
        self._bans: list[tuple[int, ...]] = [()] * max_rows
        self._num_masked = [-1] * max_rows  # tokens of the answer that the row's mask follows on
        self._stale: list[tuple[Matcher, int]] = []  # guides and rows whose masks are to be written
        self._changing: list[int] = []  # rows whose sequence may change more of them than is written yet
        for row in range(max_rows):
            self._write(row, row_record())

    @property
    def num_rows(self) -> int:
        """Rows that the step samples or scores; 0: it computes nothing but logits."""
        return int(self._struct.num_rows)

    def lists_in_use(self) -> list[str]:
        """Names of the long lists that the step's rows read; writes `counts`. For devices that copy their inputs."""
        count = self.num_rows
        self.counts[0] = count
        found = []
        if count and self._num_biases[:count].any():
            found += ["bias_ids", "bias_values"]
        if count and self._num_history[:count].any():
            found += ["history_ids", "history_counts"]
        if count and (self._mask_row[:count] >= 0).any():
            found.append("masks")
        return found

    def use_work(self, work: np.ndarray) -> None:
        """Memory of work_bytes for the workers, which all inputs of a device may share; kept alive."""
        self._work = work
        self._struct.work = work.ctypes.data

    def clear(self) -> None:
        """No row is sampled."""
        self._struct.num_rows = 0

    def fill(self, rows: Sequence[Owner]) -> None:
        """The rows of the next step: sampled, scored, or (None) only computed.

        Rows that hold the same sequence as when these inputs were last filled cost nothing, unless its history or its
        bans change from token to token.
        """
        count, owners = len(rows), self._owners
        self._struct.num_rows = count
        if owners[:count] != rows:  # compares identities before anything else
            for row, owner in enumerate(rows):
                if owner is None or owner is not owners[row]:
                    self._take(row, owner)
        self.mask_wait_s = 0.0
        if self._changing:
            self._changing = [row for row in self._changing if row >= count or self._update(row)]
            if self._stale:
                begin = time.perf_counter()
                write_masks(self._stale, self.masks)
                self._stale.clear()
                self.mask_wait_s = time.perf_counter() - begin

    def _take(self, row: int, owner: Owner) -> None:
        if row in self._changing:
            self._changing.remove(row)
        self._owners[row] = owner
        if owner is None:
            self._write(row, _NOTHING)
        elif isinstance(owner, Score):
            self._write(row, row_record(target=owner.token, num_logprobs=owner.num_logprobs))
        else:
            self._write(row, owner.record)
            if owner.history is not None:
                ids, counts = owner.history.ids, owner.history.counts
                self.history_ids[row, : len(ids)], self.history_counts[row, : len(ids)] = ids, counts
                self._num_history[row] = len(ids)
                self._num_applied[row] = len(owner.history.changes)
            if owner.biases:
                self.bias_ids[row, : len(owner.biases)] = list(owner.biases)
                self.bias_values[row, : len(owner.biases)] = list(owner.biases.values())
                self._num_biases[row] = len(owner.biases)
            self._bans[row] = ()
            if owner.guide is not None:
                self._mask_row[row] = row
                self._num_masked[row] = -1
            self._changing.append(row)

    def _update(self, row: int) -> bool:
        """Writes what the row's sequence has changed since; whether its next token can change more."""
        owner = self._owners[row]
        assert owner is not None and not isinstance(owner, Score)
        history = owner.history
        if history is not None and self._num_applied[row] < len(history.changes):
            for slot, token, times in history.changes[self._num_applied[row] :]:
                self._history_ids[row, slot], self._history_counts[row, slot] = token, times
            self._num_applied[row] = len(history.changes)
            self._num_history[row] = history.size
        if self._bans[row] is not owner.bans:
            begin, end = len(owner.biases), len(owner.biases) + len(owner.bans)
            self.bias_ids[row, begin:end] = owner.bans
            self.bias_values[row, begin:end] = -np.inf
            self._num_biases[row] = end
            self._bans[row] = owner.bans
        guide = owner.guide
        if guide is not None and self._num_masked[row] != guide.num_tokens:
            self._num_masked[row] = guide.num_tokens
            self._stale.append((guide, row))
        return owner.may_change

    def _write(self, row: int, record: bytes) -> None:
        size = ROW.itemsize
        self._records[row * size : (row + 1) * size] = record


_NOTHING = row_record()


def work_bytes(vocab_size: int, num_workers: int) -> int:
    """Of SamplingInputs.use_work: two rows a worker, INGOT_SAMPLING_WORK floats each."""
    return num_workers * 2 * (-(-vocab_size // 64) * 64 + 64) * 4

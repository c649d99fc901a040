"""What each launch of a step has to read and to multiply, by the plan alone: shapes of weights, keys and values.

Counted is what cannot be avoided: every weight once, every key and value that a token sees once. Activations are not
counted, which lie in the caches of a CPU, nor is the arithmetic between matrices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..devices.plan_fields import memory_of
from ..engine_file import EngineFile
from ..program import outdated

_DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "i8": 1, "u8": 1}
FLOAT, BF16, INT8, W4A8 = "float", "bf16", "int8", "w4a8"
_ARITHMETIC = {"int8": INT8, "int8g32": INT8, "w4a8": W4A8}


@dataclass(frozen=True)
class Phase:
    """A step of num_seqs sequences with num_new tokens each, at the end of `context` tokens, those included.

    Logits are computed for the last token of each sequence.
    """

    name: str
    num_seqs: int
    num_new: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new

    def visible(self, window: int | None) -> int:
        """Pairs of a token of this step and a position that it sees."""
        first = self.context - self.num_new + 1
        seen = (min(position, window or position) for position in range(first, self.context + 1))
        return self.num_seqs * sum(seen)


@dataclass(frozen=True)
class Work:
    """Bytes to read or write of weights and KV cache, multiplications (each with an addition), and of what numbers."""

    num_bytes: int = 0
    multiplies: int = 0
    arithmetic: str = FLOAT

    @property
    def operations(self) -> int:
        return 2 * self.multiplies


def bucket_of(engine: EngineFile, num_tokens: int) -> dict[str, Any]:
    """The launches of a step of so many tokens. Raises EngineMismatch if they do not say what they compute."""
    buckets = engine.plan["buckets"]
    bucket: dict[str, Any] = buckets[bisect_left([bucket["tokens"] for bucket in buckets], num_tokens)]
    if not all("op" in launch for launch in bucket["launches"]):
        raise outdated(engine, "its plan does not say what each launch computes")
    return bucket


def work_of(plan: Mapping[str, Any], launch: Mapping[str, Any], phase: Phase, features: Collection[str] = ()) -> Work:
    """What one launch of the plan has to do in such a step. features: of the target, if a CPU."""
    # Of joined launches the last one counts, a matrix: its result is the last of the arguments that are written.
    writes = sorted(launch.get("writes", {}).values(), key=lambda write: int(write["arg"]))
    written = _count(writes[-1]["shape"], phase) if writes else 0
    args = memory_of(launch)
    weights = [plan["weights"][arg[1]] for arg in args if arg[0] == "weight"]
    slots = {arg[1] for arg in args if arg[0] == "kv"}
    matrix = max(weights, key=lambda weight: int(weight["size"]), default=None)
    size = sum(weight["size"] for weight in weights)
    op = launch["op"].rpartition("+")[2]
    if slots:
        slot = next(slot for slot in plan["kv"]["slots"] if slot["slot"] in slots)
        return _attention(plan["kv"], slot, written, phase, features) if op == "attention" else Work(
            size + phase.num_tokens * _row_bytes(slot))
    if matrix is None:
        return Work()
    rows, width = matrix["shape"][:-1], matrix["shape"][-1]
    if op == "embedding":  # reads the rows of its tokens only
        return Work(min(size, size * phase.num_tokens // max(1, rows[0])))
    if op == "route" and len(rows) == 1:
        return Work(size, phase.num_tokens * rows[0] * width, _of_matrix(matrix["scheme"], features))
    if op == "expert_linear" and writes:
        gate = 2 if rows[-1] == 2 * int(writes[-1]["shape"][-1]) else 1
        results = written * gate * _summed(plan, launch)
        touched = min(rows[0], results // rows[-1])  # at most: tokens may share experts
        return Work(size * touched // rows[0], results * width, _of_matrix(matrix["scheme"], features))
    if op == "linear" and writes:
        each = _count([dim for dim in writes[-1]["shape"] if isinstance(dim, int)], phase)
        gate = 2 if rows[-1] == 2 * each else 1  # its rows come first, and are not in the result
        return Work(size, gate * written * width, _of_matrix(matrix["scheme"], features))
    return Work(size)


def _summed(plan: Mapping[str, Any], launch: Mapping[str, Any]) -> int:
    """How many results of experts a launch adds up for each that it writes."""
    constants = plan.get("kernels", {}).get(launch.get("kernel"), {}).get("constants", {})
    return int(constants["CHOICES"]) if constants.get("SUM_ROWS") else 1


def _attention(kv: Mapping[str, Any], slot: Mapping[str, Any], written: int, phase: Phase,
               features: Collection[str]) -> Work:
    window = kv["windows"][slot["table"]]
    reach = phase.context if window is None else min(phase.context, window + phase.num_new - 1)
    heads = written // (phase.num_tokens * slot["value_dim"])
    return Work(phase.num_seqs * reach * _row_bytes(slot),
                phase.visible(window) * heads * (slot["key_dim"] + slot["value_dim"]),
                _multiplied(slot["dtype"], phase, features))


def _of_matrix(scheme: str, features: Collection[str]) -> str:
    """As what numbers a matrix in this scheme is multiplied."""
    return BF16 if scheme == "bf16" and "avx512_bf16" in features else _ARITHMETIC.get(scheme, FLOAT)


def _multiplied(kv_dtype: str, phase: Phase, features: Collection[str]) -> str:
    """As what numbers attention multiplies keys and values of this type (docs/kv-cache.md). GPUs have no features."""
    if kv_dtype == "bf16" and "avx512_bf16" in features:
        return BF16
    return INT8 if kv_dtype == "i8" and phase.num_new == 1 and features else FLOAT


def _row_bytes(slot: Mapping[str, Any]) -> int:
    """Of a token's keys and values in one slot, with their scales."""
    scales = 0 if slot.get("key_scale_offset") is None else 2 * 4
    return int(slot["heads"] * ((slot["key_dim"] + slot["value_dim"]) * _DTYPE_BYTES[slot["dtype"]] + scales))


def _count(shape: list[int | str], phase: Phase) -> int:
    """Elements of a value; "T" is the tokens of the step, "L" its rows of logits, "9*T" nine times as many."""
    sizes = {"T": phase.num_tokens, "L": phase.num_seqs}
    count = 1
    for dim in shape:
        factor, _, symbol = str(dim).rpartition("*")
        count *= int(factor or 1) * (sizes[symbol] if symbol in sizes else int(symbol))
    return count

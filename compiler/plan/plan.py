"""The plan of an engine: for each token bucket a list of launches, each argument bound to a place in memory.

The same classes describe CPU and GPU engines. `Plan.to_json` is the member plan.json of an engine.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ingot.runtime.program import PLAN_VERSION

from .kv_cache import KvCache


@dataclass(frozen=True)
class Arg:
    """Where a kernel's pointer points to.

    kind   "value"  a value of the graph, in the arena (bound to an offset by the memory planner)
           "weight" a packed blob of the engine, `offset` bytes in
           "kv"     a part ("k", "v", "k_scale" or "v_scale") of KV-cache slot `name`, in the first block
           "input"  an array of the step (runtime/step.py), `offset` bytes in
           "lora"   the first slot for adapters, `offset` bytes in
           "null"   nothing
           "workspace"  memory that the launches of a GPU share, `offset` bytes in
           "peers"  where each rank's memory is, of a tensor-parallel engine
           "scalar" no place, but the number `offset`
    rectangle  of a pointer that a copy engine takes: (rows, columns, elements from one row to the next)
    """

    kind: str
    name: str = ""
    offset: int = 0
    part: str = ""
    rectangle: tuple[int, int, int] | None = None

    def to_json(self, offsets: dict[str, int]) -> list[Any]:
        if self.rectangle is not None:
            rows, columns, stride = self.rectangle
            return ["tensormap", replace(self, rectangle=None).to_json(offsets), [rows, columns], stride]
        if self.kind in ("workspace", "scalar", "lora"):
            return [self.kind, self.offset]
        if self.kind == "value":
            return ["arena", offsets[self.name] + self.offset]
        if self.kind == "kv":
            return ["kv", int(self.name), self.part]
        if self.kind in ("null", "peers"):
            return [self.kind]
        return [self.kind, self.name, self.offset] if self.offset else [self.kind, self.name]


NULL = Arg("null")


@dataclass(frozen=True)
class Write:
    """A value that a launch leaves in its argument number `arg`; for tools that look into a running engine."""

    arg: int
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """One kernel over the whole step. `reads`, `writes` and `scratch` name buffers, for liveness.

    op: what it computes, as the graph calls it; for profiles. grid: blocks in x, y and z, of GPUs. rows: how many it
    divides evenly among the workers of a CPU, in the words of plugins/constants.py, if it touches of each value the row
    that it is at and of no other; else "". adapters: it has nothing to do in a step without LoRA adapters.
    """

    kernel: str
    args: tuple[Arg, ...]
    origin: str = ""
    reads: tuple[str, ...] = ()
    writes: dict[str, Write] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()
    op: str = ""
    grid: tuple[int, int, int] | None = None
    rows: str = ""
    adapters: bool = False


@dataclass(frozen=True)
class Output:
    """The rows of an output in the arena: [L, width]."""

    offset: int
    width: int
    dtype: str


@dataclass(frozen=True)
class Bucket:
    """What runs when a step has at most `tokens` tokens (and more than the next smaller bucket)."""

    tokens: int
    launches: tuple[Launch, ...]
    offsets: dict[str, int]
    arena_bytes: int
    arena_bound_bytes: int
    arena_unshared_bytes: int
    outputs: dict[str, Output]

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "arena_bytes": self.arena_bytes,
            "outputs": {name: vars(output) for name, output in self.outputs.items()},
            "launches": [_launch_json(launch, self.offsets) for launch in self.launches]}


@dataclass(frozen=True)
class Weight:
    """A packed blob. label says what it is: "model.layers.0.self_attn.qkv w4a8 [960, 576]".

    shape   of what is packed; scheme: how, a key of SCHEMES, or "" for elements as they are; for profiles
    blobs   one for each rank of a tensor-parallel engine, the first is `blob`; empty where all ranks hold the same
    """

    blob: str
    size: int
    label: str
    shape: tuple[int, ...] = ()
    scheme: str = ""
    blobs: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "blobs" or value}


@dataclass(frozen=True)
class Workspace:
    """Memory that the launches of a GPU share. The first zeroed_bytes are zero before the first launch and after each.
    signal_bytes: of other memory, which the ranks of a tensor-parallel engine write to each other.
    """

    bytes: int
    zeroed_bytes: int
    signal_bytes: int


@dataclass(frozen=True)
class Plan:
    """kernels, workspace: of GPUs. kernels: symbol -> what a device must know of it, as JSON."""

    kv: KvCache
    weights: dict[str, Weight]
    buckets: tuple[Bucket, ...]
    probes: dict[str, str]
    kernels: dict[str, Any] | None = None
    workspace: Workspace | None = None

    def to_json(self) -> dict[str, Any]:
        gpu = {} if self.workspace is None else {"kernels": self.kernels, "workspace": vars(self.workspace)}
        return {"version": PLAN_VERSION,
                "kv": {"block_size": self.kv.block_size, "block_bytes": self.kv.block_bytes,
                       "windows": list(self.kv.windows), "slots": [slot.to_json() for slot in self.kv.slots]},
                "weights": {name: weight.to_json() for name, weight in self.weights.items()},
                "buckets": [bucket.to_json() for bucket in self.buckets], "probes": self.probes, **gpu}


def _launch_json(launch: Launch, offsets: dict[str, int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kernel": launch.kernel, "args": [arg.to_json(offsets) for arg in launch.args]}
    if launch.grid is not None:
        entry["grid"] = list(launch.grid)
    if launch.op:
        entry["op"] = launch.op
    if launch.origin:
        entry["origin"] = launch.origin
    if launch.adapters:
        entry["adapters"] = True
    if launch.writes:
        entry["writes"] = {name: {"arg": w.arg, "shape": list(w.shape), "dtype": w.dtype}
                           for name, w in launch.writes.items()}
    return entry

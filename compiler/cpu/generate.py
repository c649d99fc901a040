"""The CPU back end: from the final graph to kernels, weights and a plan for every token bucket."""
from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit

from ..ir.graph import Graph
from ..plan.plan import Bucket, KvSlot, Plan, Weight
from .emitters import EMITTERS
from .isa import ISAS
from .lower import Lowering
from .toolchain import Compiler, compile_shared
from .weights import PackedWeight, WeightTable

KERNELS_A_FILE = 12
"""Kernels of one C file: small enough to compile side by side, large enough to read the headers once for many."""


@dataclass(frozen=True)
class CpuProgram:
    """Everything of an engine but the bytes of its weights."""

    isa: str
    block_size: int
    buckets: tuple[Bucket, ...]
    kernels: tuple[CpuKernel, ...]
    weights: tuple[PackedWeight, ...]
    kv: tuple[KvSlot, ...]
    probes: dict[str, str]
    vocab_size: int

    @property
    def machine(self) -> str:
        return ISAS[self.isa].machine

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(sorted(ISAS[self.isa].required))

    def plan(self, written: dict[str, Weight]) -> Plan:
        return Plan(self.block_size, self.kv, written, self.buckets, self.probes)

    def kernel_table(self) -> list[dict[str, Any]]:
        """Which kernel runs how often, in which buckets."""
        table = []
        for kernel in self.kernels:
            counts = {str(bucket.tokens): sum(launch.kernel == kernel.symbol for launch in bucket.launches)
                      for bucket in self.buckets}
            table.append({"name": kernel.symbol, "launches": {tokens: n for tokens, n in counts.items() if n}})
        return table

    def memory(self) -> dict[str, int]:
        largest = max(self.buckets, key=lambda bucket: bucket.arena_bytes)
        return {"weights_bytes": sum(weight.size_bytes for weight in self.weights),
                "arena_bytes": largest.arena_bytes, "arena_bound_bytes": largest.arena_bound_bytes,
                "arena_unshared_bytes": largest.arena_unshared_bytes,
                "kv_bytes_per_token": sum(slot.bytes_per_token for slot in self.kv)}

    def compile(self, compiler: str) -> bytes:
        """The shared object. Raises CompileError or NoCompiler."""
        files = {"pool.c": (INCLUDE_DIR / "cpu" / "pool.c").read_text()}
        for number, start in enumerate(range(0, len(self.kernels), KERNELS_A_FILE)):
            files[f"kernels{number}.c"] = translation_unit(self.kernels[start:start + KERNELS_A_FILE])
        chosen: Compiler = "cc" if compiler == "cc" else "zig"
        with tempfile.TemporaryDirectory(prefix="ingot-code-") as folder:
            out = Path(folder) / "model.so"
            compile_shared(files, ISAS[self.isa], [INCLUDE_DIR, INCLUDE_DIR / "cpu"], out, chosen,
                           len(os.sched_getaffinity(0)))
            return out.read_bytes()


def token_buckets(max_num_tokens: int) -> list[int]:
    """1, 2, 4, … max_num_tokens: each has its own kernels and its own arena."""
    buckets = [1]
    while buckets[-1] < max_num_tokens:
        buckets.append(min(2 * buckets[-1], max_num_tokens))
    return buckets


def generate(graph: Graph, isa: str, limits: dict[str, int], block_size: int) -> CpuProgram:
    """Lower the graph for every token bucket."""
    weights, kernels, buckets = WeightTable(), {}, []
    for tokens in token_buckets(limits["max_num_tokens"]):
        bindings = {"T": tokens, "L": min(tokens, limits["max_batch_size"])}
        lowering = Lowering(graph, isa, tokens, bindings, limits, weights, block_size, EMITTERS)
        buckets.append(lowering.run())
        kernels.update(lowering.kernels)
    vocab = graph.types[graph.outputs[0]].shape[-1]
    made = {name for node in graph.nodes for name in node.outputs}
    return CpuProgram(isa, block_size, tuple(buckets), tuple(kernels.values()), tuple(weights.entries.values()),
                      kv_slots(graph), {label: v for label, v in graph.probes.items() if v in made}, int(vocab))


def kv_slots(graph: Graph) -> tuple[KvSlot, ...]:
    slots = []
    for node in graph.nodes:
        if node.op in ("kv_write", "rope_kv_write"):
            k, v = (graph.types[name].shape for name in node.outputs[-2:])
            slots.append(KvSlot(node.attrs["slot"], int(k[1]), int(k[2]), int(v[2]), node.attrs["dtype"].value))
    return tuple(sorted(slots, key=lambda slot: slot.slot))

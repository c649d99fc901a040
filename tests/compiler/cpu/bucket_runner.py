"""Runs what a graph is lowered to: its launches, in C, on an arena, caches and weights of its own."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ingot.compiler.cpu.emitters import EMITTERS
from ingot.compiler.cpu.lower import Lowering
from ingot.compiler.fusion.fuse import fuse_loops
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import concrete
from ingot.compiler.ir.verify import verify
from ingot.compiler.passes.strided import accepts_strided
from ingot.compiler.plan.kv_cache import KvCache, plan_kv_cache
from ingot.compiler.plan.plan import Arg, Bucket
from ingot.compiler.weights.packed import WeightTable
from ingot.plugins.kernel import CpuKernel
from tests.compiler.graphs import Builder, Weights, compare, random_inputs
from tests.plugins.native import Library, Step, aligned, placed

MAX_SEQS = 2
MAX_SEQ_LEN = 64
BLOCK_SIZE = 16


@dataclass
class Lowered:
    """A graph that a test builds, lowered for steps of some tokens."""

    name: str
    build: Callable[[Builder], str | list[str]]
    tokens: tuple[int, ...] = (1, 3, 16)
    graph: Graph = field(init=False)
    kv: KvCache = field(init=False)
    weights: WeightTable = field(default_factory=WeightTable)
    buckets: dict[int, Bucket] = field(default_factory=dict)
    kernels: dict[str, CpuKernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        builder = Builder()
        outputs = self.build(builder)
        self.graph = verify(fuse_loops(builder.made(*([outputs] if isinstance(outputs, str) else outputs)),
                                       accepts_strided))

    def lower(self, isa: str) -> list[CpuKernel]:
        limits = {"max_batch_size": MAX_SEQS, "max_num_tokens": max(self.tokens), "max_seq_len": MAX_SEQ_LEN}
        self.kv = plan_kv_cache(self.graph, BLOCK_SIZE, MAX_SEQ_LEN)
        for tokens in self.tokens:
            bindings = {"T": tokens, "L": min(tokens, MAX_SEQS)}
            lowering = Lowering(graph=self.graph, isa=isa, tokens=tokens, bindings=bindings, limits=limits,
                                weights=self.weights, kv=self.kv, emitters=EMITTERS)
            self.buckets[tokens] = lowering.run()
            self.kernels.update(lowering.kernels)
        return list(self.kernels.values())

    def run(self, library: Library, tokens: int, inputs: Mapping[str, np.ndarray], workers: int,
            ) -> dict[str, np.ndarray]:
        """The outputs. All memory is filled with NaN before."""
        bucket, source = self.buckets[tokens], Weights(self.graph)
        step = Step.of_tokens(tokens, logit_rows=inputs.get("logit_rows", np.arange(0)).tolist())
        blobs = {}
        for weight in self.weights.entries.values():
            blob = weight.make(source)
            blobs[weight.name] = placed(np.concatenate([blob, np.zeros(64, np.uint8)]))
        arena = aligned((bucket.arena_bytes // 4 + 16,))
        # Blocks of the tables are neighbours, so that one read through another's table is wrong.
        num_tables, num_blocks = len(self.kv.windows), -(-tokens // BLOCK_SIZE)
        blocks = aligned((step.num_blocks * num_tables * self.kv.block_bytes // 4 + 16,)).view(np.uint8)
        tables = np.full((num_tables, MAX_SEQS, MAX_SEQ_LEN // BLOCK_SIZE), -1, np.int32)
        for table in range(num_tables):
            tables[table, 0, :num_blocks] = step.block_table[0, :num_blocks] * num_tables + table
        step.block_table = tables[0]  # its row length
        parts = {(str(slot.slot), part): blocks[offset:] for slot in self.kv.slots
                 for part, offset in (("k", slot.key_offset), ("v", slot.value_offset),
                                      ("k_scale", slot.key_scale_offset), ("v_scale", slot.value_scale_offset))
                 if offset is not None}
        given = {name: placed(array) for name, array in {**inputs, "block_tables": tables}.items()}
        bytes_ = arena.view(np.uint8).reshape(-1)

        def pointer(arg: Arg) -> np.ndarray | None:
            match arg.kind:
                case "value":
                    return bytes_[bucket.offsets[arg.name] + arg.offset:]
                case "weight":
                    return blobs[arg.name][arg.offset:]
                case "kv":
                    return parts[arg.name, arg.part]
                case "input":
                    return given[arg.name].reshape(-1).view(np.uint8)[arg.offset:]
            return None

        for launch in bucket.launches:
            library.run(self.kernels[launch.kernel], step, *(pointer(arg) for arg in launch.args), workers=workers)
        labels = dict(zip(bucket.outputs, self.graph.outputs, strict=True))
        found = {}
        for label, output in bucket.outputs.items():
            type_ = self.graph.types[labels[label]]
            shape = concrete(type_.shape, {"T": tokens, "L": min(tokens, MAX_SEQS)})
            size = int(np.prod(shape)) * type_.dtype.size_bytes
            found[labels[label]] = bytes_[output.offset:output.offset + size].view(type_.dtype.numpy).reshape(shape)
        return found

    def check(self, library: Library, tolerance: float) -> None:
        """As interpreted, for any number of workers to the bit."""
        for tokens in self.tokens:
            inputs = random_inputs(self.graph, tokens)
            want = run(self.graph, inputs, Weights(self.graph))
            first = self.run(library, tokens, inputs, 1)
            compare(first, want, tolerance, f"{self.name}, T = {tokens}")
            for workers in (2, 3):
                for name, got in self.run(library, tokens, inputs, workers).items():
                    assert got.tobytes() == first[name].tobytes(), f"{self.name}, T = {tokens}, {workers} workers"

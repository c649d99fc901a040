"""The CPU back end: from the final graph to kernels, weights and a plan for every token bucket."""
from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.plugins.cpu.ceilings import CEILINGS
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.plugins.sampling.cpu import sampling
from ingot.runtime.lora import LoraRoom

from ..cache.build_cache import BuildCache
from ..ir.graph import Graph
from ..passes.add_lora import lora_room
from ..plan.buckets import memory_report, token_buckets
from ..plan.kv_cache import KvCache, plan_kv_cache
from ..plan.plan import Bucket, Launch, Plan, Weight
from ..tune.problems import key_of, name_of
from ..tune.records import Records
from ..weights.packed import PackedWeight, WeightTable
from .emitters import EMITTERS
from .isa import ISAS
from .lower import Lowering
from .toolchain import Compiler, compile_shared

CODE_MEMBER = "code/model.so"

KERNELS_A_FILE = 6
"""Kernels of one C file: small enough to compile side by side, large enough to read the headers once for many."""


@dataclass(frozen=True)
class CpuProgram:
    """Everything of an engine but the bytes of its weights. tuning: the records that it was chosen by, of its problems.
    lora: room for adapters.
    """

    isa: str
    buckets: tuple[Bucket, ...]
    kernels: tuple[CpuKernel, ...]
    weights: tuple[PackedWeight, ...]
    kv: KvCache
    probes: dict[str, str]
    vocab_size: int
    tuning: Records | None = None
    lora: LoraRoom | None = None

    def target_facts(self) -> dict[str, Any]:
        """For the manifest: the machine that the code is for, and what its processor must have."""
        return {"machine": ISAS[self.isa].machine, "features": sorted(ISAS[self.isa].required)}

    def facts(self) -> dict[str, Any]:
        """More of the manifest."""
        return {"lora": self.lora.to_json()} if self.lora else {}

    def warnings(self) -> tuple[str, ...]:
        """What the user should know of it."""
        return ()

    def members(self, compiler: str, cache: BuildCache | None = None) -> dict[str, bytes]:
        """Member of the engine -> its bytes. Raises CompileError or NoCompiler."""
        return {CODE_MEMBER: self.compile(compiler, cache)}

    def plan(self, written: dict[str, Weight]) -> Plan:
        return Plan(self.kv, written, self.buckets, self.probes)

    def kernel_table(self) -> list[dict[str, Any]]:
        """Which kernel runs how often, in which buckets; where there are several ways: for which problem, by which
        tactic (what differs from the model's choice), and what decided."""
        table = []
        for kernel in self.kernels:
            counts = {str(bucket.tokens): sum(launch.kernel == kernel.symbol for launch in bucket.launches)
                      for bucket in self.buckets}
            entry = {"name": kernel.symbol, "launches": {tokens: n for tokens, n in counts.items() if n},
                     "tuned_by": "model"}
            if (problem := kernel.choice) is not None:
                entry["problem"] = {"kernel": name_of(problem), **key_of(problem)}
                entry["tactic"] = {name: value for name, value in vars(problem.tactic).items() if value}
                if self.tuning is not None and self.tuning.tuned(problem) is not None:
                    entry["tuned_by"] = "measured"
            table.append(entry)
        return table

    def memory(self) -> dict[str, Any]:
        return memory_report(self.weights, self.buckets, self.kv, self.lora)

    def compile(self, compiler: str, cache: BuildCache | None = None) -> bytes:
        """The shared object. Raises CompileError or NoCompiler."""
        chosen: Compiler = "cc" if compiler == "cc" else "zig"
        with tempfile.TemporaryDirectory(prefix="ingot-code-") as folder:
            out = Path(folder) / "model.so"
            compile_shared(self.sources(), ISAS[self.isa], [INCLUDE_DIR, INCLUDE_DIR / "cpu"], out, chosen,
                           len(os.sched_getaffinity(0)), cache)
            return out.read_bytes()

    def sources(self) -> dict[str, str]:
        """C file -> text. Kernels of one header share files, so that another precision leaves the others' alone."""
        by_header: dict[str, list[CpuKernel]] = {}
        for kernel in self.kernels:
            by_header.setdefault(kernel.include, []).append(kernel)
        files = {"pool.c": (INCLUDE_DIR / "cpu" / "pool.c").read_text(),
                 "ceilings.c": translation_unit(CEILINGS.values())}
        for header, kernels in by_header.items():
            for start in range(0, len(kernels), KERNELS_A_FILE):
                name = f"{Path(header).stem or 'kernels'}{start // KERNELS_A_FILE}.c"
                files[name] = translation_unit(kernels[start:start + KERNELS_A_FILE])
        assert len(files) == 2 + sum(-(-len(k) // KERNELS_A_FILE) for k in by_header.values()), "headers share a name"
        return files


def generate(graph: Graph, isa: str, limits: dict[str, int], block_size: int, tuning: Records | None = None,
             ) -> CpuProgram:
    """Lower the graph for every token bucket; behind the logits each chooses the tokens."""
    weights, kernels, buckets = WeightTable(), {}, []
    logits = graph.outputs[0]
    vocab = int(graph.types[logits].shape[-1])
    choosing = sampling(vocab)
    kv = plan_kv_cache(graph, block_size, limits["max_seq_len"])
    for tokens in token_buckets(limits["max_num_tokens"]):
        bindings = {"T": tokens, "L": min(tokens, limits["max_batch_size"])}
        lowering = Lowering(graph=graph, isa=isa, tokens=tokens, bindings=bindings, limits=limits, weights=weights,
                            kv=kv, emitters=EMITTERS, tuning=tuning)
        bucket = lowering.run()
        launches = tuple(Launch(kernel.symbol, (lowering.arg(logits),), "sampling", op="sampling")
                         for kernel in choosing)
        buckets.append(replace(bucket, launches=bucket.launches + launches))
        kernels.update(lowering.kernels)
    kernels.update({kernel.symbol: kernel for kernel in choosing})
    made = {name for node in graph.nodes for name in node.outputs}
    probes = {label: value for label, value in graph.probes.items() if value in made}
    if tuning is not None:
        tuning = tuning.only(kernel.choice for kernel in kernels.values() if kernel.choice is not None)
    return CpuProgram(isa, tuple(buckets), tuple(kernels.values()), tuple(weights.entries.values()), kv, probes, vocab,
                      tuning, lora_room(graph))

"""Programs of small models for GPU targets."""
from __future__ import annotations

from dataclasses import replace

from ingot.compiler.gpu.emitters import EMITTERS, emit_sample
from ingot.compiler.gpu.generate import GpuProgram, generate
from ingot.compiler.gpu.lower import GpuLowering
from ingot.compiler.gpu.storage import stored_types
from ingot.compiler.ir.graph import Graph
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.plan.kv_cache import plan_kv_cache
from ingot.compiler.precision import Precision, Rule, find_precision
from ingot.compiler.targets import Gpu, find_target
from ingot.compiler.weights.packed import WeightTable

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64}
BLOCK_SIZE = 16


def gpu(target: str) -> Gpu:
    found = find_target(target).gpu
    assert found is not None
    return found


def exact(precision: Precision) -> Precision:
    """The same matrices, and all other values in float32: what is left of an error is a mistake."""
    rules = tuple(replace(rule, scheme={"bf16": "fp32", "fp16": "fp32"}.get(rule.scheme, rule.scheme))
                  for rule in precision.rules)
    return replace(precision, rules=rules, floats="fp32", kv="fp32")


def final(graph: Graph, precision: Precision, kv: str = "") -> Graph:
    return run_passes(graph, gpu_pipeline(precision, kv or precision.kv))


def program(graph: Graph, target: str, precision: Precision, kv: str = "") -> GpuProgram:
    return generate(final(graph, precision, kv), gpu(target), precision.floats, LIMITS, BLOCK_SIZE)


def lowered(graph: Graph, tokens: int, target: str, precision: str, kv: str = "", scheme: str = "") -> GpuLowering:
    """One bucket, before kernels are chosen. scheme: of all matrices, in the place of the precision's."""
    chosen = find_precision(precision, gpu(target))
    if scheme:
        chosen = replace(chosen, rules=(Rule("*", scheme),))
    graph = final(graph, chosen, kv)
    low = GpuLowering(
        graph=graph, tokens=tokens, bindings={"T": tokens, "L": min(tokens, LIMITS["max_batch_size"])}, limits=LIMITS,
        weights=WeightTable(), kv=plan_kv_cache(graph, BLOCK_SIZE, LIMITS["max_seq_len"]), gpu=gpu(target),
        floats=chosen.floats, stored=stored_types(graph, chosen.floats), emitters=EMITTERS)
    low.emit_all()
    emit_sample(low, int(graph.types[graph.outputs[0]].shape[-1]))
    return low

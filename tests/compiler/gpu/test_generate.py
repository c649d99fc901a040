"""Whole programs: what their plans compute in the interpreter, and that the runtime can read them."""
from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.gpu.generate import GpuProgram
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.plan.plan import Weight
from ingot.compiler.precision import Precision, find_precision, with_groups
from ingot.runtime.devices.gpu_plan import GpuPlan
from ingot.runtime.program import Limits
from tests.compiler.graphs import Weights
from tests.compiler.models import VOCAB, Layer, model

from .program_runner import ProgramRunner
from .programs import LIMITS, exact, final, gpu, program

pytestmark = pytest.mark.usefixtures("uncompiled")

LLAMA = model([Layer(), Layer()])
GEMMA = model([Layer(post_norm=True, qk_norm=True), Layer(post_norm=True, qk_norm=True)])
OTHERS = {
    "parallel": model([Layer(parallel=True), Layer(parallel=True, pre_norm=False)]),
    "no rotation": model([Layer(rope=False), Layer(rope=False, qk_norm=True)]),
    "experts": model([Layer(experts=True), Layer(experts=True, post_norm=True)]),
    "shared": model([Layer(experts=True, shared=48), Layer(experts=True, shared=144, weighed=True)]),
    "another width": model([Layer(experts=True, shared=32), Layer(experts=True, shared=32, weighed=True)]),
    "late": model([Layer(late=True), Layer(pre_norm=False, late=True)]),
}
STEPS = ((0, 17), (17, 18), (18, 20), (20, 28))
"""Tokens of one sequence: context in a large bucket, then one, two and eight at a time."""


def errors(graph: Graph, made: GpuProgram, interpreted: Graph, interpreter: Interpreter) -> list[float]:
    """Of the logits behind each step, as a part of their size, against the final graph in float32."""
    source = Weights(graph)
    ids = np.random.default_rng(1).integers(0, VOCAB, STEPS[-1][1]).astype(np.int32)
    runner, found = ProgramRunner(made, source, Limits(**LIMITS), interpreter), []
    for begin, end in STEPS:
        got = runner.step(ids[begin:end].tolist(), 1)[0]
        inputs = {"token_ids": ids[:end], "positions": np.arange(end, dtype=np.int32),
                  "logit_rows": np.array([end - 1], np.int32)}
        want = run(interpreted, inputs, source)[interpreted.outputs[0]][0]
        found.append(float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))))
    return found


def without_minimums(name: str, target: str) -> Precision:
    """Minimums need sums of inputs, in float16: `test_groups_with_minimums`."""
    found = find_precision(name, gpu(target))
    return with_groups(found, 128, False) if name == "w4a8" else found


@pytest.mark.parametrize(("precision", "target"), [
    ("fp32", "h200"), ("fp8", "h200"), ("int8", "a100"), pytest.param("w4a8", "h200", marks=pytest.mark.slow),
    pytest.param("w4a8", "a100", marks=pytest.mark.slow), pytest.param("fp8", "b200", marks=pytest.mark.slow)])
def test_a_dense_model(interpreter: Interpreter, precision: str, target: str) -> None:
    """With all else in float32 the logits are those of the quantized graph: what is left is the order of sums."""
    chosen = exact(without_minimums(precision, target))
    made = program(LLAMA, target, chosen)
    assert max(errors(LLAMA, made, final(LLAMA, chosen), interpreter)) < 1e-4


@pytest.mark.parametrize(("name", "group", "target", "most"), [
    ("dense", 32, "a100", 1e-4), pytest.param("dense", 64, "h200", 0.1, marks=pytest.mark.slow),
    pytest.param("experts", 32, "a100", 1e-4, marks=pytest.mark.slow),
    pytest.param("shared", 32, "a100", 1e-4, marks=pytest.mark.slow)])
def test_groups_with_minimums(interpreter: Interpreter, name: str, group: int, target: str, most: float) -> None:
    """Sums of inputs beside these, made by norms, by attention, behind a gate, and in matrices themselves; where they
    lie in memory they are float16. What that changes is far less than a level of eight bits: it is gone where the next
    matrix rounds its inputs, unless one of them, of a coarse e4m3, goes to another level by it."""
    graph = OTHERS.get(name, LLAMA)
    chosen = exact(with_groups(find_precision("w4a8", gpu(target)), group, True))
    made = program(graph, target, chosen)
    written = {launch.op for bucket in made.buckets for launch in bucket.launches
               if any(parameter == "y_sum" for parameter, _ in made.kernels[launch.kernel].parameters)}
    assert {"rms_norm", "attention"} <= written or graph is not LLAMA
    assert max(errors(graph, made, final(graph, chosen), interpreter)) < most


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_norms_behind_blocks(interpreter: Interpreter, precision: str) -> None:
    chosen = exact(find_precision(precision, gpu("h200")))
    made = program(GEMMA, "h200", chosen)
    assert max(errors(GEMMA, made, final(GEMMA, chosen), interpreter)) < 1e-4


@pytest.mark.parametrize(("name", "precision"), [
    ("experts", "fp32"), ("experts", "fp8"), ("shared", "fp32"), ("shared", "fp8"),
    *(pytest.param(name, "fp32", marks=pytest.mark.slow) for name in OTHERS if name not in ("experts", "shared")),
    pytest.param("shared", "int8", marks=pytest.mark.slow),
    *(pytest.param("experts", precision, marks=pytest.mark.slow) for precision in ("int8", "w4a8"))])
def test_other_models(interpreter: Interpreter, name: str, precision: str) -> None:
    graph, chosen = OTHERS[name], exact(without_minimums(precision, "h200"))
    made = program(graph, "h200", chosen)
    assert max(errors(graph, made, final(graph, chosen), interpreter)) < 1e-4


@pytest.mark.parametrize(("precision", "kv"), [
    ("bf16", "bf16"), pytest.param("fp16", "fp16", marks=pytest.mark.slow),
    pytest.param("bf16", "int8", marks=pytest.mark.slow), pytest.param("bf16", "fp8", marks=pytest.mark.slow)])
def test_sixteen_bits_between_launches(interpreter: Interpreter, precision: str, kv: str) -> None:
    chosen = find_precision(precision, gpu("h200"))
    made = program(LLAMA, "h200", chosen, kv)
    assert max(errors(LLAMA, made, final(LLAMA, chosen, kv), interpreter)) < (0.05 if kv == precision else 0.2)


def plan_of(made: GpuProgram) -> dict[str, object]:
    """As the runtime reads it from an engine."""
    weights = {weight.name: Weight("0" * 64, weight.size_bytes, weight.label) for weight in made.weights}
    found: dict[str, object] = json.loads(json.dumps(made.plan(weights).to_json()))
    return found


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "w4a8"])
def test_the_runtime_reads_the_plan(precision: str, target: str) -> None:
    """Every pointer is inside of memory, aligned, and of the kernel's type; the arena is near its bound."""
    if precision not in gpu(target).arch.precisions:
        pytest.skip(f"{target} has no {precision}")
    for graph in (LLAMA, GEMMA, *OTHERS.values()):
        made = program(graph, target, find_precision(precision, gpu(target)))
        plan = GpuPlan.read(plan_of(made), Limits(**LIMITS))
        assert plan.vocab_size == VOCAB and plan.zeroed_bytes <= plan.workspace_bytes
        memory = made.memory()
        assert memory["arena_bytes"] <= 1.05 * memory["arena_bound_bytes"]
        assert set(made.members("")) == {member for kernel in plan.kernels.values()
                                         for member in (kernel.code, kernel.source) if member}


def named(graph: Graph) -> Graph:
    """Every node says which layer it belongs to, as in imported models."""
    nodes, origin, last = [], "model", [*graph.probes.values()][-1]
    for node in graph.nodes:
        weights = [value for value in node.values if value in graph.constants]
        origin = f"model.{weights[0]}" if weights else origin
        nodes.append(replace(node, origin="model" if node.op in ("cos", "sin") else origin))
        origin = "model.norm" if last in node.outputs else origin
    return graph.rebuilt(nodes)


@pytest.mark.parametrize(("layer", "precision", "few", "many"), [
    (Layer(), "bf16", 5, 8), (Layer(), "fp8", 5, 9), (Layer(qk_norm=True), "w4a8", 5, 9),
    (Layer(post_norm=True, qk_norm=True), "bf16", 5, 8), (Layer(post_norm=True, qk_norm=True), "fp8", 5, 9),
    (Layer(experts=True), "bf16", 6, 8), (Layer(experts=True), "fp8", 6, 9)])
def test_launches_a_layer(layer: Layer, precision: str, few: int, many: int) -> None:
    """Before the first of four layers stand tables, behind the last one the choice of rows."""
    made = program(named(model([layer] * 4)), "h200", find_precision(precision, gpu("h200")))
    counts = made.facts()["launches_per_layer"]
    assert {counts[str(tokens)] for tokens in (1, 2, 4, 8)} == {few}
    assert {counts[str(tokens)] for tokens in (16, 32)} == {many}


def test_the_table_of_kernels() -> None:
    made = program(LLAMA, "h200", find_precision("fp8", gpu("h200")))
    table = {entry["name"]: entry for entry in made.kernel_table()}
    assert set(table) == set(made.kernels)
    for bucket in made.buckets:
        for name, entry in table.items():
            count = sum(launch.kernel == name for launch in bucket.launches)
            assert entry["launches"].get(str(bucket.tokens), 0) == count
    linear = [entry for entry in table.values() if entry["op"] == "linear" and entry["precision"] == "fp8"]
    assert linear and all(entry["matrix"] and entry["tuned_by"] == "model" for entry in linear)
    assert {entry["phase"] for entry in linear} == {"generation"}  # no bucket has more than 64 tokens


def test_memory_of_a_gpu() -> None:
    made = program(LLAMA, "h200", find_precision("bf16", gpu("h200")))
    memory = made.memory()
    assert memory["device_bytes"] == gpu("h200").memory_bytes and made.warnings() == ()
    left = memory["device_bytes"] - memory["fixed_bytes"]
    assert 0.89 * left < memory["kv_tokens"] * memory["kv_bytes_per_token"] <= 0.9 * left

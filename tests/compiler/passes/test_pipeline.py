from __future__ import annotations

from pathlib import Path

import pytest

from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.ir.verify import GraphError
from ingot.compiler.passes.pipeline import cpu_pipeline, run_passes
from ingot.compiler.passes.strided import accepts_strided
from ingot.compiler.precision import PRECISIONS
from tests.compiler.graphs import Builder, Weights, compare, ops, random_inputs

H, D, KV = 4, 8, 2


def block(b: Builder, x: str, name: str) -> str:
    """A layer of a language model, as it is imported: rotate-half, grouped queries, gated MLP, norms spelled out."""
    def norm(x: str, weight: str) -> str:
        mean = b.op("reduce_mean", b.op("pow", x, 2), dims=(2,), keepdim=True)
        return b.op("mul", b.weight(f"{name}.{weight}", 32), b.op("mul", x, b.op("rsqrt", b.op("add", mean, 1e-6))))

    def rotated(x: str) -> str:
        angle = b.op("mul", b.op("reshape", b.op("cast", "positions", dtype=DType.F32), shape=(1, "T", 1, 1)),
                     b.op("exp", b.op("arange", start=0, step=-0.5, length=D, dtype=DType.F32)))
        turned = b.op("cat", b.op("neg", b.slice(x, 3, D // 2, D)), b.slice(x, 3, 0, D // 2), dim=3)
        return b.op("add", b.op("mul", x, b.op("cos", angle)), b.op("mul", turned, b.op("sin", angle)))

    def heads(y: str, count: int) -> str:
        return b.op("reshape", b.op("linear", y, b.weight(f"{name}.{len(b.constants)}", count * D, 32)),
                    shape=(1, "T", count, D))

    y = norm(x, "norm")
    q, k, v = rotated(heads(y, H)), rotated(heads(y, KV)), heads(y, KV)
    q, k, v = (b.op("reshape", part, shape=("T", *b.types[part].shape[2:])) for part in (q, k, v))
    attended = b.op("reshape", b.op("attention", q, k, v, slot=0, scale=0.3), shape=(1, "T", H * D))
    x = b.op("add", x, b.op("linear", attended, b.weight(f"{name}.o", 32, 32)))
    y = norm(x, "post_norm")
    gate, up = (b.op("linear", y, b.weight(f"{name}.{part}", 64, 32)) for part in ("gate", "up"))
    down = b.op("linear", b.op("mul", b.op("silu", gate), up), b.weight(f"{name}.down", 32, 64))
    b.probes[name] = b.op("add", x, down)
    return b.probes[name]


@pytest.fixture(scope="module")
def model() -> Graph:
    b = Builder()
    ids = b.x("token_ids_below64", "T", dtype=DType.I32)
    b.x("positions", "T", dtype=DType.I32)
    x = b.op("embedding", b.weight("embed", 64, 32), b.op("reshape", ids, shape=(1, "T")))
    for layer in range(2):
        x = block(b, x, f"layers.{layer}")
    logits = b.op("linear", b.op("rms_norm", x, b.weight("final", 32), eps=1e-6), b.weight("head", 64, 32))
    return b.made(b.op("reshape", logits, shape=("T", 64)))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 2e-2), ("int8", 6e-2), ("w4a8", 0.5)])
def test_what_a_model_becomes(model: Graph, precision: str, tolerance: float) -> None:
    rule = PRECISIONS[precision]
    final = run_passes(model, cpu_pipeline(rule, rule.kv))
    integer = precision in ("int8", "w4a8")
    block_ops = ["linear", "rope_kv_write", "attention", "linear", "add_rms_norm", "linear", "loop", "linear"]
    launched = [op for op in ops(final) if op not in ("reshape", "slice", "quantize")]
    # The tables of the rotation are made in the first layer; the last sum only where its rows are asked for.
    first = [block_ops[0], "loop", "loop", *block_ops[1:]]
    assert launched == ["embedding", "rms_norm", *first, "add_rms_norm", *block_ops, "loop", "loop", "rms_norm",
                        "linear"]
    assert ops(final).count("quantize") == (9 if integer else 0)
    assert set(final.probes) == {"layers.0", "layers.1"}
    inputs = random_inputs(final, 6)
    weights = Weights(model)
    want = run(model, {name: inputs[name] for name in model.inputs}, weights)[model.outputs[0]]
    got = run(final, inputs, weights)[final.outputs[0]]
    compare({"": got}, {"": want[inputs["logit_rows"]]}, tolerance, precision)


def test_dumps_are_numbered(model: Graph, tmp_path: Path) -> None:
    passes = cpu_pipeline(PRECISIONS["fp32"], "fp32")
    seen: list[str] = []
    run_passes(model, passes, tmp_path / "dump", seen.append)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["00_import.txt", *(f"{i:02d}_{name}.txt" for i, (name, _) in enumerate(passes, 1))]
    assert seen == [name for name, _ in passes]
    assert "= attention(" in (tmp_path / "dump" / names[-1]).read_text()


def test_every_pass_is_verified(model: Graph) -> None:
    def breaks(graph: Graph) -> Graph:
        return graph.rebuilt(graph.nodes[1:])

    with pytest.raises(GraphError, match="before it is defined"):
        run_passes(model, [("breaks", breaks)])


@pytest.mark.parametrize(("op", "operand", "shape", "attrs", "expected"), [
    ("rope_kv_write", 2, ("T", 2, 8), {}, True), ("rope_kv_write", 3, ("T", 8), {}, False),
    ("rms_norm", 0, (1, "T", 4, 8), {}, True), ("rms_norm", 1, (8,), {}, False),
    ("quantize", 0, (1, "T", 8), {"scheme": "int8"}, True), ("quantize", 0, ("T", 4, 8), {"scheme": "int8"}, False),
    ("linear", 0, ("T", 8), {"scheme": "bf16"}, True), ("linear", 0, ("T", 8), {"scheme": "w4a8"}, False),
    ("linear", 1, ("T", 8), {"scheme": "bf16"}, False), ("softmax", 0, ("T", 8), {}, False)])
def test_which_operands_may_be_column_ranges(op: str, operand: int, shape: tuple[int | str, ...],
                                             attrs: dict[str, str], expected: bool) -> None:
    assert accepts_strided(Node(op, (), (), attrs), operand, TensorType(shape)) == expected

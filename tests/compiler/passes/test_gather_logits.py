from __future__ import annotations

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType
from ingot.compiler.ir.verify import verify
from ingot.compiler.passes.gather_logits import gather_logits
from tests.compiler.graphs import Builder, Weights, compare, expect_structure, ops, random_inputs


def expect_rows(before: Graph, after: Graph) -> None:
    """The rows of the logits that are asked for."""
    verify(after)
    inputs = random_inputs(after, 7)
    weights = Weights(before)
    want = run(before, {name: inputs[name] for name in before.inputs}, weights)[before.outputs[0]]
    got = run(after, inputs, weights)[after.outputs[0]]
    compare({"logits": got}, {"logits": want[inputs["logit_rows"]]}, 1e-6, "rows")


def test_norm_and_head_run_on_the_rows_alone() -> None:
    b = Builder()
    h = b.op("add", b.x("x", 1, "T", 8), b.x("r", 1, "T", 8))
    y = b.op("linear", b.op("rms_norm", h, b.weight("g", 8), eps=1e-6), b.weight("w", 16, 8))
    graph = b.made(b.op("reshape", b.op("mul", b.op("tanh", y), 30.0), shape=("T", 16)))
    gathered = gather_logits(graph)

    e = Builder()
    h = e.op("add", e.x("x", 1, "T", 8), e.x("r", 1, "T", 8))
    rows = e.op("gather_rows", h, e.x("logit_rows", "L", dtype=DType.I32), dim=1)
    y = e.op("linear", e.op("rms_norm", rows, e.weight("g", 8), eps=1e-6), e.weight("w", 16, 8))
    expect_structure(gathered, e.made(e.op("reshape", e.op("mul", e.op("tanh", y), 30.0), shape=("L", 16))))
    assert gathered.inputs == ("x", "r", "logit_rows") and gathered.types[gathered.outputs[0]].shape == ("L", 16)
    expect_rows(graph, gathered)


def test_the_gather_stays_below_what_reads_two_values() -> None:
    b = Builder()
    x = b.x("x", "T", 8)
    h = b.op("add", b.op("exp", x), b.op("neg", x))
    graph = b.made(b.op("linear", h, b.weight("w", 16, 8)))
    gathered = gather_logits(graph)
    assert ops(gathered) == ["exp", "neg", "add", "gather_rows", "linear"]
    expect_rows(graph, gathered)


def test_the_end_of_a_padded_vocabulary_is_cut_from_the_rows() -> None:
    b = Builder()
    h = b.op("add", b.x("x", "T", 8), b.x("r", "T", 8))
    graph = b.made(b.slice(b.op("linear", h, b.weight("w", 16, 8)), 1, 0, 13))
    assert ops(gather_logits(graph)) == ["add", "gather_rows", "linear", "slice"]
    expect_rows(graph, gather_logits(graph))


def test_the_gather_stays_below_what_mixes_tokens() -> None:
    b = Builder()
    y = b.op("softmax", b.x("x", "T", 8), dim=0)
    graph = b.made(b.op("linear", y, b.weight("w", 16, 8)))
    assert ops(gather_logits(graph)) == ["softmax", "gather_rows", "linear"]
    expect_rows(graph, gather_logits(graph))


def test_the_gather_stays_below_what_takes_the_tokens_apart() -> None:
    b = Builder()
    y = b.op("reshape", b.op("neg", b.op("reshape", b.x("x", "T", 8), shape=("2*T", 4))), shape=("T", 8))
    graph = b.made(b.op("linear", y, b.weight("w", 16, 8)))
    assert ops(gather_logits(graph)) == ["reshape", "neg", "reshape", "gather_rows", "linear"]
    expect_rows(graph, gather_logits(graph))


def test_logits_that_nothing_computes_by_row_are_gathered_themselves() -> None:
    b = Builder()
    x = b.x("x", "T", 8)
    graph = b.made(b.op("add", x, b.op("exp", x)))
    gathered = gather_logits(graph)
    assert ops(gathered) == ["exp", "add", "gather_rows"]
    expect_rows(graph, gathered)


def test_probes_before_the_gather_keep_all_tokens() -> None:
    b = Builder()
    h = b.op("add", b.x("x", "T", 8), b.x("r", "T", 8))
    y = b.op("rms_norm", h, eps=1e-6)
    graph = b.made(b.op("linear", y, b.weight("w", 16, 8)), probes={"layer": h, "norm": y})
    gathered = gather_logits(graph)
    assert gathered.types[gathered.probes["layer"]].shape == ("T", 8)
    assert gathered.types[gathered.probes["norm"]].shape == ("L", 8)

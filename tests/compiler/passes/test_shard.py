"""Graphs divided among ranks give what the whole graph gives."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.interpret_ranks import run_ranks
from ingot.compiler.ir.types import DType
from ingot.compiler.ir.verify import verify
from ingot.compiler.passes.shard import shard_graph
from ingot.compiler.passes.shard_region import CannotShard
from ingot.compiler.weights.sharding import Segment, at_rank, is_sharded
from tests.compiler.graphs import Builder, Weights, random_inputs


def count(graph: Graph, op: str) -> int:
    return sum(node.op == op for node in graph.nodes)


def check(graph: Graph, ranks: int) -> Graph:
    """Divides a graph, verifies it, and compares its logits on every rank."""
    divided = verify(shard_graph(graph, ranks))
    weights, inputs = Weights(graph), random_inputs(graph, 5)
    wanted = run(graph, inputs, weights)[graph.outputs[0]]
    for values in run_ranks(divided, inputs, weights, ranks):
        got = values[divided.outputs[0]]
        np.testing.assert_allclose(got, wanted, atol=2e-4 * np.abs(wanted).max())
    return divided


def attention(b: Builder, x: str, heads: int, kv_heads: int, dim: int = 8, sinks: bool = False) -> str:
    def projected(name: str, count: int) -> str:
        y = b.op("linear", x, b.weight(f"{name}.weight", count * dim, 32), b.weight(f"{name}.bias", count * dim))
        return b.op("reshape", y, shape=("T", count, dim))
    parts = [projected("q", heads), projected("k", kv_heads), projected("v", kv_heads)]
    if sinks:
        parts.append(b.weight("sinks", heads))
    out = b.op("attention", *parts, slot=0, scale=dim**-0.5, softcap=0.0, window=0, chunk=0)
    return b.op("linear", b.op("reshape", out, shape=("T", heads * dim)), b.weight("o.weight", 32, heads * dim),
                b.weight("o.bias", 32))


def start() -> tuple[Builder, str]:
    b = Builder()
    return b, b.x("x", "T", 32)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks", "local_kv"), [
    (4, 4, 2, 2), (4, 2, 2, 1), (8, 2, 4, 1), (4, 1, 2, 1), (8, 1, 4, 1)])
def test_heads_are_divided(heads: int, kv_heads: int, ranks: int, local_kv: int) -> None:
    """Fewer heads of keys and values than ranks: neighbours hold the same."""
    b, x = start()
    divided = check(b.made(b.op("add", x, attention(b, x, heads, kv_heads, sinks=True))), ranks)
    node = next(node for node in divided.nodes if node.op == "attention")
    assert divided.types[node.values[0]].shape == ("T", heads // ranks, 8)
    assert divided.types[node.values[1]].shape == ("T", local_kv, 8)
    assert count(divided, "all_reduce") == 1


def test_an_mlp_meets_once() -> None:
    b, x = start()
    gate, up = (b.op("linear", x, b.weight(name, 48, 32)) for name in ("gate", "up"))
    y = b.op("linear", b.op("mul", b.op("silu", gate), up), b.weight("down", 32, 48), b.weight("down.bias", 32))
    divided = check(b.made(b.op("add", x, y)), 4)
    assert count(divided, "all_reduce") == 1
    assert sum(is_sharded(expr) for expr in divided.constants.values()) == 4


@pytest.mark.parametrize("step", [1, 2])
def test_gate_and_up_in_one_matrix(step: int) -> None:
    """One below the other, or interleaved."""
    b, x = start()
    both = b.op("linear", x, b.weight("both", 96, 32), b.weight("both.bias", 96))
    gate, up = ((b.slice(both, 1, 0, 48), b.slice(both, 1, 48, 96)) if step == 1 else
                (b.slice(both, 1, 0, 96, 2), b.slice(both, 1, 1, 96, 2)))
    y = b.op("linear", b.op("mul", b.op("silu", gate), up), b.weight("down", 32, 48))
    divided = check(b.made(y), 2)
    assert divided.types[both].shape == ("T", 48)


def test_q_k_and_v_in_one_matrix() -> None:
    b, x = start()
    merged = b.op("linear", x, b.weight("qkv", 64, 32))
    q, k, v = (b.op("reshape", b.slice(merged, 1, begin, end), shape=("T", (end - begin) // 8, 8))
               for begin, end in ((0, 32), (32, 48), (48, 64)))
    out = b.op("attention", q, k, v, slot=0, scale=0.35, softcap=0.0, window=0, chunk=0)
    y = b.op("linear", b.op("reshape", out, shape=("T", 32)), b.weight("o", 32, 32))
    divided = check(b.made(y), 2)
    assert divided.types[merged].shape == ("T", 32)


def test_experts_meet_after_their_sum() -> None:
    b, x = start()
    scores, ids = b.add("topk", [b.op("softmax", b.op("linear", x, b.weight("router", 4, 32)), dim=1)], k=2, dim=1,
                        largest=True)
    both = b.op("expert_linear", x, ids, b.weight("gate_up", 4, 96, 32), b.weight("gate_up.bias", 4, 96))
    inner = b.op("mul", b.op("silu", b.slice(both, 2, 0, 48)), b.slice(both, 2, 48, 96))
    y = b.op("expert_linear", inner, ids, b.weight("down", 4, 32, 48), b.weight("down.bias", 4, 32))
    y = b.op("reduce_sum", b.op("mul", y, b.op("reshape", scores, shape=("T", 2, 1))), dims=(1,), keepdim=False)
    divided = check(b.made(b.op("add", x, y)), 2)
    reduced = next(node for node in divided.nodes if node.op == "all_reduce")
    assert divided.types[reduced.output].shape == ("T", 32)


def test_logits_are_gathered() -> None:
    b = Builder()
    x, rows = b.x("x", "T", 32), b.x("rows", "L", dtype=DType.I32)
    b_out = attention(b, x, 4, 4)
    last = b.op("gather_rows", b.op("add", x, b_out), rows, dim=0)
    graph = b.made(b.op("linear", last, b.weight("head", 64, 32), b.weight("head.bias", 64)))
    divided = verify(shard_graph(graph, 2))
    weights = Weights(graph)
    inputs = {"x": np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32),
              "rows": np.array([1, 4], np.int32)}
    wanted = run(graph, inputs, weights)[graph.outputs[0]]
    for values in run_ranks(divided, inputs, weights, 2):
        np.testing.assert_allclose(values[divided.outputs[0]], wanted, atol=2e-3)
    assert count(divided, "all_gather") == 1


def test_what_cannot_be_divided_stays_whole() -> None:
    """A norm over all channels stands between the projection and the heads: attention stays, the MLP is divided."""
    b, x = start()
    q, k, v = (b.op("linear", x, b.weight(name, 32, 32)) for name in "qkv")
    q = b.op("rms_norm", q, b.weight("norm", 32), eps=1e-6)
    q, k, v = (b.op("reshape", value, shape=("T", 4, 8)) for value in (q, k, v))
    out = b.op("attention", q, k, v, slot=0, scale=0.35, softcap=0.0, window=0, chunk=0)
    y = b.op("linear", b.op("reshape", out, shape=("T", 32)), b.weight("o", 32, 32))
    y = b.op("linear", b.op("silu", b.op("linear", y, b.weight("up", 48, 32))), b.weight("down", 32, 48))
    divided = check(b.made(y), 2)
    node = next(node for node in divided.nodes if node.op == "attention")
    assert divided.types[node.values[0]].shape == ("T", 4, 8)
    assert count(divided, "all_reduce") == 1


def test_nothing_to_divide() -> None:
    b, x = start()
    graph = b.made(attention(b, x, 3, 3))
    with pytest.raises(CannotShard, match="divided in 2 equal parts"):
        shard_graph(graph, 2)


def test_one_rank_is_the_whole() -> None:
    b, x = start()
    graph = b.made(attention(b, x, 4, 4))
    assert shard_graph(graph, 1) is graph


@pytest.mark.parametrize(("size", "ways", "ranks", "begins"), [
    (8, 4, 4, [0, 2, 4, 6]), (2, 2, 4, [0, 0, 1, 1]), (6, 2, 2, [0, 3])])
def test_segments(size: int, ways: int, ranks: int, begins: list[int]) -> None:
    assert [Segment(size, ways).begin(rank, ranks) for rank in range(ranks)] == begins


def test_constants_of_a_rank_name_no_rank() -> None:
    """A bias that is added before the sum is on one rank alone."""
    b, x = start()
    divided = shard_graph(b.made(attention(b, x, 4, 4)), 2)
    bias = next(expr for name, expr in divided.constants.items() if name.startswith("o.bias"))
    assert at_rank(bias, 0).op == "tensor" and at_rank(bias, 1).op == "mul"
    assert not any(is_sharded(at_rank(expr, 1)) for expr in divided.constants.values())


PASSES = ("fold_constants", "raise_linear", "raise_norms", "raise_rope", "bring_last", "merge_duplicates",
          "gather_logits")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "whole"), [
    ("llama", []), ("qwen3", []), ("gemma3_text", []), ("mixtral", ["gate"]), ("gpt_oss", ["router"]), ("phi3", []),
    ("qwen3_moe", ["gate"])])
def test_models(kind: str, whole: list[str], tmp_path: Path) -> None:
    """whole: the only matrices of a layer that every rank holds."""
    from ingot.compiler.checkpoint.open import open_checkpoint
    from ingot.compiler.importer.importer import import_model
    from ingot.compiler.passes.pipeline import cpu_pipeline, run_passes
    from ingot.compiler.precision import find_precision
    from tools.small_models import save_random, small_config

    save_random(small_config(kind), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    passes = [found for found in cpu_pipeline(find_precision("fp32"), "fp32") if found[0] in PASSES]
    graph = run_passes(import_model(checkpoint).graph, passes)
    rng = np.random.default_rng(0)
    inputs = {"token_ids": rng.integers(0, 512, 12).astype(np.int32), "positions": np.arange(12, dtype=np.int32),
              "logit_rows": np.array([3, 11], np.int32)}
    wanted = run(graph, inputs, checkpoint)[graph.outputs[0]]
    for ranks in (2, 4):
        divided = verify(shard_graph(graph, ranks))
        for values in run_ranks(divided, inputs, checkpoint, ranks):
            np.testing.assert_allclose(values[divided.outputs[0]], wanted, atol=1e-4 * np.abs(wanted).max())
        kept = [node.values[1] for node in divided.nodes if node.op in ("linear", "expert_linear") and not any(
            is_sharded(divided.constants[value]) for value in node.values if value in divided.constants)]
        assert all(any(f".{name}." in value for name in whole) for value in kept), kept
        assert len(kept) == len(whole) * sum(node.op == "attention" for node in divided.nodes)

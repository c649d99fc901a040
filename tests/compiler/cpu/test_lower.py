"""Where values lie, how long they stay there, and what reads them."""
from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ingot.compiler.cpu.emitters import EMITTERS
from ingot.compiler.cpu.lower import Lowering
from ingot.compiler.errors import CannotCompile
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.types import DType, concrete
from ingot.compiler.passes.pipeline import cpu_pipeline, run_passes
from ingot.compiler.plan.kv_cache import plan_kv_cache
from ingot.compiler.plan.memory import ALIGNMENT
from ingot.compiler.plan.plan import Arg, Bucket, Launch
from ingot.compiler.precision import PRECISIONS
from ingot.compiler.weights.packed import WeightTable
from tests.compiler.graphs import Builder
from tests.compiler.models import Layer, model, random_model

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64}
IN_PLACE = {"add_rms_norm", "add_layer_norm", "rope", "rope_kv_write", "softmax", "cumsum", "scatter"}
"""Operators whose kernels may write over what they read, element by element or row by row."""


@dataclass
class Traced(Lowering):
    """A lowering that remembers which node each launch is of, before small ones join others."""

    launched: list[Node] = field(default_factory=list)

    def emit(self, node: Node) -> None:
        begin = len(self.launches)
        super().emit(node)
        self.launched += [node] * (len(self.launches) - begin)


def lowered(graph: Graph, tokens: int) -> tuple[Traced, Bucket]:
    bindings = {"T": tokens, "L": min(tokens, LIMITS["max_batch_size"])}
    kv = plan_kv_cache(graph, 16, LIMITS["max_seq_len"])
    lowering = Traced(graph=graph, isa="x86-64-v3", tokens=tokens, bindings=bindings, limits=LIMITS,
                      weights=WeightTable(), kv=kv, emitters=EMITTERS)
    return lowering, lowering.run()


def final(graph: Graph, precision: str) -> Graph:
    rule = PRECISIONS[precision]
    return run_passes(graph, cpu_pipeline(rule, rule.kv))


class Replay:
    """The arena while the launches run: which value lies where. Every value must be whole when it is read."""

    def __init__(self, lowering: Traced, bucket: Bucket) -> None:
        self.low, self.bucket, self.graph = lowering, bucket, lowering.graph
        self.producers = self.graph.producers()
        self.memory: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        nodes = iter(self.low.launched)
        for launch in self.bucket.launches:
            self.launch([next(nodes) for _ in launch.op.split("+")], launch)
        assert not [*nodes]
        for name in self.graph.outputs:
            self.expect(self.source(name), f"output {name}")

    def launch(self, nodes: list[Node], launch: Launch) -> None:
        """nodes: more than one where launches have joined."""
        what = f"{launch.kernel} of {', '.join(nodes[-1].outputs)}"
        sources = {source for node in nodes for value in node.values if (source := self.source(value)) is not None}
        read = {arg.name for arg in launch.args if arg.kind == "value"}
        reads = {source for source in sources if self.low.buffer(source) in read}
        for source in reads - launch.writes.keys():
            self.expect(source, what)
        scratch = [arg.name for arg in launch.args if arg.kind == "value" and arg.name.startswith("scratch")]
        written = {name: launch.args[write.arg] for name, write in launch.writes.items()}
        written.update({name: Arg("value", name) for name in scratch})
        for name, arg in written.items():
            place = self.interval(arg, self.low.sizes[name] if name in scratch else self.size(name))
            for other, taken in list(self.memory.items()):
                if other == name or not (place[0] < taken[1] and taken[0] < place[1]):
                    continue
                if other in reads or other in written:
                    assert (len(nodes) == 1 or launch.rows) and place == taken and any(
                        node.op in IN_PLACE for node in nodes), (
                        f"{what} writes {name} into {other}, which it reads")
                del self.memory[other]
            self.memory[name] = place

    def source(self, value: str) -> str | None:
        """The value in the arena that a value is a view of; None for inputs, constants and what lies in the cache."""
        while value in self.producers and self.producers[value].op in ("reshape", "slice"):
            value = self.producers[value].values[0]
        if value not in self.producers:
            return None
        made = self.producers[value]
        if made.op == "kv_write" or (made.op == "rope_kv_write" and value != made.outputs[0]):
            return None
        deferred = self.low.deferred(value)
        return self.source(deferred) if deferred is not None else value

    def expect(self, value: str | None, what: str) -> None:
        assert value is None or value in self.memory, f"{what} reads {value}, which something has been written over"

    def interval(self, arg: Arg, size: int) -> tuple[int, int]:
        begin = self.bucket.offsets[arg.name] + arg.offset
        assert begin % 4 == 0 and begin + size <= self.bucket.arena_bytes
        return begin, begin + size

    def size(self, value: str) -> int:
        total = self.graph.types[value].dtype.size_bytes
        for dim in concrete(self.graph.types[value].shape, dict(self.low.bindings)):
            total *= dim
        return total


def check(graph: Graph, tokens: int) -> Bucket:
    lowering, bucket = lowered(graph, tokens)
    Replay(lowering, bucket).run()
    assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets.values())
    assert bucket.arena_bound_bytes <= bucket.arena_bytes <= 1.05 * bucket.arena_bound_bytes
    return bucket


@pytest.mark.parametrize("precision", ["fp32", "w4a8"])
@pytest.mark.parametrize("seed", range(12))
def test_no_value_is_overwritten_before_its_last_reader(seed: int, precision: str) -> None:
    graph = final(random_model(seed), precision)
    for tokens in (1, 2, 16):
        check(graph, tokens)


def test_input_of_deferred_quantization_lives_as_long_as_what_reads_it() -> None:
    """Two layers quantize x themselves, the second after a sum that could take x over."""
    b = Builder()
    x = b.op("linear", b.x("x", "T", 64), b.weight("w", 64, 64), scheme="fp32")
    quantized = b.op("quantize", x, scheme="int8")
    first = b.op("linear", quantized, b.weight("v", 64, 64), scheme="int8")
    y, s = b.add("add_rms_norm", [first, x], eps=1e-6)
    graph = b.made(b.op("linear", quantized, b.weight("u", 64, 64), scheme="int8"), y, s)
    for tokens in (1, 16):
        lowering, bucket = lowered(graph, tokens)
        Replay(lowering, bucket).run()
        assert (lowering.deferred(quantized) == x) == (tokens == 1)


def test_sums_take_over_the_residual() -> None:
    graph = final(model([Layer(), Layer()]), "fp32")
    lowering, _ = lowered(graph, 16)
    sums = [node for node in graph.nodes if node.op == "add_rms_norm"]
    assert len(sums) == 3
    for node in sums:
        place = lowering.places[node.outputs[1]]
        assert place in (lowering.places[node.values[0]], lowering.places[node.values[1]])


def test_a_probe_is_named_by_the_launch_that_writes_it() -> None:
    graph = final(random_model(3), "fp32")
    _, bucket = lowered(graph, 4)
    written = {name for launch in bucket.launches for name in launch.writes}
    assert set(graph.probes.values()) <= written


def normed_slice(slice_dim: int, start: int, stop: int, *shape: int | str) -> tuple[Traced, str]:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 6), b.weight("w", 24, 6), scheme="fp32")
    part = b.op("reshape", y, shape=shape) if shape else y
    part = b.slice(part, slice_dim, start, stop)
    graph = b.made(b.op("rms_norm", part, eps=1e-6))
    return lowered(graph, 4)[0], part


def test_a_column_range_is_an_offset_and_a_stride() -> None:
    lowering, part = normed_slice(1, 8, 20)
    place = lowering.places[part]
    assert (place.offset, place.stride) == (8, 24) and place.arg.name != part
    assert lowering.arg(part).offset == 32 and lowering.stride(part) == 24 and lowering.row_group(part) == (1, 24)


def test_heads_of_a_row_are_an_offset_and_the_stride_of_tokens() -> None:
    lowering, part = normed_slice(1, 2, 5, "T", 6, 4)
    place = lowering.places[part]
    assert (place.offset, place.stride) == (8, 24)
    assert lowering.token_stride(part) == 24 and lowering.row_group(part) == (3, 24)
    with pytest.raises(AssertionError, match="rows within rows"):
        lowering.stride(part)


def test_a_slice_of_a_slice() -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 6), b.weight("w", 24, 6), scheme="fp32")
    inner = b.slice(b.op("reshape", b.slice(y, 1, 4, 20), shape=("T", 4, 4)), 1, 1, 3)
    lowering, _ = lowered(b.made(b.op("rms_norm", inner, eps=1e-6)), 4)
    assert (lowering.places[inner].offset, lowering.places[inner].stride) == (8, 24)


def test_values_that_are_read_again_are_not_taken_over() -> None:
    b = Builder()
    x = b.op("linear", b.x("x", "T", 8), b.weight("w", 8, 8), scheme="fp32")
    y, s = b.add("add_rms_norm", [x, b.op("linear", "x", b.weight("v", 8, 8), scheme="fp32")], eps=1e-6)
    again = b.op("rms_norm", x, eps=1e-6)
    graph = b.made(b.add("add_rms_norm", [s, again], eps=1e-6)[0], y)
    lowering, bucket = lowered(graph, 4)
    Replay(lowering, bucket).run()
    assert lowering.places[s] != lowering.places[x]


def test_what_a_launch_reads_in_another_order_is_not_taken_over() -> None:
    """Queries and keys of one projection: a worker would turn the queries while another still reads the keys."""
    b = Builder()
    row = b.op("reshape", b.op("linear", b.x("x", "T", 8), b.weight("w", 16, 8), scheme="fp32"), shape=("T", 2, 8))
    cos, sin = (b.op("reshape", b.op("linear", "x", b.weight(name, 8, 8), scheme="fp32"), shape=("T", 8))
                for name in ("cos", "sin"))
    q, k, v = b.add("rope_kv_write", [row, row, row, cos, sin], slot=0, dtype=DType.F32)
    graph = b.made(b.op("attention", q, k, v, slot=0, scale=1.0))
    lowering, bucket = lowered(graph, 4)
    Replay(lowering, bucket).run()
    assert lowering.places[q] != lowering.places[row]


def test_attention_reads_and_writes_through_the_table_of_its_layer() -> None:
    """Of 4 sequences of 4 blocks of 4 bytes."""
    b, outputs = Builder(), []
    for number, window in enumerate((8, 0, 8)):
        q, k, v = (b.x(f"{name}{number}", "T", 2, 8) for name in ("query", "key", "value"))
        cached = b.add("kv_write", [k, v], slot=number, dtype=DType.F32)
        outputs.append(b.op("attention", q, *cached, slot=number, scale=1.0, window=window))
    _, bucket = lowered(b.made(*outputs), 4)
    found = [[arg.to_json(bucket.offsets) for arg in launch.args if arg.kind in ("kv", "input")][-3:]
             for launch in bucket.launches if not launch.kernel.startswith("attention_combine")]
    assert found == [[["kv", slot, "k"], ["kv", slot, "v"], ["input", "block_tables", *offset]]
                     for slot, offset in ((0, [64]), (1, []), (2, [128])) for _ in range(2)]


def test_the_scratch_of_attention_lives_over_both_of_its_launches() -> None:
    graph = final(model([Layer()]), "fp32")
    _, bucket = lowered(graph, 4)
    first, second = (launch for launch in bucket.launches if launch.kernel.startswith("attention"))
    assert {name for name in first.reads if name.startswith("scratch")} == {
        name for name in second.reads if name.startswith("scratch")} != set()


def test_operators_without_a_kernel_are_named() -> None:
    b = Builder()
    b.origin = "model.layers.0 (modeling_x.py:3)"
    graph = b.made(b.op("exp", b.x("x", "T", 8)))
    with pytest.raises(CannotCompile, match=r"exp\(f32\[T, 8\]\)(?s:.*)modeling_x.py:3"):
        lowered(graph, 4)

"""What LoRA adapters add to linear layers. Steps without adapters leave these launches out."""
from __future__ import annotations

from ingot.plugins.lora import tactics as lora_tactics

from ..ir.graph import Node
from ..ir.ops_lora import SLOTS
from ..plan.plan import Arg
from .adapter_inputs import make
from .lower import GpuLowering

_STEP = {name: Arg("input", name) for name in ("adapters", "token_seq")}


def emit_shrink(low: GpuLowering, node: Node) -> None:
    make(low, node.values[0])
    x, h, offsets = node.values[0], node.output, [offset for _, offset in node.attrs["modules"]]
    apart = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    assert offsets == [offsets[0] + number * apart for number in range(len(offsets))], offsets
    problem = lora_tactics.Shrink(low.count("T"), low.width(x), node.attrs["rank"], len(offsets), apart, low.slot_bytes,
                                  _num_slots(low), low.stored[x], low.x_stride(x))
    args = {"x": low.arg(x), "a": Arg("lora", offset=offsets[0]), "h": low.output(h), **_STEP}
    splits = lora_tactics.splits(problem.m, problem.k)
    low.sizes[h] *= splits
    writes = {h: "h"} if splits == 1 else {}  # several sums are no value of the graph
    low.request(node, low.candidates(problem, lora_tactics.shrink), args, writes, adapters=True)


def emit_expand(low: GpuLowering, node: Node) -> None:
    """A launch for each few parts, all of them onto the same memory."""
    y, h = node.values[:2]
    made = next(other for other in low.graph.nodes if h in other.outputs)
    parts = [part[1:] for part in node.attrs["parts"]]
    args = {"y": low.onto(node), "h": low.arg(h), **_STEP}
    for begin in range(0, len(parts), lora_tactics.MAX_PARTS):
        some = parts[begin:begin + lora_tactics.MAX_PARTS]
        first = min(offset for _, _, offset, _ in some)
        problem = lora_tactics.Expand(
            low.count("T"), low.width(y), low.width(h), lora_tactics.splits(low.count("T"), low.width(made.values[0])),
            node.attrs["rank"], low.slot_bytes, _num_slots(low), low.stored[y],
            tuple((start, width, offset - first, column) for start, width, offset, column in some))
        last = begin + len(some) == len(parts)
        low.request(node, low.candidates(problem, lora_tactics.expand), {**args, "b": Arg("lora", offset=first)},
                    {node.output: "y"} if last else {}, adapters=True)


def _num_slots(low: GpuLowering) -> int:
    return int(low.type(SLOTS).shape[0])

"""What adapters read of norms that steps without adapters do not leave in memory as they are.

Matrices normalise their inputs themselves, or get them quantized by the norm. They go on so where a low-rank product
reads the norm too: it has a norm of its own, a launch that only steps with adapters take.
"""
from __future__ import annotations

from ingot.plugins.norm import tactics as norm_tactics

from ..ir.graph import Node
from .lower import GpuLowering


def others(low: GpuLowering, value: str) -> list[Node]:
    """The readers of a value but for those that are for adapters and take its whole rows."""
    return [user for user in low.users(value) if not _is_for_adapters(low, user, value)]


def leave_unmade(low: GpuLowering, norm: Node) -> None:
    """The norm's result will not be in memory; what it is made of stays as it is until adapters have read it."""
    y = norm.outputs[0]
    source = _source(norm)
    if len(others(low, y)) == len(low.users(y)):
        return
    low.unmade[y] = norm
    buffer = low.buffer(source)
    low.last_reader[buffer] = max(low.last_reader.get(buffer, -1), low.last_reader[y])


def make(low: GpuLowering, value: str) -> None:
    """Ask for the launch that makes the norm which a value is, if it is not there."""
    y = low.root(value)
    norm = low.unmade.pop(y, None)
    if norm is None:
        return
    source = _source(norm)
    parameters = norm.values[3:] if norm.op == "norm_add_norm" else norm.values[len(norm.outputs):]
    args = {"x": low.arg(source), **dict(zip(("weight", "bias"), map(low.arg, parameters), strict=False))}
    op = "layer_norm" if norm.op.endswith("layer_norm") else "rms_norm"
    problem = norm_tactics.Problem(
        low.count("T"), low.width(source), norm.attrs["eps"], low.stored[source], low.stored[y], op, "T",
        weight="weight" in args, bias="bias" in args, x_stride=low.place(source).stride or 0)
    low.request(norm, low.candidates(problem, norm_tactics.candidates), {**args, "y": low.output(y)}, {y: "y"},
                op=op, adapters=True)


def _is_for_adapters(low: GpuLowering, user: Node, value: str) -> bool:
    reads_rows = low.rows(value) == "T" and low.root(user.values[0]) == value \
        and low.width(user.values[0]) == low.width(value) and value not in map(low.root, user.values[1:])
    return reads_rows and (user.op == "lora_shrink" or (user.op == "loop" and low.is_of_adapters(user.output)))


def _source(norm: Node) -> str:
    """What a norm is taken of: its first operand, or the sum that it makes too."""
    return norm.values[0] if len(norm.outputs) == 1 else norm.outputs[1]

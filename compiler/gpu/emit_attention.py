"""Attention on a GPU and what comes before it. For few tokens one launch does both."""
from __future__ import annotations

from ingot.plugins.attention import tactics as attention_tactics
from ingot.plugins.rope import tactics as rope_tactics
from ingot.runtime.step import table_width

from ..errors import CannotCompile
from ..ir.graph import Node
from ..plan.plan import Arg
from .emit_linear import wanted_form, write_quantized
from .lower import GpuLowering

_KV_TYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "fp8": "fp8", "i8": "int8"}
"""Element type of a slot -> as the kernels call it."""

_ROPE = ("q", "k", "v", "cos", "sin", "q_norm", "k_norm")


def emit_rope_kv_write(low: GpuLowering, node: Node) -> None:
    if _left_to_attention(low, node):
        return
    q_out, problem = node.outputs[0], _rope_problem(low, node)
    args = dict(zip(_ROPE, map(low.arg, node.values), strict=False)) | low.kv_args(node.attrs["slot"]) | _step()
    args["q_out"] = low.in_place(q_out, node.values[0], beside=node.values[1:]) or low.output(q_out)
    low.request(node, low.candidates(problem, rope_tactics.candidates), args, {q_out: "q_out"})


def _left_to_attention(low: GpuLowering, node: Node) -> bool:
    """Whether the launch of the only attention that reads what a node writes to the cache does the node's work too."""
    first = node.outputs[0]
    users = low.users(first)
    if not low.few or len(users) != 1 or users[0].op != "attention" \
            or not low.candidates(_attention_problem(low, users[0], node), attention_tactics.candidates).legal:
        return False
    low.absorbed[first] = node
    for value in node.values:
        if value not in low.graph.constants:
            low.defer(first, value)
    return True


def emit_rope(low: GpuLowering, node: Node) -> None:
    x, cos, sin = node.values
    problem = rope_tactics.Problem(
        low.tokens, int(low.type(x).shape[1]), 0, low.width(x), 0, low.token_stride(x), 0, 0, low.width(cos),
        low.floats, low.floats, low.kv.block_size, low.kv.block_bytes, 1,
        interleaved=node.attrs.get("interleaved", False))
    args = {"q": low.arg(x), "cos": low.arg(cos), "sin": low.arg(sin), **_step()}
    args["q_out"] = low.in_place(node.output, x, beside=(cos, sin)) or low.output(node.output)
    low.request(node, low.candidates(problem, rope_tactics.candidates), args, {node.output: "q_out"})


def emit_kv_write(low: GpuLowering, node: Node) -> None:
    if _left_to_attention(low, node):
        return
    k, v = node.values
    slot = low.kv_slot(node.attrs["slot"])
    problem = rope_tactics.Problem(
        low.tokens, 0, slot.heads, slot.key_dim, slot.value_dim, 0, low.token_stride(k), low.token_stride(v), 0,
        low.floats, _KV_TYPES[slot.dtype], low.kv.block_size, low.kv.block_bytes, _max_blocks(low))
    args = {"k": low.arg(k), "v": low.arg(v), **low.kv_args(slot.slot), **_step()}
    low.request(node, low.candidates(problem, rope_tactics.candidates), args, {})


def emit_attention(low: GpuLowering, node: Node) -> None:
    q, cached, _, *sinks = node.values
    before = low.absorbed.get(low.buffer(q)) or low.absorbed.get(cached)
    problem = _attention_problem(low, node, before)
    args = low.kv_args(node.attrs["slot"]) | {name: Arg("input", name) for name in ("query_start", "context_len")}
    args |= dict(zip(_ROPE, map(low.arg, _prepared(node, before)), strict=False))
    if sinks:
        args["sinks"] = low.arg(sinks[0])
    args["out"] = low.output(node.output)
    if problem.y_type:
        args |= write_quantized(low, node.output, problem.y_type)
    low.request(node, low.candidates(problem, attention_tactics.candidates), args, {node.output: "out"})


def _prepared(node: Node, before: Node | None) -> tuple[str, ...]:
    """q, and what else the launch of an attention reads where it does the work of the node before too."""
    if before is None or before.op == "rope_kv_write":
        return before.values if before else node.values[:1]
    return node.values[0], *before.values


def _attention_problem(low: GpuLowering, node: Node, before: Node | None) -> attention_tactics.Problem:
    """before: the node whose work this launch does too, rope_kv_write or kv_write."""
    slot, a = low.kv_slot(node.attrs["slot"]), node.attrs
    q, *given = _prepared(node, before)
    turn = None
    if before is not None:
        q_stride, k_stride, v_stride = map(low.token_stride, (q, *given[:2]))
        turn = attention_tactics.Rope(q_stride, k_stride, v_stride, rotary=low.width(given[2]) if given[2:] else 0,
                                      interleaved=before.attrs.get("interleaved", False),
                                      norm_eps=before.attrs["eps"] if len(given) > 4 else None)
    heads = int(low.type(q).shape[1])
    dense = low.token_stride(q) == heads * slot.key_dim
    kv_type = _KV_TYPES[slot.dtype]
    if kv_type not in (low.floats, "fp8", "int8"):
        raise CannotCompile(f"attention in {low.floats} over a KV cache in {kv_type}; kernels of GPUs read one in "
                            f"{low.floats}, fp8 or int8")
    return attention_tactics.Problem(
        low.tokens, low.limits["max_batch_size"], heads, slot.heads, slot.key_dim, slot.value_dim, a["scale"],
        low.floats, kv_type, low.kv.block_size, low.kv.block_bytes, _max_blocks(low), window=a.get("window", 0),
        chunk=a.get("chunk", 0), softcap=a.get("softcap", 0.0), sinks=len(node.values) > 3,
        y_type=wanted_form(low, node.output),
        q_stride=0 if dense or turn else low.token_stride(q), rope=turn)


def _rope_problem(low: GpuLowering, node: Node) -> rope_tactics.Problem:
    q, k, v, cos, *rest = node.values
    slot = low.kv_slot(node.attrs["slot"])
    q_stride, k_stride, v_stride = map(low.token_stride, (q, k, v))
    return rope_tactics.Problem(
        low.tokens, int(low.type(q).shape[1]), slot.heads, slot.key_dim, slot.value_dim, q_stride, k_stride, v_stride,
        low.width(cos), low.floats, _KV_TYPES[slot.dtype], low.kv.block_size, low.kv.block_bytes, _max_blocks(low),
        interleaved=node.attrs.get("interleaved", False), norm_eps=node.attrs["eps"] if len(rest) > 1 else None)


def _max_blocks(low: GpuLowering) -> int:
    """The length of a row of a block table."""
    return table_width(low.limits["max_seq_len"], low.kv.block_size)


def _step() -> dict[str, Arg]:
    return {name: Arg("input", name) for name in ("positions", "token_seq")}

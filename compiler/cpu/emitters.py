"""For each operator of the final graph: which kernel runs, and with what arguments."""
from __future__ import annotations

from collections.abc import Callable

from ingot.plugins.attention import cpu as attention_cpu
from ingot.plugins.embedding import cpu as embedding_cpu
from ingot.plugins.expert_linear import cpu as experts_cpu
from ingot.plugins.linear import cpu as linear_cpu
from ingot.plugins.lora import cpu as lora_cpu
from ingot.plugins.matmul import cpu as matmul_cpu
from ingot.plugins.norm import cpu as norm_cpu
from ingot.plugins.quantize import cpu as quantize_cpu
from ingot.plugins.rope import cpu as rope_cpu
from ingot.plugins.scheme import SCHEMES
from ingot.plugins.select import cpu as select_cpu

from ..errors import CannotCompile
from ..fusion import c_emit
from ..ir.graph import Node
from ..plan.plan import NULL, Arg
from ..weights.packed import Packing
from .lower import Lowering
from .repeat import MAX_REPEATED_TOKENS


def _quantize(low: Lowering, node: Node) -> None:
    x, scheme = node.values[0], SCHEMES[node.attrs["scheme"]]
    if low.count(low.rows(x)) <= MAX_REPEATED_TOKENS and all(user.op == "linear" for user in low.users(node.output)):
        low.defer(node.output, x)
        return
    kernel = quantize_cpu.emit(low.width(x), scheme, str(low.rows(x)), low.stride(x))
    low.launch(node, kernel, [low.arg(x), low.output(node.output)], {node.output: 1}, rows=low.rows(x))


def _linear(low: Lowering, node: Node) -> None:
    x, w, *bias = node.values
    n, k = (int(dim) for dim in low.type(w).shape)
    scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
    floats = low.deferred(x)
    source = floats or x
    problem = linear_cpu.Problem(
        n, k, scheme, low.count(low.rows(x)), str(low.rows(x)), bias=bool(bias), float_input=floats is not None,
        x_stride=low.stride(source) if floats or not scheme.rounds_inputs else 0)
    args = [low.arg(source), low.weight(w, Packing(scheme.stored)), low.output(node.output), *map(low.arg, bias)]
    low.launch(node, linear_cpu.emit(low.tuned(problem)), args, {node.output: 2})


def _lora_shrink(low: Lowering, node: Node) -> None:
    x, offsets = node.values[0], [offset for _, offset in node.attrs["modules"]]
    apart = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    assert offsets == [offsets[0] + number * apart for number in range(len(offsets))], offsets
    problem = lora_cpu.Shrink(low.width(x), node.attrs["rank"], len(offsets), apart, low.slot_bytes, low.stride(x))
    args = [low.arg(x), Arg("lora", offset=offsets[0]), low.output(node.output)]
    low.launch(node, lora_cpu.shrink(problem), args, {node.output: 2}, adapters=True)


def _lora_expand(low: Lowering, node: Node) -> None:
    y, h = node.values[:2]
    parts = [part[1:] for part in node.attrs["parts"]]
    first = min(offset for _, _, offset, _ in parts)
    problem = lora_cpu.Expand(low.width(y), low.width(h), node.attrs["rank"], low.slot_bytes, tuple(
        (start, width, offset - first, column) for start, width, offset, column in parts))
    args = [low.onto(node), low.arg(h), Arg("lora", offset=first)]
    low.launch(node, lora_cpu.expand(problem), args, {node.output: 0}, adapters=True)


def _expert_linear(low: Lowering, node: Node) -> None:
    x, ids, w, *bias = node.values
    experts, n, k = (int(dim) for dim in low.type(w).shape)
    scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
    problem = experts_cpu.Problem(experts, low.width(ids), n, k, scheme, low.tokens,
                                  shared=len(low.type(x).shape) == 2, bias=bool(bias))
    args = [low.arg(x), low.arg(ids), low.weight(w, Packing(scheme.stored)), low.output(node.output),
            *map(low.arg, bias)]
    low.launch(node, experts_cpu.emit(problem), args, {node.output: 3})


def _embedding(low: Lowering, node: Node) -> None:
    w, ids = node.values
    if low.rows_of_tokens(ids) != 1:
        raise CannotCompile(f"embedding of {low.type(ids)}: the kernel looks up one id a token\n  in {node.origin}")
    scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
    kernel = embedding_cpu.emit(low.width(w), scheme)
    args = [low.arg(ids), low.weight(w, Packing(scheme.stored)), low.output(node.output)]
    low.launch(node, kernel, args, {node.output: 2})


def _norm(low: Lowering, node: Node) -> None:
    x, *parameters = node.values
    group, stride = low.row_group(x)
    problem = norm_cpu.Norm(node.op, low.rows(x), low.width(x), node.attrs["eps"], x_stride=stride, x_group=group)
    args = [low.arg(x), *_optional(low, parameters), low.output(node.output)]
    low.launch(node, norm_cpu.norm(problem), args, {node.output: 3}, rows=low.rows(x) if group == 1 else "")


def _add_norm(low: Lowering, node: Node) -> None:
    x, r, *parameters = node.values
    y, s = node.outputs
    problem = norm_cpu.Norm(node.op.removeprefix("add_"), low.rows(x), low.width(x), node.attrs["eps"])
    sum_arg = None
    if low.tokens > MAX_REPEATED_TOKENS:
        sum_arg = low.in_place(s, r, beside=parameters) or low.in_place(s, x, beside=parameters)
    sum_arg = sum_arg or low.output(s)
    args = [low.arg(x), low.arg(r), *_optional(low, parameters), low.output(y), sum_arg]
    low.launch(node, norm_cpu.add_norm(problem), args, {y: 4, s: 5}, rows=low.rows(x))


def _optional(low: Lowering, parameters: list[str]) -> list[Arg]:
    """Weight and bias, null where the node has none."""
    return [low.arg(parameters[i]) if i < len(parameters) else NULL for i in range(2)]


def _rope_kv_write(low: Lowering, node: Node) -> None:
    q, k, v, cos, sin, *norms = node.values
    q_out = low.in_place(node.outputs[0], q, beside=node.values[1:]) or low.output(node.outputs[0])
    problem = rope_cpu.Rope(
        q_heads=int(low.type(q).shape[1]), kv_heads=int(low.type(k).shape[1]), key_dim=low.width(q),
        value_dim=low.width(v), block_size=low.kv.block_size, block_bytes=low.kv.block_bytes,
        kv_dtype=node.attrs["dtype"].value, rotary=low.width(cos),
        interleaved=node.attrs.get("interleaved", False), norm=bool(norms), eps=node.attrs.get("eps", 0.0),
        q_stride=low.token_stride(q), k_stride=low.token_stride(k), v_stride=low.token_stride(v))
    slot = node.attrs["slot"]
    args = [*map(low.arg, (q, k, v, cos, sin)), *(low.arg(n) for n in norms), *[NULL] * (2 - len(norms)), q_out,
            *low.kv_args(slot)]
    low.launch(node, rope_cpu.rope_kv_write(problem), args, {node.outputs[0]: 7})


def _rope(low: Lowering, node: Node) -> None:
    x, cos, sin = node.values
    out = low.in_place(node.output, x, beside=(cos, sin)) or low.output(node.output)
    problem = rope_cpu.Rope(
        q_heads=int(low.type(x).shape[1]), kv_heads=0, key_dim=low.width(x), value_dim=0,
        block_size=low.kv.block_size, block_bytes=low.kv.block_bytes, rotary=low.width(cos),
        interleaved=node.attrs.get("interleaved", False), q_stride=low.token_stride(x))
    low.launch(node, rope_cpu.rope(problem), [*map(low.arg, (x, cos, sin)), out], {node.output: 3})


def _kv_write(low: Lowering, node: Node) -> None:
    k, v = node.values
    problem = rope_cpu.Rope(
        q_heads=0, kv_heads=int(low.type(k).shape[1]), key_dim=low.width(k), value_dim=low.width(v),
        block_size=low.kv.block_size, block_bytes=low.kv.block_bytes, kv_dtype=node.attrs["dtype"].value,
        k_stride=low.token_stride(k), v_stride=low.token_stride(v))
    args = [low.arg(k), low.arg(v), *low.kv_args(node.attrs["slot"])]
    low.launch(node, rope_cpu.kv_write(problem), args)


def _attention(low: Lowering, node: Node) -> None:
    q, k, v, *sinks = node.values
    a = node.attrs
    problem = low.tuned(attention_cpu.Attention(
        q_heads=int(low.type(q).shape[1]), kv_heads=int(low.type(k).shape[1]), key_dim=low.width(q),
        value_dim=low.width(v), block_size=low.kv.block_size, block_bytes=low.kv.block_bytes, scale=a["scale"],
        window=a.get("window", 0), chunk=a.get("chunk", 0), softcap=a.get("softcap", 0.0),
        kv_dtype=low.kv_slot(a["slot"]).dtype, q_stride=low.token_stride(q)))
    sequences = low.limits["max_batch_size"]
    scratch = low.scratch(attention_cpu.scratch_bytes(problem, low.tokens, sequences))
    sink = low.arg(sinks[0]) if sinks else NULL
    out = low.output(node.output)
    # Where the second launch is to become a part of the next one, it must not write what all read.
    whole = low.draft(node.output) if low.tokens <= MAX_REPEATED_TOKENS else out
    first = [low.arg(q), *low.kv_args(a["slot"]), sink, scratch, whole]
    low.launch(node, attention_cpu.attention(problem), first, {whole.name: len(first) - 1})
    second = [scratch, sink, NULL if whole == out else whole, out]
    low.launch(node, attention_cpu.attention_combine(problem), second, {node.output: 3}, op="attention_combine")


def _softmax(low: Lowering, node: Node) -> None:
    x, = node.values
    kernel = select_cpu.softmax(low.rows(x), low.width(x))
    low.launch(node, kernel, [low.arg(x), low.in_place(node.output, x) or low.output(node.output)], {node.output: 1})


def _cumsum(low: Lowering, node: Node) -> None:
    x, = node.values
    kernel = select_cpu.cumsum(low.rows(x), low.width(x), low.type(x).dtype.value)
    low.launch(node, kernel, [low.arg(x), low.in_place(node.output, x) or low.output(node.output)], {node.output: 1})


def _argmax(low: Lowering, node: Node) -> None:
    x, = node.values
    kernel = select_cpu.argmax(low.rows(x), low.width(x), low.type(x).dtype.value)
    low.launch(node, kernel, [low.arg(x), low.output(node.output)], {node.output: 1})


def _topk(low: Lowering, node: Node) -> None:
    """And sort, which is a topk of all."""
    x, (values, indices) = node.values[0], node.outputs
    if node.op == "topk":
        largest, k = node.attrs.get("largest", True), node.attrs["k"]
    else:
        largest, k = node.attrs.get("descending", False), low.width(x)
    kernel = select_cpu.topk(low.rows(x), low.width(x), k, largest, low.type(x).dtype.value)
    args = [low.arg(x), low.output(values), low.output(indices)]
    low.launch(node, kernel, args, {values: 1, indices: 2})


def _scatter(low: Lowering, node: Node) -> None:
    x, index, source = node.values
    low.require_same_rows(node)
    kernel = select_cpu.scatter(low.rows(x), low.width(x), low.width(index),
                                low.width(source) if low.type(source).shape else 0, low.type(x).dtype.size_bytes)
    out = low.in_place(node.output, x, beside=(index, source)) or low.output(node.output)
    args = [low.arg(x), low.arg(index), low.arg(source), out]
    low.launch(node, kernel, args, {node.output: 3})


def _matmul(low: Lowering, node: Node) -> None:
    a, b = node.values
    kernel = matmul_cpu.matmul(matmul_cpu.Matmul(low.type(a).shape, low.type(b).shape))
    low.launch(node, kernel, [low.arg(a), low.arg(b), low.output(node.output)], {node.output: 2})


def _loop(low: Lowering, node: Node) -> None:
    types = [low.type(value) for value in node.values]
    args = [*map(low.arg, node.values), low.output(node.output)]
    adapters = low.is_of_adapters(node.output)
    low.launch(node, c_emit.emit(node, types), args, {node.output: len(node.values)},
               rows="" if adapters else c_emit.own_rows(node, types), adapters=adapters)


EMITTERS: dict[str, Callable[[Lowering, Node], None]] = {
    "quantize": _quantize,
    "linear": _linear,
    "lora_shrink": _lora_shrink,
    "lora_expand": _lora_expand,
    "expert_linear": _expert_linear,
    "embedding": _embedding,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _add_norm,
    "add_layer_norm": _add_norm,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "kv_write": _kv_write,
    "attention": _attention,
    "softmax": _softmax,
    "cumsum": _cumsum,
    "argmax": _argmax,
    "topk": _topk,
    "sort": _topk,
    "scatter": _scatter,
    "matmul": _matmul,
    "loop": _loop,
}

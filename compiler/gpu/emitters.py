"""For each operator of the final graph: which launches compute it on a GPU, and with what arguments."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ingot.plugins.embedding import tactics as embedding_tactics
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.norm import tactics as norm_tactics
from ingot.plugins.sampling import tactics as sampling_tactics
from ingot.runtime.sampling_inputs import MAX_BIASES

from ..errors import CannotCompile
from ..fusion import triton_emit
from ..fusion.triton_expr import Operand
from ..ir.graph import Node
from ..plan.lowering import Place
from ..plan.plan import Arg
from .absorb import absorbs_norm
from .adapter_inputs import leave_unmade, make, others
from .emit_attention import emit_attention, emit_kv_write, emit_rope, emit_rope_kv_write
from .emit_collective import emit_collective
from .emit_experts import emit_combine, emit_expert_linear, emit_route
from .emit_linear import emit_linear, wanted_form, write_quantized
from .emit_lora import emit_expand, emit_shrink
from .emit_router import emit_norm_and_router, emit_router, norm_behind, wanted, write_wanted
from .emit_select import emit_argmax, emit_cumsum, emit_matmul, emit_scatter, emit_softmax, emit_topk
from .lower import GpuLowering


def _embedding(low: GpuLowering, node: Node) -> None:
    """For many tokens with the norm of the first layer."""
    w, ids = node.values
    if low.rows_of_tokens(ids) != 1:
        raise CannotCompile(f"embedding of {low.type(ids)}: the kernel looks up one id a token\n  in {node.origin}")
    scheme = GPU_SCHEMES[node.attrs["scheme"]]
    problem = embedding_tactics.Problem(low.count("T"), low.width(w), scheme.format, low.stored[node.output],
                                        node.attrs.get("factor", 1.0))
    _, arrays = low.matrix(w, scheme.name)
    args = {**arrays, "ids": low.arg(ids), "y": low.output(node.output)}
    writes = {node.output: "y"}
    norm = norm_behind(low, node)
    if norm is not None:
        normed, form = wanted(low, norm.output)
        whole = replace(problem, norm_eps=norm.attrs["eps"], normed=normed, normed_form=form)
        if low.candidates(whole, embedding_tactics.candidates).legal:
            problem = whole
            args |= {"norm_weight": low.arg(norm.values[1]), **write_wanted(low, norm.output, normed, form, "normed")}
            low.made.add(norm.output)
            writes |= {norm.output: "normed"} if normed else {}
    low.request(node, low.candidates(problem, embedding_tactics.candidates), args, writes)


def _norm(low: GpuLowering, node: Node) -> None:
    """rms_norm, layer_norm; left to the matrices that read it where there are few tokens."""
    x, y = node.values[0], node.output
    if absorbs_norm(low, node):
        low.defer(y, x)
        low.absorbed[y] = node
        leave_unmade(low, node)
        return
    if emit_norm_and_router(low, node):
        return
    parameters = dict(zip(("weight", "bias"), node.values[1:], strict=False))
    _normalise(low, node, x, y, parameters, op=node.op)


def _linear(low: GpuLowering, node: Node) -> None:
    if not emit_router(low, node):
        emit_linear(low, node)


def _add_norm(low: GpuLowering, node: Node) -> None:
    """y, s = norm(x + r), x + r"""
    x, r, *rest = node.values
    y, s = node.outputs
    parameters = dict(zip(("weight", "bias"), rest, strict=False))
    _normalise(low, node, x, y, parameters, op=node.op.removeprefix("add_"), residual=r, total=s)


def _norm_add_norm(low: GpuLowering, node: Node) -> None:
    x, r, x_weight, w = node.values
    y, s = node.outputs
    if absorbs_norm(low, node):
        low.defer(y, x)
        low.defer(y, r)
        low.absorbed[y] = node
        low.output(s)
        leave_unmade(low, node)
        return
    _normalise(low, node, x, y, {"x_weight": x_weight, "weight": w}, residual=r, total=s)


def _norm_add(low: GpuLowering, node: Node) -> None:
    x, r, x_weight = node.values
    _normalise(low, node, x, "", {"x_weight": x_weight}, residual=r, total=node.output)


def _normalise(low: GpuLowering, node: Node, x: str, y: str, parameters: dict[str, str], *, op: str = "rms_norm",
               residual: str = "", total: str = "") -> None:
    """One launch: sum, norm, and the quantization that all readers of the norm want. y "": the sum alone."""
    group, stride = low.rows_a_token(x), low.place(x).stride or 0
    form = wanted_form(low, y, others(low, y)) if y and group == 1 else ""
    problem = norm_tactics.Problem(
        low.count("T" if "T" in str(low.rows(x)) else "L"), low.width(x), node.attrs["eps"], low.stored[x],
        (form or low.stored[y]) if y else "", op, _symbol(low, x, node), weight="weight" in parameters,
        bias="bias" in parameters, residual=bool(residual), x_weight="x_weight" in parameters, x_stride=stride,
        group=group)
    args = {"x": low.arg(x), **{name: low.arg(value) for name, value in parameters.items()}}
    writes = {}
    if residual:
        args["residual"] = low.arg(residual)
        beside = [x, *parameters.values()]
        args["total"] = low.in_place(total, residual, beside=beside) or low.output(total)
        writes[total] = "total"
    if form:
        low.places[y] = Place(Arg("value", y))
        args |= write_quantized(low, y, form)
        leave_unmade(low, node)
    elif y:
        args["y"] = low.output(y)
        writes[y] = "y"
    low.request(node, low.candidates(problem, norm_tactics.candidates), args, writes)


def _symbol(low: GpuLowering, x: str, node: Node) -> str:
    rows = str(low.rows(x)).rpartition("*")[2]
    if rows not in ("T", "L"):
        raise CannotCompile(f"{node.op} of {low.type(x)}: the kernel takes rows of tokens\n  in {node.origin}")
    return rows


def _loop(low: GpuLowering, node: Node) -> None:
    operands = [Operand(low.type(value), low.stored[value]) for value in node.values]
    if adapters := low.is_of_adapters(node.output):
        make(low, node.values[0])
    assert all(low.place(value).stride is None for value in node.values), f"a loop over a column range: {node.origin}"
    found = triton_emit.candidates(node, operands, low.stored[node.output], low.bindings)
    args = {f"in{number}": low.arg(value) for number, value in enumerate(node.values)}
    low.request(node, found, {**args, "out": low.output(node.output)}, {node.output: "out"},
                adapters=adapters)


def emit_sample(low: GpuLowering, vocab: int) -> None:
    """Behind the logits: the tokens. Its results are arrays of the step."""
    logits = low.graph.outputs[0]
    rows = low.count("L")
    problem = sampling_tactics.Problem(rows, vocab, min(vocab, low.limits["max_seq_len"]), MAX_BIASES,
                                       -(-vocab // 32))
    inputs = ("counts", "rows", "history_ids", "history_counts", "bias_ids", "bias_values", "masks", "tokens",
              "logprobs", "ranks", "top_ids", "top_logprobs")
    args = {name: Arg("input", f"sampling.{name}") for name in inputs}
    args |= {name: Arg("input", name) for name in ("positions", "logit_rows")}
    args |= {name: low.temporary(f"sample.{name}", rows * vocab * size)
             for name, size in sampling_tactics.SCRATCH.items()}
    args["logits"] = low.arg(logits)
    node = Node("sample", (logits,), (), {}, "sampling")
    low.request(node, low.candidates(problem, sampling_tactics.candidates), args, {})


EMITTERS: dict[str, Callable[[GpuLowering, Node], None]] = {
    "all_reduce": emit_collective,
    "all_gather": emit_collective,
    "embedding": _embedding,
    "linear": _linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _add_norm,
    "add_layer_norm": _add_norm,
    "norm_add_norm": _norm_add_norm,
    "norm_add": _norm_add,
    "rope_kv_write": emit_rope_kv_write,
    "rope": emit_rope,
    "kv_write": emit_kv_write,
    "attention": emit_attention,
    "route": emit_route,
    "expert_linear": emit_expert_linear,
    "lora_shrink": emit_shrink,
    "lora_expand": emit_expand,
    "combine": emit_combine,
    "softmax": emit_softmax,
    "cumsum": emit_cumsum,
    "argmax": emit_argmax,
    "topk": emit_topk,
    "sort": emit_topk,
    "scatter": emit_scatter,
    "matmul": emit_matmul,
    "loop": _loop,
}

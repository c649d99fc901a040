"""From a traced program to a graph of tensor operators."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.export.graph_signature import InputKind, OutputKind

from ..ir.graph import Graph
from ..ir.types import DType, TensorType
from ..weights.expr import literal
from . import aten_elementwise, aten_linear, aten_reduce, aten_views
from .aten_complex import COMPLEX_CONVERSIONS, Complex, convert_complex
from .attention_calls import AttentionCall, find_attention_calls
from .builder import GraphBuilder
from .canonical import canonical
from .conversion import CONVERSIONS, SYMBOL, Context, Symbolic, dim_of, dtype_of, operator_name, result_type, type_of
from .export import Exported
from .masks import MaskMeaning, MaskReader, UnknownMask, refusal
from .parameters import Parameters

__all__ = ["aten_elementwise", "aten_linear", "aten_reduce", "aten_views", "convert"]


def convert(exported: Exported, parameters: Parameters, max_seq_len: int | None) -> tuple[Graph, list[str]]:
    """The graph, and warnings for the user. max_seq_len: see Context.

    Raises ImportRefused for what has no counterpart (names operator, module and source line), CheckpointMismatch for
    parameters that the graph needs and the checkpoint lacks."""
    converter = _Converter(exported, parameters, max_seq_len)
    if not converter.is_complete():
        converter = _Converter(exported.decomposed(), parameters, max_seq_len)
    return canonical(converter.graph()), converter.context.warnings


_MAX_COMPUTED = 1 << 20
"""Elements of a value that is computed at once."""


class _Converter:
    def __init__(self, exported: Exported, parameters: Parameters, max_seq_len: int | None) -> None:
        self.program = exported.program
        self.parameters = parameters
        self.context = Context(GraphBuilder(), max_seq_len)
        self.values: dict[torch.fx.Node, Any] = {}
        self.known: dict[torch.fx.Node, torch.Tensor] = {}
        self.num_attentions = 0
        specs = self.program.graph_signature.input_specs
        self.specs = {spec.arg.name: spec for spec in specs}
        self.token_input, self.position_input = [s.arg.name for s in specs if s.kind == InputKind.USER_INPUT]
        self.attentions = find_attention_calls(self.program.graph)
        self.masks = MaskReader(self._buffers(), self.position_input, exported.max_tokens)

    def graph(self) -> Graph:
        builder = self.context.builder
        for name in ("token_ids", "positions"):
            builder.input(name, TensorType((SYMBOL,), DType.I32))
        output = self._output()
        needed = self._needed(output)
        self.parameters.require(self._parameter_name(n) for n in needed if self._is_parameter(n))
        for node in needed:
            self._convert(node)
        logits = self.context.emit("reshape", self.values[output], shape=self.context.shape(self.values[output])[1:])
        return builder.graph([logits])

    def is_complete(self) -> bool:
        """Whether each operator has a conversion as it is and none changes its operand in place."""
        nodes = [n for n in self.program.graph.nodes if n.op == "call_function"]
        needed = self._needed(self._output())
        return all(n.op in ("placeholder", "call_function") for n in needed) and not any(
            getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in nodes) and all(
            _has_conversion(n) for n in needed if n.op == "call_function" and n not in self.attentions)

    def _output(self) -> torch.fx.Node:
        names = [s.arg.name for s in self.program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
        (result,) = [n for n in self.program.graph.nodes if n.name == names[0]]
        return result

    def _needed(self, output: torch.fx.Node) -> list[torch.fx.Node]:
        """What the output depends on, in execution order. Masks are read, not converted."""
        needed: set[torch.fx.Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(self.attentions[node].inputs if node in self.attentions else node.all_input_nodes)
        return [n for n in self.program.graph.nodes if n in needed]

    def _convert(self, node: torch.fx.Node) -> None:
        self.context.node = node
        self.context.builder.origin = origin(_tensor_user(node)) or "inputs"
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
            return
        assert node.op == "call_function", f"{node.op} in a traced program"
        name = operator_name(node)
        value = node.meta.get("val")
        if node in self.attentions:
            self.values[node] = self._attention(self.attentions[node])
            self._check(node)
        elif isinstance(value, int | float | bool) and not isinstance(value, torch.SymInt):
            self.values[node] = value
        elif isinstance(value, torch.SymInt):
            self.values[node] = _number_or_symbol(value, self.context)
        elif name == "getitem":
            self.values[node] = self.values[node.args[0]][node.args[1]]
        elif not self._compute(node):
            self.values[node] = self._call(node, name)
            self._check(node)

    def _call(self, node: torch.fx.Node, name: str) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        if (name in COMPLEX_CONVERSIONS and name not in CONVERSIONS) or any(isinstance(a, Complex) for a in args):
            return convert_complex(self.context, node, args, kwargs)
        if name in ("ingot.mask", "ingot.probe_indices"):
            raise self.context.refuse("the mask is used by other means than attention: the model computes attention in "
                                      "a way that is not recognised")
        if name not in CONVERSIONS:
            raise self.context.refuse("this operator has no conversion")
        for argument in [*args, *kwargs.values()]:
            if isinstance(argument, Symbolic) and not _takes_sizes(name):
                raise self.context.refuse("the number of tokens of a step is used as a value")
        return CONVERSIONS[name](self.context, node, *args, **kwargs)

    def _compute(self, node: torch.fx.Node) -> bool:
        """Computes at once what depends on nothing but values that the model makes from its configuration: rotation
        tables, scales, indices. False if it depends on more, or is large (a mask over all positions)."""
        value = node.meta.get("val")
        if not (isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
                and value.numel() <= _MAX_COMPUTED and str(node.target).startswith("aten.")
                and not value.dtype.is_complex and all(n in self.known for n in node.all_input_nodes)):
            return False
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        result = self.known[node] = node.target(*args, **kwargs)
        array, c = _as_array(result), self.context
        if array.size and (array == array.flat[0]).all():
            dtype = dtype_of(result.dtype)
            self.values[node] = c.emit("full", shape=array.shape, value=array.flat[0].item(), dtype=dtype)
        else:
            module = c.builder.origin.split(" ")[0]
            self.values[node] = c.builder.constant(literal(array), f"{module}.{node.name}")
        return True

    def _check(self, node: torch.fx.Node) -> None:
        """Each result has the type that the tracer recorded: a conversion that is wrong is found here."""
        value, recorded = self.values[node], node.meta["val"]
        if isinstance(value, Complex):
            value, recorded = (value.real, value.imaginary), (recorded, recorded)
        for name, tensor in zip(value, recorded, strict=False) if isinstance(value, tuple) else [(value, recorded)]:
            expected, got = type_of(tensor, self.context), self.context.type(name)
            assert expected == got, f"{operator_name(node)} gave {got}, traced as {expected}, in {origin(node)}"

    def _placeholder(self, node: torch.fx.Node) -> str:
        builder, spec = self.context.builder, self.specs[node.name]
        if node.name == self.token_input:
            return self.context.emit("reshape", "token_ids", shape=(1, SYMBOL))
        if node.name == self.position_input:
            return self.context.emit("reshape", "positions", shape=(1, SYMBOL))
        name = self._parameter_name(node)
        if self._is_parameter(node) and name in self.parameters.recipes:
            return builder.constant(self.parameters.recipes[name], name)
        value = self._value_of(spec)
        assert value is not None, f"{spec} has neither a recipe nor a value"
        if not self._is_parameter(node):
            self.known[node] = value
        return builder.constant(literal(_as_array(value)), name)

    def _is_parameter(self, node: torch.fx.Node) -> bool:
        """Parameters and buffers that are saved with the model: what a checkpoint holds."""
        spec = self.specs.get(node.name) if node.op == "placeholder" else None
        return spec is not None and (spec.kind == InputKind.PARAMETER
                                     or (spec.kind == InputKind.BUFFER and spec.persistent is not False))

    def _parameter_name(self, node: torch.fx.Node) -> str:
        """The path in the model; "model." in front is the traced wrapper's."""
        return (self.specs[node.name].target or node.name).removeprefix("model.")

    def _value_of(self, spec: Any) -> torch.Tensor | None:
        """The value of what the model computes from its configuration: buffers that are not saved, constants."""
        if spec.kind == InputKind.BUFFER:
            source = self.program.constants if spec.persistent is False else self.program.state_dict
            return source.get(spec.target)
        if spec.kind == InputKind.CONSTANT_TENSOR:
            return self.program.constants.get(spec.target)
        return None

    def _buffers(self) -> dict[str, torch.Tensor]:
        values = {name: self._value_of(spec) for name, spec in self.specs.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _attention(self, call: AttentionCall) -> str:
        c = self.context
        try:
            meaning = self.masks.meaning(call.masks) if call.masks else MaskMeaning()
        except UnknownMask as error:
            raise refusal(error, c.builder.origin) from error
        if not call.masks and not call.is_causal:
            raise c.refuse("attention to later tokens is not supported: an engine generates token by token")
        q, k, v = (self._by_token(call, node) for node in (call.q, call.k, call.v))
        sinks = []
        if call.sinks is not None:
            sinks = [c.emit("reshape", self.values[call.sinks], shape=(c.shape(q)[1],))]
        out = c.emit("attention", q, k, v, *sinks, slot=self.num_attentions, scale=call.scale, softcap=call.softcap,
                     window=meaning.window, chunk=meaning.chunk)
        self.num_attentions += 1
        if call.heads_last:
            return c.emit("reshape", out, shape=(1, *c.shape(out)))
        whole = c.emit("permute", out, dims=(1, 0, 2))
        return c.emit("reshape", whole, shape=result_type(c, self.context.node).shape)

    def _by_token(self, call: AttentionCall, node: torch.fx.Node) -> str:
        """A query, key or value as [T, H, D]."""
        c, name = self.context, self.values[node]
        shape = c.shape(name)
        if call.heads_last:
            return c.emit("reshape", name, shape=shape[1:])
        heads_first = c.emit("reshape", name, shape=shape[-3:])
        dims = (2, 0, 1) if node is call.k and call.key_transposed else (1, 0, 2)
        return c.emit("permute", heads_first, dims=dims)


def _has_conversion(node: torch.fx.Node) -> bool:
    """Operators of Python's own compute sizes."""
    name = operator_name(node)
    return name in CONVERSIONS or name in COMPLEX_CONVERSIONS or not hasattr(node.target, "_schema")


def _number_or_symbol(value: torch.SymInt, context: Context) -> int | Symbolic:
    dim = dim_of(value, context)
    return dim if isinstance(dim, int) else Symbolic(dim)


def _takes_sizes(name: str) -> bool:
    """Operators whose arguments may be sizes; a list of sizes is always allowed."""
    return name.split(".")[0] in ("slice", "arange", "full", "slice_scatter", "scalar_tensor", "select", "narrow")


def _as_array(value: torch.Tensor) -> np.ndarray:
    if value.dtype == torch.bool:
        return value.numpy(force=True)
    return value.to(torch.float32 if value.dtype.is_floating_point else torch.int32).numpy(force=True)


def _tensor_user(node: torch.fx.Node) -> torch.fx.Node:
    """For a size, which the tracer does not place: the first operator on tensors that depends on it."""
    waiting = [node]
    while waiting:
        current = waiting.pop(0)
        if not isinstance(current.meta.get("val"), torch.SymInt | torch.SymBool | None):
            return current
        waiting += list(current.users)
    return node


def origin(node: torch.fx.Node) -> str:
    """"model.layers.3.mlp (modeling_llama.py:172)", as far as the tracer recorded it."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    module = stack[-1][0].removeprefix("model.") if stack else ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0] and "/importer/" not in f[0]]
    line = f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""
    return f"{module} ({line})" if module and line else module or line

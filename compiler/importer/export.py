"""Traces the model's own class to ATen operators, without its weights.

Parameters are fake tensors (a shape and a type, no memory), buffers are real: what a model computes from its
configuration (inverse frequencies, position tables) comes out as values.
"""
from __future__ import annotations

import contextlib
import copy
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from .errors import ImportRefused
from .interfaces import FALLBACK_IMPLEMENTATIONS, IMPLEMENTATION, tracing
from .token_guards import GuardLog, base_name

_TRACED_TOKENS = 16
_MAX_TOKENS = 1 << 20
"""Upper bound of the symbolic number of tokens where nothing else bounds it; the tracer wants one."""

_LARGE_ELEMENTS = 1 << 20

# Kept whole instead of being decomposed: each is one operator of ours, or is recognised as a part of attention.
_KEPT = ("aten.linear.", "aten.silu.", "aten.gelu.", "aten.layer_norm.", "aten.softmax.int", "aten.rms_norm.",
         "aten.softplus.", "aten.matmul.", "aten.scaled_dot_product_attention.")


@dataclass(frozen=True)
class Exported:
    """program: the operators that the model calls. model: the module that was traced; its parameters are fake.

    max_tokens: the program holds for sequences of up to so many tokens.
    """

    program: torch.export.ExportedProgram
    model: PreTrainedModel
    max_tokens: int

    def decomposed(self) -> Exported:
        """In core ATen operators, and without assignments to parts of tensors. Takes longer than the trace itself."""
        table = torch.export.default_decompositions()
        for operator in [op for op in table if any(str(op).startswith(name) for name in _KEPT)]:
            table.pop(operator)
        with torch.no_grad(), _quiet():
            return replace(self, program=self.program.run_decompositions(table))


class Step(torch.nn.Module):
    """ids, positions [1, T] -> logits [1, T, V].

    The positions are not handed to the model: it numbers the tokens in its own way (some begin at 2, some do not take
    positions at all), and the conversion puts the positions in where it counts from 0.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with tracing(positions):
            return self.model(input_ids=ids, use_cache=False).logits


def export(config: PretrainedConfig, max_seq_len: int | None = None) -> Exported:
    """max_seq_len: bounds the tokens, so that code which only longer sequences reach does not matter.

    Raises ImportRefused where the class cannot be built or traced, with the model's own source line.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        model = build_model(config, mode)
    except ImportRefused:
        raise
    except Exception as error:
        raise ImportRefused(f"{config.model_type}: transformers cannot build this configuration: {_place(error)}"
                            ) from error
    _mark_module_outputs(model)
    max_tokens = max(max_seq_len or _MAX_TOKENS, 2 * _TRACED_TOKENS)
    try:
        with torch.no_grad(), _quiet(), GuardLog() as guards:
            program = _trace(model, mode, max_tokens)
    except ImportRefused:
        raise
    except Exception as error:
        _require_independent(model, guards, max_tokens, error)
        raise ImportRefused(f"{type(model).__name__} cannot be traced: {_place(error)}") from error
    _require_independent(model, guards, max_tokens, None)
    return Exported(program, model, max_tokens)


def _require_independent(model: PreTrainedModel, guards: GuardLog, max_tokens: int, cause: Exception | None) -> None:
    places = guards.differing_places(max_tokens)
    if cause is not None and "pecializ" in str(cause):
        places = places or guards.last_places()
    if places:
        raise ImportRefused(f"{type(model).__name__} cannot be traced for any number of tokens: what it computes "
                            f"depends on their number, at {', '.join(places[:3])}") from cause


def _trace(model: PreTrainedModel, mode: FakeTensorMode, max_tokens: int) -> torch.export.ExportedProgram:
    with mode:
        ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.long)
        positions = torch.zeros(1, _TRACED_TOKENS, dtype=torch.long)
    tokens = torch.export.Dim("T", min=2, max=max_tokens)
    return torch.export.export(Step(model), (ids, positions), dynamic_shapes=({1: tokens}, {1: tokens}),
                               strict=False, prefer_deferred_runtime_asserts_over_guards=True)


def build_model(config: PretrainedConfig, mode: FakeTensorMode) -> PreTrainedModel:
    """The causal-LM class of the configuration, in f32, with fake parameters and real buffers."""
    model = _build(config)
    # On the device of the buffers, so that the model's own code sees one device.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            with mode:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, torch.nn.Parameter(fake, requires_grad=False))
    return model.eval()


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The causal-LM class of a configuration: by its type, or for the text part of a larger one, the class it names.

    Raises ImportRefused for a configuration that has none.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        classes: list[type[PreTrainedModel]] = list(found) if isinstance(found, tuple) else [found]
    else:
        named = [getattr(transformers, name, None) for name in config.architectures or []
                 if name.endswith(("ForCausalLM", "LMHeadModel"))]
        classes = [c for c in named if c is not None and c.config_class is type(config)]
    if not classes:
        raise ImportRefused(f"{config.model_type} has no causal language model in transformers "
                            "(AutoModelForCausalLM); an engine generates text")
    return classes[0]


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal-LM class of the configuration, in f32, with memory for parameters that are to be filled; eager
    attention, and experts that are called one after the other."""
    with no_init_weights(), _quiet():
        return _model_class(config)._from_config(_plain(config), attn_implementation="eager",
                                                 experts_implementation="eager", dtype=torch.float32)


def model_without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """The same with parameters on the meta device; buffers that the class computes are there. Experts are called one
    after the other."""
    with _parameters_without_memory(), no_init_weights(), _quiet():
        return _model_class(config)._from_config(_plain(config), attn_implementation="eager",
                                                 experts_implementation="eager", dtype=torch.float32)


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    """A copy without how the checkpoint is quantized: the model's own class is traced, not a quantizer's."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """With our attention, or for a class that knows only transformers' own names, with one of those."""
    first_error: Exception | None = None
    for attention in (IMPLEMENTATION, *FALLBACK_IMPLEMENTATIONS):
        try:
            with _parameters_without_memory(), no_init_weights(), _quiet():
                return _model_class(config)._from_config(_plain(config), attn_implementation=attention,
                                                         experts_implementation=IMPLEMENTATION, dtype=torch.float32)
        except (KeyError, ValueError) as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


class _LargeOnMeta(TorchFunctionMode):
    """torch.empty of a parameter's size gives a meta tensor. No model fills a buffer of that size this way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = None
        if func is torch.empty:
            result = torch.empty(*args, **{**(kwargs or {}), "device": "meta"})
        if result is None or result.numel() < _LARGE_ELEMENTS:
            return func(*args, **(kwargs or {}))
        return result


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Every parameter that a module registers goes to the meta device; buffers stay what they are.

    Large tensors are made there at once: the experts of one layer alone can exceed the machine's memory.
    """
    register = torch.nn.Module.register_parameter

    def register_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        register(self, name, param)

    torch.nn.Module.register_parameter = register_meta
    try:
        with _LargeOnMeta():
            yield
    finally:
        torch.nn.Module.register_parameter = register


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The libraries' advice about training, caches and newer names is no use to someone who builds an engine."""
    loggers = [logging.getLogger(name) for name in ("transformers", "torch.export", "torch.fx", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _mark_module_outputs(model: PreTrainedModel) -> None:
    """Forward hooks that mark the outputs of the layers (elements of module lists that lie in no other list's element)
    and of the other parts of the base model: embedding, final norm."""
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    layers = [f"{name}.{index}" for name in outer for index in range(len(model.get_submodule(name)))]
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    names = {module: name for name, module in model.named_modules()}
    parts = [names[m] for m in decoder.children() if m in names and not isinstance(m, torch.nn.ModuleList)]
    for path in layers + parts:
        model.get_submodule(path).register_forward_hook(_marking_hook(path, path in layers))


def _marking_hook(path: str, is_layer: bool) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Only hidden states [1, T, H] are marked: the output, or the first of a layer's several."""
        first = output[0] if isinstance(output, tuple) and output and is_layer else output
        if not isinstance(first, torch.Tensor) or first.ndim != 3 or not first.is_floating_point():
            return None
        marked = torch.ops.ingot.probe(first, path)
        return (marked, *output[1:]) if isinstance(output, tuple) else marked
    return hook


def _place(error: BaseException) -> str:
    """The message and the innermost line of model code that it comes from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "transformers" in f.filename]
    modeling = [f for f in frames if "/models/" in f.filename] or frames
    message = re.sub(r"\x1b\[[0-9;]*m", "", str(error).strip().split("\n")[0])[:300] or type(error).__name__
    if modeling:
        frame = modeling[-1]
        return f"{message} ({base_name(frame.filename)}:{frame.lineno}: {frame.line})"
    user_code = re.search(r'File "([^"]+/models/[^"]+)", line (\d+)', str(error))
    return f"{message} ({base_name(user_code[1])}:{user_code[2]})" if user_code else message

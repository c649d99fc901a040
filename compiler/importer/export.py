"""Traces the model's own class to ATen operators, without its weights.

Parameters are fake tensors (a shape and a type, no memory), buffers are real: what a model computes from its
configuration (inverse frequencies, position tables) comes out as values.
"""
from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .errors import ImportRefused
from .interfaces import IMPLEMENTATION, tracing
from .parameters import untie

MAX_TOKENS = 1 << 20
"""Upper bound of the symbolic number of tokens; the tracer wants one."""

# Kept whole instead of being decomposed: each is one operator of ours.
_KEPT = ("aten.linear.", "aten.silu.", "aten.gelu.", "aten.layer_norm.", "aten.softmax.int", "aten.rms_norm.",
         "aten.softplus.")


@dataclass(frozen=True)
class Exported:
    """program: decomposed to core ATen. model: the module that was traced; its parameters are fake."""

    program: torch.export.ExportedProgram
    model: PreTrainedModel


class Step(torch.nn.Module):
    """ids, positions [1, T] -> logits [1, T, V]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kwargs = {"position_ids": positions} if self.takes_positions else {}
        with tracing(positions):
            return self.model(input_ids=ids, use_cache=False, **kwargs).logits


def build_model(config: PretrainedConfig, mode: FakeTensorMode) -> PreTrainedModel:
    """The causal-LM class of the configuration, in f32, with fake parameters and real buffers."""
    with _fake_parameters(mode), _quiet():
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=IMPLEMENTATION, experts_implementation=IMPLEMENTATION,
            dtype=torch.float32)
    return model.eval()


def export(config: PretrainedConfig) -> Exported:
    """Raises ImportRefused where the class cannot be built or traced, with the model's own source line."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        model = build_model(config, mode)
    except Exception as error:
        raise ImportRefused(f"{config.model_type}: transformers cannot build this configuration: {_place(error)}"
                            ) from error
    untie(model)
    _mark_module_outputs(model)
    with mode:
        ids = torch.zeros(1, 16, dtype=torch.long)
        positions = torch.zeros(1, 16, dtype=torch.long)
    tokens = torch.export.Dim("T", min=2, max=MAX_TOKENS)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(Step(model), (ids, positions), dynamic_shapes=({1: tokens}, {1: tokens}),
                                          strict=False)
            return Exported(program.run_decompositions(_decompositions()), model)
    except ImportRefused:
        raise
    except Exception as error:
        raise ImportRefused(f"{type(model).__name__} cannot be traced for any number of tokens: {_place(error)}"
                            ) from error


@contextlib.contextmanager
def _fake_parameters(mode: FakeTensorMode) -> Iterator[None]:
    """Every parameter that a module registers becomes a fake one; buffers stay what they are."""
    register = torch.nn.Module.register_parameter

    def register_fake(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not isinstance(param.data, FakeTensor):
            with mode:
                param = torch.nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=False)
        register(self, name, param)

    torch.nn.Module.register_parameter = register_fake
    try:
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


def _decompositions() -> dict[Any, Any]:
    table = torch.export.default_decompositions()
    for operator in [op for op in table if any(str(op).startswith(name) for name in _KEPT)]:
        table.pop(operator)
    return table


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
    text = str(error).strip()
    user_code = re.search(r'File "([^"]+/models/[^"]+)", line (\d+)', text)
    message = re.sub(r"\x1b\[[0-9;]*m", "", text.split("\n")[0])[:300] or type(error).__name__
    if modeling:
        frame = modeling[-1]
        return f"{message} ({_base(frame.filename)}:{frame.lineno}: {frame.line})"
    return f"{message} ({_base(user_code[1])}:{user_code[2]})" if user_code else message


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]

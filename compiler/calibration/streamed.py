"""transformers' own model with one layer in memory at a time: every layer reads all the text before the next is loaded.

The model's own forward pass runs once, on all windows of the text as one batch. What stands in a list of modules is a
layer: it is loaded when it is called, called for one window after the other, and dropped. Of embeddings only the rows
that the text needs are read. So memory is that of a layer, plus the hidden states of the text.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ingot.runtime.errors import WorkFailed

from ..checkpoint.checkpoint import Checkpoint
from ..importer.importer import load_without_memory
from ..weights.evaluate import evaluate
from ..weights.expr import WeightExpr

_ROWS_AT_A_TIME = 4096


class StreamedModel:
    """Raises what the checkpoint and the importer raise."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        model, self.recipes = load_without_memory(checkpoint)
        self.model: Any = model
        self.base: Any = model.base_model
        self._load_buffers()
        self.layers = _layers(self.base)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.head = self._head_name()

    def run(self, windows: Sequence[Sequence[int]], around_layer: Callable[[str, dict[str, torch.Tensor]], Any],
            around_window: Callable[[], Any]) -> torch.Tensor:
        """The last hidden states [windows, T, H].

        around_layer(name, its parameters)   context in which a layer reads all windows
        around_window()                      context of each of its calls
        """
        count = len(windows)
        # A layer's arguments are cut along the windows wherever their first dimension is that of the batch: it must
        # not be taken for another.
        ids = torch.tensor([list(window) for window in windows])
        if count == ids.shape[1] > 1:
            ids = ids[:-1]
            count -= 1
        undo: list[Callable[[], None]] = []
        try:
            for module in self.layers:
                undo.append(self._wrap(module, count, around_layer, around_window))
            self._load_rest(undo)
            with torch.inference_mode():
                output = self.base(ids, use_cache=False)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise WorkFailed(f"{type(self.model).__name__} cannot be calibrated: {error}") from error
        finally:
            for step in reversed(undo):
                step()
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return hidden

    def _wrap(self, module: Any, count: int, around_layer: Any, around_window: Any) -> Callable[[], None]:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._loaded(module) as parameters, around_layer(self.names[id(module)], parameters):
                outputs = []
                for number in range(count):
                    part = _part(number, count)
                    with around_window():
                        outputs.append(plain(*tree_map(part, args), **tree_map(part, kwargs)))
                return _joined(outputs)

        def undo() -> None:
            module.forward = plain

        module.forward = forward
        return undo

    @contextmanager
    def _loaded(self, module: Any) -> Iterator[dict[str, torch.Tensor]]:
        """The module's parameters with their values; name in the model -> tensor."""
        prefix, found = self.names[id(module)], {}
        places = [(owner, name, value) for owner in module.modules() for name, value in owner._parameters.items()
                  if value is not None and value.is_meta]
        try:
            for owner, name, value in places:
                full = f"{self.names[id(owner)]}.{name}"
                owner._parameters[name] = found[full] = _parameter(evaluate(self.recipes[full], self.checkpoint))
                assert found[full].shape == value.shape, (prefix, full)
            yield found
        finally:
            for owner, name, value in places:
                owner._parameters[name] = value

    def _load_rest(self, undo: list[Callable[[], None]]) -> None:
        """What belongs to no layer: embeddings by rows, norms whole."""
        inside = {id(part) for layer in self.layers for part in layer.modules()}
        for module in self.base.modules():
            if id(module) in inside:
                continue
            for name, value in list(module._parameters.items()):
                if value is None or not value.is_meta:
                    continue
                recipe = self.recipes[f"{self.names[id(module)]}.{name}"]
                if isinstance(module, torch.nn.Embedding):
                    handle = module.register_forward_pre_hook(_rows_hook(module, recipe, self.checkpoint))
                    undo.append(handle.remove)
                else:
                    module._parameters[name] = _parameter(evaluate(recipe, self.checkpoint))
                undo.append(partial(module._parameters.__setitem__, name, value))

    def _load_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.recipes:
                    buffer.copy_(torch.tensor(evaluate(self.recipes[name], self.checkpoint)))

    def _head_name(self) -> str:
        """The parameter that makes the logits, "" if the class does not tell."""
        head = self.model.get_output_embeddings()
        return f"{self.names[id(head)]}.weight" if head is not None and id(head) in self.names else ""


def _layers(base: torch.nn.Module) -> list[Any]:
    """The elements of module lists that lie in no other list's element."""
    lists = [name for name, module in base.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    return [module for name in outer for module in base.get_submodule(name)]


def _part(number: int, count: int) -> Callable[[Any], Any]:
    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == count and count > 1:
            return value[number:number + 1]
        return value
    return part


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs)
    if isinstance(first, (tuple, list)):
        return type(first)(_joined([output[i] for output in outputs]) for i in range(len(first)))
    return first


def _parameter(values: np.ndarray) -> torch.nn.Parameter:
    writable = values if values.flags.writeable else values.copy()
    return torch.nn.Parameter(torch.from_numpy(writable), requires_grad=False)


def _rows_hook(module: torch.nn.Embedding, recipe: WeightExpr, checkpoint: Checkpoint) -> Any:
    def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The rows that these ids name, and the ids as numbers of these rows."""
        wanted, places = torch.unique(args[0], return_inverse=True)
        module._parameters["weight"] = _parameter(_rows(recipe, checkpoint, wanted.numpy()))
        return (places, *args[1:])
    return hook


def _rows(recipe: WeightExpr, checkpoint: Checkpoint, wanted: np.ndarray) -> np.ndarray:
    """wanted: ascending."""
    parts = []
    for begin in range(0, recipe.shape[0], _ROWS_AT_A_TIME):
        end = min(begin + _ROWS_AT_A_TIME, recipe.shape[0])
        inside = wanted[np.searchsorted(wanted, begin):np.searchsorted(wanted, end)] - begin
        if len(inside):
            parts.append(evaluate(recipe, checkpoint, (begin, end))[inside])
    return np.concatenate(parts)

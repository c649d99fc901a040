"""The experts of a layer in Hugging Face's model, and what rounding them changes there.

A layer has all its experts in one module, a parameter [E, N, K] for each kind of matrix (or [E, K, N], where products
are x @ w); which of them a token passes the router decides. So a rounded layer is the module itself with other
parameters, whose products round their inputs first.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from .units import Unit

if TYPE_CHECKING:
    import torch

_PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm"}


@dataclass(frozen=True)
class Experts:
    """weights: of the module's parameters that a unit names, name -> (the stored part of the unit, whether the
    parameter is [E, K, N])."""

    module: Any
    weights: Mapping[str, tuple[Unit, bool]]

    def rounded(self, error: Callable[[Unit], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Parameters with their errors, float32; error: bf16 [E, N, K], None for none."""
        found = {}
        for name, (unit, transposed) in self.weights.items():
            weight, added = getattr(self.module, name), error(unit)
            if added is not None:
                added = added.float()
                weight = weight + (added.transpose(1, 2) if transposed else added)
            found[name] = weight
        return found

    def output(self, weights: Mapping[str, torch.Tensor], rounding: Callable[[Any], Any] | None,
               inputs: tuple[Any, ...]) -> torch.Tensor:
        """The module's, with other parameters; the model stays as it is."""
        import torch

        with _RoundedInputs(list(weights.values()), rounding):
            found: torch.Tensor = torch.func.functional_call(self.module, dict(weights), inputs)
        return found

    @contextmanager
    def rounds_inputs(self, rounding: Callable[[Any], Any]) -> Iterator[None]:
        """While it is open the module itself rounds the inputs of its products."""
        forward = self.module.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            with _RoundedInputs([getattr(self.module, name) for name in self.weights], rounding):
                return forward(*args, **kwargs)

        self.module.forward = entered
        try:
            yield
        finally:
            del self.module.forward  # that of its class is seen again


def experts_of(model: torch.nn.Module, unit: Unit) -> Experts | None:
    """None for a unit of other layers, or if the model has its experts otherwise."""
    if unit.role != "experts":
        return None
    weights: dict[str, tuple[Unit, bool]] = {}
    modules = {matrix.name.rpartition(".")[0] for matrix in unit.matrices}
    try:
        (module,) = (model.get_submodule(name) for name in modules)
    except (AttributeError, ValueError):
        return None
    for part in unit.stored:
        name, shape = part.names[0].rpartition(".")[2], part.shapes[0]
        found = tuple(getattr(getattr(module, name, None), "shape", ()))
        transposed = bool(getattr(module, "is_transposed", False))
        if found != ((shape[0], shape[2], shape[1]) if transposed else shape):
            return None
        weights[name] = part, transposed
    return Experts(module, weights)


class _RoundedInputs(TorchFunctionMode):
    """Products with one of the weights, or a part of it, round their other operand."""

    def __init__(self, weights: list[torch.Tensor], rounding: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._places = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in weights]
        self._rounding = rounding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._rounding is not None and getattr(func, "__name__", "") in _PRODUCTS and len(args) > 1:
            at = args[1].data_ptr()
            if any(begin <= at < end for begin, end in self._places):
                args = (self._rounding(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

"""A model whose units are rounded, without an engine: what a choice is measured by before it is built."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from ..quality import Scorer
from ..reference_model import ReferenceModel
from ..targets import Target
from .modules import parts_of
from .rounded import RoundingErrors, rounding_of
from .units import Unit


@contextmanager
def rounded(reference: ReferenceModel, units: Sequence[Unit], schemes: Sequence[str], target: Target,
            errors: RoundingErrors) -> Iterator[Scorer]:
    """A scorer of the model in which each unit has its scheme; weights and inputs are rounded, all else is float32.

    While it is open the reference model itself is changed.
    """
    import torch

    from .experts import experts_of

    with torch.no_grad(), ExitStack() as stack:
        for unit, scheme in zip(units, schemes, strict=True):
            parts, changed = parts_of(reference.model, unit), set()
            error = errors.get(unit, scheme) if parts else None
            rounding = rounding_of(unit, scheme, target, errors)
            for part in parts:
                weight = part.module.weight
                if error is not None and weight.data_ptr() not in changed:  # tied weights are one tensor
                    stack.callback(weight.copy_, weight.clone())
                    rows = error[part.begin:part.begin + part.rows].float()
                    weight.add_(rows.T if part.kind == "transposed" else rows)
                    changed.add(weight.data_ptr())
                if part.kind != "embedding" and rounding is not None:
                    entry = partial(_enter, rounding)
                    stack.callback(part.module.register_forward_pre_hook(entry).remove)
            if (experts := experts_of(reference.model, unit)) is not None:
                for name, weight in experts.rounded(partial(errors.get, scheme=scheme)).items():
                    stack.enter_context(_in_place(experts.module, name, weight))
                if rounding is not None:
                    stack.enter_context(experts.rounds_inputs(rounding))
        yield lambda tokens: [reference.logits(tokens)]


def _enter(rounding: Callable[[Any], Any], module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounding(inputs[0]), *inputs[1:])


@contextmanager
def _in_place(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a parameter."""
    parameter = getattr(module, name)
    given, parameter.data = parameter.data, value
    try:
        yield
    finally:
        parameter.data = given


def windows_of(tokens: Sequence[int], prefix: Sequence[int], window: int, count: int) -> np.ndarray:
    """i64 [windows, window]: the text in windows that begin with the prefix each, evenly spread over it; a shorter rest
    is left out."""
    size = window - len(prefix)
    whole = len(tokens) // size
    chosen = sorted({number * whole // min(count, whole) for number in range(min(count, whole))}) if whole else []
    return np.array([[*prefix, *tokens[size * at:size * (at + 1)]] for at in chosen], np.int64).reshape(-1, window)

"""A model whose units are rounded, without an engine: what a choice is measured by before it is built."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..quality import Scorer
from ..reference_model import ReferenceModel
from ..targets import Target
from .modules import parts_of
from .rounded import RoundingErrors, input_kind, rounded_inputs
from .units import Unit


@contextmanager
def rounded(reference: ReferenceModel, units: Sequence[Unit], schemes: Sequence[str], target: Target,
            errors: RoundingErrors) -> Iterator[Scorer]:
    """A scorer of the model in which each unit has its scheme; weights and inputs are rounded, all else is float32.

    While it is open the reference model itself is changed.
    """
    import torch

    with torch.no_grad(), ExitStack() as stack:
        for unit, scheme in zip(units, schemes, strict=True):
            error, changed = errors.get(unit, scheme), set()
            for part in parts_of(reference.model, unit):
                weight = part.module.weight
                if error is not None and weight.data_ptr() not in changed:  # tied weights are one tensor
                    stack.callback(weight.copy_, weight.clone())
                    rows = error[part.begin:part.begin + part.rows].float()
                    weight.add_(rows.T if part.kind == "transposed" else rows)
                    changed.add(weight.data_ptr())
                if part.kind != "embedding" and input_kind(scheme, target):
                    entry = _rounding(scheme, target, errors.scale(unit, scheme))
                    stack.callback(part.module.register_forward_pre_hook(entry).remove)
        yield lambda tokens: [reference.logits(tokens)]


def _rounding(scheme: str, target: Target, scale: np.ndarray | None) -> Callable[..., Any]:
    def enter(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded_inputs(inputs[0], scheme, target, scale), *inputs[1:])
    return enter


def windows_of(tokens: Sequence[int], prefix: Sequence[int], window: int, count: int) -> np.ndarray:
    """i64 [windows, window]: the text in windows that begin with the prefix each, evenly spread over it; a shorter rest
    is left out."""
    size = window - len(prefix)
    whole = len(tokens) // size
    chosen = sorted({number * whole // min(count, whole) for number in range(min(count, whole))}) if whole else []
    return np.array([[*prefix, *tokens[size * at:size * (at + 1)]] for at in chosen], np.int64).reshape(-1, window)

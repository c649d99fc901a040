"""Second moments of the inputs of linear layers: how the directions of an input vary together."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reference_model import ReferenceModel

if TYPE_CHECKING:
    import torch

WINDOW = 512
"""Tokens of a sequence that the model reads at a time."""

MAX_MOMENT_BYTES = 64 << 20
"""Layers with wider inputs (4,096 channels and more) are left out: there are as many moments as layers."""


def calibration_text() -> str:
    """English prose, dialogue, tables and code, a little German, French and Spanish; written for Ingot (Apache-2.0)."""
    return (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")


def gather(model: ReferenceModel, tokens: Sequence[int], weights: Collection[str], prefix: Sequence[int] = (),
           progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, np.ndarray]:
    """Parameter name of a linear layer's matrix -> mean of x^T x over the tokens, f32 [K, K].

    tokens   read in windows that each begin with `prefix` (BOS, for models that expect it); its own inputs count too
    weights  the parameters that are asked for; those of other modules than Linear and Conv1D, and those of layers
             with very wide inputs, are missing in the result

    Layers that read the same tensor share one array. One thread, so that the sums have one order: the same model and
    tokens give the same bytes.
    """
    import torch

    sums: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}  # parameter -> the one that read the same tensor first
    last: list[Any] = [None, ""]  # the tensor that was read last, and by which

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if x is last[0] and shared.get(name, last[1]) == last[1]:
                shared[name] = last[1]
                return
            last[:] = x, name
            rows = x[:, len(prefix):].reshape(-1, x.shape[-1])
            if name in sums:
                sums[name].addmm_(rows.T, rows)
            else:
                sums[name] = rows.T @ rows
        return hook

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    size, count = WINDOW - len(prefix), 0
    try:
        with ExitStack() as stack, torch.inference_mode():
            for name, module in _linears(model.model, weights):
                stack.enter_context(module.register_forward_pre_hook(keep(name)))
            for begin in range(0, len(tokens), size):
                progress(begin, len(tokens))
                ids = [*prefix, *tokens[begin:begin + size]]
                model.model.base_model(torch.tensor([ids]), use_cache=False)
                count += len(ids) - len(prefix)
                last[:] = None, ""
    finally:
        torch.set_num_threads(threads)
    moments = {name: (total / count).numpy() for name, total in sums.items()}
    return moments | {name: moments[first] for name, first in shared.items()}


def _linears(model: torch.nn.Module, weights: Collection[str]) -> list[tuple[str, torch.nn.Module]]:
    import torch
    from transformers.pytorch_utils import Conv1D
    found = []
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if name in weights and isinstance(module, (torch.nn.Linear, Conv1D)):
            inputs = module.weight.shape[1 if isinstance(module, torch.nn.Linear) else 0]
            if 4 * inputs * inputs <= MAX_MOMENT_BYTES:
                found.append((name, module))
    return found

"""How much worse the model's answers get when one unit's weights and inputs are rounded: from one pass over a text.

Let y be what a unit's layers give, d what rounding them by some scheme adds to it, and p the model's distribution of
the next token. To second order the KL divergence of the rounded model from the model is

    1/2 E[(sum over tokens of g . d)^2],   g = gradient of log p(t) with respect to y,

t drawn from p itself for every token: the Fisher information in the direction of the error (Amari 1998; as a proxy of
quantization error in HAWQ-V2, Dong et al. 2020, and in SqueezeLLM, Kim et al. 2024, where its diagonal stands for it).
Here the error is that of the real scheme with the real inputs, and no diagonal over weights is taken: one forward and
one backward pass give g of all units, and each scheme costs a multiplication with its weights; of experts, whose
product with the weights of the router is what counts, one more pass through the layer. Errors of different units are
taken as independent, so that their divergences add up. What is not seen: an error that makes a later layer's router
choose other experts.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.runtime.errors import WorkFailed

from ..reference_model import ReferenceModel
from ..targets import Target
from .modules import Part, parts_of
from .rounded import RoundingErrors, input_kind, rounded_inputs, rounding_of
from .units import Unit

if TYPE_CHECKING:
    from .experts import Experts

_LOGITS_BYTES = 256 << 20
"""Of the windows that are read at a time."""


def sensitivities(reference: ReferenceModel, units: Sequence[Unit], schemes: Sequence[Sequence[str]], target: Target,
                  errors: RoundingErrors, windows: np.ndarray, skipped: int,
                  progress: Callable[[int, int], None] = lambda done, total: None) -> list[dict[str, float]]:
    """For each unit: scheme, of those given for it -> KL divergence that it causes alone, nats a predicted token.

    windows  i64 [windows, tokens]; skipped: tokens at their beginning whose own predictions do not count (BOS)
    A unit whose module is not known is missing its schemes. The same arguments give the same figures on one machine.
    """
    import torch

    from .experts import Experts, experts_of

    model = reference.model
    found: list[Sequence[Part | Experts]] = []
    for unit in units:
        experts = experts_of(model, unit)
        found.append(parts_of(model, unit) if experts is None else [experts])
    scores: list[dict[str, list[torch.Tensor]]] = [{scheme: [] for scheme in names} if parts else {}
                                                   for names, parts in zip(schemes, found, strict=True)]
    sums: dict[tuple[int, str], torch.Tensor] = {}  # g . d of each token
    generator = torch.Generator().manual_seed(0)

    def add(number: int, scheme: str, total: torch.Tensor) -> None:
        sums[number, scheme] = sums.get((number, scheme), 0) + total

    def watch(number: int, part: Part) -> Callable[..., None]:
        def meet(x: torch.Tensor, gradient: torch.Tensor) -> None:
            rounded: dict[str, tuple[torch.Tensor, Any]] = {"": (x, 0)}
            for scheme in schemes[number]:
                kind = "" if part.kind == "embedding" else input_kind(scheme, target)
                scale = errors.scale(units[number], scheme) if kind else None
                if scale is not None:
                    kind = scheme
                if kind not in rounded:
                    seen = rounded_inputs(x, scheme, target, scale)
                    rounded[kind] = seen, (gradient * part.by_inputs(seen - x)).sum(-1)
                seen, total = rounded[kind]
                if (error := errors.get(units[number], scheme)) is not None:
                    total = total + (gradient * part.by_weights(seen, error)).sum(-1)
                add(number, scheme, total)

        def leave(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            x = inputs[0].detach()

            def hook(gradient: torch.Tensor) -> None:
                with torch.no_grad():
                    meet(x, gradient)
            output.register_hook(hook)
        return leave

    def watch_experts(number: int, experts: Experts) -> Callable[..., None]:
        def leave(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            if not output.requires_grad:  # called by the hook below
                return
            given, plain = tuple(value.detach() for value in inputs), output.detach()

            def hook(gradient: torch.Tensor) -> None:
                with torch.no_grad():
                    for scheme in schemes[number]:
                        weights = experts.rounded(partial(errors.get, scheme=scheme))
                        change = experts.output(weights, rounding_of(units[number], scheme, target, errors), given)
                        add(number, scheme, (gradient * (change - plain)).sum(-1).reshape(-1, length))
            output.register_hook(hook)
        return leave

    count, length = windows.shape
    width = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() is not None else 1 << 16
    at_once = max(1, _LOGITS_BYTES // (4 * length * width))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with ExitStack() as stack:
        embeddings = model.get_input_embeddings()
        stack.callback(embeddings.register_forward_hook(lambda m, i, out: out.requires_grad_()).remove)
        for number, parts in enumerate(found):
            for part in parts:
                met = watch_experts(number, part) if isinstance(part, Experts) else watch(number, part)
                stack.callback(part.module.register_forward_hook(met).remove)
        for begin in range(0, count, at_once):
            progress(begin * length, count * length)
            ids = torch.from_numpy(windows[begin:begin + at_once])
            logits = model(ids, use_cache=False).logits
            with torch.no_grad():
                chances = logits.detach().float().softmax(-1)
                drawn = torch.multinomial(chances.reshape(-1, chances.shape[-1]), 1, generator=generator)
                gradient = chances.neg_().reshape(-1, chances.shape[-1]).scatter_add_(
                    1, drawn, torch.ones_like(drawn, dtype=chances.dtype)).reshape(logits.shape)
                gradient[:, :max(skipped - 1, 0)] = 0
            logits.backward(gradient.to(logits.dtype))
            for (number, scheme), total in sums.items():
                if isinstance(total, torch.Tensor):
                    scores[number][scheme].append(total)
            sums.clear()
    predicted = length - max(skipped - 1, 0)
    return _divergences(units, scores, predicted)


def _divergences(units: Sequence[Unit], scores: Sequence[Mapping[str, Sequence[Any]]], predicted: int,
                 ) -> list[dict[str, float]]:
    """scores: g . d of all tokens, [windows, tokens] each; none for a scheme that changes nothing.

    The square of a window's sum is what is meant, but there are few windows. The sum of its tokens' squares leaves out
    what the errors of different tokens do together, and comes from many numbers: it tells units and schemes apart, and
    the former, over all of them, the scale.
    """
    import torch

    together, apart = 0.0, 0.0
    found: list[dict[str, float]] = []
    for unit, by_scheme in zip(units, scores, strict=True):
        found.append({})
        for scheme, parts in by_scheme.items():
            tokens = torch.cat(list(parts)).double() if parts else torch.zeros(1, 1)
            found[-1][scheme] = value = float((tokens ** 2).sum(1).mean()) / 2 / predicted
            together += float((tokens.sum(1) ** 2).mean()) / 2 / predicted
            apart += value
            if not np.isfinite(value):
                raise WorkFailed(f"the model's gradient at {unit.names[0]} is not finite: its sensitivity cannot be "
                                 "told")
    factor = together / apart if apart else 1.0
    return [{scheme: value * factor for scheme, value in known.items()} for known in found]

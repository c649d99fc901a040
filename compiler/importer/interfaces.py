"""Ingot's entries in transformers' interfaces for attention, masks and experts, and the patches around a trace.

They are what makes one importer serve every architecture: models call them instead of their own implementation.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import transformers.masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .errors import ImportRefused
from .torch_ops import NAMESPACE

IMPLEMENTATION = NAMESPACE
"""The name under which a model's configuration selects these functions."""

FALLBACK_IMPLEMENTATIONS = ("sdpa", "eager")
"""For classes that know only transformers' own names: torch's attention operator, or one that is written out."""

_positions: ContextVar[torch.Tensor] = ContextVar("positions")

_WITHOUT_EFFECT = frozenset({
    "dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "output_attentions", "use_cache",
    "output_hidden_states", "return_dict", "layer_idx", "training", "deterministic", "past_key_values",
    "output_router_logits", "position_embeddings", "logits_to_keep", "token_type_ids", "input_ids",
    "num_items_in_batch",
})
"""Arguments that transformers' eager attention does not read either: a window, for one, stands in the mask."""


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None = None, scaling: float | None = None,
              softcap: float | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
              ) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise ImportRefused(f"{type(module).__name__}: attention with the argument{'s'[:len(unknown) > 1]} "
                            f"{', '.join(unknown)} is not supported")
    is_causal = kwargs.get("is_causal")
    if attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ImportRefused(f"{type(module).__name__}: attention to later tokens (bidirectional) is not supported; "
                            "an engine generates token by token")
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    out = torch.ops.ingot.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask,
                                    s_aux, float(scale), float(softcap or 0.0))
    return out, None


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function: Callable[..., torch.Tensor] = transformers.masking_utils.causal_mask_function,
         **_: Any) -> torch.Tensor:
    """A marker [1, 1, T, T] that carries what the mask function says about the probed pairs of positions."""
    q, k = torch.ops.ingot.probe_indices(_positions.get())
    zero = torch.zeros_like(q)
    visible = mask_function(zero, zero, q, k).expand(q.shape)
    return torch.ops.ingot.mask(visible.to(torch.bool), q_length)


def experts(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor) -> torch.Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]: the sum of the chosen experts."""
    up_name = "gate_up_proj" if self.has_gate else "up_proj"

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return torch.ops.ingot.expert_linear(x, top_k_index, getattr(self, name), bias, self.is_transposed)

    hidden = project(hidden_states, up_name)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    out = project(hidden, "down_proj")
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    return (out * top_k_weights[..., None].to(out.dtype)).sum(dim=1)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts)


@contextlib.contextmanager
def tracing(positions: torch.Tensor) -> Iterator[None]:
    """What must hold while a model's forward runs under the tracer."""
    token = _positions.set(positions)
    # A jump in the positions means another sequence; the attention operator knows sequences by itself.
    find_packed = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    own_masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in FALLBACK_IMPLEMENTATIONS}
    for name in own_masks:
        ALL_MASK_ATTENTION_FUNCTIONS[name] = mask
    try:
        yield
    finally:
        for name, function in own_masks.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = function
        transformers.masking_utils.find_packed_sequence_indices = find_packed
        _positions.reset(token)

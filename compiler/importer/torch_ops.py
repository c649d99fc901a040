"""Opaque torch operators that stand in the traced program for what Ingot imports as a whole.

Only their shapes are computed while the model is traced. They mark calls (attention, experts) and values (masks,
module outputs) so that the conversion finds them again.
"""
from __future__ import annotations

import torch

NAMESPACE = "ingot"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_SCHEMAS = {
    # q [1, T, Hq, D], k [1, T, Hkv, D], v [1, T, Hkv, Dv] -> [1, T, Hq, Dv]; the mask as the model passes it.
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float softcap) -> Tensor",
    # visible: what the mask function says about the pairs of probe_indices -> [1, 1, T, T].
    "mask": "(Tensor visible, SymInt tokens) -> Tensor",
    # The q and k positions at which mask functions are probed: two of [NUM_PROBES], i64. Their values are unknown while
    # the model is traced.
    "probe_indices": "(Tensor positions) -> (Tensor, Tensor)",
    # x [T, K] or [T, k, K], ids [T, k], w [E, N, K] (transposed: [E, K, N]), bias [E, N] -> [T, k, N]
    "expert_linear": "(Tensor x, Tensor ids, Tensor w, Tensor? bias, bool transposed) -> Tensor",
    # x -> x; remembers it as the output of the module at this path.
    "probe": "(Tensor x, str label) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)

NUM_PROBES = 4096


@torch.library.register_fake(f"{NAMESPACE}::attention", lib=_LIBRARY)
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
               sinks: torch.Tensor | None, scale: float, softcap: float) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.register_fake(f"{NAMESPACE}::mask", lib=_LIBRARY)
def _mask(visible: torch.Tensor, tokens: int) -> torch.Tensor:
    return visible.new_empty(1, 1, tokens, tokens, dtype=torch.bool)


@torch.library.register_fake(f"{NAMESPACE}::probe_indices", lib=_LIBRARY)
def _probe_indices(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (positions.new_empty(NUM_PROBES, dtype=torch.int64), positions.new_empty(NUM_PROBES, dtype=torch.int64))


@torch.library.register_fake(f"{NAMESPACE}::expert_linear", lib=_LIBRARY)
def _expert_linear(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
                   transposed: bool) -> torch.Tensor:
    return x.new_empty(*ids.shape, w.shape[2 if transposed else 1])


@torch.library.register_fake(f"{NAMESPACE}::probe", lib=_LIBRARY)
def _probe(x: torch.Tensor, label: str) -> torch.Tensor:
    return torch.empty_like(x)

"""The kernel that looks up embeddings in a packed matrix."""
from __future__ import annotations

from ..kernel import CpuKernel
from ..linear.pack import panel_bytes
from ..scheme import Scheme


def emit(k: int, scheme: Scheme) -> CpuKernel:
    """args: ids i32 [T] in [0, V); w [V, k] from linear.pack.pack(); y f32 [T, k]."""
    body = (f"ingot_embedding(ingot_read_{scheme.name}, args[1], {panel_bytes(k, scheme)}, args[0], args[2],\n"
            f"                step->num_tokens, {k}, worker, num_workers);")
    return CpuKernel(f"embedding_{scheme.name}_k{k}", "embedding/embedding.h", body)

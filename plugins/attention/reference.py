"""The meaning of attention in numpy: over a paged cache, and over one sequence."""
from __future__ import annotations

from itertools import pairwise

import numpy as np


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None = None, *, scale: float,
              window: int = 0, chunk: int = 0, softcap: float = 0.0) -> np.ndarray:
    """The last T tokens of one sequence attend to the whole of it, in float64.

    q [T, Hq, Dk], k [S, Hkv, Dk], v [S, Hkv, Dv] with S >= T, sinks [Hq] -> [T, Hq, Dv].
    Token t has position S - T + t and sees the positions up to its own: of these with `window` the last `window`, with
    `chunk` those of its own chunk of so many positions. Head h reads key/value head h // (Hq / Hkv). softcap bounds the
    scores; sinks are one more logit a head in the softmax's denominator.
    """
    tokens, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    grouped = q.astype(np.float64).reshape(tokens, kv_heads, heads // kv_heads, -1)
    scores = np.einsum("thgd,shd->hgts", grouped, k.astype(np.float64)) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position, key = np.arange(length - tokens, length)[:, None], np.arange(length)[None]
    visible: np.ndarray = np.asarray(key <= position)
    if window:
        visible &= key > position - window
    if chunk:
        visible &= key >= position // chunk * chunk
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        logits = np.broadcast_to(sinks.astype(np.float64).reshape(kv_heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, logits], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights[..., :length] / weights.sum(axis=-1, keepdims=True)
    seen = np.where(np.asarray(visible.any(axis=0))[:, None, None], v, 0)  # what lies elsewhere may be NaN
    return np.einsum("hgts,shd->thgd", weights, seen.astype(np.float64)).reshape(tokens, heads, v.shape[2])


def paged_attention(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, query_start: np.ndarray,
                    context_len: np.ndarray, block_table: np.ndarray, sinks: np.ndarray | None = None, *, scale: float,
                    window: int = 0, chunk: int = 0, softcap: float = 0.0) -> np.ndarray:
    """q [T, Hq, Dk], caches [blocks, Hkv, block_size, D], query_start [B + 1], context_len [B],
    block_table [B, max_blocks] -> [T, Hq, Dv]. The tokens' own keys and values are in the cache.
    """
    out = np.empty((*q.shape[:2], v_cache.shape[3]))
    for seq, (begin, end) in enumerate(pairwise(query_start.tolist())):
        if begin == end:
            continue
        length = context_len[seq]
        blocks = block_table[seq, :-(-length // k_cache.shape[2])]
        k, v = (cache[blocks].transpose(0, 2, 1, 3).reshape(-1, cache.shape[1], cache.shape[3])[:length]
                for cache in (k_cache, v_cache))
        out[begin:end] = attention(q[begin:end], k, v, sinks, scale=scale, window=window, chunk=chunk, softcap=softcap)
    return out

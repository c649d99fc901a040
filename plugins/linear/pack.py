"""Packed matrices: from float weights to the bytes that the kernels read, and back.

The layout is told in panel.h. It is the same for every instruction set, and panels follow each other: the packed form
of rows [16 i, 16 j) of a matrix is a contiguous part of the packed form of the whole, so that a matrix can be packed
piece by piece.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..scheme import BLOCK, PANEL, Scheme
from . import native
from .compensate import Feedback, round_compensated
from .grids import MinimumGrid
from .quantize_weights import quantize_w4, quantize_w8, quantize_w8_groups, settle_exact

_CHUNK_ELEMENTS = 1 << 20
"""Weights that are worked on at a time: few enough for the cache, and for memory whatever the matrix."""


def packed_size(n: int, k: int, scheme: Scheme) -> int:
    """Bytes of the packed form of w[n, k]."""
    return -(-n // PANEL) * panel_bytes(k, scheme)


def panel_bytes(k: int, scheme: Scheme) -> int:
    """Bytes of 16 output channels."""
    blocks = -(-k // BLOCK)
    if scheme.weight_group:
        return 512 * blocks + -(-32 * blocks // 64) * 64
    return {32: 64 * k, 16: 64 * -(-k // 2), 8: 512 * blocks + 64, 4: 320 * blocks}[scheme.weight_bits]


def pack(w: np.ndarray, scheme: Scheme, inputs: Feedback | None = None) -> np.ndarray:
    """w [N, K], float32, or bfloat16 as uint16 bits -> uint8 [packed_size(N, K)].

    inputs: those that the layer gets; four bits are then rounded for the least error of its output.
    Beyond its result it takes memory for about a million weights. NaN or infinite weights are the caller's to refuse;
    native.NotFinite may be raised for them.
    """
    n, k = w.shape
    out = np.empty((-(-n // PANEL), panel_bytes(k, scheme)), np.uint8)
    for begin, end in _chunks(n, k):
        part, panels = w[begin:end], slice(begin // PANEL, -(-end // PANEL))
        done = None
        if scheme.weight_bits == 4 and inputs is None:
            done = native.pack_w4(part, settle_exact)
        elif scheme.weight_group:
            done = native.pack_w8_groups(part, out[panels].size)
        if done is None:
            rows = np.zeros((-(-(end - begin) // PANEL) * PANEL, k), w.dtype)
            rows[:end - begin] = part
            done = _pack_rows(rows, scheme, inputs)
        out[panels] = done.reshape(out[panels].shape)
    return out.reshape(-1)


def unpack(blob: np.ndarray, n: int, k: int, scheme: Scheme) -> np.ndarray:
    """The float32 weights [n, k] that a packed matrix stands for."""
    panels = blob.reshape(-1, panel_bytes(k, scheme))
    out = np.empty((n, k), np.float32)
    for begin, end in _chunks(n, k):
        rows = _unpack_rows(panels[begin // PANEL:-(-end // PANEL)], k, scheme)
        out[begin:end] = rows[:end - begin, :k]
    return out


def dequantize(w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """What w[N, K] becomes by its scheme, in float32: the weights that the kernels multiply with."""
    return unpack(pack(w, scheme), w.shape[0], w.shape[1], scheme)


def bf16_bits(w: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, to nearest even."""
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(w), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def to_float32(w: np.ndarray) -> np.ndarray:
    """float32, or bfloat16 as uint16 bits -> float32."""
    return (w.astype(np.uint32) << 16).view(np.float32) if w.dtype == np.uint16 else w.astype(np.float32, copy=False)


def _chunks(n: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS // max(1, k) // PANEL) * PANEL
    for begin in range(0, n, step):
        yield begin, min(n, begin + step)


def _pack_rows(w: np.ndarray, scheme: Scheme, inputs: Feedback | None) -> np.ndarray:
    """Rows of whole panels -> uint8 [panels, panel_bytes]."""
    panels, k = w.shape[0] // PANEL, w.shape[1]
    if scheme.weight_bits == 32:
        return _bytes(to_float32(w).reshape(panels, PANEL, k).transpose(0, 2, 1))
    if scheme.weight_bits == 16:
        bits = _pad_k(w if w.dtype == np.uint16 else bf16_bits(w), 2)
        return _bytes(bits.reshape(panels, PANEL, -1, 2).transpose(0, 2, 1, 3))
    if scheme.weight_group:
        return _pack_w8_groups(_pad_k(to_float32(w), BLOCK))
    if scheme.weight_bits == 8:
        q, scale = quantize_w8(to_float32(w))
        return np.concatenate([_bytes(_pad_k(q, BLOCK).reshape(panels, PANEL, -1, 4).transpose(0, 2, 1, 3)),
                               _bytes(scale.reshape(panels, PANEL))], axis=1)
    padded = _pad_k(to_float32(w), BLOCK)
    nibbles, step, minimum = quantize_w4(padded)
    if inputs is not None:
        nibbles, (step, minimum) = round_compensated(padded, MinimumGrid(), inputs, (nibbles, (step, minimum)))
    halves = nibbles.reshape(panels, PANEL, -1, 2, 4, 4)
    pairs = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(0, 2, 3, 1, 4)
    blocks = [pairs.reshape(panels, pairs.shape[1], -1)]
    for values in (step, minimum):
        blocks.append(np.ascontiguousarray(values.reshape(panels, PANEL, -1).transpose(0, 2, 1)).view(np.uint8))
    return np.concatenate(blocks, axis=2).reshape(panels, -1)


def _unpack_rows(data: np.ndarray, k: int, scheme: Scheme) -> np.ndarray:
    """uint8 [panels, panel_bytes] -> float32 rows, K still padded."""
    panels = data.shape[0]
    if scheme.weight_bits == 32:
        return data.view(np.float32).reshape(panels, k, PANEL).transpose(0, 2, 1).reshape(panels * PANEL, k)
    if scheme.weight_bits == 16:
        bits = data.view(np.uint16).reshape(panels, -1, PANEL, 2).transpose(0, 2, 1, 3)
        return to_float32(bits.reshape(panels * PANEL, -1))
    if scheme.weight_group:
        return _unpack_w8_groups(data, -(-k // BLOCK))
    if scheme.weight_bits == 8:
        q = data[:, :-4 * PANEL].view(np.int8).reshape(panels, -1, PANEL, 4).transpose(0, 2, 1, 3)
        scale = np.ascontiguousarray(data[:, -4 * PANEL:]).view(np.float32).reshape(-1, 1)
        return q.reshape(panels * PANEL, -1) * scale
    blocks = data.reshape(panels, -1, 320)
    pairs = blocks[:, :, :256].reshape(panels, -1, 4, PANEL, 4)
    # to: panel, channel, block, half, 4, 4
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).transpose(0, 4, 1, 2, 3, 5)
    step, minimum = (np.ascontiguousarray(blocks[:, :, a:a + 32]).view(np.float16).astype(np.float32)
                     .transpose(0, 2, 1)[..., None] for a in (256, 288))
    return (nibbles.reshape(panels, PANEL, -1, BLOCK) * step + minimum).reshape(panels * PANEL, -1)


def _pack_w8_groups(w: np.ndarray) -> np.ndarray:
    """Whole panels and blocks -> uint8 [panels, bytes]: the scales of two blocks, then these."""
    q, scale = quantize_w8_groups(w)
    panels, blocks = w.shape[0] // PANEL, w.shape[1] // BLOCK
    weights = _bytes(q.reshape(panels, PANEL, -1, 4).transpose(0, 2, 1, 3)).reshape(panels, blocks, -1)
    scales = np.zeros((panels, blocks + blocks % 2, PANEL), np.float16)
    scales[:, :blocks] = scale.reshape(panels, PANEL, blocks).transpose(0, 2, 1)
    pairs = scales.reshape(panels, -1, 2 * PANEL).view(np.uint8)
    return np.concatenate([part for pair in range(pairs.shape[1]) for part in (
        pairs[:, pair], weights[:, 2 * pair:2 * pair + 2].reshape(panels, -1))], axis=1)


def _unpack_w8_groups(data: np.ndarray, blocks: int) -> np.ndarray:
    """uint8 [panels, bytes] -> float32 rows of so many blocks."""
    panels = len(data)
    padded = np.zeros((panels, -(-blocks // 2), 64 + 1024), np.uint8)
    padded.reshape(panels, -1)[:, :data.shape[1]] = data
    scales = np.ascontiguousarray(padded[:, :, :64]).view(np.float16).astype(np.float32).reshape(panels, -1, PANEL)
    q = np.ascontiguousarray(padded[:, :, 64:]).view(np.int8).reshape(panels, -1, PANEL, 4).transpose(0, 2, 1, 3)
    values = q.reshape(panels, PANEL, -1, BLOCK) * scales.transpose(0, 2, 1)[..., None]
    return values[:, :, :blocks].reshape(panels * PANEL, -1)


def _pad_k(w: np.ndarray, multiple: int) -> np.ndarray:
    missing = -w.shape[1] % multiple
    return np.pad(w, ((0, 0), (0, missing))) if missing else w


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape[0], -1).view(np.uint8)

"""Elements of matrices as they lie in registers and memory: bits -> numbers that products are made of.

Names are those of PTX: f16, bf16, tf32, e4m3, e5m2, e2m1, ue4m3, ue8m0, s8, u8. A 32-bit register holds 32 / bits
elements, the first in its lowest bits. Source: PTX ISA, "Data types" and "Matrix multiply-accumulate".
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ingot.plugins.gpu.floats import from_bf16, from_e2m1, from_e4m3

BITS = {"f32": 32, "s32": 32, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "e2m1": 4}
_CONTAINERS = {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}


class UnknownElement(ValueError):
    """An element type that no function here decodes."""


def unpack(words: np.ndarray, kind: str) -> np.ndarray:
    """words: u32 [..., n] -> bits [..., n * 32 / bits], the lowest of each word first."""
    bits = _bits(kind)
    words = np.ascontiguousarray(words, np.uint32)
    if bits == 4:
        return split_nibbles(words.view(np.uint8))
    return words.view(_CONTAINERS[bits])


def split_nibbles(data: np.ndarray) -> np.ndarray:
    """u8 [..., n] -> u8 [..., 2n] of 0..15, the lower half of each byte first."""
    found = np.empty((*data.shape, 2), np.uint8)
    found[..., 0], found[..., 1] = data & 15, data >> 4
    return found.reshape(*data.shape[:-1], -1)


def from_bytes(data: np.ndarray, kind: str) -> np.ndarray:
    """data: u8 [..., n], contiguous along n -> bits [..., n * 8 / bits]."""
    bits = _bits(kind)
    data = np.ascontiguousarray(data, np.uint8)
    return split_nibbles(data) if bits == 4 else data.view(_CONTAINERS[bits])


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """Values, float32. Products of eight-bit integers and their sums over 512 channels are exact in it, too."""
    if kind not in _DECODERS:
        raise UnknownElement(f"matrices of {kind} are not known; known are {', '.join(_DECODERS)}")
    return _DECODERS[kind](bits)


def decode_scale(bits: np.ndarray, kind: str) -> np.ndarray:
    """u8 -> float32: "ue4m3", an e4m3 without a sign; "ue8m0", a power of two, 255 not a number."""
    if kind == "ue4m3":
        return from_e4m3(bits & 0x7F)
    if kind == "ue8m0":
        return np.where(bits == 255, np.nan, np.exp2(bits.astype(np.float64) - 127)).astype(np.float32)
    raise UnknownElement(f"scales of {kind} are not known; known are ue4m3 and ue8m0")


def _bits(kind: str) -> int:
    if kind not in BITS:
        raise UnknownElement(f"elements of {kind} are not known; known are {', '.join(BITS)}")
    return BITS[kind]


def _from_tf32(bits: np.ndarray) -> np.ndarray:
    """The lowest 13 bits of a float32 are not looked at."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _from_e5m2(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bf16": from_bf16,
    "tf32": _from_tf32,
    "e4m3": from_e4m3,
    "e5m2": _from_e5m2,
    "e2m1": from_e2m1,
    "s8": lambda bits: bits.view(np.int8).astype(np.float32),
    "u8": lambda bits: bits.astype(np.float32),
}

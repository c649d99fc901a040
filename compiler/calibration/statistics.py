"""What is known of the inputs of a linear layer: how large each channel gets, and how the channels vary together.

The mean of x^T x over the tokens is kept in diagonal blocks of at most MAX_BLOCK channels: what lies between two blocks
is left out, so that very wide layers cost memory in proportion to their width. On disk each block is its diagonal in
float32 and its correlations, the upper triangle, in 16 bits: an error of 1.5e-5 of what two channels could have in
common, far below what the damping of the users adds. The samples are bf16 there.
"""
from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from ingot.plugins.gpu.floats import from_bf16, to_bf16

MAX_BLOCK = 4096
_STEPS = np.float32(32767)
_HEADER = struct.Struct("<QQQ")

SAMPLES = 256


@dataclass(frozen=True)
class InputStatistics:
    """amax    float32 [K]: largest absolute value of each channel
    blocks  float32 [k, k] each, symmetric: means of x^T x over consecutive channels, K in all
    count   tokens that were seen
    rows    float32 [R, K]: some of the inputs as they are, R up to SAMPLES
    """

    amax: np.ndarray
    blocks: tuple[np.ndarray, ...]
    count: int
    rows: np.ndarray

    @property
    def width(self) -> int:
        return len(self.amax)

    @property
    def mean_square(self) -> np.ndarray:
        """float32 [K]."""
        return np.concatenate([np.diagonal(block) for block in self.blocks])

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.amax).all() and all(np.isfinite(block).all() for block in self.blocks))

    def scaled(self, factor: np.ndarray) -> InputStatistics:
        """Of the inputs multiplied by factor [K]."""
        spans = block_spans(self.width)
        blocks = tuple(block * np.outer(factor[a:b], factor[a:b]).astype(np.float32)
                       for block, (a, b) in zip(self.blocks, spans, strict=True))
        return InputStatistics((self.amax * np.abs(factor)).astype(np.float32), blocks, self.count,
                               (self.rows * factor).astype(np.float32))

    def between(self, begin: int, end: int, group: int) -> tuple[np.ndarray, ...]:
        """Second moments of the channels [begin, end), for weights that are rounded in groups: blocks [k, k], whose
        sizes but for the last one's are multiples of the group. Where spans of channels end within a group, and with a
        group of 0, the mean squares alone, [end - begin]."""
        parts = [(block, start, max(start, begin), min(stop, end)) for block, (start, stop) in
                 zip(self.blocks, block_spans(self.width), strict=True) if start < end and stop > begin]
        if not group or any((b - a) % group for _, _, a, b in parts[:-1]):
            return (self.mean_square[begin:end],)
        return tuple(block[a - start:b - start, a - start:b - start] for block, start, a, b in parts)

    def to_bytes(self) -> bytes:
        head = _HEADER.pack(self.width, self.count, len(self.rows))
        parts = [head, self.amax.astype(np.float32).tobytes(), to_bf16(self.rows).tobytes()]
        for block in self.blocks:
            diagonal = np.maximum(np.diagonal(block), 0).astype(np.float32)
            root = np.sqrt(diagonal)
            inverse = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
            parts.append(diagonal.tobytes())
            for row in range(len(block) - 1):  # a row at a time: the block is large
                values = block[row, row + 1:] * inverse[row + 1:] * (inverse[row] * _STEPS)
                parts.append(np.rint(values).clip(-_STEPS, _STEPS).astype(np.int16).tobytes())
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> InputStatistics:
        """Raises ValueError for data of another length."""
        width, count, num_rows = _HEADER.unpack_from(data)
        spans = block_spans(width)
        of_blocks = sum(4 * (b - a) + (b - a) * (b - a - 1) for a, b in spans)
        expected = _HEADER.size + 4 * width + 2 * width * num_rows + of_blocks
        if len(data) != expected:
            raise ValueError(f"statistics of {width} channels take {expected} bytes, got {len(data)}")
        amax, at = np.frombuffer(data, np.float32, width, _HEADER.size), _HEADER.size + 4 * width
        rows = from_bf16(np.frombuffer(data, np.uint16, width * num_rows, at)).reshape(num_rows, width)
        at += 2 * width * num_rows
        blocks = []
        for begin, end in spans:
            size = end - begin
            diagonal = np.frombuffer(data, np.float32, size, at)
            at += 4 * size
            root, block = np.sqrt(diagonal), np.empty((size, size), np.float32)
            for row in range(size):
                rest = size - row - 1
                values = np.frombuffer(data, np.int16, rest, at) * (root[row] / _STEPS) * root[row + 1:]
                block[row, row + 1:] = block[row + 1:, row] = values
                at += 2 * rest
            np.fill_diagonal(block, diagonal)
            blocks.append(block)
        return InputStatistics(amax, tuple(blocks), count, rows)


def block_spans(width: int) -> list[tuple[int, int]]:
    """Equal spans, as far as multiples of 128 allow, of at most MAX_BLOCK channels."""
    count = -(-width // MAX_BLOCK)
    if count <= 1:
        return [(0, width)] if width else []
    step = 128 * math.ceil(width / count / 128)
    return [(begin, min(begin + step, width)) for begin in range(0, width, step)]

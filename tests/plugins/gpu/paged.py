"""A paged cache for tests of GPU kernels: sequences in scattered blocks of poisoned memory."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.plugins.gpu.floats import from_bf16, from_e4m3, to_bf16, to_e4m3

BLOCK_SIZE = 16
_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}


@dataclass
class Paged:
    """One layer's keys and values among other bytes of blocks. lengths: tokens of each sequence, those of this step
    (counts) included."""

    lengths: list[int]
    counts: list[int]
    kv_heads: int
    key_dim: int
    value_dim: int
    kv_type: str
    max_batch: int = 8
    max_blocks: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        element = _ELEMENT[self.kv_type]
        rows = self.kv_heads * BLOCK_SIZE
        self.key_offset = 64
        self.value_offset = self.key_offset + rows * self.key_dim * element
        self.k_scale_offset = self.value_offset + rows * self.value_dim * element
        self.v_scale_offset = self.k_scale_offset + 4 * rows
        self.block_bytes = -(-(self.v_scale_offset + 4 * rows + 32) // 64) * 64
        blocks = [-(-length // BLOCK_SIZE) for length in self.lengths]
        numbers = iter(rng.permutation(sum(blocks) + 2).tolist())
        self.num_blocks = sum(blocks) + 2
        self.pool = np.full(self.num_blocks * self.block_bytes, 0xFF, np.uint8)  # NaN in every floating type
        self.table = np.full((self.max_batch, self.max_blocks), 2**30, np.int32)  # an access to it ends the process
        for seq, count in enumerate(blocks):
            self.table[seq, :count] = [next(numbers) for _ in range(count)]

    @property
    def step(self) -> dict[str, np.ndarray]:
        """The arrays of a step, with entries beyond what counts."""
        tokens, seqs = sum(self.counts), len(self.counts)
        starts = np.zeros(self.max_batch + 1, np.int32)
        starts[1:seqs + 1] = np.cumsum(self.counts)
        context = np.zeros(self.max_batch, np.int32)
        context[:seqs] = self.lengths
        positions = np.concatenate([np.arange(length - count, length) for length, count in
                                    zip(self.lengths, self.counts, strict=True)]).astype(np.int32)
        return {"sizes": np.array([tokens, seqs, seqs], np.int32), "query_start": starts, "context_len": context,
                "positions": positions, "token_seq": np.repeat(np.arange(seqs), self.counts).astype(np.int32),
                "block_table": self.table}

    def parts(self) -> dict[str, np.ndarray]:
        """The pool as the kernels' parameters see it: each begins at its own offset of block 0."""
        return {"k_part": self.pool[self.key_offset:], "v_part": self.pool[self.value_offset:],
                "k_scales": self.pool[self.k_scale_offset:], "v_scales": self.pool[self.v_scale_offset:]}

    def fill(self, keys: list[np.ndarray], values: list[np.ndarray], static: tuple[float, float] = (1, 1)) -> None:
        """Write each sequence's keys [length, kv_heads, key_dim] and values, rounded to the cache's type."""
        for seq, (k, v) in enumerate(zip(keys, values, strict=True)):
            for offset, scale_offset, x, factor in ((self.key_offset, self.k_scale_offset, k, static[0]),
                                                    (self.value_offset, self.v_scale_offset, v, static[1])):
                for position in range(len(x)):
                    for head in range(self.kv_heads):
                        self._put(seq, position, head, offset, scale_offset, x[position, head], factor)

    def _place(self, seq: int, position: int, head: int, offset: int, width: int) -> slice:
        block = int(self.table[seq, position // BLOCK_SIZE])
        begin = block * self.block_bytes + offset + (head * BLOCK_SIZE + position % BLOCK_SIZE) * width
        return slice(begin, begin + width)

    def _put(self, seq: int, position: int, head: int, offset: int, scale_offset: int, x: np.ndarray,
             factor: float) -> None:
        x = x.astype(np.float32)
        if self.kv_type == "int8":
            scale = np.float32(np.abs(x).max() / np.float32(127))
            self.pool[self._place(seq, position, head, scale_offset, 4)] = np.array([scale]).view(np.uint8)
            bits = np.rint(x / (scale or 1)).astype(np.int8).view(np.uint8)
        elif self.kv_type == "fp8":
            bits = to_e4m3(x / np.float32(factor))
        elif self.kv_type == "bf16":
            bits = to_bf16(x).view(np.uint8)
        else:
            bits = x.astype(np.float16 if self.kv_type == "fp16" else np.float32).view(np.uint8)
        self.pool[self._place(seq, position, head, offset, len(bits))] = bits

    def read(self, pool: np.ndarray, seq: int, keys: bool, factor: float = 1.0) -> np.ndarray:
        """float64 [length, kv_heads, dim] of one sequence, of `pool` as a kernel left it."""
        dim = self.key_dim if keys else self.value_dim
        offset = self.key_offset if keys else self.value_offset
        scale_offset = self.k_scale_offset if keys else self.v_scale_offset
        out = np.empty((self.lengths[seq], self.kv_heads, dim))
        for position in range(self.lengths[seq]):
            for head in range(self.kv_heads):
                bits = pool[self._place(seq, position, head, offset, dim * _ELEMENT[self.kv_type])].copy()
                if self.kv_type == "int8":
                    scale = pool[self._place(seq, position, head, scale_offset, 4)].copy().view(np.float32)[0]
                    out[position, head] = bits.view(np.int8) * np.float64(scale)
                elif self.kv_type == "fp8":
                    out[position, head] = from_e4m3(bits) * np.float64(factor)
                elif self.kv_type == "bf16":
                    out[position, head] = from_bf16(bits.view(np.uint16))
                else:
                    out[position, head] = bits.view(np.float16 if self.kv_type == "fp16" else np.float32)
        return out

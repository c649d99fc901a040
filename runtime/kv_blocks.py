"""The pool of KV blocks that a device has room for. Pure bookkeeping: the memory itself is the device's."""

from collections.abc import Sequence


class KvBlocks:
    """Hands out block numbers 0 .. num_blocks - 1.

    The blocks of a sequence are its block table: the KV of the token at position p lies in block p // block_size.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: what was freed last is used first, so that a small load touches little memory.
        self._free = list(range(num_blocks))[::-1]
        self._is_free = bytearray(b"\1" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def needed(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None if there are not so many: never part of them."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Take back blocks that `allocate` gave."""
        for block in reversed(blocks):
            assert not self._is_free[block], f"block {block} is free already"
            self._is_free[block] = 1
            self._free.append(block)

"""Memory of this machine for devices that compute on it: what is large is taken page by page as it is touched."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..errors import WorkFailed
from ..lora import LoraRoom

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def anonymous(size: int, what: str) -> Bytes:
    """Zeroed memory, aligned to a page, that takes no room before it is touched; in large pages, where the system has
    them: attention reads a few kilobytes here and there, and would look up an address for each.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise WorkFailed(f"no memory for {what}: {size} bytes are refused ({error})") from None


class KvBlocks:
    """The blocks of the KV cache of both tiers, the device's and the host's.

    num_blocks, num_host_blocks  as the Program protocol has them
    address  of block 0
    """

    def __init__(self, tokens: int, host_tokens: int, block_size: int, block_bytes: int, num_tables: int) -> None:
        self.num_blocks, self.num_host_blocks = (
            -(-count // block_size) * num_tables for count in (tokens, host_tokens))
        self._block_bytes = block_bytes
        # Vector loads of a row's last elements may reach 64 bytes past the end of the last buffer.
        self._tiers = (anonymous(self.num_blocks * block_bytes + 64, f"a KV cache of {tokens} tokens"),
                       anonymous(self.num_host_blocks * block_bytes + 64, f"{host_tokens} tokens of KV on the host"))
        self.address = int(self._tiers[0].ctypes.data)
        self._copies: list[tuple[int, int]] = []

    def copy_later(self, pairs: Sequence[tuple[int, int]]) -> None:
        last = self.num_blocks + self.num_host_blocks
        assert all(0 <= source < last and 0 <= destination < last for source, destination in pairs), pairs
        self._copies += pairs

    def copy_now(self) -> None:
        """The copies that were asked for; no step is in flight."""
        for source, destination in self._copies:
            self._block(destination)[:] = self._block(source)
        self._copies.clear()

    def _block(self, number: int) -> Bytes:
        tier, index = (0, number) if number < self.num_blocks else (1, number - self.num_blocks)
        return self._tiers[tier][index * self._block_bytes : (index + 1) * self._block_bytes]


class AdapterMemory:
    """The slots for LoRA adapters, zeroed; none without room.

    place  (address, bytes) of the first one
    """

    def __init__(self, room: LoraRoom | None) -> None:
        self._room = room
        self.num_bytes = room.num_bytes if room else 0
        # Vector loads of a row's last elements may reach 64 bytes past the end of the last matrix.
        self._memory = anonymous(self.num_bytes + 64, "the slots for adapters")
        self.place = int(self._memory.ctypes.data), room.bytes_per_adapter if room else 0
        self._writes: list[tuple[int, Bytes]] = []

    def write(self, slot: int, image: np.ndarray, later: bool) -> None:
        """u8 [bytes_per_adapter], now, or with `write_now`: a step in flight must not see it."""
        assert self._room is not None, "the engine has no room for adapters"
        self._room.check_slot(slot, image.size)
        self._writes.append((slot, np.array(image) if later else image))
        if not later:
            self.write_now()

    def write_now(self) -> None:
        """What waits to be written; no step is in flight."""
        size = self.place[1]
        for slot, image in self._writes:
            self._memory[slot * size : (slot + 1) * size] = image
        self._writes.clear()

"""The 256-bit names of blocks, as events and routers use them.

A block's hash is SHA-256 of its parent's hash and its tokens (int32, little-endian); the first block's parent is a
hash of salt and LoRA adapter. So a hash names the whole prefix up to the block's end, and whose it is: without the salt
nobody can tell from a hash what the tokens are, nor make a block that collides with another tenant's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from .sequence import CacheKey


def root_hash(key: CacheKey) -> bytes:
    """The parent's hash of a sequence's first block."""
    return hashlib.sha256(repr(("ingot-kv", key.salt, key.lora)).encode()).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """parent: 32 bytes. tokens: of this block; fewer than a whole block's in a partly filled one."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}i", *tokens)).digest()


def block_hashes(tokens: Sequence[int], key: CacheKey, block_size: int) -> list[bytes]:
    """The hashes of all whole blocks of `tokens`."""
    hashes, parent = [], root_hash(key)
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[begin : begin + block_size])
        hashes.append(parent)
    return hashes

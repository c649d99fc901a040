"""What a sequence tells the KV cache, and what the cache tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .tree import Node

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100


class CacheKey(NamedTuple):
    """Whose KV may be reused: only that of the same salt (a tenant's secret) and the same LoRA adapter."""

    salt: str | int | None = None
    lora: int | None = None


DEFAULT_KEY = CacheKey()


@dataclass(frozen=True)
class RetentionRange:
    """How long to keep the KV of the prompt tokens begin <= position < end (None: to the prompt's end).

    priority    0 (evicted first) to 100 (evicted last); blocks that no range covers have 35
    duration_s  seconds after the last use until the priority falls back to 35; None: never

    As TensorRT-LLM's KvCacheRetentionConfig has it: a block belongs to the first range that covers its first token.
    """

    begin: int
    end: int | None
    priority: int
    duration_s: float | None = None


@dataclass(eq=False, slots=True)
class Probe:
    """What the cache could give a sequence now. Token counts of its prompt, without the last token.

    num_cached   tokens that need not be computed
    num_host     how many of these lie in blocks of the host tier and would be copied to the device
    num_pending  tokens beyond num_cached that running sequences are just computing: what waiting would gain
    owner        the running sequence that computes the first of them, None if there are none
    until        worth another look once owner.num_computed has reached this (see `ready`)
    """

    num_cached: int
    num_host: int = 0
    num_pending: int = 0
    owner: KvSequence | None = None
    until: int = 0

    @property
    def ready(self) -> bool:
        """Whether to probe again: what was pending has been computed or given up. Costs next to nothing."""
        owner = self.owner
        return owner is None or not owner.publishes or owner.num_computed >= self.until


class KvSequence:
    """The KV blocks of one sequence, from KvCache.acquire to KvCache.release, and again after a pause.

    tokens       the prompt, then the answer; the scheduler's own list, only appended to
    num_prompt   tokens of it that are the prompt (all that it holds at first)
    key          whose KV may be reused
    retention    retention of prompt blocks; decode_priority, decode_duration_s: of the answer's blocks
    tables       per table the block numbers: that of position p is tables[t][p // block_size]; -1 once it left the
                 window. Existing entries change to nothing but -1 between acquire and release
    num_cached   tokens that were taken from the cache at the last acquire
    num_computed tokens whose KV is written, num_cached at first; KvCache.advance raises it
    capacity     tokens that every table has blocks for; KvCache.grow raises it
    publishes    whether others can find what this sequence computes, before it is released
    """

    __slots__ = (
        "capacity", "chunks", "claims", "counted", "decode_duration_s", "decode_priority", "firsts", "is_active", "key",
        "max_blocks", "next_advance", "num_cached", "num_computed", "num_known", "num_prompt", "path", "pending",
        "publishes", "retention", "root", "tables", "tail", "tokens",
    )  # fmt: skip

    def __init__(self, tokens: list[int], key: CacheKey = DEFAULT_KEY, retention: Sequence[RetentionRange] = (),
                 decode_priority: int = DEFAULT_PRIORITY, decode_duration_s: float | None = None) -> None:
        self.tokens = tokens
        self.num_prompt = len(tokens)
        self.key = key
        self.retention = tuple(retention)
        self.decode_priority = decode_priority
        self.decode_duration_s = decode_duration_s
        self.tables: list[list[int]] = []
        self.num_cached = 0
        self.num_computed = 0
        self.capacity = 0
        self.publishes = False
        # The rest is the cache's.
        self.is_active = False
        self.counted = False  # its look-up has been counted
        self.num_known = 0  # len(tokens) at acquire: what is surely going to be computed
        self.next_advance: float = 0  # below this num_computed, advance has nothing to do
        self.chunks: list[tuple[int, ...]] = []  # tokens by whole blocks, made as they are needed
        self.root: Node | None = None
        self.path: list[Node] = []  # nodes of the published blocks, from the first on
        self.pending: list[Node] = []  # nodes to be published next, the last one first
        self.tail: Node | None = None  # node of the published part of the block that is being filled
        self.firsts: list[int] = []  # per group of tables: the first block that is still held
        self.max_blocks = 0  # reserved length in blocks, 0: nothing is reserved
        self.claims = 0  # reserved blocks of the window tables

    def chunk(self, index: int, block_size: int) -> tuple[int, ...]:
        """The tokens of whole block `index`, kept for the next look-up."""
        chunks, tokens = self.chunks, self.tokens
        for block in range(len(chunks), index + 1):
            chunks.append(tuple(tokens[block * block_size : (block + 1) * block_size]))
        return chunks[index]

    def retention_of(self, position: int) -> tuple[int, float | None] | None:
        """(priority, duration) that the sequence asks for the block whose first token is at `position`."""
        if position >= self.num_prompt:
            if self.decode_priority != DEFAULT_PRIORITY:
                return self.decode_priority, self.decode_duration_s
            return None
        for part in self.retention:
            if part.begin <= position and (part.end is None or position < part.end):
                return part.priority, part.duration_s
        return None

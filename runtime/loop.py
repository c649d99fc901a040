"""Which tokens the next step computes. Pure bookkeeping, no tensors: first come, first served.

A sequence is a list of tokens of which some are computed: their KV is in the cache. In the context phase the prompt is
still being computed, in chunks where it is long; in the generation phase exactly one token, the last, is not. Both are
one path: a step takes of each running sequence as many tokens as there is room for, generation first, because each of
its tokens is one that somebody waits for.

A sequence is admitted when the KV blocks that it can need until its end are free, so that what runs never stops.
"""

from collections import deque
from dataclasses import dataclass, field

from .errors import RequestError, WorkFailed
from .kv_blocks import KvBlocks


class KvCacheTooSmall(RequestError):
    """A sequence needs more KV blocks than there are."""


class KvCacheBusy(WorkFailed):
    """The KV blocks that a sequence needs are held by others that this loop does not run."""


@dataclass(eq=False)
class Sequence:
    """A prompt and the answer that grows behind it.

    tokens        the prompt, then the answer; the caller appends
    max_len       how long `tokens` may become
    num_computed  how many of them have their KV in `blocks`
    blocks        the block table, of as many blocks as max_len needs; owned from admission until `Loop.finish`
    """

    tokens: list[int]
    max_len: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def generates(self) -> bool:
        return self.num_pending == 1 and self.num_computed > 0


class Loop:
    """Waiting and running sequences, over a pool of blocks that other loops may use too."""

    def __init__(self, blocks: KvBlocks, max_batch_size: int, max_num_tokens: int) -> None:
        self._blocks = blocks
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn. Raises KvCacheTooSmall if it could never have one."""
        needed, existing = self._needed(sequence), self._blocks.num_blocks
        if needed > existing:
            size = self._blocks.block_size
            raise KvCacheTooSmall(
                f"a prompt of {len(sequence.tokens)} tokens with its answer, {sequence.max_len} tokens together, needs "
                f"{needed} KV blocks of {size} tokens; there are {existing} ({existing * size} tokens).\n"
                f"  Raise kv_cache_tokens to {needed * size}, or lower max_tokens."
            )
        self._waiting.append(sequence)

    def next_step(self) -> list[tuple[Sequence, int]]:
        """(sequence, number of its pending tokens to compute now); empty when nothing is left to do.

        The caller computes them, adds to num_computed, and appends a token to those that have none pending, or
        calls `finish`. Raises KvCacheBusy if sequences wait, none runs and the blocks are held elsewhere.
        """
        self._admit()
        room = self._max_num_tokens
        step = []
        for sequence in sorted(self._running, key=lambda sequence: not sequence.generates):
            count = min(sequence.num_pending, room)
            if count:
                step.append((sequence, count))
                room -= count
        return step

    def finish(self, sequence: Sequence) -> None:
        """The sequence is complete, or given up: its blocks are free again."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._blocks.release(sequence.blocks)
            sequence.blocks = []
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            needed = self._needed(self._waiting[0])
            blocks = self._blocks.allocate(needed)
            if blocks is None:
                if not self._running:
                    raise KvCacheBusy(f"the next sequence needs {needed} KV blocks; {self._blocks.num_free} of "
                                      f"{self._blocks.num_blocks} are free, the others are held by other streams")
                return
            sequence = self._waiting.popleft()
            sequence.blocks = blocks
            self._running.append(sequence)

    def _needed(self, sequence: Sequence) -> int:
        # The last token of an answer is never computed, for no token follows it.
        return self._blocks.needed(max(len(sequence.tokens), sequence.max_len - 1))

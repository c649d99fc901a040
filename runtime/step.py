"""The input of one step: which tokens of which sequences, where their KV blocks are, whose logits are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .sampling_inputs import SamplingInputs

if TYPE_CHECKING:
    from .program import Limits

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class StepInputs:
    """The arrays of a step (plugins/cpu/ingot_kernel.h), allocated once, filled anew for each step.

    clear() empties them, add() appends a sequence; the arrays' first elements, as the counts say, are then valid.
    block_tables i32 [num_tables, max_batch_size, max_blocks]: in each table of KV blocks one row a sequence.
    """

    # The arrays that a plan may bind to a kernel's argument.
    ARRAYS = ("token_ids", "positions", "token_seq", "logit_rows", "query_start", "context_len", "block_tables")

    def __init__(self, limits: Limits, vocab_size: int, block_size: int, num_tables: int = 1) -> None:
        """Of an engine with these limits, KV blocks of block_size tokens and so many tables of them.

        max_blocks: KV blocks of a sequence in a table. sampling: how the tokens of the rows of logits are chosen.
        """
        self.max_num_tokens = max_num_tokens = limits.max_num_tokens
        self.max_batch_size = max_batch_size = limits.max_batch_size
        self.max_blocks = max_blocks = -(-limits.max_seq_len // block_size)
        self.num_tables = num_tables
        self.sampling = SamplingInputs(max_batch_size, vocab_size, limits.max_seq_len)
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_logits = 0
        self.token_ids: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.positions: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.token_seq: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.logit_rows: Int32Array = np.zeros(max_batch_size, np.int32)
        self.query_start: Int32Array = np.zeros(max_batch_size + 1, np.int32)
        self.context_len: Int32Array = np.zeros(max_batch_size, np.int32)
        self.block_tables: Int32Array = np.full((num_tables, max_batch_size, max_blocks), -1, np.int32)
        self._counting: Int32Array = np.arange(max_num_tokens, dtype=np.int32)
        # Single elements are written through these: half the time of a numpy assignment.
        self._token_ids = self.token_ids.data
        self._positions = self.positions.data
        self._token_seq = self.token_seq.data
        self._logit_rows = self.logit_rows.data
        self._query_start = self.query_start.data
        self._context_len = self.context_len.data
        # Of each row of the block tables: whose blocks it holds, and how many.
        self._keys: list[int | None] = [None] * max_batch_size
        self._num_blocks = [0] * max_batch_size

    def clear(self) -> None:
        """Neither tokens, nor rows of logits, nor any that is sampled."""
        self.num_tokens = self.num_seqs = self.num_logits = 0
        self.sampling.clear()

    def add(self, tokens: Sequence[int], position: int, block_tables: Sequence[Sequence[int]], num_logits: int,
            key: int | None = None) -> None:
        """Append `tokens` of a new sequence, the first of which stands at `position`.

        block_tables  the sequence's KV blocks in each table, all of one length: entry p // block_size holds the token
                      at position p, for all up to the last of `tokens`; -1 where it has left the table's window
        num_logits    of how many of these tokens, counted from the end, the logits are asked for
        key           stands for block tables that only grow: from one step to a later one entries are appended or
                      become -1, nothing else. A row that holds the same key as when this buffer was filled last gets
                      the new entries only (what became -1 keeps its old number, which no kernel reads); so keep
                      sequences in their order. Take a new key when a sequence is admitted anew.
        """
        begin, seq = self.num_tokens, self.num_seqs
        count = len(tokens)
        end = begin + count
        logits_end = self.num_logits + num_logits
        assert count and end <= self.max_num_tokens and seq < self.max_batch_size, (begin, end, seq)
        assert num_logits <= count and logits_end <= self.max_batch_size, (num_logits, count, logits_end)
        if count == 1:
            self._token_ids[begin] = tokens[0]
            self._positions[begin] = position
            self._token_seq[begin] = seq
            if num_logits:
                self._logit_rows[self.num_logits] = begin
        else:
            self.token_ids[begin:end] = tokens
            np.add(self._counting[:count], position, out=self.positions[begin:end])
            self.token_seq[begin:end] = seq
            np.add(self._counting[:num_logits], end - num_logits, out=self.logit_rows[self.num_logits : logits_end])
        self._query_start[seq] = begin
        self._query_start[seq + 1] = end
        self._context_len[seq] = position + count
        known = self._num_blocks[seq] if key is not None and self._keys[seq] == key else 0
        num_blocks = len(block_tables[0])
        if known < num_blocks:
            assert len(block_tables) == self.num_tables, (len(block_tables), self.num_tables)
            for rows, table in zip(self.block_tables, block_tables, strict=True):
                assert len(table) == num_blocks <= self.max_blocks, (len(table), num_blocks, self.max_blocks)
                rows[seq, known:num_blocks] = table[known:]
            self._num_blocks[seq] = num_blocks
        self._keys[seq] = key
        self.num_tokens, self.num_seqs, self.num_logits = end, seq + 1, logits_end

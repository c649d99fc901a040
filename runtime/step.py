"""The input of one step: which tokens of which sequences, where their KV blocks are, whose logits are asked for."""

from collections.abc import Sequence

import numpy as np

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class StepInputs:
    """The arrays of ingot_step (plugins/cpu/ingot_kernel.h), allocated once, filled anew for each step.

    clear() empties them, add() appends a sequence; the arrays' first elements, as the counts say, are then valid.
    """

    # The arrays that a plan may bind to a kernel's argument.
    ARRAYS = ("token_ids", "positions", "token_seq", "logit_rows", "query_start", "context_len", "block_table")

    def __init__(self, max_num_tokens: int, max_batch_size: int, max_blocks: int) -> None:
        """max_batch_size: sequences in a step, and rows of logits. max_blocks: KV blocks of a sequence."""
        self.max_num_tokens = max_num_tokens
        self.max_batch_size = max_batch_size
        self.max_blocks = max_blocks
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_logits = 0
        self.token_ids: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.positions: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.token_seq: Int32Array = np.zeros(max_num_tokens, np.int32)
        self.logit_rows: Int32Array = np.zeros(max_batch_size, np.int32)
        self.query_start: Int32Array = np.zeros(max_batch_size + 1, np.int32)
        self.context_len: Int32Array = np.zeros(max_batch_size, np.int32)
        self.block_table: Int32Array = np.zeros((max_batch_size, max_blocks), np.int32)
        self._steps: Int32Array = np.arange(max_num_tokens, dtype=np.int32)

    def clear(self) -> None:
        self.num_tokens = self.num_seqs = self.num_logits = 0

    def add(self, tokens: Sequence[int], position: int, blocks: Sequence[int], num_logits: int) -> None:
        """Append `tokens` of a new sequence, the first of which stands at `position`.

        blocks      the sequence's KV blocks; they cover position + len(tokens) tokens
        num_logits  of how many of these tokens, counted from the end, the logits are asked for
        """
        begin, seq = self.num_tokens, self.num_seqs
        end = begin + len(tokens)
        logits_end = self.num_logits + num_logits
        assert tokens and end <= self.max_num_tokens and seq < self.max_batch_size
        assert num_logits <= len(tokens) and logits_end <= self.max_batch_size
        self.token_ids[begin:end] = tokens
        np.add(self._steps[: end - begin], position, out=self.positions[begin:end])
        self.token_seq[begin:end] = seq
        np.add(self._steps[:num_logits], end - num_logits, out=self.logit_rows[self.num_logits : logits_end])
        self.query_start[seq] = begin
        self.query_start[seq + 1] = end
        self.context_len[seq] = position + len(tokens)
        self.block_table[seq, : len(blocks)] = blocks
        self.num_tokens, self.num_seqs, self.num_logits = end, seq + 1, logits_end

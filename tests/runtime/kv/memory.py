"""A device that shows what KV blocks hold: names of prefixes in place of keys and values."""

from collections.abc import Sequence

from ingot.runtime.kv import KvCache, KvSequence


class Memory:
    """The blocks of a cache, as a device would have them: written by steps, moved by copies.

    What a position's keys and values are depends on all tokens up to it, on the table and on the LoRA adapter. That of
    another salt must not be read either, so it is part of the name.
    """

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._slots: dict[tuple[int, int], int] = {}

    def step(self, sequences: Sequence[tuple[KvSequence, int]]) -> None:
        """Runs the copies, then computes so many tokens of each sequence, then tells the cache.

        Asserts that all that these tokens see is there.
        """
        kv, size = self._kv, self._kv.block_size
        for source, target in kv.take_copies():
            for slot in range(size):
                self._slots[target, slot] = self._slots.get((source, slot), 0)
        for seq, count in sequences:
            names = prefix_names(seq)
            begin = seq.num_computed
            assert begin + count <= min(seq.capacity, len(seq.tokens))
            for t, (table, window) in enumerate(zip(seq.tables, kv.windows, strict=True)):
                first = 0 if window is None else max(0, begin - window + 1)
                for position in range(first, begin):
                    found = self._slots.get((table[position // size], position % size))
                    assert found == hash((t, names[position])), f"position {position} of {len(seq.tokens)}, table {t}"
            for t, table in enumerate(seq.tables):
                for position in range(begin, begin + count):
                    self._slots[table[position // size], position % size] = hash((t, names[position]))
        for seq, count in sequences:
            kv.advance(seq, seq.num_computed + count)


def prefix_names(seq: KvSequence) -> list[int]:
    name, names = hash(seq.key), []
    for token in seq.tokens:
        name = hash((name, token))
        names.append(name)
    return names

"""How a step's free tokens are divided among sequences in the context phase."""

from collections.abc import Sequence as Listing

from .sequence import Sequence
from .settings import ChunkingPolicy


def divide(contexts: Listing[Sequence], room: int, rows: int, policy: ChunkingPolicy, unit: int) -> list[int]:
    """For each sequence, oldest first, how many of its pending tokens this step computes; some may get none.

    room  tokens that are free in the step
    rows  rows of logits that are free in the step
    unit  tokens; EQUAL_PROGRESS gives whole units, so that blocks are filled
    """
    if policy is ChunkingPolicy.FIRST_COME_FIRST_SERVED:
        counts = []
        for sequence in contexts:
            count = min(sequence.num_pending, room)
            room -= count
            counts.append(count)
    else:
        counts = _equal_shares([sequence.num_pending for sequence in contexts], room, unit)
    for index, sequence in enumerate(contexts):
        counts[index], used = _cut_to_rows(sequence, counts[index], rows)
        rows -= used
    return counts


def room_for_next(contexts: Listing[Sequence], room: int, policy: ChunkingPolicy, unit: int) -> int:
    """Tokens that one more sequence could compute beside `contexts`; 0 if it had better start later.

    Later it finds more in the cache. So it starts when it really gets tokens: what older ones leave, or a whole unit.
    """
    pending = [sequence.num_pending for sequence in contexts]
    if policy is ChunkingPolicy.FIRST_COME_FIRST_SERVED:
        return max(room - sum(pending), 0)
    if contexts and room < unit * (len(contexts) + 1):
        return 0
    return _equal_shares([*pending, room], room, unit)[-1]


def _equal_shares(pending: list[int], room: int, unit: int) -> list[int]:
    """As much to each as to any other, until it has all it needs; less than a unit for each goes to the oldest."""
    counts = [0] * len(pending)
    open_ = [index for index, count in enumerate(pending) if count]
    while room and open_:
        share = max(room // len(open_) // unit, 1) * unit
        for index in open_:
            count = min(pending[index] - counts[index], share, room)
            counts[index] += count
            room -= count
        open_ = [index for index in open_ if counts[index] < pending[index]]
    return counts


def _cut_to_rows(sequence: Sequence, count: int, rows: int) -> tuple[int, int]:
    """(at most `count` tokens, whose logits need at most `rows` rows; the rows they need)."""
    needed = sequence.num_logits(count)
    if needed > rows:
        # Each token of a scored prompt has a row; otherwise only the last token has one, and it waits for another step.
        count -= needed - rows
        needed = rows
    return count, needed

"""The loop: what each step computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv_blocks import KvBlocks
from ingot.runtime.loop import KvCacheBusy, KvCacheTooSmall, Loop, Sequence


def advance(step: list[tuple[Sequence, int]], loop: Loop) -> None:
    """What a step does to its sequences: the next token where none is pending, the end where max_len is reached."""
    for sequence, count in step:
        sequence.num_computed += count
        if not sequence.num_pending:
            sequence.tokens.append(0)
            if len(sequence.tokens) == sequence.max_len:
                loop.finish(sequence)


def test_a_long_prompt_in_chunks_beside_generation() -> None:
    loop = Loop(KvBlocks(100, 4), max_batch_size=4, max_num_tokens=8)
    short, long = Sequence([1, 2, 3], 10), Sequence([1] * 20, 25)
    loop.add(short)
    loop.add(long)
    plans = []
    for _ in range(5):
        step = loop.next_step()
        plans.append([(sequence is long, count) for sequence, count in step])
        advance(step, loop)
    # Generation comes first and is never starved by the prompt.
    assert plans == [
        [(False, 3), (True, 5)], [(False, 1), (True, 7)], [(False, 1), (True, 7)], [(False, 1), (True, 1)],
        [(False, 1), (True, 1)],
    ]


def test_admission_is_in_order_and_for_the_whole_answer() -> None:
    blocks = KvBlocks(4, 4)
    loop = Loop(blocks, max_batch_size=4, max_num_tokens=16)
    # 2, 3 and 1 blocks: the third would fit beside the first but does not overtake the second.
    sequences = [Sequence([1] * 3, 9), Sequence([1] * 3, 13), Sequence([1], 5)]
    for sequence in sequences:
        loop.add(sequence)
    assert [sequence for sequence, _ in loop.next_step()] == sequences[:1]
    assert blocks.num_free == 2
    loop.finish(sequences[0])
    assert [sequence for sequence, _ in loop.next_step()] == sequences[1:]
    assert blocks.num_free == 0


def test_too_large_for_the_cache() -> None:
    loop = Loop(KvBlocks(4, 4), 4, 16)
    loop.add(Sequence([1] * 3, 17))  # the last token needs no KV
    with pytest.raises(KvCacheTooSmall) as caught:
        loop.add(Sequence([1] * 3, 18))
    assert str(caught.value) == (
        "a prompt of 3 tokens with its answer, 18 tokens together, needs 5 KV blocks of 4 tokens; there are 4 "
        "(16 tokens).\n  Raise kv_cache_tokens to 20, or lower max_tokens."
    )


def test_blocks_held_elsewhere() -> None:
    blocks = KvBlocks(4, 4)
    blocks.allocate(3)
    loop = Loop(blocks, 4, 16)
    loop.add(Sequence([1] * 3, 9))
    with pytest.raises(KvCacheBusy, match="needs 2 KV blocks; 1 of 4 are free"):
        loop.next_step()


def test_finish_of_what_waits_or_is_unknown() -> None:
    blocks = KvBlocks(4, 4)
    loop = Loop(blocks, max_batch_size=1, max_num_tokens=16)
    running, waiting = Sequence([1], 4), Sequence([1], 4)
    loop.add(running)
    loop.add(waiting)
    loop.next_step()
    loop.finish(waiting)
    loop.finish(running)
    loop.finish(running)
    assert loop.next_step() == []
    assert blocks.num_free == 4


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(1, 4), st.integers(1, 12), st.integers(11, 30),
)
def test_everything_is_computed_once_within_the_limits(
    requests: list[tuple[int, int]], max_batch_size: int, max_num_tokens: int, num_blocks: int,
) -> None:
    blocks = KvBlocks(num_blocks, 4)
    loop = Loop(blocks, max_batch_size, max_num_tokens)
    sequences = [Sequence([1] * prompt, prompt + answer) for prompt, answer in requests]
    for sequence in sequences:
        loop.add(sequence)
    first_steps: dict[int, int] = {}
    number = 0
    while step := loop.next_step():
        assert sum(count for _, count in step) <= max_num_tokens
        assert len(step) <= max_batch_size
        running = {id(sequence): sequence for sequence, _ in step}
        assert len(running) == len(step)
        for sequence, count in step:
            assert 1 <= count <= sequence.num_pending
            assert len(sequence.blocks) * 4 >= sequence.num_computed + count
            first_steps.setdefault(sequences.index(sequence), number)
        advance(step, loop)
        number += 1
        assert number < 1000
    assert [len(sequence.tokens) for sequence in sequences] == [sequence.max_len for sequence in sequences]
    assert blocks.num_free == num_blocks
    starts = [first_steps[index] for index in range(len(sequences))]
    assert starts == sorted(starts)

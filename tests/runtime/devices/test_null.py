"""The program that computes nothing."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.devices.null_memory import NullMemory
from ingot.runtime.program import Limits, Program, step_logits

LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=64)
TOKENS = [7, 200, 13, 13, 91, 0, 255, 30, 31, 32, 33]


def simulated(windows: tuple[int | None, ...] = (None,)) -> NullProgram:
    return NullProgram(LIMITS, 300, 40, windows, num_host_blocks=8, block_size=4, simulate_kv=True)


def run(program: Program, tokens: list[int], begin: int, end: int, tables: list[list[int]]) -> int:
    """The token that follows."""
    inputs = program.inputs[begin % 2]
    inputs.clear()
    inputs.add(tokens[begin:end], begin, tables, 1)
    program.launch(inputs)
    return int(program.wait().tokens[0])


def test_tokens_follow_from_token_and_position() -> None:
    program, found = NullProgram(LIMITS, 300, 40), []
    for position, token in ((0, 5), (1, 5), (0, 6), (0, 5)):
        inputs = program.inputs[0]
        inputs.clear()
        inputs.add([1, 2, token], position, [[0]], 1)
        inputs.add([9], 3, [[1]], 0)
        inputs.add([token], position + 2, [[2]], 1)
        program.launch(inputs)
        tokens = program.wait().tokens[:2].tolist()
        assert tokens[0] == tokens[1] and 0 <= tokens[0] < 300
        found.append(tokens[0])
    assert found[0] == found[3] and len(set(found)) == 3
    assert program.num_steps == 4


def test_tokens_of_a_function_and_logits() -> None:
    program = NullProgram(LIMITS, 10, 40, next_token=lambda position, token: (position + token) % 10)
    program.inputs[1].add([3, 4], 4, [[0, 1]], 2)
    assert step_logits(program, program.inputs[1]).argmax(axis=1).tolist() == [7, 9]
    assert program.trace(program.inputs[1], {"x"}) == {}
    program.close()


def test_a_step_takes_its_time() -> None:
    program = NullProgram(LIMITS, 10, 40, step_s=0.05)
    program.inputs[0].add([1], 0, [[0]], 1)
    start = time.perf_counter()
    program.launch(program.inputs[0])
    program.wait()
    assert time.perf_counter() - start >= 0.05


def test_one_step_at_a_time() -> None:
    program = NullProgram(LIMITS, 10, 40)
    program.inputs[0].add([1], 0, [[0]], 1)
    with pytest.raises(AssertionError, match="no step"):
        program.wait()
    program.launch(program.inputs[0])
    for call in (lambda: program.launch(program.inputs[1]), program.logits):
        with pytest.raises(AssertionError, match="in flight"):
            call()
    program.wait()
    with pytest.raises(AssertionError):
        program.copy_blocks([(0, 40)])


@pytest.mark.parametrize("windows", [(None,), (None, 3), (5, None, 5)])
@pytest.mark.parametrize("cuts", [[11], [4, 8, 11], [3, 4, 5, 11]])
def test_the_context_is_read_through_the_tables(windows: tuple[int | None, ...], cuts: list[int]) -> None:
    program, begin = simulated(windows), 0
    tables = [[3 * i + table for i in range(3)] for table in range(len(windows))]
    for end in cuts:
        for table, window in zip(tables, windows, strict=True):
            if window is not None:
                gone = max(0, begin - window + 1) // 4
                table[:gone] = [-1] * gone
        token = run(program, TOKENS, begin, end, [table[: -(-end // 4)] for table in tables])
        assert token == NullMemory.next_token(TOKENS[:end], 300)
        begin = end


def test_copies_of_blocks_count() -> None:
    program = simulated()
    run(program, TOKENS, 0, 8, [[0, 1]])
    program.copy_blocks([(0, 41), (1, 5), (41, 6)])
    run(program, TOKENS[::-1], 0, 8, [[0, 1]])
    assert run(program, TOKENS, 8, 11, [[6, 5, 7]]) == NullMemory.next_token(TOKENS, 300)


def _other_sequence(program: NullProgram) -> None:
    run(program, TOKENS[::-1], 0, 8, [[2, 3], [12, 13]])


@pytest.mark.parametrize(("tables", "message"), [
    ([[0, 3, 4], [10, 11, 14]], "of two contexts"),
    ([[2, 3, 4], [10, 11, 14]], "another context than the tables before"),
    ([[0, 1, 4], [1, 11, 14]], "holds something else"),
    ([[0, 1, 4], [0, 1, 14]], "holds something else"),
    ([[1, 0, 4], [10, 11, 14]], "holds something else"),
    ([[0, 5, 4], [10, 11, 14]], "holds something else"),
    ([[-1, 1, 4], [10, 11, 14]], "position 0 is in block -1"),
    ([[0, 1, 40], [10, 11, 14]], "position 8 is in block 40; the device has 40"),
])  # fmt: skip
def test_wrong_blocks_are_told(tables: list[list[int]], message: str) -> None:
    program = simulated((None, None))
    run(program, TOKENS, 0, 8, [[0, 1], [10, 11]])
    _other_sequence(program)
    with pytest.raises(AssertionError, match=message):
        run(program, TOKENS, 8, 11, tables)


def test_two_sequences_do_not_write_to_one_block() -> None:
    program = simulated()
    program.inputs[0].add(TOKENS[:2], 0, [[0]], 1)
    program.inputs[0].add(TOKENS[:2], 0, [[0]], 1)
    with pytest.raises(AssertionError, match="0 and 1 of a step write to the same block 0"):
        program.launch(program.inputs[0])


def test_it_is_a_program() -> None:
    make: Callable[..., Program] = NullProgram
    program = make(LIMITS, 10, 40, (None, 8), num_host_blocks=2, block_size=4, block_bytes=64)
    assert (program.num_blocks, program.num_host_blocks, program.block_size, program.block_bytes) == (40, 2, 4, 64)
    assert program.inputs[0].block_tables.shape == (2, 4, 16)
    assert not np.shares_memory(program.inputs[0].token_ids, program.inputs[1].token_ids)

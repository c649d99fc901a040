"""The arrays of a step."""

import numpy as np
import pytest

from ingot.runtime.program import Limits
from ingot.runtime.sampling_inputs import SamplingStruct, Score
from ingot.runtime.step import StepInputs, StepLayout


def made(num_tables: int = 1) -> StepInputs:
    """For 8 tokens of 3 sequences of 6 blocks."""
    return StepInputs(Limits(max_batch_size=3, max_num_tokens=8, max_seq_len=24), 50, 4, num_tables)


def test_two_sequences() -> None:
    inputs = made()
    inputs.add([5, 6, 7], 2, [[9, 1]], 2)
    inputs.add([8], 0, [[3]], 0)
    assert (inputs.num_tokens, inputs.num_seqs, inputs.num_logits) == (4, 2, 2)
    expected = {
        "token_ids": [5, 6, 7, 8], "positions": [2, 3, 4, 0], "token_seq": [0, 0, 0, 1], "logit_rows": [1, 2],
        "query_start": [0, 3, 4], "context_len": [5, 1],
    }
    for name, values in expected.items():
        assert getattr(inputs, name)[: len(values)].tolist() == values, name
        assert getattr(inputs, name).dtype == np.int32
    assert inputs.block_tables[0, 0, :2].tolist() == [9, 1]
    assert inputs.block_tables[0, 1, :1].tolist() == [3]


@pytest.mark.parametrize("count", [1, 3])
def test_one_token_is_as_several(count: int) -> None:
    inputs = made()
    inputs.add([4, 4], 0, [[0]], 1)
    inputs.add(np.full(count, 7).tolist(), 11, [[3, 1, 2, 0]], 1)
    assert inputs.token_ids[2:5].tolist() == [7] * count + [0] * (3 - count)
    assert inputs.positions[2 : 2 + count].tolist() == [11, 12, 13][:count]
    assert inputs.token_seq[2 : 2 + count].tolist() == [1] * count
    assert inputs.query_start[:3].tolist() == [0, 2, 2 + count]
    assert inputs.logit_rows[:2].tolist() == [1, 1 + count]
    assert inputs.context_len[:2].tolist() == [2, 11 + count]


def test_clear_starts_anew_in_the_same_memory() -> None:
    inputs = made()
    addresses = [getattr(inputs, name).ctypes.data for name in StepInputs.ARRAYS]
    inputs.add([1, 2, 3], 0, [[0]], 1)
    inputs.clear()
    inputs.add([4], 7, [[2, 3]], 1)
    assert (inputs.num_tokens, inputs.num_seqs, inputs.num_logits) == (1, 1, 1)
    assert inputs.positions[0] == 7
    assert inputs.logit_rows[0] == 0
    assert inputs.query_start[:2].tolist() == [0, 1]
    assert [getattr(inputs, name).ctypes.data for name in StepInputs.ARRAYS] == addresses


def test_several_tables() -> None:
    inputs = made(num_tables=2)
    inputs.add([1], 5, [[4, 5], [-1, 6]], 1)
    inputs.add([1], 9, [[1, 2, 3], [-1, 8, 9]], 1)
    assert inputs.block_tables[:, :2, :3].tolist() == [[[4, 5, -1], [1, 2, 3]], [[-1, 6, -1], [-1, 8, 9]]]
    assert (inputs.block_tables[:, :, 3:] == -1).all()


def test_a_row_of_the_same_key_gets_new_entries_only() -> None:
    inputs, table = made(), [7, 8]
    inputs.add([1], 7, [table], 1, key=1)
    inputs.add([1], 7, [table], 1)
    inputs.block_tables[:] += 100  # to see what is written
    table += [9, 10]
    inputs.clear()
    inputs.add([1], 12, [table], 1, key=1)
    inputs.add([1], 12, [table], 1)
    assert inputs.block_tables[0, :2, :4].tolist() == [[107, 108, 9, 10], [7, 8, 9, 10]]
    # The row goes to another sequence, and comes back.
    for key, expected in ((2, [3, 4]), (1, [7, 8]), (1, [7, 8])):
        inputs.clear()
        inputs.add([1], 0, [[3, 4] if key == 2 else table], 1, key=key)
        assert inputs.block_tables[0, 0, :2].tolist() == expected
    assert inputs.block_tables[0, 0, :4].tolist() == table


def test_what_was_written_without_a_key_is_written_again() -> None:
    inputs = made()
    for table in ([1, 2], [3, 4], [5]):
        inputs.clear()
        inputs.add([1], 0, [table], 1)
        assert inputs.block_tables[0, 0, : len(table)].tolist() == table


@pytest.mark.parametrize(("tokens", "tables", "num_logits"), [
    ([], [[0]], 0), ([1] * 9, [[0]], 1), ([1], [[0]], 2), ([1, 1, 1, 1], [[0]], 4), ([1], [[0, 1, 2, 3, 4, 5, 6]], 1),
    ([1], [[0], [0]], 1),
])  # fmt: skip
def test_what_does_not_fit_is_the_fault_of_the_caller(tokens: list[int], tables: list[list[int]],
                                                      num_logits: int) -> None:
    with pytest.raises(AssertionError):
        made().add(tokens, 0, tables, num_logits)


def test_arrays_lie_apart_in_one_memory() -> None:
    limits = Limits(max_batch_size=3, max_num_tokens=8, max_seq_len=40)
    layout = StepLayout(limits, 50, 4, 2)
    memory = np.zeros(layout.num_bytes, np.uint8)
    inputs = StepInputs(limits, 50, 4, 2, memory)
    end = 0
    for name, place in layout.places.items():
        array = getattr(inputs.sampling, name.removeprefix("sampling."), None)
        if array is None:
            array = getattr(inputs, name, None)
        if array is None and name != "sizes":
            array = getattr(inputs.sampling.outputs, name.removeprefix("sampling."))
        assert place.offset % 64 == 0 and place.offset >= end, name
        end = place.offset + place.size
        if array is not None:
            assert (array.shape, array.dtype) == (place.shape, place.dtype), name
            assert array.ctypes.data == memory.ctypes.data + place.offset, name
    assert end <= layout.num_bytes
    outputs = [layout.places[f"sampling.{name}"].offset for name in SamplingStruct.OUTPUTS]
    assert [name for name, place in layout.places.items() if place.offset >= layout.input_bytes] == [
        f"sampling.{name}" for name in SamplingStruct.OUTPUTS] and min(outputs) == layout.input_bytes
    inputs.add([7], 0, [[1], [2]], 1)
    other = StepInputs(limits, 50, 4, 2, memory.copy())
    assert other.token_ids[0] == 7, "what was filled in lies in the memory that was given"


def test_tables_begin_where_gpus_may_read() -> None:
    for max_seq_len in range(1, 70):
        inputs = StepInputs(Limits(1, 8, max_seq_len), 50, 4, 3)
        assert inputs.max_blocks <= inputs.table_width < inputs.max_blocks + 4
        assert all(table.ctypes.data % 16 == inputs.memory.ctypes.data % 16 for table in inputs.block_tables)


def covered(inputs: StepInputs) -> np.ndarray:
    """Which bytes of the memory `pieces` names; they must ascend and not overlap."""
    found = np.zeros(inputs.layout.num_bytes, bool)
    end = 0
    for offset, size in inputs.pieces():
        assert offset >= end and size > 0
        end = offset + size
        found[offset:end] = True
    assert end <= inputs.layout.input_bytes
    return found


@pytest.mark.parametrize("max_seq_len", [40, 1 << 17])
def test_pieces_cover_what_a_step_reads_and_not_much_more(max_seq_len: int) -> None:
    """max_seq_len: tables close together, copied as one piece, or far apart."""
    inputs = StepInputs(Limits(max_batch_size=16, max_num_tokens=32, max_seq_len=max_seq_len), 1 << 18, 4, 3)
    for seq in range(2):
        inputs.add([5, 6], 0, [[seq], [seq + 4], [seq + 8]], 1)
    places, row_bytes = inputs.layout.places, 4 * inputs.table_width
    needed = np.zeros(inputs.layout.num_bytes, bool)
    needed[: places["block_tables"].offset] = True
    for table in range(3):
        begin = places["block_tables"].offset + table * 16 * row_bytes
        needed[begin : begin + 2 * row_bytes] = True
    found = covered(inputs)
    assert (needed & ~found).sum() == 0 and found.sum() <= needed.sum() + 2 * (1 << 16)
    assert len(inputs.pieces()) == (1 if max_seq_len == 40 else 3)
    assert inputs.layout.views(inputs.memory)["sizes"].tolist() == [4, 2, 2, 0]

    inputs.sampling.fill([Score(3), Score(4)])
    assert not (covered(inputs) & ~found).any() and inputs.sampling.counts.tolist() == [2, 0, 0, 0]
    lists_of = {"num_biases": ("bias_ids", "bias_values"), "num_history": ("history_ids", "history_counts"),
                "mask_row": ("masks",)}
    for field, lists in lists_of.items():
        before = covered(inputs)
        inputs.sampling.rows[field][1] = 1
        more = covered(inputs)
        for name in lists:
            place = places[f"sampling.{name}"]
            rows = place.size // 16 * 2
            assert more[place.offset : place.offset + rows].all()
        assert (more & ~before).sum() <= sum(places[f"sampling.{name}"].size // 8 for name in lists) + (1 << 18)
    inputs.clear()
    inputs.add([5], 0, [[0], [4], [8]], 1)
    inputs.sampling.fill([Score(3)])
    assert not (covered(inputs) & ~found).any(), "rows beyond the step's are not looked at"

"""The arrays of a step."""

import numpy as np

from ingot.runtime.step import StepInputs


def test_two_sequences() -> None:
    inputs = StepInputs(max_num_tokens=8, max_batch_size=3, max_blocks=4)
    inputs.add([5, 6, 7], 2, [9, 1], 2)
    inputs.add([8], 0, [3], 0)
    assert (inputs.num_tokens, inputs.num_seqs, inputs.num_logits) == (4, 2, 2)
    expected = {
        "token_ids": [5, 6, 7, 8], "positions": [2, 3, 4, 0], "token_seq": [0, 0, 0, 1], "logit_rows": [1, 2],
        "query_start": [0, 3, 4], "context_len": [5, 1],
    }
    for name, values in expected.items():
        assert getattr(inputs, name)[: len(values)].tolist() == values, name
        assert getattr(inputs, name).dtype == np.int32
    assert inputs.block_table[0, :2].tolist() == [9, 1]
    assert inputs.block_table[1, :1].tolist() == [3]


def test_clear_starts_anew_in_the_same_memory() -> None:
    inputs = StepInputs(8, 3, 4)
    addresses = [getattr(inputs, name).ctypes.data for name in StepInputs.ARRAYS]
    inputs.add([1, 2, 3], 0, [0], 1)
    inputs.clear()
    inputs.add([4], 7, [2, 3], 1)
    assert (inputs.num_tokens, inputs.num_seqs, inputs.num_logits) == (1, 1, 1)
    assert inputs.positions[0] == 7
    assert inputs.logit_rows[0] == 0
    assert inputs.query_start[:2].tolist() == [0, 1]
    assert [getattr(inputs, name).ctypes.data for name in StepInputs.ARRAYS] == addresses

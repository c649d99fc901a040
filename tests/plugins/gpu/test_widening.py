"""The instructions that widen four bits, followed by hand over all bytes: Triton's interpreter has none of them, so
that no other test without a GPU sees what they compute."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_e4m3
from ingot.plugins.linear.gpu_widening import ABOVE, TO_E4M3, TO_FLOAT32, TO_INT8


def permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: four of eight bytes, by the nibbles of the selector's low half; a fourth bit would repeat a sign."""
    found = 0
    for position in range(4):
        nibble = selector >> 4 * position & 15
        assert nibble < 8, f"{selector:x}"
        found |= ((low | high << 32) >> 8 * nibble & 255) << 8 * position
    return found


def logic(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32: bit i of the table is the result where a, b and c have the bits of i."""
    return sum((table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit for bit in range(32))


OPERATIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b, "xor.b32": lambda a, b: a ^ b, "sub.u32": lambda a, b: (a - b) % 2**32,
    "shr.b32": lambda a, b: a >> b, "prmt.b32": permuted, "lop3.b32": logic}


def followed(text: str, word: int) -> list[int]:
    """What is in the results in the end: $0, $1, …; the input is the operand behind them."""
    given = f"${sum(f'${number},' in text for number in range(10)) - 1}"
    values = {given: word}
    for line in text.strip("{}\n").split("\n")[1:]:
        operation, _, operands = line.rstrip(";").partition(" ")
        to, *sources = operands.split(", ")
        assert given not in sources or "$0" not in values, "a result may lie where the input lay"
        values[to] = OPERATIONS[operation](*(values[name] if name in values else int(name, 0) for name in sources))
    return [values[f"${number}"] for number in range(int(given[1:]))]


def read_float32(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32) - ABOVE - 8


@pytest.mark.parametrize(("text", "read"), [
    (TO_E4M3, lambda words: from_e4m3(words.view(np.uint8))), (TO_INT8, lambda words: words.view(np.int8)),
    (TO_FLOAT32, read_float32)], ids=["e4m3", "int8", "float32"])
def test_all_bytes_in_all_places(text: str, read: Callable[[np.ndarray], np.ndarray]) -> None:
    for start in range(256):
        packed = (start + np.array([0, 37, 101, 202])) % 256
        words = followed(text, int.from_bytes(bytes(packed.tolist()), "little"))
        wanted = np.concatenate([packed & 15, packed >> 4]) - 8.0
        assert read(np.array(words, np.uint32)).tolist() == wanted.tolist()

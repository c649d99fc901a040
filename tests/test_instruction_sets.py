"""Engines of one tiny model for every instruction set: what is in their code, and that they agree."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import host_isas
from ingot.compiler.precision import PRECISIONS
from ingot.plugins.cpu.ceilings import CHAINS
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.sampling import SamplingParams

# Of A64: (mask, value) of the encodings, with vectors and with one element.
_SDOT = ((0xBFE0FC00, 0x0E809400), (0xBFC0F400, 0x0F80E000))
_FMLA = ((0xBFA0FC00, 0x0E20CC00), (0xBF80F400, 0x0F801000))
_MACHINE_AARCH64, _EXECUTABLE = 183, 4
PROMPTS = ([5, 6, 7], [200], list(range(0, 99, 3)))


def code_of(engine: Path) -> bytes:
    with EngineFile.open(engine) as file:
        return bytes(file.read("code/model.so"))


def instructions(elf: bytes) -> np.ndarray:
    """The 32-bit words of the executable sections of a 64-bit ELF file."""
    offset, = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    words = []
    for number in range(count):
        flags, _, begin, length = struct.unpack_from("<QQQQ", elf, offset + number * size + 8)
        if flags & _EXECUTABLE:
            words.append(np.frombuffer(elf, np.uint32, length // 4, begin))
    return np.concatenate(words)


def count(words: np.ndarray, encodings: tuple[tuple[int, int], ...]) -> int:
    return sum(int(np.count_nonzero((words & mask) == value)) for mask, value in encodings)


def test_encodings() -> None:
    """sdot v0.4s, v1.16b, v2.16b and v0.4s, v1.16b, v2.4b[3]; fmla v3.4s, v4.4s, v5.4s and v3.4s, v4.4s, v5.s[1];
    what is none: udot v0.4s, v1.16b, v2.16b; add v0.4s, v1.4s, v2.4s; ret."""
    words = np.array([0x4E829420, 0x4FA2E820, 0x4E25CC83, 0x4FA51083, 0x6E829420, 0x4EA28420, 0xD65F03C0], np.uint32)
    assert (count(words, _SDOT), count(words, _FMLA)) == (2, 2)
    assert (count(words[4:], _SDOT), count(words[4:], _FMLA)) == (0, 0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_code_for_aarch64(speaking_engine: Callable[..., Path], precision: str) -> None:
    """Cross-compiled here: integer precisions multiply with sdot, the others with fmla."""
    path = speaking_engine("cpu:aarch64-dotprod", precision)
    with EngineFile.open(path) as file:
        assert file.manifest["target"]["machine"] == "aarch64"
        assert "asimddp" in file.manifest["target"]["features"]
        file.verify()
    elf = code_of(path)
    assert elf[:6] == b"\x7fELF\x02\x01" and struct.unpack_from("<H", elf, 18) == (_MACHINE_AARCH64,)
    words = instructions(elf)
    sdot, fmla = count(words, _SDOT), count(words, _FMLA)
    print(f"{precision}: {len(words)} instructions, {sdot} sdot, {fmla} fmla")
    in_ceilings = 2 * CHAINS  # what the machine can do with integers is measured by engines of every precision
    assert (sdot >= 100) if precision in ("int8", "w4a8") else (sdot == in_ceilings)
    assert fmla >= 100


def test_every_instruction_set_gives_the_same_answers(speaking_engine: Callable[..., Path]) -> None:
    """In fp32, of all that this machine can run."""
    runnable = [isa.name for isa in host_isas()]
    if len(runnable) < 2:
        pytest.skip(f"this machine runs {runnable} alone")
    answers, codes = {}, set()
    for name in runnable:
        path = speaking_engine(f"cpu:{name}", "fp32")
        codes.add(code_of(path))
        with Engine.load(path, num_workers=2) as engine:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            answers[name] = [engine.generate(prompt, params).token_ids for prompt in PROMPTS]
    assert all(len(answer) == 40 for answer in answers[runnable[0]])
    assert all(answer == answers[runnable[0]] for answer in answers.values()), answers
    # What VNNI and BF16 add is arithmetic of other numbers: fp32 code may be the same with them.
    assert len(codes) >= len(set(runnable) - {"x86-64-v4-vnni", "x86-64-v4-bf16"})

"""Engines of one tiny model for every instruction set: what is in their code, and that they agree."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cpu.isa import ISAS, host_isas
from ingot.compiler.precision import PRECISIONS
from ingot.plugins.cpu.ceilings import CHAINS
from ingot.runtime import amx
from ingot.runtime.devices import native_code
from ingot.runtime.devices.cpu import CpuProgram
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import WorkFailed
from ingot.runtime.program import EngineMismatch, step_logits
from ingot.runtime.sampling import SamplingParams
from tests.plugins.native import AMX_ISA, PAIR_ISA, needs_pairs
from tests.plugins.native import runnable as runnable_here

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
    # What VNNI, BF16 and AMX add is arithmetic of other numbers: fp32 code may be the same with them.
    assert len(codes) >= len(set(runnable) - {"x86-64-v4-vnni", PAIR_ISA, AMX_ISA})


# VEX of three bytes, map 2, no W and L: (its last byte under 0x87, opcode).
_TDPBSSD, _TDPBF16PS = (0x03, 0x5E), (0x02, 0x5C)


def count_tiles(elf: bytes, encoding: tuple[int, int]) -> int:
    """Products of tile registers."""
    end, opcode = encoding
    found = re.findall(rb"\xc4\xe2(.)" + re.escape(bytes([opcode])) + rb"[\xc0-\xff]", elf, re.DOTALL)
    return sum(byte[0] & 0x87 == end for byte in found)


def test_tile_encodings() -> None:
    """tdpbssd %tmm4, %tmm2, %tmm0; tdpbf16ps %tmm6, %tmm4, %tmm0; vpdpbusd %ymm2, %ymm1, %ymm0, which is none."""
    code = bytes.fromhex("c4e25b5ec2 c4e24a5cc4 c4e27550c2")
    assert (count_tiles(code, _TDPBSSD), count_tiles(code, _TDPBF16PS)) == (1, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_code_for_amx(speaking_checkpoint: Path, precision: str, tmp_path: Path,
                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-compiled here, for steps of up to 32 tokens. Before it is loaded, the system is asked for tiles."""
    path = engine_of(speaking_checkpoint, precision, AMX_ISA, tmp_path)
    with EngineFile.open(path) as file:
        assert {"amx_tile", "amx_int8", "amx_bf16"} <= set(file.manifest["target"]["features"])
    code = code_of(path)
    of_bytes, of_pairs = count_tiles(code, _TDPBSSD), count_tiles(code, _TDPBF16PS)
    print(f"{precision}: {of_bytes} tdpbssd, {of_pairs} tdpbf16ps")
    assert (of_bytes >= 10) == (precision in ("int8", "w4a8")) and (of_pairs >= 10) == (precision == "bf16")
    if AMX_ISA not in {isa.name for isa in host_isas()}:
        with EngineFile.open(path) as file, pytest.raises(EngineMismatch, match=r"lacks .*amx_tile.*\n.*--target cpu "):
            CpuProgram(file, 64)

    def refuse(what: str) -> None:
        raise WorkFailed(f"{what}: refused")

    monkeypatch.setattr(native_code, "cpu_features", lambda: ISAS[AMX_ISA].required)
    monkeypatch.setattr(amx, "request_tiles", refuse)
    with EngineFile.open(path) as file, pytest.raises(WorkFailed, match=r"\.engine: refused"):
        CpuProgram(file, 64)


def engine_of(checkpoint: Path, precision: str, isa: str, folder: Path) -> Path:
    path = folder / f"{isa}.{precision}.engine"
    build(BuildRequest(str(checkpoint), f"cpu:{isa}", precision, path, max_batch_size=32, max_num_tokens=32,
                       calibrate=False))
    return path


@needs_pairs
@pytest.mark.parametrize("precision", ["bf16", "int8", "w4a8"])
def test_tiles_give_the_answers_of_vectors(speaking_checkpoint: Path, precision: str, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines for AMX, its instructions emulated where they are missing: integers give the same logits to the bit,
    pairs of bfloat16 nearly; and in either case a token's are the same whatever the step it is in."""
    monkeypatch.setitem(ISAS, AMX_ISA, runnable_here(AMX_ISA))
    logits = {}
    for name in (AMX_ISA, PAIR_ISA):
        with EngineFile.open(engine_of(speaking_checkpoint, precision, name, tmp_path)) as file:
            for workers, steps in ((1, [32]), (2, [1, 20, 11])):
                program = CpuProgram(file, kv_cache_tokens=64, num_workers=workers)
                logits[name, len(steps)] = logits_of(program, steps)
                program.close()
        np.testing.assert_array_equal(logits[name, 1], logits[name, 3])
    tiles, vectors = logits[AMX_ISA, 1], logits[PAIR_ISA, 1]
    if precision == "bf16":
        assert 0 < np.abs(tiles - vectors).max() <= 2e-2 * np.abs(vectors).max()
    else:
        np.testing.assert_array_equal(tiles, vectors)


def logits_of(program: CpuProgram, steps: list[int]) -> np.ndarray:
    """Of all tokens of one sequence."""
    rows: list[np.ndarray] = []
    position = 0
    ids = np.random.default_rng(0).integers(0, program.vocab_size, sum(steps)).tolist()
    for count in steps:
        inputs = program.inputs[len(rows) % 2]
        inputs.clear()
        blocks = list(range(-(-(position + count) // program.block_size)))
        inputs.add(ids[position:position + count], position, [blocks], count)
        rows.append(step_logits(program, inputs).copy())
        position += count
    return np.concatenate(rows)

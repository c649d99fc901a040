"""What is inside a cubin: instructions, registers and memory, read with the tools that Triton's wheel brings."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.runtime.errors import RequestError, WorkFailed

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_OPERAND_BITS = {"D": 64, "H": 16, "I": 8, "Q": 8, "O": 4}


@dataclass(frozen=True)
class Resources:
    """registers of a thread; stack_bytes of a thread (spilled registers lie there); static shared_bytes of a block."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def tool(name: str) -> Path:
    """A program of Triton's wheel, without importing triton."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RequestError("GPU kernels need the package triton, which is not installed.\n"
                           "  Install it: pip install --no-deps triton==3.9.0")
    return Path(spec.origin).parent / "backends/nvidia/bin" / name


def disassemble(cubin: bytes) -> str:
    """The SASS text of every function in a cubin."""
    return _run("nvdisasm", ["-c", "-ndf"], cubin)  # without an analysis of the flow of data, which shows in nothing


def resources(cubin: bytes) -> Resources:
    text = _run("cuobjdump", ["-res-usage"], cubin)
    found = _USAGE.search(text)
    if found is None:
        raise WorkFailed(f"cuobjdump told no resource usage of a cubin of {len(cubin)} bytes: {text[:200]!r}")
    return Resources(*map(int, found.groups()))


def instructions(sass: str) -> list[str]:
    """The mnemonics with their modifiers, in the order of the code."""
    found: list[str] = _INSTRUCTION.findall(sass)
    return found


def count_instructions(sass: str) -> dict[str, int]:
    """Mnemonic with its modifiers -> how often it stands in the code, sorted by mnemonic."""
    return dict(sorted(Counter(instructions(sass)).items()))


def matrix_instructions(counts: Mapping[str, int]) -> dict[str, int]:
    """Those that run on Tensor Cores: HMMA, IMMA, QMMA, OMMA; HGMMA, IGMMA, QGMMA; UTCHMMA, UTCIMMA, UTCQMMA, UTCOMMA,
    and DMMA."""
    return {name: n for name, n in counts.items() if base(name).endswith("MMA")}


def spills(counts: Mapping[str, int]) -> tuple[int, int]:
    """(stores to, loads from) thread-local memory in the code."""
    return (sum(n for name, n in counts.items() if base(name) == "STL"),
            sum(n for name, n in counts.items() if base(name) == "LDL"))


def operand_bits(mnemonic: str) -> int:
    """Bits of the operands of a matrix instruction: HMMA.16816.F32.BF16 -> 16, QGMMA.64x128x32.F32.E4M3.E4M3 -> 8."""
    kind = base(mnemonic).removeprefix("UTC")
    bits = _OPERAND_BITS[kind[0]]
    if bits == 16 and "TF32" in mnemonic:
        return 32
    return 4 if bits == 8 and ".S4" in mnemonic else bits


def base(mnemonic: str) -> str:
    """Without its modifiers."""
    return mnemonic.partition(".")[0]


def _run(name: str, options: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(prefix="ingot-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool(name)), *options, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise WorkFailed(f"{name} could not read a cubin of {len(cubin)} bytes: {done.stderr.strip()[:300]}")
    return done.stdout

"""What stands for the tile instructions where a machine has none."""
from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.cpu.toolchain import command
from ingot.runtime import amx
from ingot.runtime.errors import WorkFailed
from tests.plugins.native import PAIR_ISA, from_bf16, needs_pairs, to_bf16

SOURCE = Path(__file__).with_name("amx_faults.c")
FAULTS = ("the palette is not 1", "larger than 16 rows", "a tile that there is not", "reserved bytes",
          "different depths", "different numbers of rows", "rows of different lengths", "bytes without rows",
          "not configured", "not configured", "same tile twice", "not configured")
PRODUCT = """
#include "{header}"
__attribute__((visibility("default"))) void product(const void *a, const void *b, void *sums) {{
    amx_config shape = {{.palette = 1, .row_bytes = {{64, 64, 64}}, .rows = {{16, 16, 16}}}};
    _tile_loadconfig(&shape);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, b, 64);
    _tile_{instruction}(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
}}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("amx") / "faults.so"
    subprocess.run([*command(ISAS[PAIR_ISA], "zig"), "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(path)],
                   check=True, capture_output=True)
    return path


def use(library: Path, how: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).use({how})"],
                          capture_output=True, text=True)


@needs_pairs
def test_what_the_processor_faults_for_ends_the_program(faulty: Path) -> None:
    assert use(faulty, 0).returncode == 0
    for how, message in enumerate(FAULTS, 1):
        done = use(faulty, how)
        assert done.returncode != 0 and message in done.stderr, (how, done.stderr)


@needs_pairs
@pytest.mark.parametrize("instruction", ["dpbssd", "dpbf16ps"])
def test_products(instruction: str, tmp_path: Path) -> None:
    """Of whole tiles, added to what was there: integers exactly, the sums of bfloat16 within their roundings."""
    source = tmp_path / "product.c"
    source.write_text(PRODUCT.format(header=SOURCE.with_name("amx.h"), instruction=instruction))
    library = tmp_path / "product.so"
    subprocess.run([*command(ISAS[PAIR_ISA], "zig"), "-O1", "-fPIC", "-shared", str(source), "-o", str(library)],
                   check=True, capture_output=True)
    rng = np.random.default_rng(0)
    if instruction == "dpbssd":
        a, b = (rng.integers(-128, 128, (16, 64)).astype(np.int8) for _ in range(2))
        sums = rng.integers(-2**31, 2**31, (16, 16)).astype(np.int32)
        products = np.einsum("mk,nk->mn", a.astype(np.int64), b.reshape(16, 16, 4).transpose(1, 0, 2).reshape(16, 64))
        want = (sums + products).astype(np.int32)
    else:
        a, b = (to_bf16(rng.standard_normal((16, 32))) for _ in range(2))
        sums = rng.standard_normal((16, 16)).astype(np.float32)
        want = sums + from_bf16(a) @ from_bf16(b).reshape(16, 16, 2).transpose(1, 0, 2).reshape(16, 32).T
    ctypes.CDLL(str(library)).product(*(ctypes.c_void_p(part.ctypes.data) for part in (a, b, sums)))
    if instruction == "dpbssd":
        np.testing.assert_array_equal(sums, want)
    else:
        np.testing.assert_allclose(sums, want, atol=1e-5)


class Refusing:
    """A C library whose system calls fail."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, list[list[int]]()

    def syscall(self, *arguments: ctypes.c_long) -> int:
        self.calls.append([argument.value for argument in arguments])
        ctypes.set_errno(self.number)
        return -1 if self.number else 0


@pytest.mark.parametrize(("number", "reason"), [(22, "Linux has them from 5.16 on"), (95, "on this machine"),
                                                (28, "signal stack"), (1, "a sandbox"), (12, "Cannot allocate memory")])
def test_a_refusal_is_told_with_its_reason(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Refusing(number)
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda *_, **__: library)
    with pytest.raises(WorkFailed, match=rf"x\.engine needs the tile registers of AMX.*{reason}.*\n.*v4-bf16"):
        amx.request_tiles("x.engine")
    library.number = 0
    amx.request_tiles("x.engine")
    assert library.calls == [[158, 0x1023, 18]] * 2

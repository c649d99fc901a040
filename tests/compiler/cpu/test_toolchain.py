"""The C compiler: what it makes is right, the same everywhere, and its errors can be read."""
from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.cpu import toolchain
from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.cpu.toolchain import CompileError, NoCompiler, assembly, compile_shared, version

pytestmark = pytest.mark.usefixtures("compiles_anew")

SOURCE = """
#include <math.h>
int helper(int);
__attribute__((visibility("default"))) int answer(int x) { return helper(x) + 1; }
__attribute__((visibility("default"))) float root(float x) { return sqrtf(x); }
"""
HELPER = "int helper(int x) { return 2 * x; }"
SOURCES = {"a.c": SOURCE, "b.c": HELPER}

COMPILERS = ["zig", pytest.param("cc", marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no host cc"))]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiles_and_links(tmp_path: Path, compiler: str) -> None:
    out = tmp_path / "x.so"
    compile_shared(SOURCES, host_isa(), [], out, compiler, jobs=2)  # type: ignore[arg-type]
    library = ctypes.CDLL(str(out))
    library.root.restype, library.root.argtypes = ctypes.c_float, [ctypes.c_float]
    assert library.answer(20) == 41 and library.root(9.0) == 3.0
    assert not hasattr(library, "helper"), "only marked symbols are exported"
    assert [path.name for path in tmp_path.iterdir()] == ["x.so"]


@pytest.mark.parametrize("isa", ["x86-64-v3", "aarch64-dotprod"])
def test_bytes_do_not_depend_on_paths(tmp_path: Path, isa: str) -> None:
    made = []
    for name in ("one", "another/deeper"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "h.h").write_text("#define N 3\n")
        sources = {"a.c": '#include "h.h"\n#include <assert.h>\n' + SOURCE.replace("1;", "N;"), "b.c": HELPER}
        compile_shared(sources, ISAS[isa], [folder], folder / "x.so")
        made.append((folder / "x.so").read_bytes())
    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]


INTRINSICS = {
    "x86-64-v3": ("immintrin.h", "void NAME(float *x) { _mm256_storeu_ps(x, _mm256_sqrt_ps(_mm256_loadu_ps(x))); }"),
    "aarch64-dotprod": ("arm_neon.h", "void NAME(float *x) { vst1q_f32(x, vsqrtq_f32(vld1q_f32(x))); }")}


@pytest.mark.parametrize("isa", INTRINSICS)
def test_intrinsics_are_read_once_and_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          isa: str) -> None:
    """Of a file that includes them itself, one that a header includes them for, and one without."""
    header, function = INTRINSICS[isa]
    (tmp_path / "simd.h").write_text(f"#include <{header}>\n")
    exported = '__attribute__((visibility("default"))) ' + function
    sources = {"a.c": f"#include <{header}>\n" + exported.replace("NAME", "f"),
               "b.c": '#define _GNU_SOURCE\n#include "simd.h"\n' + exported.replace("NAME", "g"), "c.c": HELPER}
    run, is_used, made = toolchain._run, list[bool](), list[bytes]()

    def noted(words: Sequence[str], *given: Any) -> None:
        is_used.append("-include-pch" in words)
        run(words, *given)

    monkeypatch.setattr(toolchain, "_run", noted)
    for turn in range(2):
        if turn:
            monkeypatch.setattr(toolchain, "_precompiled", lambda *given: {})
        compile_shared(sources, ISAS[isa], [tmp_path], tmp_path / "x.so")
        made.append((tmp_path / "x.so").read_bytes())
    assert made[0] == made[1]
    assert is_used == [False, True, True, False, False, *[False] * 4]


def test_homes_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zig would fail, or never end; the bytes are the same."""
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    made = [assembly(HELPER, ISAS["x86-64-v3"], [])]
    for home in ("/proc/none", str(tmp_path / "file")):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        made.append(assembly(HELPER, ISAS["x86-64-v3"], []))
    assert made[1:] == made[:1] * 2


def test_error_shows_what_the_compiler_said(tmp_path: Path) -> None:
    out = tmp_path / "x.so"
    with pytest.raises(CompileError, match=r"failed on broken\.c for x86-64-v3[\s\S]*undeclared"):
        compile_shared({"broken.c": "int f(void) { return nothing; }"}, ISAS["x86-64-v3"], [], out)
    assert not list(tmp_path.iterdir())


def test_link_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="missing_function"):
        compile_shared({"a.c": "int missing_function(int);\n__attribute__((visibility(\"default\"))) "
                               "int f(void) { return missing_function(1); }"}, ISAS["x86-64-v3"], [], tmp_path / "x.so")


def test_host_compiler_does_not_cross_compile(tmp_path: Path) -> None:
    foreign = "aarch64-dotprod" if platform.machine() == "x86_64" else "x86-64-v3"
    with pytest.raises(NoCompiler, match=r"cross-compiles|no C compiler"):
        compile_shared(SOURCES, ISAS[foreign], [], tmp_path / "x.so", "cc")


def test_assembly_of_every_target() -> None:
    for isa in ISAS.values():
        assert "answer" in assembly(SOURCE, isa, [])


def test_version_names_the_compiler() -> None:
    assert version("zig").startswith("zig 0.")

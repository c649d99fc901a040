"""Kernels compile without a GPU, to the same bytes everywhere, and only once."""
from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.gpu import disassemble as disassembler
from ingot.compiler.gpu import triton_compile
from ingot.compiler.gpu.disassemble import count_instructions, matrix_instructions, operand_bits, spills
from ingot.compiler.gpu.triton_compile import CompiledKernel, CompileError, PtxCompiler, cache_key, compile_kernels
from ingot.compiler.targets import Architecture, architectures
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.plugins.gpu.sources import source_digest
from ingot.runtime.errors import RequestError

SM90 = architectures()["sm_90a"]
MODULE = "tests.compiler.gpu.kernels"
SCALED = GpuKernel("scaled", MODULE, "scaled", (("x", "*fp32"), ("y", "*fp32"), ("factor", "fp32")),
                   (("N", 1000), ("BLOCK", 256)))
PRODUCT = GpuKernel("product", MODULE, "product", (("x", "*bf16"), ("w", "*bf16"), ("y", "*fp32")),
                    (("M", 64), ("N", 64), ("K", 64)))


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def test_code_and_what_is_told_of_it(cache: Path) -> None:
    done = compile_kernels([SCALED, PRODUCT], SM90, cache, jobs=2)
    product = done[PRODUCT]
    assert product.cubin[:4] == b"\x7fELF" and product.entry == "product" and product.arch == "sm_90a"
    assert {operand_bits(name) for name in product.matrix} == {16} and next(iter(product.matrix)).startswith("HGMMA")
    assert 0 < product.registers <= 255 and product.num_warps == 4 and product.cluster == 1
    assert product.shared_bytes >= 2 * 64 * 64 * 2 and product.stack_bytes == product.spill_stores == 0
    assert not done[SCALED].matrix and done[SCALED].shared_bytes == 0
    assert done[SCALED].occupancy(SM90) == 2048 // 128, "threads are the limit"
    assert "cubin" not in product.to_json()


def test_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernels([SCALED], SM90, cache)
    monkeypatch.setattr(triton_compile, "_Worker", lambda: pytest.fail("a second compilation"))
    told: list[str] = []
    assert compile_kernels([SCALED, replace(SCALED, symbol="another_name")], SM90, cache, progress=told.append) == \
        first | {replace(SCALED, symbol="another_name"): first[SCALED]}
    assert not told


def test_a_damaged_entry_is_compiled_again(cache: Path, tmp_path: Path) -> None:
    compile_kernels([SCALED], SM90, cache)
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    folder = copy / cache_key(SCALED, SM90)[:2] / cache_key(SCALED, SM90)
    good = (folder / "kernel.cubin").read_bytes()
    (folder / "kernel.cubin").write_bytes(good[:-1])
    assert compile_kernels([SCALED], SM90, copy)[SCALED].cubin == good
    assert (folder / "kernel.cubin").read_bytes() == good
    (folder / "kernel.json").write_text("{}")
    assert compile_kernels([SCALED], SM90, copy)[SCALED].cubin == good


def test_bytes_do_not_depend_on_folder_or_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  request: pytest.FixtureRequest) -> None:
    source = (request.config.rootpath / "tests/compiler/gpu/kernels.py").read_text()
    kernel = replace(PRODUCT, module="ingot_copied_kernels")
    made = []
    for name in ("one", "another/deeper"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "ingot_copied_kernels.py").write_text(source)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(folder))
            patch.syspath_prepend(str(folder))
            patch.setenv("TRITON_DISABLE_LINE_INFO", "0")  # the user's own switches must not matter
            source_digest.cache_clear()
            made.append(compile_kernels([kernel], SM90, folder / "cache")[kernel].cubin)
    assert made[0] == made[1] and str(tmp_path).encode() not in made[0]


def test_the_key_holds_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(PRODUCT, SM90)
    others = [replace(PRODUCT, num_warps=8), replace(PRODUCT, num_stages=2), replace(PRODUCT, max_registers=64),
              replace(PRODUCT, constants=(("M", 32), *PRODUCT.constants[1:])), replace(PRODUCT, function="scaled"),
              replace(PRODUCT, parameters=(("x", "*fp16"), *PRODUCT.parameters[1:]))]
    assert len({key, cache_key(PRODUCT, architectures()["sm_89"]), *(cache_key(k, SM90) for k in others)}) == 8
    assert cache_key(replace(PRODUCT, symbol="other"), SM90) == key
    monkeypatch.setattr(triton_compile, "version", lambda package: "9.9")
    assert cache_key(PRODUCT, SM90) != key


def test_sources_are_followed_through_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ingot_pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text("import os\nfrom .shared import a\nfrom . import more\n")
    (package / "shared.py").write_text("from .deep import b\n")
    (package / "deep.py").write_text("b = 1\n")
    (package / "more.py").write_text("c = 1\n")
    (package / "unrelated.py").write_text("d = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest("ingot_pack.kernels")
    first = digest()
    for name, changes in (("unrelated.py", False), ("deep.py", True), ("more.py", True), ("kernels.py", True)):
        before = digest()
        (package / name).write_text((package / name).read_text() + "e = 2\n")
        assert (digest() != before) == changes, name
    assert digest() != first


def test_assembly_is_told_on_request(tmp_path: Path) -> None:
    with PtxCompiler(SM90, tmp_path) as compiler:
        told = compiler(PRODUCT)
        assert ".entry product(" in told.ptx and ".target sm_90a" in told.ptx and told.shared_bytes
        with pytest.raises(CompileError, match="no attribute 'absent'"):
            compiler(replace(SCALED, function="absent"))
    with PtxCompiler(SM90, tmp_path) as compiler:
        assert compiler(PRODUCT) == told and compiler._worker is None, "it was kept"


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    narrow = GpuKernel("narrow", MODULE, "narrow", (("x", "*fp32"), ("y", "*fp8e4nv")), (("TO", "x"), ("BLOCK", 64)))
    assert compile_kernels([narrow], architectures()["sm_89"], tmp_path)[narrow].registers
    with pytest.raises(CompileError, match=r"kernel narrow \(tests.compiler.gpu.kernels.narrow\) does not compile for "
                                           r"sm_80[\s\S]*fp8e4nv"):
        compile_kernels([narrow], architectures()["sm_80"], tmp_path)
    with pytest.raises(CompileError, match=r"scaled takes \['x', 'y', 'factor', 'N', 'BLOCK'\], the kernel gives"):
        compile_kernels([replace(SCALED, constants=(("N", 1),))], SM90, tmp_path)
    with pytest.raises(CompileError, match=r"takes its parameters as \['x', 'y', .*, the kernel tells \['y', 'x'"):
        compile_kernels([replace(SCALED, parameters=(SCALED.parameters[1], SCALED.parameters[0],
                                                     SCALED.parameters[2]))], SM90, tmp_path)
    with pytest.raises(CompileError, match="no attribute 'absent'"):
        compile_kernels([replace(SCALED, function="absent")], SM90, tmp_path)


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    large = replace(PRODUCT, constants=(("M", 64), ("N", 128), ("K", 1024)))
    with pytest.raises(CompileError, match=r"kernel product needs \d+ bytes of shared memory; a block of sm_90a"):
        compile_kernels([large], SM90, tmp_path)


def test_sources_that_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled must never be filed under another source."""
    monkeypatch.setattr(triton_compile, "source_digest", lambda module, text: "of an older text")
    with pytest.raises(CompileError, match=r"the source of tests.compiler.gpu.kernels changed while"):
        compile_kernels([SCALED], SM90, tmp_path)
    assert not list(tmp_path.rglob("kernel.cubin"))


def test_without_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(disassembler.importlib.util, "find_spec",
                        lambda name, *rest: None if name == "triton" else find(name, *rest))
    with pytest.raises(RequestError, match=r"triton, which is not installed[\s\S]*pip install --no-deps triton=="):
        compile_kernels([SCALED], SM90, tmp_path)


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/         @P1       IMMA.16832.S8.S8.SAT R4, R8.ROW, R12.COL, R4 ;
        /*0040*/             @!UP0 UTCQMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10], idesc[UR11], UPT ;
        /*0050*/                   FFMA R3, R4, R5, R6 ;
        /*0060*/                   STL.64 [R1], R2 ;
        /*0070*/                   LDL R2, [R1] ;
        /*0080*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*1230*/              @UPT OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R5, R6, URZ ;
"""


def test_instructions_are_counted() -> None:
    counts = count_instructions(SASS)
    assert counts["HMMA.16816.F32.BF16"] == 2 and counts["FFMA"] == 1 and "BRA" in counts and "LDC" in counts
    assert sum(counts.values()) == 10
    assert list(matrix_instructions(counts)) == [
        "HMMA.16816.F32.BF16", "IMMA.16832.S8.S8.SAT", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "UTCQMMA"]
    assert spills(counts) == (1, 1)


@pytest.mark.parametrize(("mnemonic", "bits"), [
    ("HMMA.16816.F32.BF16", 16), ("HMMA.1688.F32.TF32", 32), ("HGMMA.64x16x16.F32.BF16", 16), ("UTCHMMA", 16),
    ("QGMMA.64x128x32.F32.E4M3.E4M3", 8), ("IGMMA.64x16x32.S8.S8", 8), ("UTCIMMA", 8), ("IMMA.16864.S4.S4", 4),
    ("UTCOMMA.4X", 4), ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", 4), ("DMMA.884", 64)])
def test_operand_bits(mnemonic: str, bits: int) -> None:
    assert operand_bits(mnemonic) == bits


class TestSpills:
    """A stand-in for the compiler: (registers, spills) are `usual` when it is left alone, `more` when told a number."""

    def compiled(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usual: tuple[int, int], more: tuple[int, int],
                 max_registers: int | None = None) -> tuple[int, int, list[int | None]]:
        """Registers, spills, and how many registers each compilation was told."""
        told: list[int | None] = []

        def finish(kernel: GpuKernel, arch: Architecture, answer: dict[str, Any]) -> CompiledKernel:
            told.append(kernel.max_registers)
            registers, stores = usual if kernel.max_registers == max_registers else more
            return CompiledKernel("f", arch.name, registers, 0, stores, stores, 0, 8, 1, 0, 1, (), {}, True, b"code")

        class Silent:
            def ask(self, request: dict[str, Any]) -> dict[str, Any]:
                return {}

            def close(self) -> None:
                pass

        monkeypatch.setattr(triton_compile, "_finish", finish)
        monkeypatch.setattr(triton_compile, "_Worker", Silent)
        kernel = replace(SCALED, max_registers=max_registers)
        (found,) = compile_kernels([kernel], SM90, tmp_path).values()
        assert compile_kernels([kernel], SM90, tmp_path) == {kernel: found}
        return found.registers, found.spill_stores, told

    def test_what_spills_gets_the_registers_there_are(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.compiled(monkeypatch, tmp_path, (72, 2), (90, 0)) == (90, 0, [None, 255])

    def test_but_not_if_it_is_no_better(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.compiled(monkeypatch, tmp_path, (72, 2), (250, 3)) == (72, 2, [None, 255])

    def test_nor_if_there_are_no_more(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.compiled(monkeypatch, tmp_path, (255, 2), (90, 0)) == (255, 2, [None])

    def test_nor_if_it_was_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.compiled(monkeypatch, tmp_path, (64, 2), (90, 0), max_registers=64) == (64, 2, [64])

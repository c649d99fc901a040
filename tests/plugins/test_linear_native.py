"""The C form of rounding and packing gives the bytes of the numpy form, on every instruction set of this machine."""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import host_isas
from ingot.compiler.weights import native as compiling
from ingot.plugins.linear import native
from ingot.plugins.linear.pack import bf16_bits, dequantize, pack, to_float32
from ingot.plugins.linear.quantize_weights import fit_w4
from ingot.plugins.scheme import SCHEMES

GRIDS = pytest.mark.parametrize("scheme", ["w4a8", "int8g32"])


@pytest.fixture(scope="module", params=host_isas(), ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiling.compile_native(request.param, tmp_path_factory.mktemp("native"))))


@pytest.fixture(autouse=True)
def numpy_again() -> Iterator[None]:
    before = native._library
    native.use(None)
    yield
    native.use(before)


def kinds(n: int, k: int) -> dict[str, np.ndarray]:
    """Weights of every kind that the rounding tells apart, and what floats are at their ends."""
    rng = np.random.default_rng(n * k)
    w = rng.standard_normal((n, k)).astype(np.float32)
    coarse = (np.rint(w * 3).clip(-8, 7) * np.float32(0.07)).astype(np.float32)
    half, zeros, scales, sparse = w.copy(), w.copy(), w.copy(), w.copy()
    half[:n // 2] = coarse[:n // 2]
    zeros[::3], zeros[1::3], zeros[2::3, ::2] = 0, -0.0, -0.0
    scales[::2] *= 1e-8
    scales[1::4] *= 1e-30
    scales[3::8] *= 1e25
    sparse[rng.random((n, k)) < 0.9] = 0
    fine = (rng.integers(0, 16, (n, k)) * np.float32(0.013) - np.float32(0.1)).astype(np.float32)
    return {"normal": w, "bf16": to_float32(bf16_bits(w)), "on 16 levels": to_float32(bf16_bits(fine)),
            "on 16 levels to the bit": (rng.integers(-8, 8, (n, k)) * np.float32(0.0625)).astype(np.float32),
            "parts of larger groups": to_float32(bf16_bits(coarse)), "half of them": half, "zeros": zeros,
            "negative zeros": np.full((n, k), -0.0, np.float32), "scales": scales, "sparse": sparse,
            "constant": np.repeat(w[:, :1], k, axis=1), "denormal": (w * np.float32(1e-41)).astype(np.float32)}


@GRIDS
@pytest.mark.parametrize(("n", "k"), [(16, 32), (17, 64), (48, 33), (130, 576)], ids=str)
def test_a_matrix_is_packed_to_the_same_bytes(library: ctypes.CDLL, n: int, k: int, scheme: str) -> None:
    for kind, w in kinds(n, k).items():
        native.use(None)
        with np.errstate(all="ignore"):
            expected = pack(w, SCHEMES[scheme])
        native.use(library)
        np.testing.assert_array_equal(pack(w, SCHEMES[scheme]), expected, kind)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_are_fitted_to_the_same_bits(library: ctypes.CDLL, group: int) -> None:
    for kind, w in kinds(66, 192).items():
        for columns in (1, 2, 15, 99):
            x = np.ascontiguousarray(w.reshape(-1)[:group * columns].reshape(columns, group).T)
            native.use(None)
            with np.errstate(all="ignore"):
                expected = fit_w4(x)
                native.use(library)
                got = fit_w4(x)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16), f"{kind}, {columns} columns")


def test_bits_of_bfloat16(library: ctypes.CDLL) -> None:
    bits = bf16_bits(kinds(40, 70)["normal"])
    for scheme in ("w4a8", "int8g32"):
        native.use(library)
        got = pack(bits, SCHEMES[scheme])
        native.use(None)
        np.testing.assert_array_equal(got, pack(bits, SCHEMES[scheme]))


def test_weights_of_gguf_keep_their_bits(library: ctypes.CDLL) -> None:
    """Which takes what settle_exact does between the two calls of C."""
    import gguf
    native.use(library)
    w = kinds(64, 576)["normal"]
    for kind, scheme in (("Q4_0", "w4a8"), ("Q4_1", "w4a8"), ("Q8_0", "int8g32")):
        form = gguf.GGMLQuantizationType[kind]
        stored = gguf.dequantize(gguf.quantize(w, form), form)
        np.testing.assert_array_equal(dequantize(stored, SCHEMES[scheme]), stored)


def test_it_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_tried", False)
    assert compiling.load_native() and native.is_used() and len(list(tmp_path.glob("code/??/*"))) == 1
    native.use(None)
    monkeypatch.setattr(compiling, "_tried", False)
    monkeypatch.setattr(compiling, "compile_native", lambda *_: pytest.fail("compiled again"))
    assert compiling.load_native()


def test_without_a_compiler_numpy_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_tried", False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert not compiling.load_native() and not native.is_used()
    assert pack(kinds(16, 32)["normal"], SCHEMES["w4a8"]).size == 320

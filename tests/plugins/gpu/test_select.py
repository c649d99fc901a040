"""Softmax, running sums, the largest, the best in order, and scattering in the interpreter."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.gpu.kernel import Candidates, GpuKernel
from ingot.plugins.select import reference
from ingot.plugins.select.tactics import (
    Argmax,
    Cumsum,
    Scatter,
    Softmax,
    TopK,
    argmax,
    cumsum,
    scatter,
    softmax,
    topk,
)

from .support import ARCHITECTURES, QUICK, assert_close, compiled, device, load, store

H200 = device("sm_90a")
ROWS, MORE = 5, 3
"""Rows of the step, and how many more the launch is made for; rows are "3*T" or a number."""

SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 1.0, -1e-40, -1.0]


def numbers(width: int, kind: str, special: bool = True) -> np.ndarray:
    """[3 * (ROWS + MORE), width], with equal elements, infinities and NaN; the rows beyond the step are NaN."""
    rng = np.random.default_rng(width)
    if kind == "i32":
        x = rng.integers(-4, 5, (3 * (ROWS + MORE), width)).astype(np.int32)
        x[0, 0], x[1, -1] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        return x
    x = np.round(rng.standard_normal((3 * (ROWS + MORE), width)), 1)
    if special:
        x[1, :len(SPECIAL)] = SPECIAL[:width]
        x[2, ::2] = -np.inf
        x[3] = np.nan
        x[4, -1] = np.nan
    x[3 * ROWS:] = np.nan
    return store(x.astype(np.float32), kind)


def launched(interpreter: Interpreter, found: Candidates, arrays: dict[str, np.ndarray],
             aliases: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    one, = found.legal[0].launches
    wanted = {(aliases or {}).get(name, name) for name, _ in one.kernel.parameters}
    arrays = {**arrays, "sizes": np.array([ROWS, 2, 1], np.int32)}
    return interpreter.run([(one, aliases or {})], {name: array for name, array in arrays.items() if name in wanted})


def untouched(bits: np.ndarray, mark: object) -> None:
    assert (bits[3 * ROWS:] == mark).all(), "written beyond the step's rows"


@pytest.mark.parametrize("width", [1, 2, 7, 130, 5003])
@pytest.mark.parametrize(("kind", "out"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
def test_softmax(interpreter: Interpreter, width: int, kind: str, out: str) -> None:
    x = numbers(width, kind, special=False)
    p = Softmax(3 * (ROWS + MORE), "3*T", width, kind, out)
    y = store(np.full(x.shape, 7), out)
    got = launched(interpreter, softmax(p, H200), {"x": x, "y": y})["y"]
    wanted = reference.softmax(load(x, kind)[:3 * ROWS])
    assert_close(load(got, out)[:3 * ROWS], wanted, out, 2e-6)
    untouched(load(got, out), 7)
    if kind == out:
        same = launched(interpreter, softmax(p, H200), {"x": x}, {"y": "x"})["x"]
        assert np.array_equal(same[:3 * ROWS], got[:3 * ROWS]), "in place"


def test_softmax_of_special_values(interpreter: Interpreter) -> None:
    """As numpy: NaN anywhere makes a row NaN, infinity too; minus infinity counts for nothing."""
    x = numbers(20, "fp32")
    got = launched(interpreter, softmax(Softmax(24, "3*T", 20, "fp32", "fp32"), H200), {"x": x, "y": np.zeros_like(x)})
    with np.errstate(invalid="ignore"):
        wanted = reference.softmax(x[:3 * ROWS])
    assert np.allclose(got["y"][:3 * ROWS], wanted, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert np.isnan(wanted[3]).all() and (wanted[2, ::2] == 0).all()


@pytest.mark.parametrize("width", [1, 6, 300, 5003])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "i32"])
def test_cumsum(interpreter: Interpreter, width: int, kind: str) -> None:
    x = numbers(width, kind, special=False)
    if kind == "i32":
        x[:2] = 3
    out = "i32" if kind == "i32" else "fp32"
    y = np.full(x.shape, 7, np.int32 if kind == "i32" else np.float32)
    p = Cumsum(3 * (ROWS + MORE), "3*T", width, kind, out)
    got = launched(interpreter, cumsum(p, H200), {"x": x, "y": y})["y"]
    untouched(got, 7)
    if kind == "i32":
        assert np.array_equal(got[:3 * ROWS], np.cumsum(x[:3 * ROWS], axis=1))
    else:
        wanted = np.cumsum(load(x, kind)[:3 * ROWS], axis=1)
        assert np.abs(got[:3 * ROWS] - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("width", [1, 2, 9, 64, 5003])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "i32"])
def test_argmax(interpreter: Interpreter, width: int, kind: str) -> None:
    x = numbers(width, kind)
    if kind == "i32":
        x[2] = np.iinfo(np.int32).min
    got = launched(interpreter, argmax(Argmax(3 * (ROWS + MORE), "3*T", width, kind), H200),
                   {"x": x, "y": np.full(len(x), 7, np.int32)})["y"]
    wide = x if kind == "i32" else load(x, kind)
    assert np.array_equal(got[:3 * ROWS], np.argmax(wide[:3 * ROWS], axis=1))
    untouched(got, 7)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (9, 2), (9, 9), (64, 8), (130, 130), (300, 5)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "i32"])
def test_topk(interpreter: Interpreter, width: int, k: int, kind: str, largest: bool) -> None:
    x = numbers(width, kind)
    mark = store(np.full((len(x), k), 7), kind) if kind != "i32" else np.full((len(x), k), 7, np.int32)
    out = launched(interpreter, topk(TopK(3 * (ROWS + MORE), "3*T", width, k, kind, largest), H200),
                   {"x": x, "values": mark, "indices": np.full((len(x), k), 7, np.int32)})
    wide = x if kind == "i32" else load(x, kind)
    _, indices = reference.topk(wide[:3 * ROWS], k, largest)
    assert np.array_equal(out["indices"][:3 * ROWS], indices)
    assert out["values"][:3 * ROWS].tobytes() == np.take_along_axis(x[:3 * ROWS], indices, 1).tobytes()
    untouched(out["indices"], 7)
    untouched(out["values"], mark[0, 0])


@pytest.mark.parametrize(("width", "count", "source_width"), [
    (1, 1, 1), (9, 2, 2), (9, 2, 5), (8, 3, 0), (130, 130, 131)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "i32", "bool"])
def test_scatter(interpreter: Interpreter, width: int, count: int, source_width: int, kind: str) -> None:
    """Indices repeat: the last write counts."""
    rng = np.random.default_rng(3)
    rows, dtype = 3 * (ROWS + MORE), {"fp32": np.float32, "bf16": np.uint16, "i32": np.int32, "bool": np.uint8}[kind]
    x, source = (rng.integers(0, 250, (rows, n)).astype(dtype) for n in (width, max(source_width, 1)))
    index = rng.integers(0, width, (rows, count)).astype(np.int32)
    index[3 * ROWS:] = 1 << 30
    out = launched(interpreter, scatter(Scatter(rows, "3*T", width, count, source_width, kind), H200),
                   {"x": x, "index": index, "source": source if source_width else source[:1],
                    "y": np.full(x.shape, 7, dtype)})["y"]
    given = source[:3 * ROWS] if source_width else np.broadcast_to(source[:1, :1], (3 * ROWS, count))
    assert np.array_equal(out[:3 * ROWS], reference.scatter(x[:3 * ROWS], index[:3 * ROWS], given))
    untouched(out, 7)


def test_rows_that_are_a_number(interpreter: Interpreter) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = argmax(Argmax(4, 4, 3, "fp32"), H200)
    assert [name for name, _ in found.legal[0].launches[0].kernel.parameters] == ["x", "y"]
    assert (launched(interpreter, found, {"x": x, "y": np.zeros(4, np.int32)})["y"] == 2).all()


def test_refusals() -> None:
    assert "up to 32768 are ordered" in topk(TopK(1, "T", 50000, 5, "fp32"), H200).refused[0].reason


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[] if arch in QUICK else pytest.mark.slow)
                                  for arch in ARCHITECTURES])
def test_compiles_without_spills(arch: str) -> None:
    target, kernels = device(arch), list[GpuKernel]()
    for m in (8, 2048):
        kernels += [found.legal[0].launches[0].kernel for found in (
            softmax(Softmax(m, "T", 128, "fp32", "fp32"), target),
            softmax(Softmax(m, "T", 32000, "bf16", "bf16"), target),
            cumsum(Cumsum(m, "T", 5003, "i32", "i32"), target), argmax(Argmax(m, "T", 5003, "bf16"), target),
            topk(TopK(m, "T", 256, 8, "fp32"), target), topk(TopK(m, "T", 2048, 2048, "bf16", False), target),
            scatter(Scatter(m, "T", 256, 4, 0, "fp32"), target), scatter(Scatter(m, "T", 8, 2, 2, "bool"), target))]
    for kernel, code in compiled(kernels, arch).items():
        assert code.spill_stores == 0 and code.registers <= 168, (kernel.symbol, code.registers)

"""The interpreter runs a kernel's own source on arrays, and does not forgive accesses beside them."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter, InterpreterError
from ingot.plugins.gpu.generated import module_name
from ingot.plugins.gpu.interpret import Prepared, prepare
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch

MODULE = "tests.compiler.gpu.kernels"


@pytest.fixture(scope="module")
def interpreter(request: pytest.FixtureRequest) -> Iterator[Interpreter]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(request.config.rootpath))
        with Interpreter() as running:
            yield running


def product(kind: str) -> GpuLaunch:
    kernel = GpuKernel("product", MODULE, "product", (("x", f"*{kind}"), ("w", f"*{kind}"), ("y", "*fp32")),
                       (("M", 16), ("N", 32), ("K", 64)))
    return GpuLaunch(kernel, (1, 1, 1))


def test_launches_run_in_order(interpreter: Interpreter) -> None:
    kernel = GpuKernel("scaled", MODULE, "scaled", (("x", "*fp32"), ("y", "*fp32"), ("factor", "fp32")),
                       (("N", 100), ("BLOCK", 32)))
    launch = GpuLaunch(kernel, (4, 1, 1))
    x = np.arange(100, dtype=np.float32)
    out = interpreter.run([(launch, {"factor": 3}), (launch, {"x": "y", "y": "z", "factor": 0.5})],
                          {"x": x, "y": np.full(104, 7, np.float32), "z": np.zeros(100, np.float32)})
    assert np.array_equal(out["y"][:100], 3 * x) and (out["y"][100:] == 7).all()
    assert np.array_equal(out["z"], 1.5 * x)


def test_eight_bit_and_half_products_are_right(interpreter: Interpreter) -> None:
    """What kernels rely on; bf16 products are wrong there, and kernels widen them (plugins/gpu/math.py)."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((rows, 64)).astype(np.float16) for rows in (16, 32))
    out = interpreter.run([(product("fp16"), {})], {"x": x, "w": w, "y": np.zeros((16, 32), np.float32)})
    assert np.allclose(out["y"], x.astype(np.float32) @ w.astype(np.float32).T, atol=1e-3)


def test_reading_beyond_an_array_is_an_error(interpreter: Interpreter) -> None:
    kernel = GpuKernel("reads_beyond", MODULE, "reads_beyond", (("x", "*fp32"), ("y", "*fp32")), (("BLOCK", 16),))
    with Interpreter() as own, pytest.raises(InterpreterError, match=r"ended \(status -11\) in reads_beyond"):
        own.run([(GpuLaunch(kernel, (1, 1, 1)), {})], {"x": np.zeros(4096, np.float32), "y": np.zeros(16, np.float32)})


@pytest.mark.parametrize(("kind", "factor", "fits"), [
    ("int32", 65_537, 32_767), ("int32", -65_537, 32_767), ("int16", 255, 128), ("uint32", 65_537, 65_535)])
def test_numbers_that_overflow_are_an_error(interpreter: Interpreter, kind: str, factor: int, fits: int) -> None:
    name = kind.replace("uint", "u").replace("int", "i")
    kernel = GpuKernel("overflows", MODULE, "overflows", (("x", f"*{name}"), ("y", f"*{name}")),
                       (("FACTOR", factor), ("BLOCK", 16)))
    x = np.full(16, fits, kind)
    launch, out = GpuLaunch(kernel, (1, 1, 1)), np.zeros(16, kind)
    assert (interpreter.run([(launch, {})], {"x": x, "y": out})["y"] == fits * factor).all()
    x[7] += 1
    with pytest.raises(InterpreterError, match=f"overflows: OverflowError: mul of {kind}"):
        interpreter.run([(launch, {})], {"x": x, "y": out})


def test_integers_of_generated_kernels_wrap(interpreter: Interpreter) -> None:
    text = Path(__file__).with_name("kernels.py").read_text()
    kernel = GpuKernel("overflows", module_name(text), "overflows", (("x", "*i32"), ("y", "*i32")),
                       (("FACTOR", 65_537), ("BLOCK", 16)), source=text)
    got = interpreter.run([(GpuLaunch(kernel, (1, 1, 1)), {})],
                          {"x": np.full(16, 32_768, np.int32), "y": np.zeros(16, np.int32)})["y"]
    assert (got == 32_768 * 65_537 - 2**32).all()


def test_engines_in_other_threads_change_nothing() -> None:
    """Whether integers wrap is a kernel's matter, not that of the last one that was begun: in a swap two engines answer
    in one process."""
    text = Path(__file__).with_name("kernels.py").read_text()
    x, y, z = np.full(16, 32_768, np.int32), np.zeros(16, np.int32), np.zeros(16, np.int32)
    begun, other = threading.Event(), threading.Event()

    def prepared(factor: int, out: np.ndarray, **source: Any) -> Prepared:
        kernel = GpuKernel("overflows", source.pop("module", MODULE), "overflows", (("x", "*i32"), ("y", "*i32")),
                           (("FACTOR", factor), ("BLOCK", 16)), **source)
        return prepare(kernel, (1, 1, 1), {"x": x.ctypes.data, "y": out.ctypes.data})

    wraps, checks = prepared(65_537, y, module=module_name(text), source=text), prepared(3, z)
    function = wraps.function

    def held(**arguments: Any) -> None:
        begun.set()
        other.wait(60)
        function(**arguments)

    thread = threading.Thread(target=replace(wraps, function=held).run)
    thread.start()
    begun.wait(60)
    checks.run()
    other.set()
    thread.join(60)
    assert (y == 32_768 * 65_537 - 2**32).all() and (z == 3 * 32_768).all()


def test_numbers_that_are_equal_but_not_the_same(interpreter: Interpreter) -> None:
    kernel = GpuKernel("zeros_beside", MODULE, "zeros_beside", (("x", "*fp32"), ("y", "*fp32")), (("BLOCK", 16),))
    out = interpreter.run([(GpuLaunch(kernel, (1, 1, 1)), {})],
                          {"x": np.ones(16, np.float32), "y": np.ones((2, 16), np.float32)})["y"]
    assert (out == 0).all() and np.signbit(out).tolist() == [[False] * 16, [True] * 16]


def test_errors_are_told(interpreter: Interpreter) -> None:
    kernel = GpuKernel("lost", MODULE, "lost", (("x", "*fp32"),), ())
    with pytest.raises(InterpreterError, match="lost: AttributeError"):
        interpreter.run([(GpuLaunch(kernel, (1, 1, 1)), {})], {"x": np.zeros(4, np.float32)})
    assert interpreter.run([], {"x": np.ones(3, np.float32)})["x"].sum() == 3, "it goes on"

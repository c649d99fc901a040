"""Products of two activations in the interpreter: broadcast leading dimensions, symbolic extents anywhere."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.constants import Rows
from ingot.plugins.matmul.reference import matmul
from ingot.plugins.matmul.tactics import Matmul, candidates

from .support import ARCHITECTURES, QUICK, assert_close, compiled, device, load, store

BINDINGS = (("T", 9), ("L", 4))
STEP = {"T": 5, "L": 3}
H200 = device("sm_90a")

CASES: list[tuple[tuple[Rows, ...], tuple[Rows, ...]]] = [
    (("T", 7), (7, 5)), ((3, "T", 40), (3, 40, 70)), (("T", 1, 24), ("T", 24, 33)), (("T", 6, 17), (17, 9)),
    ((4, 1, "T", 8), (2, 8, 3)), ((2, "T", 1, 5, 8), (1, "T", 4, 8, 6)), ((3, 4, 5), (5, "2*T")), ((6, "T"), ("T", 3)),
    (("L", 70), (70, 65)), ((5, 3, 2, 4), (5, 1, 4, 3)), ((1, 1, 3, 9), (9, 2))]


def extents(shape: tuple[Rows, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else int(dim.rpartition("*")[0] or 1) * sizes[dim[-1]] for dim in shape)


@pytest.mark.parametrize(("a_shape", "b_shape"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_products(interpreter: Interpreter, a_shape: tuple[Rows, ...], b_shape: tuple[Rows, ...], kind: str) -> None:
    rng = np.random.default_rng(5)
    one, = candidates(Matmul(a_shape, b_shape, kind, kind, kind, BINDINGS), H200).legal[0].launches
    values, arrays = [], {"sizes": np.array([5, 2, 3], np.int32)}
    for name, shape in (("a", a_shape), ("b", b_shape)):
        x = store(rng.standard_normal(extents(shape, STEP)), kind)
        whole = store(np.full(np.prod(extents(shape, dict(BINDINGS))), np.nan), kind)
        whole[:x.size] = x.reshape(-1)
        values.append(load(x, kind))
        arrays[name] = whole
    wanted = matmul(*values)
    result = (*np.broadcast_shapes(extents(a_shape, dict(BINDINGS))[:-2], extents(b_shape, dict(BINDINGS))[:-2]),
              extents(a_shape, dict(BINDINGS))[-2], extents(b_shape, dict(BINDINGS))[-1])
    arrays["y"] = store(np.full(np.prod(result), np.nan), kind)
    names = {name for name, _ in one.kernel.parameters}
    got = load(interpreter.run([(one, {})], {name: arrays[name] for name in names})["y"], kind)
    assert_close(got[:wanted.size].reshape(wanted.shape), wanted, kind, 2e-6)
    assert np.isnan(got[wanted.size:]).all(), "written beyond"


def test_refusals() -> None:
    p = Matmul((2, 1, 2, 1, 4, 8), (1, 2, 1, 2, 8, 4), "bf16", "bf16", "bf16")
    assert "up to 3" in candidates(p, H200).refused[0].reason


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[] if arch in QUICK else pytest.mark.slow)
                                  for arch in ARCHITECTURES])
def test_compiles_without_spills(arch: str) -> None:
    kernels = []
    for tokens in (8, 2048):
        bindings = (("T", tokens), ("L", 8))
        for kind in ("bf16", "fp32"):
            for a, b in (((16, "T", 128), (16, 128, 512)), (("T", 1, 64), ("T", 64, 96))):
                p = Matmul(a, b, kind, kind, kind, bindings)
                kernels.append(candidates(p, device(arch)).legal[0].launches[0].kernel)
    for kernel, code in compiled(kernels, arch).items():
        assert code.spill_stores == 0, kernel.symbol
        assert bool(code.matrix) == (dict(kernel.parameters)["a"] == "*bf16"), "no TF32"

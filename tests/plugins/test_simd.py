"""The scalar functions and vectors that kernels are made of, against numpy in float64."""
from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.cpu.toolchain import assembly
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit

from .native import ALL_ISAS, HOST_ISAS, Library, Step, aligned, from_bf16, placed, to_bf16

_erf = np.vectorize(math.erf)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))


UNARY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    # what it is, error allowed in units in the last place, where these are smaller than that absolute error
    "expf": (np.exp, 1, 0), "expm1f": (np.expm1, 1.5, 0), "logf": (np.log, 1, 0), "log1pf": (np.log1p, 2, 0),
    "tanhf": (np.tanh, 3, 0), "sigmoidf": (_sigmoid, 3, 1e-37), "siluf": (lambda x: x * _sigmoid(x), 4, 1e-35),
    "softplusf": (partial(np.logaddexp, 0), 3, 0), "erff": (_erf, 4, 0),
    "geluf": (lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))), 3, 5e-7), "gelu_tanhf": (_gelu_tanh, 5, 5e-7),
    "sinf": (np.sin, 0, 1.5e-7), "cosf": (np.cos, 0, 1.5e-7),
}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1, -1, 88.72, 88.73, -87.4, -103.9, -104.1, 1e-40, -1e-40, 3e38]


def loop(name: str, x: str, y: str, step: str, statement: str) -> CpuKernel:
    return CpuKernel(name, "cpu/simd.h", f"const {x} *x = args[0];\n{y} *y = args[1];\n"
                     f"for (int i = 0; i < step->num_tokens; i += {step}) {statement};")


SCALAR = {name: loop(name, "float", "float", "1", f"y[i] = ingot_{name}(x[i])") for name in UNARY}
POW = loop("powf", "float", "float", "1", "y[i] = ingot_powf(x[i], ((const float *)args[2])[i])")
VECTOR_EXP = loop("vector_exp", "float", "float", "VF_LANES", "vf_store(y + i, vf_exp(vf_load(x + i)))")
ROUNDING = {
    name: (loop(f"to_{name}", "float", "uint16_t", "1", f"y[i] = ingot_to_{name}(x[i])"),
           loop(f"vector_to_{name}", "float", "uint16_t", "VF_LANES", f"vf_store_{name}(y + i, vf_load(x + i))"),
           loop(f"from_{name}", "uint16_t", "float", "1", f"y[i] = ingot_from_{name}(x[i])"),
           loop(f"vector_from_{name}", "uint16_t", "float", "VF_LANES", f"vf_store(y + i, vf_load_{name}(x + i))"))
    for name in ("bf16", "f16")}
TRANSPOSE = CpuKernel("transpose", "cpu/simd.h", """\
const float *x = args[0];
vf rows[VF_LANES];
for (int i = 0; i < VF_LANES; i++) rows[i] = vf_load(x + i * VF_LANES);
vf_transpose(rows);
for (int i = 0; i < VF_LANES; i++) vf_store((float *)args[1] + i * VF_LANES, rows[i]);
*(int *)args[2] = VF_LANES;""")
PARTS = CpuKernel("parts", "cpu/simd.h", """\
const float *x = args[0];
float *y = args[1];
for (int n = 0; n <= VF_LANES; n++, x += VF_LANES, y += VF_LANES + 6) {
    vf_store_first(y, vf_load_first(x, n) + vf_set1(1.0f), n);
    y[VF_LANES] = vf_hsum(vf_keep_first(vf_load(x), n, 0.5f));
    y[VF_LANES + 1] = vf_hmax(vf_load(x));
    vf_hsum4(y + VF_LANES + 2, vf_load(x), vf_set1(2.0f), vf_load(x) * vf_set1(3.0f), vf_zero());
}
*(int *)args[2] = VF_LANES;""")
KERNELS = [*SCALAR.values(), POW, VECTOR_EXP, *(k for kernels in ROUNDING.values() for k in kernels), TRANSPOSE, PARTS]


@pytest.fixture(scope="module", params=[*ALL_ISAS, "cc"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if request.param != "cc":
        return Library(KERNELS, request.param, tmp_path_factory.mktemp("simd"))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler `cc` on this machine")
    return Library(KERNELS, HOST_ISAS[-1], tmp_path_factory.mktemp("simd"), "cc")


def call(library: Library, kernel: CpuKernel, x: np.ndarray, *more: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    y = aligned(x.shape, dtype)
    library.run(kernel, Step.of_tokens(len(x)), x, y, *more)
    return y


def arguments(count: int = 1 << 14) -> np.ndarray:
    """Of every size, a multiple of 16 in number, the special values among them."""
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 1.0], count)
    parts = [rng.uniform(-110, 95, count), rng.normal(size=count) * 3, sign * 10 ** rng.uniform(-44, 38, count)]
    values = np.concatenate([*parts, np.resize(SPECIAL, 16)]).astype(np.float32)
    return placed(values)


@pytest.mark.parametrize("name", UNARY)
def test_scalar_functions(library: Library, name: str) -> None:
    function, ulps, absolute = UNARY[name]
    x = arguments()
    if name in ("sinf", "cosf"):
        x = placed(np.concatenate([x[np.abs(x) < 1e12], np.arange(999_000, 1_000_000, dtype=np.float32)]))
    with np.errstate(all="ignore"):
        want = function(x.astype(np.float64))
        nearest = want.astype(np.float32)
        got = call(library, SCALAR[name], x)
        error = np.abs(got.astype(np.float64) - want)
    size = np.abs(np.where(np.isfinite(nearest), nearest, 0)).astype(np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(size, 2.0 ** -126))) - 23)
    finite = np.isfinite(nearest) & np.isfinite(got)
    error[~finite] = 0
    assert np.array_equal(got[~finite], nearest[~finite], equal_nan=True)
    worst = np.argmax(error - np.maximum(ulps * unit, absolute))
    assert error[worst] <= max(ulps * unit[worst], absolute), (x[worst], got[worst], want[worst])


def test_pow(library: Library) -> None:
    rng, n = np.random.default_rng(1), 1 << 14
    x = np.concatenate([rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-40, 38, n), rng.uniform(-3, 3, n)])
    y = np.concatenate([rng.uniform(-4, 4, n), rng.integers(-9, 9, n)])
    special = np.array([*SPECIAL, 2, -2, 3, -3, 0.5, -0.5, 1e10, -1e10])
    bases, powers = (grid.ravel() for grid in np.meshgrid(special, special))
    x = placed(np.concatenate([x, bases]).astype(np.float32))
    y = placed(np.concatenate([y, powers]).astype(np.float32))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    got = call(library, POW, x, y)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    steps = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))[~np.isnan(want)]
    assert steps.max() <= 1 and np.count_nonzero(steps) < len(steps) / 1000


def test_vector_exp_is_the_scalar_one(library: Library) -> None:
    x = arguments()
    assert np.array_equal(call(library, VECTOR_EXP, x), call(library, SCALAR["expf"], x), equal_nan=True)


@pytest.mark.parametrize("name", ROUNDING)
def test_half_precision(library: Library, name: str) -> None:
    to_half, vector_to_half, from_half, vector_from_half = ROUNDING[name]
    bits = np.random.default_rng(2).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    x = placed(np.concatenate([bits.view(np.float32), arguments()]))
    with np.errstate(all="ignore"):
        want = to_bf16(x) if name == "bf16" else x.astype(np.float16).view(np.uint16)
    number = ~np.isnan(x)
    for kernel in (to_half, vector_to_half):
        got = call(library, kernel, x, dtype=np.uint16)
        assert np.array_equal(got[number], want[number])
        wide = from_bf16(got) if name == "bf16" else got.view(np.float16).astype(np.float32)
        assert np.isnan(wide[~number]).all()
    halves = placed(np.arange(1 << 16, dtype=np.uint16))
    wide = from_bf16(halves) if name == "bf16" else halves.view(np.float16).astype(np.float32)
    for kernel in (from_half, vector_from_half):
        assert np.array_equal(call(library, kernel, halves), wide, equal_nan=True)


def test_transpose(library: Library) -> None:
    x, y, lanes = placed(np.arange(256, dtype=np.float32)), aligned((256,)), aligned((1,), np.int32)
    library.run(TRANSPOSE, Step.of_tokens(1), x, y, lanes)
    n = int(lanes[0])
    assert np.array_equal(y[:n * n].reshape(n, n), x[:n * n].reshape(n, n).T)


def test_parts_of_vectors(library: Library) -> None:
    x, y = placed(np.random.default_rng(3).integers(-50, 50, 400).astype(np.float32)), aligned((400,))
    lanes = aligned((1,), np.int32)
    library.run(PARTS, Step.of_tokens(1), x, y, lanes)
    n = int(lanes[0])
    for count in range(n + 1):
        row, got = x[count * n:(count + 1) * n], y[count * (n + 6):(count + 1) * (n + 6)]
        assert np.array_equal(got[:count], row[:count] + 1) and np.isnan(got[count:n]).all()
        assert got[n] == row[:count].sum() + 0.5 * (n - count) and got[n + 1] == row.max()
        assert np.array_equal(got[n + 2:], [row.sum(), 2 * n, 3 * row.sum(), 0])


@pytest.mark.parametrize("isa", ["x86-64-v3", "x86-64-v4", "aarch64-dotprod"])
def test_loops_become_vectors(isa: str) -> None:
    """No call, and multiply-adds of whole vectors, in a loop over each scalar function; on every target."""
    packed = r"fmla\t" if isa.startswith("aarch64") else r"vfn?m(add|sub)\w+p[sd]\t" + ".*%[yz]mm"
    for kernel in [*SCALAR.values(), POW]:
        text = assembly(translation_unit([kernel]), ISAS[isa], [INCLUDE_DIR])
        assert re.search(packed, text), (isa, kernel.symbol)
        calls = re.findall(r"^\s+(?:call\w*|bl)\s+(\S+)", text, re.MULTILINE)
        assert not calls, (isa, kernel.symbol, calls)


def test_headers_stand_alone(tmp_path: Path) -> None:
    """Each header compiles by itself, on every target."""
    for header in ("cpu/scalar_math.h", "cpu/simd.h", "cpu/gemm.h", "attention/attention.h", "norm/norm.h",
                   "rope/rope.h", "select/rows.h", "select/order.h", "select/gather.h", "matmul/matmul.h"):
        for isa in ("x86-64-v4", "aarch64-dotprod"):
            assert assembly(f'#include "{header}"\nint nothing;\n', ISAS[isa], [INCLUDE_DIR]), header

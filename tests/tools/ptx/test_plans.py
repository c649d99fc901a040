"""Plans of small models, every launch as compiled code: what generated loops and chosen kernels make together."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.compiler.gpu import choose
from ingot.compiler.gpu.triton_compile import PtxCompiler
from ingot.compiler.precision import find_precision
from tests.compiler.gpu import test_generate
from tests.compiler.gpu.conftest import uncompiled_kernel
from tests.compiler.gpu.programs import exact, final, gpu, program
from tests.compiler.models import Layer, model
from tools.ptx.runner import PtxRunner

SMALL = model([Layer()])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are chosen without being compiled: only those that run are."""
    monkeypatch.setattr(choose, "try_compile", lambda kernels, arch, *rest: {
        kernel: uncompiled_kernel(kernel, arch) for kernel in kernels})
    yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name, precision, target", [
    ("small", "int8", "a100"), pytest.param("dense", "int8", "a100", marks=pytest.mark.slow),
    pytest.param("experts", "w4a8", "a100", marks=pytest.mark.slow),
    pytest.param("dense", "fp8", "rtx4090", marks=pytest.mark.slow),
    pytest.param("shared", "bf16", "rtx5090", marks=pytest.mark.slow),
    pytest.param("dense", "fp8", "h200", marks=pytest.mark.slow)])
def test_plans(name: str, precision: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits against the graph, with all but the matrices in float32."""
    graph = {"small": SMALL, "dense": test_generate.LLAMA}.get(name) or test_generate.OTHERS[name]
    if name == "small":
        monkeypatch.setattr(test_generate, "STEPS", ((0, 2), (2, 3)))
    chosen = exact(find_precision(precision, gpu(target)))
    made = program(graph, target, chosen)
    with PtxCompiler(gpu(target).arch) as compiler:
        runner = PtxRunner(compiler)
        found = test_generate.errors(graph, made, final(graph, chosen), runner)  # type: ignore[arg-type]
    assert max(found) < 1e-4
    assert any(symbol.startswith("loop_") for symbol in runner.kernels)

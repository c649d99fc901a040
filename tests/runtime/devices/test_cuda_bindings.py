"""The cuda device through the real cuda-bindings, over a library that stands in the place of libcuda.so.1 and writes
down what reaches it: layouts of structures, arrays of parameters, descriptors, attributes, to the bit."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
pytest.importorskip("ziglang", reason="the stub needs a C compiler")

from ingot.runtime.devices.cuda_kernels import parameter_sizes
from ingot.runtime.devices.gpu_kernels import read_kernels
from ingot.runtime.engine_file import EngineFile
from tests.runtime import mock_gpu_engine

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run([sys.executable, "-m", "ziglang", "cc", "-O1", "-shared", "-fPIC", str(source), "-o",
                    str(folder / "libcuda.so.1")], check=True)
    return folder


def clusters(plan: dict[str, Any]) -> None:
    for number, kernel in enumerate(plan["kernels"].values()):
        kernel["cluster"] = (1, 2, 16)[number % 3]


def large(plan: dict[str, Any]) -> None:
    """More shared memory than a block has without asking."""
    for kernel in plan["kernels"].values():
        kernel["shared_bytes"] = 100_000


@pytest.mark.parametrize("edit", [None, clusters, large], ids=["plain", "clusters", "large"])
def test_what_reaches_the_driver(stub: Path, tmp_path: Path, edit: Any) -> None:
    path = mock_gpu_engine.write_engine(tmp_path / "mock.engine", edit_plan=edit)
    with EngineFile.open(path) as engine:
        sizes = [parameter_sizes(kernel) for kernel in read_kernels(engine.plan).values()]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(stub), "STUB_LOG": str(tmp_path / "log"), "PYTHONPATH": str(ROOT),
        "STUB_SIZES": ";".join(",".join(map(str, one)) for one in sizes)}
    done = subprocess.run([sys.executable, "-m", "tests.runtime.devices.stub_run", str(path)], capture_output=True,
                          text=True, env=environment, cwd=ROOT)
    assert done.stdout.strip() == "as told", done.stdout + done.stderr

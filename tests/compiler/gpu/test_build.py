"""Engine files for GPUs: built, read, refitted; and with real code, the same bytes wherever they are built."""
from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.compiler.build import BuildRequest, BuildResult, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.refit import RefitRequest, refit
from ingot.runtime.devices.gpu_kernels import check_members
from ingot.runtime.devices.gpu_plan import GpuPlan
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.program import Limits


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> BuildCache:
    return BuildCache(tmp_path_factory.mktemp("cache"), 10**9)


def request(checkpoint: Path, output: Path, target: str = "h200", precision: str = "fp8") -> BuildRequest:
    return BuildRequest(str(checkpoint), target, precision, output, calibrate=False, max_batch_size=2,
                        max_num_tokens=16, max_seq_len=64)


def built(checkpoint: Path, output: Path, cache: BuildCache | None, target: str = "h200", precision: str = "fp8",
          ) -> BuildResult:
    return build(request(checkpoint, output, target, precision), cache=cache)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("precision", "target"), [("bf16", "a100"), ("fp8", "h200"), ("w4a8", "a100")])
def test_an_engine(tiny_checkpoint: Path, tmp_path: Path, cache: BuildCache, precision: str, target: str) -> None:
    result = built(tiny_checkpoint, tmp_path / "x.engine", cache, target, precision)
    manifest = result.manifest
    assert manifest["target"] == {"name": target, "kind": "cuda", "isa": {"a100": "sm_80", "h200": "sm_90a"}[target]}
    assert manifest["launches_per_layer"]["1"] == 5 and "triton" in manifest["toolchain"]
    assert "c_compiler" not in manifest["toolchain"]
    with EngineFile.open(tmp_path / "x.engine") as engine:
        plan = GpuPlan.read(engine.plan, Limits.of(engine.manifest))
        check_members(plan.kernels, {name: entry["size"] for name, entry in manifest["members"].items()}
                      if "members" in manifest else engine.sizes)
        for name, weight in plan.weights.items():
            blob, = weight.blobs
            assert len(engine.read(f"weights/{blob}.bin")) == weight.size, name


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_a_refit_is_what_a_build_gives(tiny_checkpoint: Path, tmp_path: Path, cache: BuildCache,
                                       precision: str) -> None:
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other" / tiny_checkpoint.name)
    tensors = load_file(other / "model.safetensors")
    rng = np.random.default_rng(7)
    save_file({name: (tensor + 0.1 * rng.standard_normal(tensor.shape)).astype(tensor.dtype)
               for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    built(tiny_checkpoint, tmp_path / "first.engine", cache, precision=precision)
    wanted = built(other, tmp_path / "wanted.engine", cache, precision=precision)
    got = refit(RefitRequest(tmp_path / "first.engine", str(other), tmp_path / "got.engine"), cache=cache)
    assert got.hash == wanted.hash
    assert (tmp_path / "got.engine").read_bytes() == (tmp_path / "wanted.engine").read_bytes()


@pytest.mark.usefixtures("uncompiled")
def test_a_dry_run_writes_nothing(tiny_checkpoint: Path, tmp_path: Path, cache: BuildCache) -> None:
    result = build(replace(request(tiny_checkpoint, tmp_path / "x.engine"), dry_run=True), cache=cache)
    assert result.path is None and list(tmp_path.iterdir()) == []
    assert result.manifest["memory"]["kv_tokens"] > 0 and result.manifest["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "target"), [("bf16", "h200"), ("fp8", "h200"), ("int8", "a100"),
                                                   ("w4a8", "l40s"), ("fp8", "rtx5090"), ("bf16", "b200")])
def test_compiled_engines_are_native_and_spill_nothing(tiny_checkpoint: Path, tmp_path: Path, precision: str,
                                                       target: str) -> None:
    """The build itself refuses a linear layer without the matrix instruction of its width."""
    result = built(tiny_checkpoint, tmp_path / "x.engine", BuildCache(), target, precision)
    spilling = {kernel["name"]: kernel["spill_stores"] for kernel in result.manifest["kernels"]
                if kernel["spill_stores"] and kernel["op"] != "sample"}
    assert not spilling


@pytest.mark.slow
def test_the_same_bytes_in_every_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Built twice without what the first build left behind."""
    hashes = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        hashes.add(built(tiny_checkpoint, tmp_path / name / "x.engine", None).hash)
    assert len(hashes) == 1
    assert (tmp_path / "here/x.engine").read_bytes() == (tmp_path / "there/x.engine").read_bytes()

"""Weights that a checkpoint holds in four bits stay on their grids in engines for GPUs, in groups of their own size."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.quantized import quantization_report, read_quantized, stored_groups
from ingot.compiler.checkpoint.quantized.weights import int4_groups
from ingot.compiler.importer.importer import import_model
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import default_groups, find_precision, with_groups
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.targets import find_target
from ingot.compiler.weights.evaluate import evaluate
from ingot.plugins.linear.gpu_formats import pack, unpack
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES, int4_scheme
from tests.compiler.checkpoint.quantized.layouts import LAYOUTS, write_checkpoint
from tests.compiler.checkpoint.quantized.test_read import small_model

KEPT = {"awq": "int4_g64m", "gptq": "int4_g64m", "gptq v2": "int4_g64m", "compressed w4a16": "int4",
        "compressed w4a16 zeros": "int4_g32m", "modelopt awq": "int4", "modelopt w4a8": "int4"}


def final(folder: Path, target: str, precision: str, ranks: int = 1) -> QuantizedGraph:
    checkpoint, chosen = open_checkpoint(folder), find_precision(precision, find_target(target).gpu)
    passes = gpu_pipeline(chosen, chosen.kv, stored_groups(checkpoint), ranks)
    return QuantizedGraph(run_passes(import_model(checkpoint, 64).graph, passes), True)


@pytest.mark.parametrize(("target", "precision", "activation"), [
    ("h200", "int4", "bf16"), ("h200", "w4a8", "fp8"), ("a100", "w4a8", "int8")])
@pytest.mark.parametrize("name", KEPT)
def test_every_weight_stays_on_its_grid(name: str, target: str, precision: str, activation: str,
                                        tmp_path: Path) -> None:
    """Within half a per cent of a step: minimums are float16."""
    write_checkpoint(tmp_path, small_model(num_hidden_layers=2), LAYOUTS[name])
    checkpoint, quantized = open_checkpoint(tmp_path), final(tmp_path, target, precision)
    matrices = [weight for weight in quantized.weights if weight.packing.scheme != "bf16"]
    assert len(matrices) >= 8
    for weight in matrices:
        scheme = GPU_SCHEMES[weight.packing.scheme]
        assert (scheme.format, scheme.activation) == (KEPT[name], activation)
        w = evaluate(weight.expr, checkpoint)
        packed = pack(w, scheme.weights)
        assert packed.w_scale is not None
        step = np.abs(packed.w_scale.astype(np.float32)).T.repeat(scheme.weights.channels_per_scale, axis=1)
        error = np.abs(unpack(packed) - w)
        assert (error <= 0.005 * step[:, :w.shape[1]] + 1e-7).all()
        if not scheme.weights.minimum:
            assert error.max() <= 1e-7
    found = read_quantized(checkpoint)
    assert found is not None
    manifest, lines = quantization_report(found, quantized.weights, target, True)
    assert all(row["kept"] for row in manifest["weights"]) and sum(row["count"] for row in manifest["weights"]) == 14
    assert not any("become" in line for line in lines)


@pytest.mark.slow
def test_groups_that_are_asked_for_go_before(tmp_path: Path) -> None:
    """It compiles kernels."""
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), LAYOUTS["awq"])
    for group, minimums, scheme, kept in ((None, None, "int4_g64m", True), (32, None, "int4_g32m", False),
                                          (64, True, "int4_g64m", True), (None, False, "int4", False)):
        request = BuildRequest(str(tmp_path), "h200", "int4", dry_run=True, group_size=group, group_minimums=minimums,
                               max_batch_size=1, max_num_tokens=1, max_seq_len=64)
        manifest = build(request).manifest
        row, = manifest["model"]["quantization"]["weights"]
        assert (row["scheme"], row["kept"], row["count"]) == (scheme, kept, 7)
        assert manifest["recipe"].get("group_size") == group
        assert manifest["recipe"].get("group_minimums") == minimums


def test_ranks_that_divide_a_group_do_not_keep_it(tmp_path: Path) -> None:
    """Of 384 channels of the MLP ranks have 192 or 96, of the attention's 128 they have 64 or 32; groups have 64."""
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), LAYOUTS["gptq"])
    found = read_quantized(open_checkpoint(tmp_path))
    assert found is not None
    for ranks, converted in ((2, 0), (4, 2)):
        rows = quantization_report(found, final(tmp_path, "h200", "int4", ranks).weights, "h200", True)[0]["weights"]
        assert sum(row["count"] for row in rows if not row["kept"]) == converted, ranks


@pytest.mark.parametrize(("size", "k", "symmetric", "wanted"), [
    (128, 4096, True, "int4"), (128, 4096, False, "int4_g128m"), (256, 4096, True, "int4"), (64, 256, True, "int4_g64"),
    (96, 192, False, "int4_g32m"), (576, 576, True, "int4"), (48, 96, True, ""), (16, 64, False, "")])
def test_groups_of_a_checkpoint(size: int, k: int, symmetric: bool, wanted: str) -> None:
    """A scale for a whole row is one for each of its groups."""
    assert int4_groups(size, k, symmetric) == wanted


def test_precisions_with_groups() -> None:
    gpu = find_target("h200").gpu
    assert with_groups(find_precision("w4a8", gpu), 32, None).scheme("linear") == "w4a8_fp8_g32m"
    assert with_groups(find_precision("w4a8", gpu), 64, None).scheme("linear") == "w4a8_fp8_g64m"
    assert with_groups(find_precision("int4", gpu), None, False).scheme("linear") == "int4"
    assert find_precision("int4", gpu).scheme("linear") == int4_scheme("int4", *default_groups()) == "int4_g128m"
    assert find_precision("w4a8", find_target("a100").gpu).scheme("linear") == "w4a8_int8_g128m"
    assert with_groups(find_precision("int4", gpu), 32, False).scheme("head") == "bf16"

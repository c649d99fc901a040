"""Matrices in bfloat16 are packed from the bits that the checkpoint stores: the same bytes, the same errors."""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.compiler.calibration.scaled_source import ScaledSource
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.errors import BadWeights
from ingot.compiler.checkpoint.safetensors_store import SafetensorsStore
from ingot.compiler.cpu.isa import host_isa
from ingot.compiler.weights import native as compiling
from ingot.compiler.weights.evaluate import WeightShapeError, evaluate
from ingot.compiler.weights.expr import WeightExpr, concat, elementwise, input_scale, permute, reshape, slice_, tensor
from ingot.compiler.weights.packed import ROWS_AT_A_TIME, PackedWeight, Packing
from ingot.compiler.weights.stored import bf16_rows
from ingot.plugins.linear import native

ROWS = ROWS_AT_A_TIME + 40
A, B, WIDE = tensor("a", (ROWS, 64)), tensor("b", (48, 64)), tensor("wide", (48, 64))


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a": rng.standard_normal((ROWS, 64)).astype(ml_dtypes.bfloat16),
            "b": rng.standard_normal((48, 64)).astype(ml_dtypes.bfloat16),
            "wide": rng.standard_normal((48, 64)).astype(np.float32)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiling.compile_native(host_isa(), tmp_path_factory.mktemp("native"))))


def stored(folder: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint(folder, SafetensorsStore(folder))


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    library = native._library
    yield
    native.use(library)


@pytest.mark.parametrize("expr", [A, concat([A, B], 0), slice_(A, 0, 5, 900)], ids=str)
def test_rows_come_as_they_are(tmp_path: Path, tensors: dict[str, np.ndarray], expr: WeightExpr) -> None:
    checkpoint = stored(tmp_path, tensors)
    for rows in ((0, expr.shape[0]), (16, 33), (expr.shape[0] - 45, expr.shape[0])):
        bits = bf16_rows(expr, checkpoint, rows)
        assert bits is not None and bits.dtype == np.uint16
        values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(values, evaluate(expr, checkpoint, rows))


def scaled(expr: WeightExpr, name: str) -> WeightExpr:
    columns = reshape(input_scale(name, expr.shape[1]), (1, expr.shape[1]))
    return elementwise("mul", elementwise("mul", expr, columns), reshape(input_scale(name, expr.shape[0], inverse=True),
                                                                         (expr.shape[0], 1)))


def test_scales_that_nobody_chose_are_ones(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    checkpoint = stored(tmp_path, tensors)
    expr = concat([scaled(A, "a"), scaled(B, "a")], 0)
    for rows in ((0, 16), (ROWS - 8, ROWS + 8)):
        bits = bf16_rows(expr, checkpoint, rows)
        assert bits is not None
        values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(values, evaluate(expr, checkpoint, rows))
    chosen = ScaledSource(checkpoint, {"a": np.full(64, 2, np.float32)})
    assert bf16_rows(expr, chosen, (0, 16)) is None


@pytest.mark.parametrize("expr", [WIDE, concat([WIDE, B], 0), permute(B, (1, 0)), elementwise("mul", B, 2.0),
                                  concat([B, B], 1), tensor("b", (64, 48)), tensor("nowhere", (48, 64))], ids=str)
def test_anything_else_is_evaluated(tmp_path: Path, tensors: dict[str, np.ndarray], expr: WeightExpr) -> None:
    assert bf16_rows(expr, stored(tmp_path, tensors), (0, 16)) is None


@pytest.mark.parametrize("scheme", ["w4a8", "int8g32"])
def test_packed_from_bits(tmp_path: Path, library: ctypes.CDLL, tensors: dict[str, np.ndarray], scheme: str) -> None:
    checkpoint = stored(tmp_path, tensors)
    weight = PackedWeight("w0", concat([A, B], 0), Packing(scheme), "")
    native.use(None)
    expected = weight.make(checkpoint)
    native.use(library)
    np.testing.assert_array_equal(weight.make(checkpoint), expected)


@pytest.mark.parametrize("scheme", ["w4a8", "int8g32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_by_its_place(tmp_path: Path, library: ctypes.CDLL, tensors: dict[str, np.ndarray],
                                                 scheme: str, value: float) -> None:
    damaged = tensors["a"].copy()
    damaged[ROWS - 3, 63] = value
    checkpoint = stored(tmp_path, tensors | {"a": damaged})
    native.use(library)
    with pytest.raises(BadWeights, match=rf"tensor a holds .* at \[{ROWS - 3}, 63\]"):
        PackedWeight("w0", A, Packing(scheme), "").make(checkpoint)


def test_another_shape_is_told(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    weight = PackedWeight("w0", tensor("b", (64, 48)), Packing("w4a8"), "")
    with pytest.raises(WeightShapeError):
        weight.make(stored(tmp_path, tensors))

"""The choice between plain rounding, scales and compensation: by the error of a layer's outputs."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.calibration.scaled_source import ScaledSource
from ingot.compiler.calibration.scales import _norms, candidates, spread
from ingot.compiler.calibration.smooth import choose, column_scale
from ingot.compiler.calibration.statistics import InputStatistics
from ingot.compiler.weights.expr import elementwise, input_scale, reshape, tensor
from ingot.compiler.weights.packed import PANELS, ROWS, PackedWeight, Packing
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from tests.compiler.graphs import Weights
from tests.compiler.passes.test_smooth_inputs import Builder

K = 256
SCALE = input_scale("w", K)
EXPR = elementwise("mul", tensor("w", (64, K)), reshape(SCALE, (1, K)))


def source() -> Weights:
    b = Builder()
    return Weights(b.made(b.op("linear", b.x("x", "T", K), b.weight("w", 64, K))))


def statistics(outliers: float, correlated: bool = False) -> InputStatistics:
    """Two channels, in groups of their own, are `outliers` times as large as the others."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, K))
    if correlated:
        x = x @ (np.eye(K) + rng.standard_normal((K, K)) / 8)
    x[:, ::128] *= outliers
    x = x.astype(np.float32)
    return InputStatistics(np.abs(x).max(axis=0), ((x.T @ x) / len(x),), len(x), x[:64])


def packed(scheme: str, layout: str = ROWS) -> PackedWeight:
    return PackedWeight("w0", EXPR, Packing(scheme, layout), "w", ("w",))


def output_error(weight: PackedWeight, found: InputStatistics, scale: np.ndarray | None) -> float:
    """Of the weights as they are stored, back in the checkpoint's terms; inputs as they are."""
    given = ScaledSource(source(), {} if scale is None else {"w": scale})
    moments = found.mean_square if scale is None else found.scaled(1 / scale).mean_square
    error = (weight.values(given, lambda expert: (moments,)) / (1 if scale is None else scale)) - source().get("w")
    return float(np.sum(error @ found.blocks[0] * error))


@pytest.mark.parametrize(("weight", "part"), [
    (packed("int4"), 0.85), (packed("nvfp4"), 0.85), (packed("w4a8_fp8"), 0.85),
    (packed("w4a8", PANELS), 1.1),  # it is its inputs that gain: they share scales as well
], ids=str)
def test_scales_for_large_channels_lower_the_error(weight: PackedWeight, part: float) -> None:
    found = statistics(30)
    choice = choose([weight], SCALE, source(), found, "awq")
    assert choice.method == "awq" and choice.scale is not None
    assert set(np.log2(choice.scale) % 1) == {0} and choice.scale[::128].min() > np.median(choice.scale)
    assert output_error(weight, found, choice.scale) < part * output_error(weight, found, None)


def test_inputs_by_token_are_smoothed() -> None:
    """One large channel takes the resolution of all the others."""
    choice = choose([packed("int8_token")], SCALE, source(), statistics(60), "best")
    assert choice.method == "awq_gptq" and choice.scale is not None and choice.scale[0] > choice.scale[1]


def of_inputs_and_weights(w: np.ndarray, found: InputStatistics, scale: np.ndarray) -> float:
    """Mean square of the outputs' error, int8 by token times int8 by row."""
    scheme = GPU_SCHEMES["int8_token"]
    x = found.rows
    exact, rounded = x @ w.T, scheme.inputs(x / scale) @ scheme.stored(w * scale).T
    return float(np.square(rounded - exact).mean())


def test_the_least_cost_is_found() -> None:
    """Channels of many sizes, of inputs and of weights: nothing that a power of either would give."""
    rng = np.random.default_rng(3)
    found, size = statistics(1), np.exp(rng.normal(0, 1.5, K)).astype(np.float32)
    x = found.rows * size
    found = InputStatistics(np.abs(x).max(axis=0), ((x.T @ x) / len(x),), len(x), x)
    w = (source().get("w") * np.exp(rng.normal(0, 1, K))).astype(np.float32)
    tried = candidates(w, np.ones(len(w), np.float32), found, SCALE, True)
    errors = [of_inputs_and_weights(w, found, scale) for scale in tried]
    assert min(errors[-2:]) <= 1.05 * min(errors)
    assert min(errors[-2:]) < 0.1 * of_inputs_and_weights(w, found, np.ones(K, np.float32))
    assert all(np.log(scale).mean() == pytest.approx(0, abs=1e-3) for scale in tried)


def test_the_gradient_is_that_of_the_cost() -> None:
    rng = np.random.default_rng(4)
    rows, factor = np.abs(rng.standard_normal((5, 7))).astype(np.float32), np.exp(rng.standard_normal(7))
    squares, slope = _norms(rows, factor)
    for j in range(7):
        moved = factor.copy()
        moved[j] *= np.exp(1e-3)
        assert (_norms(rows, moved)[0] - squares) / 1e-3 == pytest.approx(slope[:, j], rel=2e-2, abs=2e-3)


def test_equal_channels_stay_as_they_are() -> None:
    fitted = choose([packed("int8_token")], SCALE, source(), statistics(1), "best").scale
    assert fitted is None or fitted.max() < 2 * fitted.min()
    assert choose([packed("int4")], SCALE, source(), statistics(1), "awq").scale is None
    assert choose([packed("int4")], SCALE, source(), statistics(1), "awq").method == "awq"  # grids, for the inputs


def test_the_method_that_was_asked_for() -> None:
    found = statistics(30, correlated=True)
    methods = {method: choose([packed("int4")], SCALE, source(), found, method) for method in ("awq", "gptq", "best")}
    assert methods["awq"].method == "awq"
    assert methods["gptq"].method == "gptq" and methods["gptq"].scale is None
    assert "gptq" in methods["best"].method
    assert choose([packed("int4")], None, source(), found, "awq").scale is None


def test_heads_share_their_scales() -> None:
    scale = input_scale("w", 64, head=32)
    repeated = spread(np.arange(64, dtype=np.float32), scale, 256).reshape(2, 4, 32)
    assert repeated[:, :, 0].tolist() == [[0] * 4, [32] * 4]
    choice = choose([packed("int4")], scale, source(), statistics(30), "awq")
    assert choice.scale is None or choice.scale.shape == (64,)


def test_the_scale_of_the_inputs_is_told_from_those_of_rows() -> None:
    rows = elementwise("mul", EXPR, reshape(input_scale("other", 64, inverse=True), (64, 1)))
    assert column_scale(PackedWeight("w0", rows, Packing("int4", ROWS), "w", ("w",))) == SCALE

"""Packed matrices: sizes, layout, round trip, and the error of quantization."""
from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ingot.plugins.linear.pack import bf16_bits, dequantize, pack, packed_size, to_float32, unpack
from ingot.plugins.linear.quantize_weights import quantize_w4, quantize_w8, quantize_w8_groups
from ingot.plugins.scheme import SCHEMES, Scheme

ALL = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.tag)


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def relative_mse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want ** 2).sum())


@ALL
@pytest.mark.parametrize("shape", [(1, 1), (17, 31), (100, 576), (3000, 700)], ids=str)
def test_size_and_round_trip(shape: tuple[int, int], scheme: Scheme) -> None:
    """The last shape takes several pieces."""
    w = weights(*shape)
    blob = pack(w, scheme)
    assert blob.dtype == np.uint8 and blob.shape == (packed_size(*shape, scheme),)
    got = unpack(blob, *shape, scheme)
    assert relative_mse(got, w) < {32: 1e-30, 16: 4e-6, 8: 2e-4, 4: 7e-3}[scheme.weight_bits]
    if scheme.weight_bits >= 16:
        np.testing.assert_array_equal(pack(got, scheme), blob)


@pytest.mark.parametrize(("scheme", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.015625), ("int8g32", 8.5),
                                              ("w4a8", 5)])
def test_bits_per_weight(scheme: str, bits: float) -> None:
    assert packed_size(1024, 2048, SCHEMES[scheme]) * 8 == bits * 1024 * 2048


@ALL
def test_pieces_follow_each_other(scheme: Scheme) -> None:
    w = weights(100, 96)
    pieces = [pack(w[:48], scheme), pack(w[48:64], scheme), pack(w[64:], scheme)]
    np.testing.assert_array_equal(np.concatenate(pieces), pack(w, scheme))


@ALL
def test_bf16_input(scheme: Scheme) -> None:
    """The bits of bfloat16 weights pack like the same values in float32."""
    bits = bf16_bits(weights(50, 70))
    np.testing.assert_array_equal(pack(bits, scheme), pack(to_float32(bits), scheme))


def test_layout_of_four_bits() -> None:
    """Nibble, step and minimum of output channel 19, input channel 32 + 16 + 6, where panel.h says they are."""
    scheme, w = SCHEMES["w4a8"], weights(32, 64)
    q, step, minimum = quantize_w4(w)
    block = pack(w, scheme).reshape(2, 2, 320)[1, 1]
    assert block[64 * 1 + 4 * 3 + 2] >> 4 == q[19, 54] and block[64 * 1 + 4 * 3 + 2] & 15 == q[19, 38]
    assert block[256:288].view(np.float16)[3] == step[19, 1] and block[288:].view(np.float16)[3] == minimum[19, 1]


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.004, np.inf, np.nan, 3.4e38], np.float32)
    assert bf16_bits(values).tolist()[:5] == [0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x7F80]
    assert np.isnan(to_float32(bf16_bits(values))[5]) and bf16_bits(values)[6] == 0x7F80


def test_eight_bits_use_the_whole_range() -> None:
    q, scale = quantize_w8(np.array([[0.5, -2.0, 1.0], [0, 0, 0]], np.float32))
    assert q.tolist() == [[32, -127, 64], [0, 0, 0]]
    np.testing.assert_allclose(scale, [2 / 127, 0])


@pytest.mark.parametrize("ends", [(0, 15), (1, 14), (3, 15), (0, 11)], ids=str)
def test_four_bits_keep_a_grid_of_sixteen_levels(ends: tuple[int, int]) -> None:
    """Weights that were quantized before, and rounded to bfloat16 since, whichever of the levels a group uses."""
    rng = np.random.default_rng(0)
    q = rng.integers(ends[0], ends[1] + 1, (400, 32))
    q[:, 0], q[:, 1] = ends
    grid = (rng.uniform(0.5, 2, (400, 1)) * (q - rng.uniform(5, 10, (400, 1)))).astype(np.float32) / 100
    w = to_float32(bf16_bits(grid))
    got_q, step, minimum = quantize_w4(w)
    got = got_q * step.astype(np.float32) + minimum.astype(np.float32)
    assert relative_mse(got, grid) < 1e-5


@pytest.mark.parametrize("size", [32, 64, 192, 576])
def test_four_bits_keep_parts_of_larger_groups(size: int) -> None:
    """A part of 32 spans any number of the larger group's steps."""
    w = weights(64, 576).reshape(64, -1, size)
    step = (np.abs(w).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    on_grid = (np.rint(w / step).clip(-8, 7) * step)
    error = np.abs(dequantize(on_grid.reshape(64, 576), SCHEMES["w4a8"]).reshape(w.shape) - on_grid) / step
    assert error.max() < 0.005  # of a step: the minimum is a float16


def test_four_bits_beat_minimum_and_maximum() -> None:
    w = weights(500, 320)
    groups = w.reshape(-1, 32)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    plain = np.rint((groups - low) / (high - low) * 15) / 15 * (high - low) + low
    assert relative_mse(dequantize(w, SCHEMES["w4a8"]), w) < 0.83 * relative_mse(plain.reshape(w.shape), w)


def test_four_bits_of_odd_groups() -> None:
    """Constant, zero, huge and tiny groups stay finite and near."""
    w = np.zeros((5, 32), np.float32)
    w[0] = 0.25
    w[2], w[3], w[4] = np.linspace(-6e4, 6e4, 32), np.linspace(0, 1e-3, 32), np.linspace(1, 1e30, 32)
    got = dequantize(w, SCHEMES["w4a8"])
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:2], w[:2])
    assert np.abs(got[2] - w[2]).max() < 6e4 / 14 and np.abs(got[3] - w[3]).max() < 1e-3 / 28


@ALL
def test_memory_is_bounded(scheme: Scheme) -> None:
    """Beyond input and result, the same for any size of matrix: below 32 MB for these 64 MB."""
    w = np.ones((16384, 1024), np.float32)
    tracemalloc.start()
    blob = pack(w, scheme)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - blob.nbytes < 32 << 20


def test_layout_of_eight_bits_in_groups() -> None:
    """Number and scale of output channel 19, input channel 96 + 6, where panel.h says they are; half a last pair."""
    scheme, w = SCHEMES["int8g32"], weights(32, 160)
    q, scale = quantize_w8_groups(w)
    panel = pack(w, scheme).reshape(2, 2 * 1088 + 576)[1]
    pair = panel[1088:]
    assert pair[64 + 64 * 9 + 4 * 3 + 2].view(np.int8) == q[19, 102]
    assert pair[:64].view(np.float16)[16 + 3] == scale[19, 3]
    last = panel[2 * 1088:]
    assert last[64 + 64 * 1 + 4 * 3].view(np.int8) == q[19, 132] and last[:64].view(np.float16)[3] == scale[19, 4]


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_0", "w4a8"), ("Q4_1", "w4a8"), ("Q8_0", "int8g32")])
def test_weights_of_gguf_are_carried_over_to_the_bit(kind: str, scheme: str) -> None:
    """As llama.cpp's quantizer writes them: also groups that are constant, zero, of one sign, or with an outlier."""
    import gguf
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2048, 576)).astype(np.float32)
    w *= rng.choice([1e-3, 0.02, 1, 30], (2048, 1)).astype(np.float32)
    w[::9], w[1::9] = np.abs(w[::9]), -np.abs(w[1::9])
    w[2::50], w[3::50] = 0, 0.25
    w[4::50, ::32] *= 20
    w[5::50] = rng.integers(-2, 3, w[5::50].shape) * np.float32(0.01)
    form = gguf.GGMLQuantizationType[kind]
    stored = gguf.dequantize(gguf.quantize(w, form), form)
    np.testing.assert_array_equal(dequantize(stored, SCHEMES[scheme]), stored)


def test_eight_bits_in_groups_of_odd_groups() -> None:
    """Zero, tiny and huge groups stay finite and near: half a step, and a step of float16 at its ends."""
    w = np.zeros((5, 32), np.float32)
    w[1, 3], w[2], w[3], w[4] = 1e-7, np.linspace(-1e-5, 1e-5, 32), np.linspace(-8e6, 8e6, 32), np.linspace(1, 1e30, 32)
    got = dequantize(w, SCHEMES["int8g32"])
    assert np.isfinite(got).all() and not got[0].any()
    assert np.abs(got[1:3] - w[1:3]).max() <= 1e-7 and np.abs(got[3] - w[3]).max() <= 8e6 / 127

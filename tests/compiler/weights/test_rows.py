"""Blobs of GPU engines hold what the kernels' formats say, however many rows are packed at a time."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.weights.expr import tensor
from ingot.compiler.weights.packed import ROWS, PackedWeight, Packing
from ingot.compiler.weights.rows import ALIGNMENT, blob_parts, blob_size, pack_rows
from ingot.plugins.linear.gpu_formats import FORMATS, pack
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES


class Source:
    """One tensor; remembers how many rows of it were asked for at a time."""

    def __init__(self, *shape: int) -> None:
        self.array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        self.most = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.array.shape

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        rows = self.array[begin:end]
        self.most = max(self.most, len(rows))
        return rows


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix(name: str) -> None:
    form, source = FORMATS[name], Source(300, 256)
    blob = pack_rows(tensor("w", (300, 256)), source, form, 128)
    want = pack(source.array, form)
    parts = blob_parts((300, 256), form)
    assert source.most == 128 and len(blob) == blob_size(parts)
    assert all(offset % ALIGNMENT == 0 for offset, _ in parts.values())
    for part, array in (("w", want.w), ("w_scale", want.w_scale)):
        if array is None:
            assert part not in parts
            continue
        offset, size = parts[part]
        assert blob[offset:offset + size].tobytes() == array.tobytes(), part
    if name == "nvfp4":
        assert blob[parts["scale"][0]:].view(np.float32)[0] == np.float32(want.factor)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_lie_one_below_the_other(name: str) -> None:
    form, source = FORMATS[name], Source(3, 128, 256)
    blob = pack_rows(tensor("w", (3, 128, 256)), source, form, 128)
    parts = blob_parts((3, 128, 256), form)
    each = [pack(matrix, form) for matrix in source.array]
    assert source.most == 1
    for part in ("w", "w_scale"):
        if part in parts:
            offset, size = parts[part]
            want = b"".join(getattr(one, part).tobytes() for one in each)
            assert blob[offset:offset + size].tobytes() == want, part
    if name == "nvfp4":
        assert blob[parts["scale"][0]:].view(np.float32).tolist() == [np.float32(one.factor) for one in each]


@pytest.mark.parametrize("scheme", GPU_SCHEMES)
def test_sizes_are_known_before(scheme: str) -> None:
    weight = PackedWeight("w0", tensor("w", (96, 128)), Packing(scheme, ROWS), "w")
    assert weight.make(Source(96, 128)).nbytes == weight.size_bytes

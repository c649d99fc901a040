"""Safetensors files, whole and damaged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ingot.runtime.adapters.errors import AdapterError
from ingot.runtime.adapters.tensors import read_tensors
from ingot.runtime.bf16 import round_to_bf16, widen
from tests.runtime.adapters.samples import safetensors

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([[1.5]], np.float32)}


def file(entries: Any, data: bytes) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(kind: str = "F32", shape: Any = (1,), span: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize("kinds", ["F32", {"a": "F16", "b": "BF16"}])
def test_values_come_back(kinds: Any) -> None:
    found = read_tensors(safetensors(TENSORS, kinds), "x")
    assert found.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        assert np.array_equal(found[name], values)


@pytest.mark.parametrize(("data", "message"), [
    (b"1234", "4 bytes are no safetensors file"),
    (b"\xff" * 20, "the header claims 18446744073709551615 bytes, the file has 20"),
    (file(b"{", b""), "the header is no JSON"),
    (file(b"[" * 100_000, b""), "the header is no JSON"),
    (file(b'{"a": 1, "a": 2}', b""), "a name stands twice"),
    (file([1], b""), "no JSON object"),
    (file({"a": 1}, b""), "tensor a: malformed entry"),
    (file({"a": entry("F64", (1,), (0, 8))}, bytes(8)), "has the type 'F64'; expected F32, F16, BF16"),
    (file({"a": entry(shape=[-1])}, bytes(4)), "malformed shape"),
    (file({"a": entry(shape=[1.0])}, bytes(4)), "malformed shape"),
    (file({"a": entry(shape=[1] * 70)}, bytes(4)), "malformed shape"),
    (file({"a": entry(shape=[0, 1 << 40, 1 << 40], span=[0, 0])}, b""), "malformed shape"),
    (file({"a": {**entry(), "dtype": ["F32"]}}, bytes(4)), "has the type"),
    (file({"a": entry(span=[0])}, bytes(4)), "malformed shape"),
    (file({"a": entry(span=[0, 8])}, bytes(8)), r"takes 4 bytes, its entry says \[0, 8\]"),
    (file({"a": entry()}, bytes(3)), "truncated: tensor a ends at byte"),
    (file({"a": entry()}, bytes(5)), "1 bytes follow the last tensor"),
    (file({"a": entry(), "b": entry()}, bytes(4)), "tensor b begins at byte 0 of the data, expected 4"),
    (file({"a": entry(span=[4, 8])}, bytes(8)), "tensor a begins at byte 4 of the data, expected 0"),
])
def test_damaged_files(data: bytes, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_tensors(data, "x")


def test_any_cut_is_noticed() -> None:
    whole = safetensors(TENSORS)
    for end in range(len(whole)):
        with pytest.raises(AdapterError):
            read_tensors(whole[:end], "x")


def test_rounding_to_bfloat16() -> None:
    """To the nearest; halves to the even one."""
    one = 1 + 2.0**-8  # half-way between 1 and the next
    values = np.array([1, one, one + 2**-20, 1 + 3 * 2.0**-8, -one, 0, 1e-40], np.float32)
    expected = [1, 1, 1 + 2.0**-7, 1 + 4 * 2.0**-8, -1, 0, widen(round_to_bf16(np.array([1e-40], np.float32)))[0]]
    assert widen(round_to_bf16(values)).tolist() == expected
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    bits = bits[np.isfinite(widen(bits))]
    assert np.array_equal(round_to_bf16(widen(bits)), bits)

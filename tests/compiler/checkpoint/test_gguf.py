"""GGUF files: values against the gguf package, and one test per malformation."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ingot.compiler.checkpoint.errors import CheckpointError
from ingot.compiler.checkpoint.gguf_file import read_gguf_header
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.quantized import quantization_report, stored_schemes, stored_weights
from ingot.compiler.weights.expr import concat, permute, reshape
from ingot.compiler.weights.packed import PackedWeight, Packing

KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]


def values(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return np.random.default_rng(int(kind)).standard_normal((6, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_float32("some.number", 0.5)
    for kind in KINDS:
        writer.add_tensor(f"w.{kind.name}", gguf.quantize(values(kind), kind), raw_dtype=kind)
    writer.add_tensor("vector", np.arange(64, dtype=np.float32))
    writer.add_tensor("experts", np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS, ids=[k.name for k in KINDS])
def test_values_and_ranges_of_rows(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    checkpoint = open_checkpoint(path)
    name = f"w.{kind.name}"
    expected = gguf.dequantize(gguf.quantize(values(kind), kind), kind).astype(np.float32)
    assert checkpoint.shape(name) == (6, 64) and checkpoint.dtype(name) == kind.name
    assert checkpoint.get(name).dtype == np.float32 and (checkpoint.get(name) == expected).all()
    assert (checkpoint.get(name, 2, 5) == expected[2:5]).all()


def test_other_ranks(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.gguf_architecture == "llama"
    assert checkpoint.get("vector", 3, 5).tolist() == [3, 4]
    assert checkpoint.get("experts", 1, 2)[0, 2, 31] == 2 * 3 * 32 - 1 and checkpoint.shape("experts") == (2, 3, 32)


def test_a_folder_with_one_file(path: Path) -> None:
    checkpoint = open_checkpoint(path.parent)
    assert checkpoint.path == path and checkpoint.name == "model"


def test_truncation(path: Path, tmp_path: Path) -> None:
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    cut.write_bytes(data[:-200])
    with pytest.raises(CheckpointError, match=rf"cut.gguf: truncated: expected \d+ bytes, got {len(data) - 200}"):
        read_gguf_header(cut)
    for kept in range(5, 400, 11):
        cut.write_bytes(data[:kept])
        expected = r"cut.gguf: (the header is damaged or cut short|truncated)(?!.*unpack).*\. Download it again"
        with pytest.raises(CheckpointError, match=expected):
            read_gguf_header(cut)


@pytest.mark.parametrize(("begin", "replacement", "message"), [
    (0, b"GGML", "does not begin with the bytes GGUF"), (4, b"\x09\0\0\0", "GGUF version 9"),
    (24, b"\xff" * 8, "damaged or cut short"), (32, b"\xff\xfe", "damaged or cut short")])
def test_damage(path: Path, tmp_path: Path, begin: int, replacement: bytes, message: str) -> None:
    data = bytearray(path.read_bytes())
    data[begin:begin + len(replacement)] = replacement
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(tmp_path / "bad.gguf")


def test_a_type_that_is_not_known(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    entry = data.index(b"vector") + len("vector") + 4 + 8  # rank, one dimension
    data[entry:entry + 4] = (250).to_bytes(4, "little")
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor vector has the GGML type 250, which the gguf package"):
        read_gguf_header(tmp_path / "bad.gguf")


def test_what_it_stores_is_told_and_what_is_kept(path: Path) -> None:
    """To the bit: Q4_0 and Q4_1 in four bits, Q8_0 in eight; but not where the model divides their blocks."""
    checkpoint = open_checkpoint(path)
    found = stored_weights(checkpoint)
    assert found is not None and stored_schemes(checkpoint) == {"w.Q4_0": "w4a8", "w.Q4_1": "w4a8", "w.Q8_0": "int8g32"}
    leaf = {name: found.weights[name].expr for name in found.weights}
    turned = reshape(permute(reshape(leaf["w.Q4_0"], (3, 2, 64)), (1, 0, 2)), (6, 64))
    made = [(concat([turned, leaf["w.Q4_1"]], 0), "w4a8"), (leaf["w.Q8_0"], "int8g32"), (leaf["w.Q8_0"], "w4a8"),
            (permute(leaf["w.Q4_1"], (1, 0)), "w4a8"), (leaf["w.Q5_0"], "int8g32")]
    packed = [PackedWeight("w", expr, Packing(scheme), "") for expr, scheme in made]
    report, lines = quantization_report(found, packed, "cpu", False)
    rows = {(row["format"], row["scheme"], row["kept"]): row["count"] for row in report["weights"]}
    assert rows == {("Q4_0", "w4a8", True): 1, ("Q4_1", "w4a8", True): 1, ("Q4_1", "w4a8", False): 1,
                    ("Q8_0", "int8g32", True): 1, ("Q8_0", "w4a8", False): 1, ("Q5_0", "int8g32", False): 1}
    assert len(lines) == 3 and any("holds as Q5_0 become int8g32" in line for line in lines)

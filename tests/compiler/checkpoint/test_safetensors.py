"""Safetensors files and folders: what is read, and one test per malformation."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.errors import BadWeights, CheckpointError
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.safetensors_file import SafetensorsFile
from ingot.runtime.errors import WorkFailed

TENSORS = {
    "f32": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bf16": torch.tensor([[1.5, -2.25], [3.0, 0.125]], dtype=torch.bfloat16),
    "f16": torch.tensor([0.5, 1024.0], dtype=torch.float16),
    "i64": torch.tensor([[1, -2]]),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_every_type_is_read_as_the_compiler_computes(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    for name, value in TENSORS.items():
        got = checkpoint.get(name)
        expected = value.to(torch.bool if value.dtype == torch.bool else torch.float32 if value.is_floating_point()
                            else torch.int32).numpy()
        assert got.dtype == expected.dtype and got.shape == checkpoint.shape(name) == tuple(value.shape)
        assert (got == expected).all()
    assert checkpoint.dtype("bf16") == "BF16"
    assert checkpoint.get("bf16", 1, 2).tolist() == [[3.0, 0.125]]


def test_a_name_that_is_not_there(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no tensor f33"):
        open_checkpoint(folder).get("f33")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_weights_are_named_with_their_position(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    w = torch.ones(8, 4, dtype=dtype)
    w[5, 2] = value
    save_file({"layer.weight": w}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(BadWeights, match=rf"tensor layer.weight holds {value} at \[5, 2\]"):
        checkpoint.get("layer.weight")
    with pytest.raises(BadWeights, match=r"at \[5, 2\]"):
        checkpoint.get("layer.weight", 4, 8)
    assert checkpoint.get("layer.weight", 0, 5).sum() == 20


def test_large_finite_weights_are_no_error(tmp_path: Path) -> None:
    """Their sum overflows, which is where the quick check gives way to the thorough one."""
    save_file({"w": torch.full((4,), 3e38)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).get("w")[0] == np.float32(3e38)


def test_integers_that_do_not_fit(tmp_path: Path) -> None:
    save_file({"ids": torch.tensor([2**40])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ids holds integers that do not fit 32 bits"):
        open_checkpoint(tmp_path).get("ids")


def sharded(folder: Path) -> Path:
    weight_map = {}
    for i, name in enumerate(TENSORS):
        shard = f"model-{i % 2 + 1:05d}-of-00002.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        save_file({n: TENSORS[n] for n, s in weight_map.items() if s == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path))
    assert sorted(checkpoint.names()) == sorted(TENSORS) and checkpoint.get("bool").tolist() == [True, False]


def test_a_missing_shard_names_file_and_entry(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing; .*expects 3 tensors"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    index = sharded(tmp_path) / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["f32"], entries["weight_map"]["bf16"] = (
        entries["weight_map"]["bf16"], entries["weight_map"]["f32"])
    index.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=r"tensor f32 should be in model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_malformed_index(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"malformed index"):
        open_checkpoint(tmp_path)


def test_truncation_gives_both_sizes(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for kept in range(0, len(data), 7):
        path.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=rf"model.safetensors: .*{kept}"):
            SafetensorsFile(path)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"truncated: expected {len(data)} bytes, got {len(data) - 1}"):
        SafetensorsFile(path)
    path.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match=r"followed by other bytes"):
        SafetensorsFile(path)


def write(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("header", "message"), [
    (b"no json", "not a JSON object"),
    ([1, 2], "not a JSON object"),
    ({"w": {"dtype": "F32"}}, "malformed header entry"),
    ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"F32 \[2\] takes 8 bytes, its entry says \[0, 4"),
    ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "malformed header entry"),
])
def test_malformed_headers(tmp_path: Path, header: Any, message: str) -> None:
    write(tmp_path / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_type_that_is_not_supported_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"\0" * 2)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor w has the type F4; supported are F64, F32"):
        checkpoint.get("w")


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .* but nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickled weights .*save_pretrained"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name the one that is meant: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist, and .* is no model name"):
        open_checkpoint(tmp_path / "nowhere")
    for path in ("./nowhere", "../nowhere"):
        with pytest.raises(CheckpointError, match="does not exist"):  # the hub is not asked
            open_checkpoint(path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"is a file; a checkpoint is a folder or a .gguf file"):
        open_checkpoint(tmp_path / "model.bin")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(WorkFailed, match=r"no folder some-org/some-model, .*: no route to host\. Give the path"):
        open_checkpoint("some-org/some-model")


CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16,
          "intermediate_size": 8}


def with_config(folder: Path, text: str) -> Checkpoint:
    (folder / "config.json").write_text(text)
    return open_checkpoint(folder)


def test_the_configuration(folder: Path) -> None:
    checkpoint = with_config(folder, json.dumps(CONFIG))
    assert checkpoint.config.model_type == "llama" and checkpoint.config.hidden_size == 8


def test_a_folder_without_config(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json. A checkpoint is the folder that save_pretrained"):
        _ = open_checkpoint(folder).config


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not JSON"),
    (json.dumps({"model_type": "lama"}), "unknown architecture 'lama'; .*llama"),
    (json.dumps({}), "unknown architecture None"),
    (json.dumps({**CONFIG, "hidden_size": "wide"}), "cannot read this configuration"),
])
def test_malformed_configurations(folder: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _ = with_config(folder, text).config


def test_digests_tell_apart_what_they_should(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = with_config(folder, json.dumps(CONFIG))
    other_folder = tmp_path_factory.mktemp("other")
    save_file({**TENSORS, "f32": TENSORS["f32"] + 1}, other_folder / "model.safetensors")
    other = with_config(other_folder, json.dumps({**CONFIG, "rms_norm_eps": 1e-3}))
    assert checkpoint.layout_digest == other.layout_digest
    assert checkpoint.tensor_digest("f32") != other.tensor_digest("f32")
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    again = open_checkpoint(copy)
    assert [again.tensor_digest(name) for name in TENSORS] == [checkpoint.tensor_digest(name) for name in TENSORS]

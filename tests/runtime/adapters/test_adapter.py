"""Folders that PEFT wrote, or something like it: what a slot holds then, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.runtime.adapters.adapter import CONFIG, PICKLED, WEIGHTS, Adapter
from ingot.runtime.adapters.errors import AdapterError
from ingot.runtime.bf16 import round_to_bf16, widen
from tests.runtime.adapters.samples import SHAPES, Q, V, config, matrices, names, room, safetensors, write_adapter


def in_slot(image: np.ndarray, offset: int, rows: int, columns: int) -> np.ndarray:
    return widen(image[offset : offset + 2 * rows * columns].view(np.uint16).reshape(rows, columns))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_slot_holds_the_matrices(tmp_path: Path, kind: str) -> None:
    """a as it is, b transposed and scaled, zeros up to the rank of the room; 4 / 2 is the scaling."""
    modules, place = matrices(), room()
    adapter = Adapter.read(write_adapter(tmp_path, modules, kind))
    image = adapter.image(place)
    assert image.shape == (place.bytes_per_adapter,) and adapter.rank == 2
    for module in place.modules:
        a, b = modules[module.name]
        got = in_slot(image, module.a, 4, module.in_features), in_slot(image, module.b, 4, module.out_features)
        assert np.array_equal(got[0][:2], a) and not got[0][2:].any()
        assert np.array_equal(got[1][:2], 2 * b.T) and not got[1][2:].any()


def test_the_product_is_that_of_peft(tmp_path: Path) -> None:
    """x + scaling · B (A x), whatever modules the adapter leaves alone."""
    modules, place = {Q: matrices()[Q]}, room()
    image = Adapter.read(write_adapter(tmp_path, modules, targets=["q_proj"], alpha=1)).image(place)
    x = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    q, v = place.modules
    a, b = in_slot(image, q.a, 4, 8), in_slot(image, q.b, 4, 12)
    assert np.allclose((x @ a.T) @ b, 0.5 * modules[Q][1] @ (modules[Q][0] @ x), rtol=1e-5)
    assert not in_slot(image, v.a, 4, 8).any()


def test_a_file_of_the_safetensors_package(tmp_path: Path) -> None:
    """Not only of the writer of these tests; its header has spaces at its end, and metadata."""
    write_adapter(tmp_path)
    expected = Adapter.read(tmp_path).image(room())
    save_file(names(matrices()), tmp_path / WEIGHTS, {"format": "pt"})
    assert np.array_equal(Adapter.read(tmp_path).image(room()), expected)


@pytest.mark.parametrize(("fields", "scalings"), [
    ({"alpha": 8}, (4.0, 4.0)),
    ({"alpha": 8, "use_rslora": True}, (8 / math.sqrt(2), 8 / math.sqrt(2))),
    ({"alpha_pattern": {"q_proj": 16}}, (8.0, 2.0)),
    ({"alpha_pattern": {"layers.[01].self_attn.v_proj": 1, "v_proj": 7}}, (2.0, 0.5)),
    ({"rank": 8, "rank_pattern": {"q_proj|v_proj": 2}}, (2.0, 2.0)),
    ({"rank": 8, "rank_pattern": {"_proj": 4, ".*_proj": 2}}, (2.0, 2.0)),
])
def test_scalings(tmp_path: Path, fields: dict[str, Any], scalings: tuple[float, float]) -> None:
    """As PEFT's patterns: they fit the end of a name from a dot on, the first that fits counts."""
    modules = matrices()
    adapter = Adapter.read(write_adapter(tmp_path, modules, **fields))
    for name, scaling in zip((Q, V), scalings, strict=True):
        expected = round_to_bf16(modules[name][1].T * np.float32(scaling))
        assert np.array_equal(adapter.modules[name].b, expected), name


def test_the_content_has_a_hash_that_anybody_can_take(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    expected = hashlib.sha256((tmp_path / CONFIG).read_bytes() + (tmp_path / WEIGHTS).read_bytes()).hexdigest()
    assert Adapter.read(tmp_path, expected).sha256 == expected
    with pytest.raises(AdapterError, match=f"has SHA-256 {expected}, expected 0000"):
        Adapter.read(tmp_path, "0" * 64)


def test_an_image_holds_the_adapter_itself(tmp_path: Path) -> None:
    """For another room, whose modules stand elsewhere, without the file and without a copy beside the image."""
    adapter = Adapter.read(write_adapter(tmp_path))
    first, second = room(), room(dict(reversed(SHAPES.items())), max_rank=8)
    image = adapter.image(first)
    moved = adapter.within(image, first)
    assert all(np.shares_memory(part, image) for factors in moved.modules.values() for part in factors)
    assert np.array_equal(moved.image(second), adapter.image(second))
    assert (moved.rank, moved.sha256) == (adapter.rank, adapter.sha256)


def test_no_room_for_it(tmp_path: Path) -> None:
    adapter = Adapter.read(write_adapter(tmp_path))
    for place, message in (
        (None, r"no room for LoRA adapters\.\n.*--lora-max-rank"),
        (room(max_rank=1), r"has rank 2; this engine has room for 1\.\n.*--lora-max-rank 2"),
        (room({Q: SHAPES[Q]}), r"changes 1 modules that this engine has no room for: .*v_proj; it has room for q_proj"),
        (room({Q: (8, 16), V: (8, 4)}), r"q_proj goes from 8 to 12 features, in the engine from 8 to 16"),
    ):
        with pytest.raises(AdapterError, match=message):
            adapter.image(place)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "message"), [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"use_dora": True}, "use_dora is True, which is not served: DoRA"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*whole modules"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa_niter_4"}, "goes with other weights than the model's own"),
    ({"r": 0}, "r: expected a rank of 1 to 1048576, got 0"),
    ({"r": 10**400}, "r: expected a rank of 1 to 1048576"),
    ({"r": True}, "r: expected a rank"),
    ({"lora_alpha": "16"}, "lora_alpha: expected a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha: expected a number"),
    ({"use_rslora": 1}, "use_rslora: expected true or false"),
    ({"lora_alpha": 10**400}, "lora_alpha: expected a number"),
    ({"rank_pattern": {"(": 2}}, "rank_pattern: '\\(' is no regular expression"),
    ({"rank_pattern": {"(?i)q_proj": 2}}, "rank_pattern: .* is no regular expression"),
    ({"rank_pattern": {"q{99999999999999999999}": 2}}, "rank_pattern: .* is no regular expression"),
    ({"rank_pattern": {"(" * 5000 + ")" * 5000: 2}}, "rank_pattern: .* is no regular expression"),
    ({"alpha_pattern": {r"(a)(b)\2": 2}}, "alpha_pattern: .* is no regular expression"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj: expected a number"),
    ({"rank_pattern": [2]}, "rank_pattern: expected an object"),
    ({"target_modules": [3]}, "target_modules: expected names"),
    ({"target_modules": ["k_proj"]}, "q_proj: is none of the target_modules .*: k_proj"),
    ({"r": 4}, r"q_proj: expected lora_A \[4, in\], lora_B \[out, 4\].*got \[2, 8\] and \[12, 2\]"),
])
def test_configs_that_are_not_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**config(), **changes}))
    with pytest.raises(AdapterError, match=message):
        Adapter.read(tmp_path)


def half_missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"base_model.model.{Q}.lora_B.weight"]


def renamed(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors.pop(f"base_model.model.{Q}.lora_A.weight")
    return change


def infinite(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] = np.inf


def too_large(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"base_model.model.{Q}.lora_A.weight"][0, 0] = np.finfo(np.float32).max


def of_one_axis(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"base_model.model.{Q}.lora_A.weight"] = np.ones(16, np.float32)


@pytest.mark.parametrize(("change", "message"), [
    (half_missing, "q_proj: has no lora_B.weight"),
    (renamed(f"base_model.model.{Q}.lora_magnitude_vector"), "DoRA"),
    (renamed("base_model.model.model.embed_tokens.lora_embedding_A"), "a change of the embedding"),
    (renamed(f"base_model.model.{Q}.lora_B.bias"), "a bias"),
    (renamed("lm_head.weight"), "no matrix of a LoRA adapter; expected names as"),
    (renamed(f"base_model.model.{Q}.lora_B.default.weight"), "q_proj has two matrices lora_B"),
    (dict.clear, "holds no matrices"),
    (infinite, "no numbers, or too large"),
    (too_large, "no numbers, or too large"),
    (of_one_axis, r"got \[16\] and \[12, 2\]"),
])
def test_tensors_that_are_not_served(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None],
                                     message: str) -> None:
    write_adapter(tmp_path)
    tensors = names(matrices())
    change(tensors)
    (tmp_path / WEIGHTS).write_bytes(safetensors(tensors))
    with pytest.raises(AdapterError, match=message):
        Adapter.read(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no folder; expected one with adapter_config\.json"):
        Adapter.read(tmp_path / "none")
    with pytest.raises(AdapterError, match="no folder"):
        Adapter.read(tmp_path / ("x" * 1000))
    with pytest.raises(AdapterError, match=r"adapter_config\.json: No such file"):
        Adapter.read(tmp_path)
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / PICKLED)
    with pytest.raises(AdapterError, match=r"adapter_model.bin, a pickle.*\n.*safe_serialization=True"):
        Adapter.read(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(safetensors(names(matrices())))
    (tmp_path / CONFIG).write_text("[1]")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: expected a JSON object"):
        Adapter.read(tmp_path)
    (tmp_path / CONFIG).write_bytes(b"\xff")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: not valid JSON"):
        Adapter.read(tmp_path)
    (tmp_path / CONFIG).write_bytes(b" " * (2 << 20))
    with pytest.raises(AdapterError, match="at most 1048576 are read"):
        Adapter.read(tmp_path)


def test_weights_that_are_far_larger_than_the_room_are_not_read(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    with open(tmp_path / WEIGHTS, "r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: has {1 << 40} bytes, at most [0-9]+ are read"):
        Adapter.read(tmp_path, room=room())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    os.mkfifo(tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: is no file"):
        Adapter.read(tmp_path)

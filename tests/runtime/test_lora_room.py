"""The manifest's member `lora`: what is taken, and what each thing that is wrong is told as."""
from __future__ import annotations

import copy
from typing import Any

import pytest

from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.lora import LoraModule, LoraRoom

ROOM = LoraRoom(4, 2, 512, (LoraModule("model.q_proj", 16, 8, 0, 128), LoraModule("model.k_proj", 16, 8, 192, 320)))


def test_there_and_back() -> None:
    assert LoraRoom.of({"lora": ROOM.to_json()}) == ROOM
    assert ROOM.num_bytes == 1024
    assert LoraRoom.of({}) is None and LoraRoom.of({"lora": None}) is None


@pytest.mark.parametrize(("path", "value", "message"), [
    ((), [], "expected an object with dtype bf16"),
    (("dtype",), "fp8", "expected an object with dtype bf16"),
    (("modules",), [], "modules: expected a list, not empty"),
    (("modules", 0), 3, r"modules\[0\]: name: expected a text, got None"),
    (("modules", 0, "name"), "", r"modules\[0\]: name: expected a text"),
    (("modules", 1, "name"), "model.q_proj", "a name stands twice"),
    (("max_rank",), 257, "max_rank: expected an integer of 1 to 256, got 257"),
    (("max_rank",), True, "max_rank: expected an integer"),
    (("max_adapters",), 0, "max_adapters: expected an integer of 1 to 256, got 0"),
    (("bytes_per_adapter",), 500, "500 is no multiple of 64"),
    (("bytes_per_adapter",), 320, "does not fit a slot of 320"),
    (("modules", 0, "a"), -64, r"modules\[0\]: a: expected an integer of 0"),
    (("modules", 0, "a"), 32, "is not aligned to 64"),
    (("modules", 1, "a"), 64, "matrices of model.q_proj and model.k_proj overlap at byte 64"),
    (("modules", 1, "b"), 1 << 20, "does not fit a slot of 512"),
    (("modules", 1, "in_features"), 0, "in_features: expected an integer of 1"),
])
def test_what_is_wrong_is_told(path: tuple[Any, ...], value: Any, message: str) -> None:
    manifest: Any = copy.deepcopy({"lora": ROOM.to_json()})
    place = manifest
    for name in ("lora", *path)[:-1]:
        place = place[name]
    place[("lora", *path)[-1]] = value
    with pytest.raises(EngineFormatError, match=message):
        LoraRoom.of(manifest)

"""Adapters as PEFT saves them, and rooms for them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.adapters.adapter import CONFIG, WEIGHTS
from ingot.runtime.bf16 import round_to_bf16, widen
from ingot.runtime.lora import LoraModule, LoraRoom

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
SHAPES = {Q: (8, 12), V: (8, 4)}
"""Module -> features in, out."""


def room(shapes: Mapping[str, tuple[int, int]] = SHAPES, max_rank: int = 4, max_adapters: int = 2) -> LoraRoom:
    """As an engine's manifest has it."""
    modules, end = [], 0
    for name, (inputs, outputs) in shapes.items():
        a, b = end, -(-(end + 2 * max_rank * inputs) // 64) * 64
        end = -(-(b + 2 * max_rank * outputs) // 64) * 64
        modules.append(LoraModule(name, inputs, outputs, a, b))
    made = LoraRoom(max_rank, max_adapters, end, tuple(modules))
    assert LoraRoom.of({"lora": made.to_json()}) == made
    return made


def matrices(shapes: Mapping[str, tuple[int, int]] = SHAPES, rank: int = 2, seed: int = 0,
             scale: float = 1.0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Module -> lora_A [rank, in], lora_B [out, rank], f32 whose values bfloat16 has."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return widen(round_to_bf16((scale * rng.standard_normal(shape)).astype(np.float32)))
    return {name: (draw(rank, inputs), draw(outputs, rank)) for name, (inputs, outputs) in shapes.items()}


def safetensors(tensors: Mapping[str, np.ndarray], kinds: Mapping[str, str] | str = "F32") -> bytes:
    """The bytes of a file. kinds: of all, or of each; BF16 takes f32."""
    header, data = {}, b""
    for name, values in tensors.items():
        kind = kinds if isinstance(kinds, str) else kinds[name]
        stored = {"F32": lambda each: each.astype(np.float32), "F16": lambda each: each.astype(np.float16),
                  "BF16": round_to_bf16, "F64": lambda each: each.astype(np.float64)}[kind](values)
        raw = np.ascontiguousarray(stored).tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def names(modules: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Tensors by the names that PEFT gives them."""
    return {f"base_model.model.{name}.lora_{half}.weight": values
            for name, pair in modules.items() for half, values in zip("AB", pair, strict=True)}


def config(rank: int = 2, alpha: float = 4, targets: Sequence[str] | str = ("q_proj", "v_proj"),
           **more: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules":
            targets if isinstance(targets, str) else list(targets), "bias": "none", "use_dora": False,
            "modules_to_save": None, "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM", **more}


def write_adapter(folder: Path, modules: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
                  kind: str = "F32", **fields: Any) -> Path:
    """A folder as PEFT's save_pretrained makes it; fields: of `config`."""
    modules = matrices() if modules is None else modules
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config(**fields)))
    (folder / WEIGHTS).write_bytes(safetensors(names(modules), kind))
    return folder


def seeded_adapter(folder: Path, seed: int, shapes: Mapping[str, tuple[int, int]] = SHAPES) -> Path:
    return write_adapter(folder, matrices(shapes, seed=seed))

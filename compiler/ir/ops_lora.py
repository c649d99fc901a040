"""What LoRA adapters add to linear layers: a product of two small matrices that each token's sequence chooses."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.plugins.lora import reference

from .infer import require
from .op import operator
from .types import DType, TensorType, product

ADAPTERS, SLOTS = "token_adapters", "adapter_slots"
"""Inputs of a graph with room for adapters: i32 [T], the slot of each token's sequence, -1: none; and the slots, u8
[max_adapters, bytes_per_adapter]. Launches find both where the device has them."""


def _infer_shrink(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, adapters, slots = types
    _require_room(adapters, slots)
    require(product(x.shape[:-1]) == "T", f"lora_shrink of {x}")
    end = max(offset for _, offset in attrs["modules"]) + 2 * attrs["rank"] * int(x.shape[-1])
    require(end <= int(slots.shape[1]), f"lora_shrink reads to byte {end} of slots {slots}")
    return (TensorType((*x.shape[:-1], attrs["rank"] * len(attrs["modules"]))),)


@operator("lora_shrink", 3, _infer_shrink)
def _shrink(x: np.ndarray, adapters: np.ndarray, slots: np.ndarray, rank: int,
            modules: Sequence[tuple[str, int]]) -> np.ndarray:
    """x [.., K] -> h [.., len(modules) * rank]. modules: (name, where its matrix a begins in a slot)."""
    h = reference.shrink(x.reshape(-1, x.shape[-1]), adapters, slots, rank, [offset for _, offset in modules])
    return h.reshape(*x.shape[:-1], h.shape[1])


def _infer_expand(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    y, h, adapters, slots = types
    _require_room(adapters, slots)
    require(y.shape[:-1] == h.shape[:-1], f"lora_expand of {h} onto {y}")
    for name, start, width, offset, column in attrs["parts"]:
        require(start + width <= int(y.shape[-1]) and column + attrs["rank"] <= int(h.shape[-1])
                and offset + 2 * attrs["rank"] * width <= int(slots.shape[1]),
                f"lora_expand: {name} at columns {start} to {start + width} of {y}, byte {offset} of {slots}")
    return (y,)


@operator("lora_expand", 4, _infer_expand)
def _expand(y: np.ndarray, h: np.ndarray, adapters: np.ndarray, slots: np.ndarray, rank: int,
            parts: Sequence[tuple[str, int, int, int, int]]) -> np.ndarray:
    """y [.., N] and h [.., W] -> y plus h b in the columns of each part.

    parts  (name of the module, its first column in y, its columns, where its matrix b begins in a slot, its first
           column in h). In memory the result takes the place of y: a step without adapters leaves the launch out
    """
    rows = [part[1:] for part in parts]
    out = reference.expand(y.reshape(-1, y.shape[-1]), h.reshape(-1, h.shape[-1]), adapters, slots, rank, rows)
    return out.reshape(y.shape)


def _require_room(adapters: TensorType, slots: TensorType) -> None:
    require(adapters == TensorType(("T",), DType.I32) and slots.dtype == DType.U8 and len(slots.shape) == 2,
            f"adapters {adapters} of slots {slots}")

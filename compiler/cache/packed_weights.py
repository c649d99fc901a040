"""Packing of weights through the cache: a blob depends on its recipe, its packing, and the tensors that take part."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint.checkpoint import Checkpoint
from ..weights.packed import PackedWeight
from .build_cache import BuildCache
from .keys import key, library_versions, source_digest

if TYPE_CHECKING:
    from .calibration import Calibration

PACKING_SOURCES = ("compiler/checkpoint", "compiler/ir", "compiler/weights", "plugins/gpu/floats.py",
                   "plugins/linear/compensate.py", "plugins/linear/gpu_formats.py", "plugins/linear/gpu_hold.py",
                   "plugins/linear/grids.py",
                   "plugins/linear/native.py", "plugins/linear/pack.py", "plugins/linear/pack_native.c",
                   "plugins/linear/quantize_weights.py", "plugins/scheme.py")
"""Everything that decides what the bytes of a packed weight mean."""


def weight_key(weight: PackedWeight, digests: Mapping[str, str], calibration: Calibration) -> str:
    """digests: of the checkpoint's tensors."""
    return key(expr=weight.expr.to_json(), packing=vars(weight.packing),
               tensors={tensor: digests[tensor] for tensor in weight.expr.tensor_names()},
               calibration=calibration.key(weight),
               versions=library_versions("numpy", "gguf"), sources=source_digest(*PACKING_SOURCES))


def kept(weight: PackedWeight, name: str, cache: BuildCache) -> np.ndarray | None:
    """The blob, u8, if the cache has it."""
    data = cache.get("weights", name)
    return np.frombuffer(data, np.uint8) if data is not None and len(data) == weight.size_bytes else None


def packed(weight: PackedWeight, checkpoint: Checkpoint, digests: Mapping[str, str], calibration: Calibration,
           cache: BuildCache | None) -> np.ndarray:
    """The blob, u8, from the cache or made and kept there. Raises what the checkpoint raises."""
    name = "" if cache is None else weight_key(weight, digests, calibration)
    if cache is not None and (found := kept(weight, name, cache)) is not None:
        return found
    blob = weight.make(calibration.source(checkpoint), calibration.moments(weight))
    if cache is not None:
        cache.put("weights", name, blob.data)
    return blob

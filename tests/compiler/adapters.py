"""Random LoRA adapters for engines with room, as images for their slots and as the change of weights that they mean."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.runtime.lora import LoraRoom


@dataclass(frozen=True)
class RandomAdapter:
    """rank: at most the room's. scale: how large the change of a weight is beside weights of this size."""

    room: LoraRoom
    seed: int
    rank: int
    scale: float = 0.05

    def matrices(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Module -> a [rank, K], b [rank, M], numbers that bfloat16 has."""
        rng = np.random.default_rng(self.seed)
        return {module.name: (_rounded(rng.standard_normal((self.rank, module.in_features))),
                              _rounded(rng.standard_normal((self.rank, module.out_features)) * self.scale
                                       / self.rank ** 0.5))
                for module in self.room.modules}

    def image(self) -> np.ndarray:
        """u8 [bytes_per_adapter], filled up with zeros."""
        image = np.zeros(self.room.bytes_per_adapter, np.uint8)
        matrices = self.matrices()
        for module in self.room.modules:
            for begin, values in zip((module.a, module.b), matrices[module.name], strict=True):
                image[begin:begin + 2 * values.size] = to_bf16(values).reshape(-1).view(np.uint8)
        return image

    def deltas(self) -> dict[str, np.ndarray]:
        """Module -> [M, K], what is added to its weight."""
        return {name: b.T @ a for name, (a, b) in self.matrices().items()}


def _rounded(values: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(values.astype(np.float32)))

"""Where a unit's matrices are in Hugging Face's model, and what rounding them changes there."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..passes.matrices import Matrix
from .units import Unit

if TYPE_CHECKING:
    import torch

@dataclass(frozen=True)
class Part:
    """A module that one of a unit's matrices belongs to.

    kind   "linear" (weight [N, K]), "transposed" (weight [K, N]) or "embedding" ([V, K])
    begin  its first row in the unit's matrix; rows: how many
    """

    module: Any
    kind: str
    begin: int
    rows: int

    def by_weights(self, x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """What an error of the unit's weights adds to the module's output for x: the inputs, or ids of an embedding."""
        import torch

        rows = error[self.begin:self.begin + self.rows].float()
        if self.kind == "embedding":
            return torch.nn.functional.embedding(x, rows) * getattr(self.module, "embed_scale", 1.0)
        return x @ rows.T

    def by_inputs(self, change: torch.Tensor) -> torch.Tensor:
        """What a change of the inputs adds to the output."""
        return change @ (self.module.weight if self.kind == "transposed" else self.module.weight.T)


def parts_of(model: torch.nn.Module, unit: Unit) -> list[Part]:
    """Empty if some matrix has no module of its own that holds it as it is."""
    found, begin = list[Part](), 0
    for matrix in unit.matrices:
        rows = matrix.weight.shape[0]
        parts = [part for name in matrix.names if (part := _part(model, name, matrix, begin)) is not None]
        if not parts:
            return []
        found += {id(part.module): part for part in parts}.values()
        begin += rows
    return found


def _part(model: torch.nn.Module, name: str, matrix: Matrix, begin: int) -> Part | None:
    import torch
    from transformers.pytorch_utils import Conv1D

    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    kinds = ((torch.nn.Linear, "linear"), (Conv1D, "transposed"), (torch.nn.Embedding, "embedding"))
    kind = next((kind for type_, kind in kinds if isinstance(module, type_)), "")
    if not kind:
        return None
    shape = tuple(module.weight.shape)
    return Part(module, kind, begin, matrix.weight.shape[0]) if matrix.weight.shape == (
        shape[::-1] if kind == "transposed" else shape) else None

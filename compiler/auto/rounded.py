"""What weights and inputs are worth in a scheme, of CPU or GPU targets alike."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.quantize.reference import quantize_values
from ingot.plugins.scheme import BLOCK, SCHEMES

from ..checkpoint.checkpoint import Checkpoint
from ..targets import Target
from ..weights.evaluate import evaluate
from ..weights.packed import PANELS, ROWS, PackedWeight, Packing
from .gpu_rounding import GpuRounding
from .units import Unit

if TYPE_CHECKING:
    import torch


def input_kind(scheme: str, target: Target) -> str:
    """How a scheme's kernels round their inputs: equal for equal schemes; "" where they take floats."""
    if target.gpu is not None:
        return GPU_SCHEMES[scheme].quantized
    return f"int8 in {SCHEMES[scheme].act_group}" if SCHEMES[scheme].is_integer else ""


def rounded_inputs(x: torch.Tensor, scheme: str, target: Target, scale: np.ndarray | None = None) -> torch.Tensor:
    """x f32 [.., K] as the kernels of the scheme see it. scale: what it is divided by before, on GPUs."""
    import torch

    if not input_kind(scheme, target):
        return x
    rows = x.reshape(-1, x.shape[-1]).numpy()
    if target.gpu is not None:
        chosen = GPU_SCHEMES[scheme]
        values = chosen.inputs(rows) if scale is None else chosen.inputs(rows / scale) * scale
        return torch.from_numpy(values).reshape(x.shape)
    q, scale = quantize_values(rows, SCHEMES[scheme])
    values = (q.reshape(*scale.shape, BLOCK) * scale[..., None]).reshape(len(rows), -1)[:, :rows.shape[1]]
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(x.shape)


def rounding_of(unit: Unit, scheme: str, target: Target, errors: RoundingErrors) -> Callable[..., Any] | None:
    """What the scheme's kernels do to the unit's inputs; None for nothing."""
    if not input_kind(scheme, target):
        return None
    scale = errors.scale(unit, scheme)
    return lambda x: rounded_inputs(x, scheme, target, scale)


class RoundingErrors:
    """For a unit and a scheme: the stored weights less those of the checkpoint, bf16 [N, K]; None where they are equal.
    A unit of experts is asked for by its stored parts, [E, N, K] each.

    Made when first asked for, and kept: two bytes a weight and scheme, besides the model.
    """

    def __init__(self, checkpoint: Checkpoint, target: Target, pack: Callable[[PackedWeight], np.ndarray],
                 on_gpu: GpuRounding | None = None) -> None:
        """pack: the blob of a weight for a CPU, with what calibration knows of its inputs. on_gpu: likewise for GPUs,
        where weights are else rounded to nearest."""
        self._checkpoint, self._target, self._pack, self._on_gpu = checkpoint, target, pack, on_gpu
        self._known: dict[tuple[str, str], torch.Tensor | None] = {}

    def get(self, unit: Unit, scheme: str) -> torch.Tensor | None:
        key = unit.names[0], scheme
        if key not in self._known:
            self._known[key] = self._make(unit, scheme)
        return self._known[key]

    def scale(self, unit: Unit, scheme: str) -> np.ndarray | None:
        """Of the unit's inputs, see rounded_inputs."""
        return None if self._on_gpu is None else self._on_gpu.scale(unit, scheme)

    def _make(self, unit: Unit, scheme: str) -> torch.Tensor | None:
        import torch

        if self._target.gpu is None and SCHEMES[scheme].weight_bits == 32:
            return None
        found = None if self._on_gpu is None else self._on_gpu.error(unit, scheme)
        if found is None:
            if self._target.gpu is None:
                weight = packed_weight(unit, scheme)
                values = weight.unpacked(self._pack(weight))
            else:
                values = packed_weight(unit, scheme, ROWS).values(self._checkpoint)
            found = values - evaluate(unit.weight, self._checkpoint)
        error = torch.from_numpy(found)
        return error.to(torch.bfloat16) if error.count_nonzero() else None


def packed_weight(unit: Unit, scheme: str, layout: str = PANELS) -> PackedWeight:
    """As the builder of an engine makes it. unit: a stored one."""
    label = "+".join(unit.parameters)
    return PackedWeight(label, unit.weight, Packing(scheme, layout), label, unit.parameters)


def weights_to_calibrate(units: Sequence[Unit], schemes: Sequence[Sequence[str]]) -> list[PackedWeight]:
    """Every unit as it would be in four bits, if that is among its schemes."""
    return [packed_weight(part, scheme) for unit, names in zip(units, schemes, strict=True) for scheme in names
            if scheme in SCHEMES and SCHEMES[scheme].weight_bits == 4 for part in unit.stored]

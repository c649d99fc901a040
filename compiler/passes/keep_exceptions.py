"""Layers that a quantized checkpoint treats otherwise than the rest: whoever quantized it had a reason."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ..precision import Precision
from ..weights.carried import carried
from ..weights.expr import WeightExpr
from ..weights.unpack import UNPACK_OPS
from .matrices import Matrix


def keep_exceptions(matrices: Sequence[Matrix], schemes: Mapping[str, str], precision: Precision,
                    stored: Mapping[str, str]) -> dict[str, str]:
    """On GPUs, where the precision keeps what most layers are stored in: a layer that is stored in floats stays in
    floats, one in FP8 beside NVFP4 stays in FP8. Layers that the user names are as named.

    schemes: output of a node -> its scheme. stored: tensor of the checkpoint -> format of int4 that holds its weight.
    """
    changed = dict(schemes)
    quantized = [(matrix, scheme) for matrix in matrices if (scheme := schemes[matrix.outputs[0]]) in GPU_SCHEMES
                 and GPU_SCHEMES[scheme].weights.bits < 16]
    others = [(matrix, scheme) for matrix, scheme in quantized if not _keeps(scheme, matrix.weight, stored)]
    if len(others) == len(quantized):
        return changed
    for matrix, scheme in others:
        if not precision.is_named(matrix.names, matrix.role):
            changed |= dict.fromkeys(matrix.outputs, _instead(scheme, matrix.weight, precision))
    return changed


def _keeps(scheme: str, weight: WeightExpr, stored: Mapping[str, str]) -> bool:
    form = GPU_SCHEMES[scheme].format
    return carried(weight, form) is not None or any(stored.get(name) == form for name in weight.tensor_names())


def _instead(scheme: str, weight: WeightExpr, precision: Precision) -> str:
    if not _is_unpacked(weight):
        return precision.floats
    fp8 = next((form for form in ("fp8", "fp8_block") if carried(weight, form) is not None), scheme)
    return fp8 if scheme == "nvfp4" else scheme


def _is_unpacked(weight: WeightExpr) -> bool:
    """Whether it is made of something else than the checkpoint's floats."""
    return weight.op in UNPACK_OPS or any(map(_is_unpacked, weight.inputs))

"""What became of the weights of a quantized checkpoint in an engine: kept as they are, or converted."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ...weights.packed import PANELS, PackedWeight
from .equal import shareable
from .gguf import leaves_columns_alone
from .weights import INPUT_SCALES, KV_SCALES, Quantized, QuantizedWeight

_WHY_UNUSED = {
    (INPUT_SCALES, False): "CPU engines quantize them anew in every step, 32 channels at a time",
    (INPUT_SCALES, True): "GPU engines quantize them anew in every step, by token or finer",
    (KV_SCALES, False): "a CPU engine's cache of 8 bits has a scale for every token and head, made when it is written",
    (KV_SCALES, True): "a GPU engine's cache of 8 bits has a scale for every token and head, made when it is written",
}
"""(what, on a GPU) -> why it is not used."""


def quantization_report(quantized: Quantized, packed: Iterable[PackedWeight], target: str, for_gpu: bool,
                        ) -> tuple[dict[str, Any], list[str]]:
    """(for the manifest, lines for the user).

    packed: the weights of the engine. A checkpoint's weight that several of them hold counts for each.
    """
    owner = {tensor: name for name, weight in quantized.weights.items()
             for tensor in set(weight.expr.tensor_names()) - shareable(weight.expr)}
    counts: Counter[tuple[str, str, bool]] = Counter()
    for made in packed:
        if scheme := made.packing.scheme:
            for name in dict.fromkeys(owner[tensor] for tensor in made.expr.tensor_names() if tensor in owner):
                weight = quantized.weights[name]
                counts[weight.format, scheme, _kept(weight, made)] += 1
    rows = [{"format": form, "scheme": scheme, "kept": kept, "count": count}
            for (form, scheme, kept), count in sorted(counts.items())]
    lines = [f"{row['count']} weights that the checkpoint holds as {row['format']} become {row['scheme']}: "
             f"{target} does not compute with them as they are" for row in rows if not row["kept"]]
    notes = [f"{what} are not used: {_WHY_UNUSED[what, for_gpu]}" for what in sorted(quantized.unused, reverse=True)]
    notes += quantized.notes
    return {"method": quantized.method, "weights": rows, "notes": notes}, lines + [
        f"{quantized.method} checkpoint: {note}" for note in notes]


def _kept(weight: QuantizedWeight, made: PackedWeight) -> bool:
    # Whole tensors of a GGUF file are weights; what the model makes of them may divide their blocks.
    whole = weight.expr.op != "tensor" or leaves_columns_alone(made.expr)
    if made.packing.layout == PANELS:
        return weight.scheme == made.packing.scheme and whole
    scheme = GPU_SCHEMES[made.packing.scheme]
    if not scheme.weights.is_int4:
        return made.is_carried
    k = made.expr.shape[-1]  # of a rank, where inputs are divided
    divided = k != weight.expr.shape[-1] and k % scheme.weights.channels_per_scale != 0
    return weight.groups == scheme.format and whole and not divided

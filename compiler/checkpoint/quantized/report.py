"""What became of the weights of a quantized checkpoint in an engine: kept as they are, or converted."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...weights.expr import WeightExpr
from .gguf import leaves_columns_alone
from .weights import Quantized


def quantization_report(quantized: Quantized, packed: Iterable[tuple[WeightExpr, str]], target: str,
                        ) -> tuple[dict[str, Any], list[str]]:
    """(for the manifest, lines for the user).

    packed: the recipe of each weight of the engine and its scheme ("": the elements as they are). A checkpoint's weight
    that several of them hold counts for each.
    """
    owner = {tensor: name for name, weight in quantized.weights.items() for tensor in weight.expr.tensor_names()}
    counts: Counter[tuple[str, str, bool]] = Counter()
    for expr, scheme in packed:
        for name in dict.fromkeys(owner[tensor] for tensor in expr.tensor_names() if tensor in owner):
            weight = quantized.weights[name]
            if scheme:
                # Whole tensors of a GGUF file are weights; what the model makes of them may divide their blocks.
                whole = weight.expr.op != "tensor" or leaves_columns_alone(expr)
                counts[weight.format, scheme, weight.scheme == scheme and whole] += 1
    rows = [{"format": form, "scheme": scheme, "kept": kept, "count": count}
            for (form, scheme, kept), count in sorted(counts.items())]
    lines = [f"{row['count']} weights that the checkpoint holds as {row['format']} become {row['scheme']}: "
             f"{target} does not compute with them as they are" for row in rows if not row["kept"]]
    notes = [f"{quantized.method} checkpoint: {note}" for note in quantized.notes]
    return {"method": quantized.method, "weights": rows, "notes": list(quantized.notes)}, lines + notes

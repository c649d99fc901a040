"""Which matrices gain from knowing their inputs, and what is known of these."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ingot.plugins.linear.compensate import SMALL_ERROR
from ingot.plugins.linear.pack import dequantize
from ingot.plugins.scheme import PANEL, SCHEMES
from ingot.runtime.tokenizer import Tokenizer

from ..checkpoint.checkpoint import Checkpoint
from ..reference_model import ReferenceModel
from ..tokenizer import CONFIG, TOKENIZER
from ..weights.evaluate import evaluate
from ..weights.packed import PackedWeight
from .gather import calibration_text, gather

MAX_PARAMETERS = 1_000_000_000
"""The model runs in float32 in the build's memory: 4 GB at most."""


def calibrate(checkpoint: Checkpoint, weights: Sequence[PackedWeight], tokenizer: Mapping[str, bytes],
              progress: Callable[[str], None]) -> tuple[dict[str, np.ndarray], list[str]]:
    """(name of a packed weight -> second moment of its layer's inputs, f32 [K, K]; warnings).

    Only weights of four bits that rounding changes have one; if there are none the model is not run. Equal moments
    are one array.
    """
    rounded = [weight for weight in weights if _is_rounded(weight, checkpoint)]
    if not rounded:
        return {}, []
    size = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if size > MAX_PARAMETERS:
        return {}, [f"not calibrated: {size / 1e9:.1f} billion parameters, the most is {MAX_PARAMETERS / 1e9:.0f}; "
                    "weights of 4 bits are rounded to nearest"]
    if TOKENIZER not in tokenizer:
        return {}, ["not calibrated, for want of a tokenizer: weights of 4 bits are rounded to nearest"]
    reader = Tokenizer(tokenizer[TOKENIZER], json.loads(tokenizer[CONFIG]))
    tokens = reader.encode(calibration_text(), add_special_tokens=False)
    wanted = {parameter for weight in rounded for parameter in weight.parameters}
    moments = gather(ReferenceModel(str(checkpoint.path)), tokens, wanted, reader.encode(""),
                     lambda done, total: progress(f"{done} of {total} tokens"))
    found = {}
    for weight in rounded:
        known = [moments[parameter] for parameter in weight.parameters if parameter in moments]
        # Merged matrices read the same input. A damaged checkpoint is refused when its tensors are read.
        if known and np.isfinite(known[0]).all():
            found[weight.name] = known[0]
    missing = [weight.label for weight in rounded if weight.name not in found]
    return found, [f"not calibrated: {len(missing)} of {len(rounded)} weights of 4 bits, such as {missing[0]}; "
                   "they are rounded to nearest"] if missing else []


def _is_rounded(weight: PackedWeight, checkpoint: Checkpoint) -> bool:
    """Whether four bits change the weights noticeably: told from some rows of the whole."""
    if weight.packing.scheme != "w4a8" or len(weight.expr.shape) != 2:
        return False
    rows = weight.expr.shape[0]
    for begin in sorted({rows * part // 4 for part in range(4)}):
        w = evaluate(weight.expr, checkpoint, (begin, min(begin + PANEL, rows)))
        error = dequantize(w, SCHEMES["w4a8"]) - w
        if np.square(error).sum() > SMALL_ERROR ** 2 * np.square(w).sum():
            return True
    return False

"""What an engine's manifest says about its calibration."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ingot.runtime.tokenizer import Tokenizer

from ..tokenizer import CONFIG, TOKENIZER
from .gather import calibration_text


def calibration_record(num_weights: int, num_nearest: int, tokenizer: Mapping[str, bytes]) -> dict[str, Any]:
    """num_weights: those of four bits that were rounded for the inputs they meet; num_nearest: the others, rounded
    to nearest or on a grid of sixteen levels already.

    method "none" where no weight was rounded for its inputs: then no text was read.
    """
    counts = {"num_weights": num_weights, "num_not_calibrated": num_nearest}
    if num_weights == 0:
        return {"method": "none", **counts}
    text = calibration_text()
    reader = Tokenizer(tokenizer[TOKENIZER], json.loads(tokenizer[CONFIG]))
    return {"method": "error compensation (GPTQ)", "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "num_tokens": len(reader.encode(text, add_special_tokens=False)), **counts}

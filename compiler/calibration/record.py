"""What an engine's manifest says about its calibration."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

METHODS = {
    "rtn": "rounded to nearest",
    "awq": "inputs scaled (AWQ, SmoothQuant), rounded to nearest",
    "gptq": "error compensation (GPTQ)",
    "best": "whichever of these, or of both together, leaves the least error of a layer's outputs",
}
"""What a user can ask for."""

_TEXTS = {**METHODS, "awq_gptq": "inputs scaled (AWQ) and error compensation (GPTQ)"}
"""What can become of a weight."""


def calibration_record(chosen: Sequence[str], text: str, text_sha256: str, num_tokens: int) -> dict[str, Any]:
    """chosen: for each weight of four bits the method that rounded it; "rtn" for those that no text was read for or
    that lie on a grid of sixteen values already.

    method "none" where no weight was rounded for its inputs: then no text is named.
    """
    counts = Counter(chosen)
    fitted = len(chosen) - counts["rtn"]
    numbers = {"num_weights": fitted, "num_not_calibrated": counts["rtn"]}
    if not fitted:
        return {"method": "none", **numbers}
    return {"method": "; ".join(_TEXTS[name] for name in _TEXTS if counts[name] and name != "rtn"),
            "weights": {name: counts[name] for name in _TEXTS if counts[name]}, "text": text,
            "text_sha256": text_sha256, "num_tokens": num_tokens, **numbers}

"""Which matrices gain from knowing their inputs, and the run that tells what these are."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.plugins.linear.compensate import SMALL_ERROR
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.pack import dequantize
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.tokenizer import Tokenizer

from ..checkpoint.checkpoint import Checkpoint
from ..tokenizer import CONFIG, TOKENIZER
from ..weights.evaluate import evaluate
from ..weights.packed import PackedWeight
from .statistics import InputStatistics
from .text import CalibrationText, windows

WINDOW = 512
"""Tokens of a sequence that the model reads at a time."""

MIN_TOKENS, MAX_TOKENS = 2_048, 8_192
TOKENS_TIMES_PARAMETERS = 10**13
"""A calibration takes about as long whatever the model's size, as far as MIN_TOKENS allow: minutes on two cores."""


Sink = Callable[[str, InputStatistics, list[str]], None]
"""Called when a layer is done: number of the statistics, what they are, the parameters that they are the inputs of."""


@dataclass(frozen=True)
class Reading:
    """What a calibration reads: num_tokens of a text, in windows that each open with `prefix`."""

    windows: tuple[tuple[int, ...], ...]
    prefix: int

    @property
    def num_tokens(self) -> int:
        return sum(len(window) - self.prefix for window in self.windows)


def reading(checkpoint: Checkpoint, tokenizer: Mapping[str, bytes], text: CalibrationText) -> Reading | None:
    """None for a checkpoint without a tokenizer."""
    if TOKENIZER not in tokenizer:
        return None
    reader = Tokenizer(tokenizer[TOKENIZER], json.loads(tokenizer[CONFIG]))
    tokens = [token for document in text.documents for token in reader.encode(document, add_special_tokens=False)]
    prefix = reader.encode("")
    parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    wanted = min(max(TOKENS_TIMES_PARAMETERS // max(parameters, 1), MIN_TOKENS), MAX_TOKENS)
    parts = windows(tokens, min(WINDOW, _max_positions(checkpoint)), wanted, prefix)
    return Reading(tuple(map(tuple, parts)), len(prefix))


def config_entries(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of config.json as it is, without transformers; nothing for a GGUF file."""
    file = checkpoint.path / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _max_positions(checkpoint: Checkpoint) -> int:
    entries = config_entries(checkpoint)
    entries = entries | entries.get("text_config", {})
    found = entries.get("max_position_embeddings") or entries.get("n_positions")
    return found if isinstance(found, int) else WINDOW


def run(checkpoint: Checkpoint, read: Reading, sink: Sink, progress: Callable[[str], None]) -> None:
    """Statistics of the inputs of all matrices, layer by layer, to the sink. Raises WorkFailed, CheckpointError."""
    from .gather import gather
    from .streamed import StreamedModel
    gather(StreamedModel(checkpoint), read.windows, read.prefix, sink,
           lambda done, total: progress(f"layer {done} of {total}, {read.num_tokens} tokens"))


def is_rounded(weight: PackedWeight, checkpoint: Checkpoint) -> bool:
    """Whether its values change the weights noticeably: told from some rows of the whole. What is not rounded for its
    inputs counts as rounded."""
    if not weight.group:
        return True
    small = SMALL_ERROR if weight.packing.scheme != "int8_token" else SMALL_ERROR / 10
    experts = weight.expr.shape[0] if len(weight.expr.shape) == 3 else 0
    rows = experts or weight.expr.shape[0]
    for begin in sorted({rows * part // 4 for part in range(4)}):
        w = evaluate(weight.expr, checkpoint, (begin, min(begin + (1 if experts else 16), rows)))
        w = np.ascontiguousarray(w.reshape(-1, w.shape[-1])[:256])
        error = _stored(w, weight) - w
        if np.square(error).sum() > small ** 2 * np.square(w).sum():
            return True
    return False


def _stored(w: np.ndarray, weight: PackedWeight) -> np.ndarray:
    scheme = weight.packing.scheme
    return GPU_SCHEMES[scheme].stored(w) if weight.packing.layout == "rows" else dequantize(w, SCHEMES[scheme])


def parameters_of(weights: Sequence[PackedWeight]) -> list[str]:
    return sorted({parameter for weight in weights for parameter in weight.parameters})

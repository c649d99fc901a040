"""adapter_config.json, as PEFT writes it: what scales an adapter, and what of it is more than low-rank matrices."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import AdapterError
from .patterns import NamePattern, Work

Value = TypeVar("Value")

# Fields that ask for what is no sum of two matrices' product -> the values with which they ask for nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None), "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}), "layer_replication": (None, []), "target_parameters": (None, []),
    "use_qalora": (False, None), "alora_invocation_tokens": (None, []), "corda_config": (None, {}),
}
_WHY = {
    "use_dora": "DoRA scales the rows of the whole matrix, which an adapter that is added beside it cannot",
    "bias": "a bias of its own would have to be added too; train with bias=\"none\"",
    "modules_to_save": "whole modules that replace those of the model are no part of an adapter here",
}
# Ways to begin a training that change the model's own weights too: PEFT marks adapters that were converted back.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# Far above what any engine has room for, so that the error for a large one can name what to build.
_MAX_RANK = 1 << 20
# A rank for each module of the largest models are some thousand.
_MAX_PATTERNS = 1 << 13


@dataclass(frozen=True)
class AdapterConfig:
    """rank, alpha  of modules that no pattern names
    rank_pattern, alpha_pattern  what ends a module's name, and its value; the first that fits counts
    targets         ends of the names of all modules that are changed; None where the file says it by an expression
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Sequence[tuple[NamePattern, int]]
    alpha_pattern: Sequence[tuple[NamePattern, float]]
    targets: tuple[str, ...] | None

    def rank_of(self, module: str) -> int:
        """Raises AdapterError if its patterns take too long, as scaling_of does."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(data: bytes, what: str) -> AdapterConfig:
    """what: the file's name in errors. Raises AdapterError for what is malformed, or not served."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{what}: expected a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{what}: peft_type is {config.get('peft_type')!r:.40}; expected \"LORA\"")
    for name, plain in _PLAIN.items():
        if (value := config.get(name)) not in plain:
            why = f": {_WHY[name]}" if name in _WHY else ""
            raise AdapterError(f"{what}: {name} is {value!r:.80}, which is not served{why}")
    begins = config.get("init_lora_weights")
    if isinstance(begins, str) and begins.startswith(_CHANGES_BASE):
        raise AdapterError(f"{what}: init_lora_weights is {begins!r:.40}: this adapter goes with other weights than "
                           "the model's own.\n  Saved with path_initial_model_for_weight_conversion it is a plain one.")
    targets = config.get("target_modules")
    if isinstance(targets, list) and not all(isinstance(each, str) for each in targets):
        raise AdapterError(f"{what}: target_modules: expected names, got {targets!r:.80}")
    work = Work(what)
    return AdapterConfig(
        _rank(config.get("r"), f"{what}: r"), _number(config.get("lora_alpha"), f"{what}: lora_alpha"),
        _boolean(config.get("use_rslora", False), f"{what}: use_rslora"),
        _patterns(config, "rank_pattern", what, work, _rank),
        _patterns(config, "alpha_pattern", what, work, _number),
        tuple(targets) if isinstance(targets, list) else None)


def _patterns(config: dict[str, Any], name: str, what: str, work: Work,
              check: Callable[[Any, str], Value]) -> list[tuple[NamePattern, Value]]:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{what}: {name}: expected an object, got {given!r:.60}")
    if len(given) > _MAX_PATTERNS:
        raise AdapterError(f"{what}: {name}: has {len(given)} entries, at most {_MAX_PATTERNS} are read")
    found = []
    for text, value in given.items():
        try:
            pattern = NamePattern(text, work)
        except (ValueError, re.error, OverflowError, RecursionError) as error:
            raise AdapterError(f"{what}: {name}: {text!r:.60} is no regular expression that the end of a name can "
                               f"have here: {error}") from None
        found.append((pattern, check(value, f"{what}: {name}.{text:.60}")))
    return found


def _by_pattern(patterns: Sequence[tuple[NamePattern, Value]], module: str, default: Value) -> Value:
    return next((value for pattern, value in patterns if pattern.fits(module)), default)


def _rank(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{where}: expected a rank of 1 to {_MAX_RANK}, got {value!r:.40}")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:  # nor NaN, nor an integer beyond floats
        raise AdapterError(f"{where}: expected a number, got {value!r:.40}")
    return float(value)


def _boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise AdapterError(f"{where}: expected true or false, got {value!r:.40}")
    return value

"""How long the KV of a prompt's parts is kept, from TensorRT-LLM's KvCacheRetentionConfig as JSON.

    {"token_range_retention_configs": [{"token_start": 0, "token_end": 512, "priority": 80, "duration_ms": 30000}],
     "decode_retention_priority": 20, "decode_duration_ms": 60000}
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kv.sequence import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, RetentionRange
from .grpc_errors import InvalidField, Unsupported

if TYPE_CHECKING:
    from smg_grpc_proto.trtllm_service_pb2 import KvCacheRetentionConfig

_RANGES = "token_range_retention_configs"
_DECODE_PRIORITY, _DECODE_DURATION = "decode_retention_priority", "decode_duration_ms"
_RANGE_KEYS = {"token_start", "token_end", "priority", "duration_ms"}
_MAX_RANGES = 64
_MAX_DURATION_MS = 1 << 53


class Retention(NamedTuple):
    """retention: of the prompt; decode_priority, decode_duration_s: of the answer's blocks. As Request has them."""

    retention: tuple[RetentionRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None


def parse_retention(config: KvCacheRetentionConfig, field: str) -> Retention:
    """Raises InvalidField or Unsupported."""
    if config.policy:
        raise Unsupported(f"{field}.policy", f"{config.policy[:40]!r} is unknown; describe the ranges in config_json")
    if not config.config_json:
        return Retention()
    where = f"{field}.config_json"
    try:
        parsed = json.loads(config.config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidField(where, f"is not valid JSON: {error}") from None
    found = _object(parsed, where, {_RANGES, _DECODE_PRIORITY, _DECODE_DURATION})
    ranges = found.get(_RANGES) or []
    if not isinstance(ranges, list) or len(ranges) > _MAX_RANGES:
        raise InvalidField(f"{where}.{_RANGES}", f"expected a list of at most {_MAX_RANGES} ranges")
    return Retention(
        tuple(_range(each, f"{where}.{_RANGES}[{index}]") for index, each in enumerate(ranges)),
        _priority(found.get(_DECODE_PRIORITY, DEFAULT_PRIORITY), f"{where}.{_DECODE_PRIORITY}"),
        _seconds(found.get(_DECODE_DURATION), f"{where}.{_DECODE_DURATION}"))


def _range(value: Any, where: str) -> RetentionRange:
    found = _object(value, where, _RANGE_KEYS)
    begin = _integer(found.get("token_start", 0), f"{where}.token_start", 0)
    end = found.get("token_end")
    if end is not None:
        end = _integer(end, f"{where}.token_end", begin + 1)
    return RetentionRange(begin, end, _priority(found.get("priority"), f"{where}.priority"),
                          _seconds(found.get("duration_ms"), f"{where}.duration_ms"))


def _priority(value: Any, where: str) -> int:
    return _integer(value, where, MIN_PRIORITY, MAX_PRIORITY)


def _seconds(milliseconds: Any, where: str) -> float | None:
    return None if milliseconds is None else _integer(milliseconds, where, 0, _MAX_DURATION_MS) / 1e3


def _object(value: Any, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(where, "expected a JSON object")
    if unknown := value.keys() - known:
        raise InvalidField(where, f"has no field {min(unknown)[:40]!r}; expected {', '.join(sorted(known))}")
    return value


def _integer(value: Any, where: str, least: int, most: int | None = None) -> int:
    if type(value) is not int or value < least or (most is not None and value > most):
        expected = f"an integer of {least} to {most}" if most is not None else f"an integer, at least {least}"
        raise InvalidField(where, f"expected {expected}")
    return value

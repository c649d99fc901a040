"""How long the KV of a prompt's parts is kept, from TensorRT-LLM's KvCacheRetentionConfig as JSON.

    {"token_range_retention_configs": [{"token_start": 0, "token_end": 512, "priority": 80, "duration_ms": 30000}],
     "decode_retention_priority": 20}
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..kv.sequence import MAX_PRIORITY, MIN_PRIORITY, RetentionRange
from .grpc_errors import InvalidField, Unsupported

if TYPE_CHECKING:
    from smg_grpc_proto.trtllm_service_pb2 import KvCacheRetentionConfig

_RANGES, _DECODE_PRIORITY = "token_range_retention_configs", "decode_retention_priority"
_RANGE_KEYS = {"token_start", "token_end", "priority", "duration_ms"}
_MAX_RANGES = 64


def parse_retention(config: KvCacheRetentionConfig, field: str) -> tuple[tuple[RetentionRange, ...], int | None]:
    """(ranges of the prompt, priority of the answer's blocks or None). Raises InvalidField or Unsupported."""
    if config.policy:
        raise Unsupported(f"{field}.policy", f"{config.policy[:40]!r} is unknown; describe the ranges in config_json")
    if not config.config_json:
        return (), None
    where = f"{field}.config_json"
    try:
        parsed = json.loads(config.config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidField(where, f"is not valid JSON: {error}") from None
    found = _object(parsed, where, {_RANGES, _DECODE_PRIORITY})
    ranges = found.get(_RANGES) or []
    if not isinstance(ranges, list) or len(ranges) > _MAX_RANGES:
        raise InvalidField(f"{where}.{_RANGES}", f"expected a list of at most {_MAX_RANGES} ranges")
    decode = found.get(_DECODE_PRIORITY)
    if decode is not None:
        decode = _integer(decode, f"{where}.{_DECODE_PRIORITY}", MIN_PRIORITY, MAX_PRIORITY)
    return tuple(_range(each, f"{where}.{_RANGES}[{index}]") for index, each in enumerate(ranges)), decode


def _range(value: Any, where: str) -> RetentionRange:
    found = _object(value, where, _RANGE_KEYS)
    begin = _integer(found.get("token_start", 0), f"{where}.token_start", 0)
    end = found.get("token_end")
    if end is not None:
        end = _integer(end, f"{where}.token_end", begin + 1)
    priority = _integer(found.get("priority"), f"{where}.priority", MIN_PRIORITY, MAX_PRIORITY)
    duration = found.get("duration_ms")
    if duration is not None:
        duration = _integer(duration, f"{where}.duration_ms", 0, 1 << 53) / 1e3
    return RetentionRange(begin, end, priority, duration)


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

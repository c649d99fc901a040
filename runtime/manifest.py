"""The manifest of an engine: canonical JSON, and the fields that every manifest has.

Canonical JSON is UTF-8, keys sorted by code point, no spaces, no NaN or infinity, no duplicate keys, no line break at
the end: equal objects have equal bytes, so that a hash of the bytes names the object.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from .engine_format import MANIFEST, EngineFormatError, Member, check_name, check_version

MAX_MANIFEST_BYTES = 256 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Sha256:
    """Schema type: a SHA-256 in lower-case hexadecimal."""


class Count:
    """Schema type: an integer of at least 1."""


# Required fields; a mapping of this table is an object that may have more fields than those named.
FIELDS: dict[str, Any] = {
    "format_version": Count,
    "ingot_version": str,
    "model": {"name": str, "architecture": str, "config_sha256": Sha256},
    "target": {"name": str, "isa": str},
    "precision": str,
    "limits": {"max_batch_size": Count, "max_num_tokens": Count, "max_seq_len": Count},
    "kernels": list,
    "memory": {},
    "toolchain": {},
    "members": {},
}
_TYPE_NAMES = {str: "a string", list: "a list", Count: "an integer of at least 1", Sha256: "64 hexadecimal digits"}


def canonical_json(value: Any) -> bytes:
    """The canonical JSON of dicts with string keys, lists, tuples, strings, numbers, booleans and None.

    Raises ValueError for NaN and infinities, TypeError for other types and for keys that are not strings.
    """
    _require_string_keys(value)
    return _encode(value)


def _encode(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def _require_string_keys(value: Any) -> None:
    # json.dumps would turn 2 and 10 into strings after sorting them as numbers: not what sorting the strings gives.
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON needs string keys, got {key!r}")
            _require_string_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_string_keys(item)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`, canonical or not. Raises EngineFormatError that starts with `what`."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise EngineFormatError(f"{what}: JSON is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise EngineFormatError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineFormatError(f"{what}: expected a JSON object, got {_shown(value)}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def parse_canonical(data: bytes, what: str) -> dict[str, Any]:
    """As parse_object, and `data` are the canonical JSON of what is returned."""
    value = parse_object(data, what)
    try:
        encoded = _encode(value)
    except RecursionError:
        raise EngineFormatError(f"{what}: JSON is nested too deeply") from None
    except ValueError as error:  # a float beyond the range of doubles, half of a surrogate pair
        raise EngineFormatError(f"{what}: not canonical JSON: {error}") from None
    if encoded != data:
        pairs = enumerate(zip(data, encoded, strict=False))
        index = next((i for i, (got, want) in pairs if got != want), min(len(data), len(encoded)))
        got, want = (repr(part[index : index + 16]) for part in (data, encoded))
        raise EngineFormatError(f"{what}: not canonical JSON: byte {index} starts {got[1:]}, expected {want[1:]}")
    return value


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raises EngineVersionError, or EngineFormatError that names the field, unless the required fields are right."""
    version = manifest.get("format_version")
    if type(version) is int:
        check_version(version)
    _check_fields(manifest, FIELDS, "")
    for name, entry in manifest["members"].items():
        check_name(name)
        where = f"members.{name}"
        if type(entry) is not dict or set(entry) != {"sha256", "size"}:
            raise EngineFormatError(f"{MANIFEST}: {where}: expected an object of sha256 and size, got {_shown(entry)}")
        _check_fields(entry, {"sha256": Sha256}, where + ".")
        if type(entry["size"]) is not int or entry["size"] < 0:
            raise EngineFormatError(f"{MANIFEST}: {where}.size: expected bytes, got {_shown(entry['size'])}")
        if is_weight(name) and name != weight_name(entry["sha256"]):
            raise EngineFormatError(
                f"{MANIFEST}: {where}: a weight is named by its content, expected {weight_name(entry['sha256'])}"
            )


def is_weight(name: str) -> bool:
    return name.startswith("weights/")


def weight_name(sha256: str) -> str:
    """The member name of a weight blob."""
    return f"weights/{sha256}.bin"


def _check_fields(value: Mapping[str, Any], fields: Mapping[str, Any], prefix: str) -> None:
    for field, expected in fields.items():
        where = f"{MANIFEST}: {prefix}{field}"
        if field not in value:
            raise EngineFormatError(f"{where}: required field is missing")
        item = value[field]
        if isinstance(expected, dict):
            if type(item) is not dict:
                raise EngineFormatError(f"{where}: expected an object, got {_shown(item)}")
            _check_fields(item, expected, f"{prefix}{field}.")
        elif not _fits(item, expected):
            raise EngineFormatError(f"{where}: expected {_TYPE_NAMES[expected]}, got {_shown(item)}")


def _fits(item: Any, expected: type) -> bool:
    if expected is Count:
        return type(item) is int and item >= 1
    if expected is Sha256:
        return type(item) is str and _SHA256.fullmatch(item) is not None
    return type(item) is expected


def _shown(value: Any) -> str:
    return reprlib.repr(value)  # bounded in length and depth, whatever the file holds


def check_members(manifest: Mapping[str, Any], members: Mapping[str, Member]) -> None:
    """Raises EngineFormatError unless the manifest's table names exactly the members of the file, with their sizes.

    A stripped engine lacks its weights: all of them.
    """
    table = manifest["members"]
    present = set(members) - {MANIFEST}
    expected = set(table)
    if not any(is_weight(name) for name in present):
        expected = {name for name in expected if not is_weight(name)}
    if missing := sorted(expected - present):
        raise EngineFormatError(f"{len(missing)} of {len(table)} members are missing, the first is {missing[0]}")
    if extra := sorted(present - set(table)):
        raise EngineFormatError(f"{len(extra)} members are not in the manifest, the first is {extra[0]}")
    for name in sorted(expected):
        if members[name].size != table[name]["size"]:
            raise EngineFormatError(f"member {name} has {members[name].size} bytes, the manifest says "
                                    f"{table[name]['size']}")

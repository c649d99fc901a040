"""Canonical JSON and the manifest's schema."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.engine_format import EngineFormatError, EngineVersionError
from ingot.runtime.manifest import canonical_json, check_manifest, parse_canonical, parse_object
from tests.runtime.engine_sample import FILES, MANIFEST_FIELDS, table, weight_members

WEIGHT = next(iter(weight_members()))


def test_canonical_json() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": "\n", "Z": (-0.0, 1e22)}, "10": 1, "2": 2}
    expected = '{"10":1,"2":2,"a":{"Z":[-0.0,1e+22],"é":"\\n"},"b":[1,2.5,null,true]}'
    assert canonical_json(value) == expected.encode()


def test_canonical_json_refuses_what_has_no_single_form() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})
    with pytest.raises(TypeError, match="needs string keys, got 2"):
        canonical_json({"a": [{2: "x", 10: "y"}]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON))
def test_canonical_json_comes_back(value: dict[str, Any]) -> None:
    encoded = canonical_json(value)
    assert parse_canonical(encoded, "x") == value
    assert canonical_json(dict(reversed(value.items()))) == encoded


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x: not valid JSON: Expecting value"),
        (b"\x80", "x: not valid JSON: 'utf-8' codec"),
        (b"{", "x: not valid JSON: Expecting property name"),
        (b'{"a":NaN}', "x: not valid JSON: NaN is not a JSON number"),
        (b'{"a":-Infinity}', "x: not valid JSON: -Infinity"),
        (b'{"a":' + b"9" * 5000 + b"}", "x: not valid JSON: Exceeds the limit"),
        (b"[]", r"x: expected a JSON object, got \[\]"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "x: JSON is nested too deeply"),
        (b'{"a":1}\n', r"x: not canonical JSON: byte 7 starts '\\n', expected ''"),
        (b'{"a": 1}', "x: not canonical JSON: byte 5 starts ' 1}', expected '1}'"),
        (b'{"b":1,"a":1}', "x: not canonical JSON: byte 2 "),
        (b'{"a":1,"a":1}', "x: not canonical JSON: byte 6 "),
        (b'{"a":"\\u0041"}', "x: not canonical JSON: byte 6 "),
        (b'{"a":1.50}', "x: not canonical JSON: byte 8 "),
        (b'{"a":1e999}', "x: not canonical JSON: Out of range"),
        (b'{"a":"\\ud800"}', "x: not canonical JSON: 'utf-8' codec"),
    ],
)
def test_not_canonical(data: bytes, message: str) -> None:
    with pytest.raises(EngineFormatError, match=message):
        parse_canonical(data, "x")


def test_parse_object_takes_other_spellings() -> None:
    assert parse_object(b'{ "b": 1, "a": 2 }\n', "x") == {"b": 1, "a": 2}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The sample's manifest with the field at `path` ("a|b") set, or removed when the value is `...`."""
    manifest = json.loads(json.dumps({**MANIFEST_FIELDS, "members": table(FILES)}))
    *parents, last = path.split("|")
    inner = manifest
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return manifest


def test_right_manifest_and_free_fields() -> None:
    check_manifest(changed("model|license", "apache-2.0"))
    check_manifest(changed("quality", {"perplexity": 12.5}))


FIELDS = [*MANIFEST_FIELDS, "members"]
INNER = ["model|name", "model|architecture", "model|config_sha256", "target|name", "target|isa"]


@pytest.mark.parametrize("path", [*FIELDS, *INNER, "limits|max_batch_size", "limits|max_num_tokens"])
def test_required_fields(path: str) -> None:
    name = path.replace("|", ".")
    with pytest.raises(EngineFormatError, match=f"manifest.json: {name}: required field is missing"):
        check_manifest(changed(path, ...))
    with pytest.raises(EngineFormatError, match=f"manifest.json: {name}: expected .*, got 1.5"):
        check_manifest(changed(path, 1.5))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format_version", True, "format_version: expected an integer of at least 1, got True"),
        ("model|config_sha256", "AB" * 32, "model.config_sha256: expected 64 hexadecimal digits, got 'ABAB"),
        ("limits|max_seq_len", 0, "limits.max_seq_len: expected an integer of at least 1, got 0"),
        ("limits|max_seq_len", "8", "limits.max_seq_len: expected an integer of at least 1, got '8'"),
        ("members|code", {}, "member name 'code' is not allowed"),
        ("members|plan.json", [], "members.plan.json: expected an object of sha256 and size"),
        ("members|plan.json|crc", 1, "members.plan.json: expected an object of sha256 and size"),
        ("members|plan.json|size", -1, "members.plan.json.size: expected bytes, got -1"),
        ("members|plan.json|size", 1.0, "members.plan.json.size: expected bytes, got 1.0"),
        ("members|plan.json|sha256", "0", "members.plan.json.sha256: expected 64 hexadecimal digits, got '0'"),
        (f"members|{WEIGHT}|sha256", "0" * 64, f"a weight is named by its content, expected weights/{'0' * 64}.bin"),
    ],
)
def test_wrong_fields(path: str, value: Any, message: str) -> None:
    with pytest.raises(EngineFormatError, match=message):
        check_manifest(changed(path, value))


def test_newer_version_is_told_before_anything_else() -> None:
    with pytest.raises(EngineVersionError, match="engine format 7; this runtime reads formats up to 1"):
        check_manifest({"format_version": 7})

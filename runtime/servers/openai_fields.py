"""Checks of JSON values, each with an error that names the field."""

import json
import reprlib
from collections.abc import Callable
from typing import Any

from .openai_errors import ApiError, invalid

Check = Callable[[str, Any], Any]
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer",
               float: "a number", type(None): "null"}


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {_JSON_TYPES[type(value)]}; expected a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def wrong_type(name: str, expected: str, value: Any) -> ApiError:
    got = _JSON_TYPES.get(type(value), type(value).__name__)
    return invalid(name, f"{name}: expected {expected}, got {got}", "invalid_type")


def number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise wrong_type(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise invalid(name, f"{name}: {reprlib.repr(value)} is too large") from None


def integer(name: str, value: Any) -> int:
    if type(value) is float and value.is_integer():  # JSON has one kind of number
        return int(value)
    if type(value) is not int:
        raise wrong_type(name, "an integer", value)
    return value


def boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise wrong_type(name, "a boolean", value)
    return value


def text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name}: holds half of a surrogate pair, which is no character") from None
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong_type(name, "an object", value)
    return value


def list_of(check: Check) -> Check:
    def checked(name: str, value: Any) -> list[Any]:
        if type(value) is not list:
            raise wrong_type(name, "a list", value)
        return [check(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return checked


def token_ids(name: str, value: Any) -> list[int]:
    """As list_of(integer), but fast for long prompts."""
    if type(value) is not list:
        raise wrong_type(name, "a list", value)
    if not set(map(type, value)) <= {int}:
        return [integer(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return value

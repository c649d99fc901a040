"""Parses protocol buffers, and says what is wrong with those that cannot be parsed.

The library tells only that a message is malformed. A client that sends half a character or a cut message wants to know
in which field, so `explain` walks the bytes once more, by the encoding's own rules.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from .grpc_errors import InvalidField

AnyMessage = TypeVar("AnyMessage", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
_LONG_VARINT = re.compile(rb"[\x80-\xff]{10}")
# Whoever sends more fields than that in front of a malformed one is not told where it is: to look for it takes time.
_MAX_FIELDS = 20_000
_PACKED_FIXED = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4,
                 FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8}
_UNPACKED = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE,
             FieldDescriptor.TYPE_GROUP}


def parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """Raises InvalidField that names the field which is malformed."""
    try:
        return kind.FromString(data)
    except DecodeError:
        descriptor: Descriptor = kind.DESCRIPTOR
        field, problem = explain(descriptor, data) or (descriptor.name, "is malformed")
        raise InvalidField(field, problem) from None


def explain(kind: Descriptor, data: bytes) -> tuple[str, str] | None:
    """(path of the first malformed field, what is wrong with it); None if nothing is found."""
    try:
        _walk(kind, memoryview(data), "", iter(range(_MAX_FIELDS)))
    except _Malformed as error:
        return error.path or kind.name, error.problem
    return None


class _Malformed(Exception):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem


def _walk(kind: Descriptor, data: memoryview, path: str, budget: Iterator[int]) -> None:
    position = 0
    counts: dict[int, int] = {}
    while position < len(data):
        if next(budget, None) is None:
            raise _Malformed("", f"is malformed, somewhere behind its first {_MAX_FIELDS} fields")
        tag, position = _varint(data, position, path, "a field's tag")
        number, wire_type = tag >> 3, tag & 7
        field = kind.fields_by_number.get(number)
        where = _path(path, field, number, counts)
        if number == 0:
            raise _Malformed(path, "a field has the number 0")
        if wire_type == _VARINT:
            _, position = _varint(data, position, where, "the number")
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
            if position > len(data):
                raise _Malformed(where, "the message ends within this field")
        elif wire_type == _LENGTH:
            length, position = _varint(data, position, where, "the length")
            if length > len(data) - position:
                raise _Malformed(where, f"has a length of {length} bytes; {len(data) - position} are left")
            if field is not None:
                _check_value(field, data[position : position + length], where, budget)
            position += length
        else:
            raise _Malformed(where, f"has wire type {wire_type}, which proto3 does not use")


def _check_value(field: FieldDescriptor, data: memoryview, where: str, budget: Iterator[int]) -> None:
    """A value that has a length: a message, a string, bytes, or packed numbers."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        _walk(field.message_type, data, where, budget)
    elif field.type == FieldDescriptor.TYPE_STRING:
        try:
            bytes(data).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Malformed(where, f"is not valid UTF-8 at byte {error.start} ({error.reason})") from None
    elif field.type in _PACKED_FIXED:
        size = _PACKED_FIXED[field.type]
        if len(data) % size:
            raise _Malformed(where, f"{len(data)} bytes are no whole number of {size}-byte values")
    elif field.type not in _UNPACKED and len(data):
        # By the library's own speed: there may be millions of numbers.
        if data[-1] >= 0x80:
            raise _Malformed(where, "the message ends within a number")
        if _LONG_VARINT.search(data):
            raise _Malformed(where, f"a number is longer than {_MAX_VARINT_BYTES} bytes")


def _varint(data: memoryview, position: int, where: str, what: str) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if position >= len(data):
            raise _Malformed(where, f"the message ends within {what}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position
    raise _Malformed(where, f"{what} is longer than {_MAX_VARINT_BYTES} bytes")


def _path(path: str, field: FieldDescriptor | None, number: int, counts: dict[int, int]) -> str:
    if field is None:
        name = f"field {number}"
    elif field.is_repeated and field.type in _UNPACKED:
        name = f"{field.name}[{counts.setdefault(number, 0)}]"
        counts[number] += 1
    else:
        name = field.name
    return f"{path}.{name}" if path else name

"""Tensors of KServe v2 as Python values, and back: typed contents or raw bytes, as the request has them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from .grpc_errors import InvalidField
from .proto import kserve_v2_pb2 as pb

# Data type -> (its field in InferTensorContents, its code for struct, least, most).
_TYPES: dict[str, tuple[str, str, int | None, int | None]] = {
    "BOOL": ("bool_contents", "?", None, None),
    "INT8": ("int_contents", "b", -(1 << 7), (1 << 7) - 1),
    "INT16": ("int_contents", "h", -(1 << 15), (1 << 15) - 1),
    "INT32": ("int_contents", "i", None, None),
    "INT64": ("int64_contents", "q", None, None),
    "UINT8": ("uint_contents", "B", 0, (1 << 8) - 1),
    "UINT16": ("uint_contents", "H", 0, (1 << 16) - 1),
    "UINT32": ("uint_contents", "I", None, None),
    "UINT64": ("uint64_contents", "Q", None, None),
    "FP32": ("fp32_contents", "f", None, None),
    "FP64": ("fp64_contents", "d", None, None),
    "BYTES": ("bytes_contents", "", None, None),
}
_MAX_DIMENSIONS = 8
_MAX_TEXTS = 4096

INTEGERS = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})
FLOATS = frozenset({"FP32", "FP64"})
BOOLEANS = frozenset({"BOOL"})
TEXTS = frozenset({"BYTES"})


def read_inputs(request: pb.ModelInferRequest) -> Iterator[tuple[str, str, list[Any]]]:
    """(name, data type, elements in row-major order) of each input. Raises InvalidField."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidField("raw_input_contents", f"has {len(raw)} entries; expected one for each of the "
                                                 f"{len(request.inputs)} inputs")
    for index, tensor in enumerate(request.inputs):
        where = f"inputs[{index}]"
        if tensor.datatype not in _TYPES:
            raise InvalidField(f"{where}.datatype", f"{tensor.name[:40]} is {tensor.datatype[:40]!r}; expected one of "
                                                    f"{', '.join(_TYPES)}")
        if len(tensor.shape) > _MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
            raise InvalidField(f"{where}.shape", f"{tensor.name[:40]}: expected at most {_MAX_DIMENSIONS} dimensions, "
                                                 "none of them negative")
        if tensor.parameters:
            raise InvalidField(f"{where}.parameters", f"{min(tensor.parameters)[:40]!r} is not supported, nor is any "
                                                      "other parameter of a tensor")
        if raw:
            if tensor.HasField("contents"):
                raise InvalidField(f"{where}.contents", "must be left out where raw_input_contents are given")
            values = _from_raw(raw[index], tensor.datatype, f"raw_input_contents[{index}]")
        else:
            values = _from_contents(tensor, where)
        if (count := math.prod(tensor.shape)) != len(values):
            raise InvalidField(where, f"{tensor.name[:40]} has shape {list(tensor.shape)[:8]}, {count} elements; its "
                                      f"contents have {len(values)}")
        yield tensor.name, tensor.datatype, values


def _from_contents(tensor: pb.ModelInferRequest.InferInputTensor, where: str) -> list[Any]:
    name, _, least, most = _TYPES[tensor.datatype]
    for field, _ in tensor.contents.ListFields():
        if field.name != name:
            raise InvalidField(f"{where}.contents.{field.name}", f"{tensor.name[:40]} is {tensor.datatype}; expected "
                                                                 f"{name}")
    values = list(getattr(tensor.contents, name))
    if least is not None and most is not None and values and not (least <= min(values) and max(values) <= most):
        raise InvalidField(f"{where}.contents.{name}", f"holds a value outside {tensor.datatype}")
    return values


def _from_raw(data: bytes, datatype: str, where: str) -> list[Any]:
    if datatype == "BYTES":
        return _split_bytes(data, where)
    code = _TYPES[datatype][1]
    size = struct.calcsize(code)
    if len(data) % size:
        raise InvalidField(where, f"has {len(data)} bytes; expected a multiple of {size} for {datatype}")
    return list(struct.unpack(f"<{len(data) // size}{code}", data))


def _split_bytes(data: bytes, where: str) -> list[bytes]:
    """Elements, each with its length before it as uint32."""
    elements: list[bytes] = []
    position = 0
    while position < len(data):
        if len(elements) == _MAX_TEXTS:
            raise InvalidField(where, f"has more than {_MAX_TEXTS} elements")
        if position + 4 > len(data):
            raise InvalidField(where, f"element {len(elements)}: expected a length of 4 bytes, {len(data) - position} "
                                      "are left")
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + size > len(data):
            raise InvalidField(where, f"element {len(elements)} has a length of {size} bytes; {len(data) - position} "
                                      "are left")
        elements.append(data[position : position + size])
        position += size
    return elements


def add_output(response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[Any], raw: bool) -> None:
    """Appends a tensor of shape [len(values)]."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    field, code, _, _ = _TYPES[datatype]
    if not raw:
        getattr(tensor.contents, field).extend(values)
    elif datatype == "BYTES":
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in values))
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{code}", *values))

"""What is wrong with bytes that are no message: the field is named, at any depth."""

import pytest
from smg_grpc_proto import trtllm_service_pb2 as trtllm

from ingot.runtime.servers.grpc_errors import InvalidField
from ingot.runtime.servers.proto import kserve_v2_pb2 as kserve
from ingot.runtime.servers.wire import explain, parse

REQUEST = trtllm.GenerateRequest.DESCRIPTOR


def field(number: int, wire_type: int, payload: bytes = b"") -> bytes:
    return varint(number << 3 | wire_type) + payload


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def text(number: int, data: bytes) -> bytes:
    return field(number, 2, varint(len(data)) + data)


BROKEN = [
    (text(1, b"\xff"), "request_id", "UTF-8 at byte 0"),
    (text(21, b"fine") + text(21, b"abc\xc3("), "stop[1]", "UTF-8 at byte 3"),
    (text(2, text(1, b"\x80")), "tokenized.original_text", "UTF-8"),
    (text(16, text(2, b"\xed\xa0\x80")), "kv_cache_retention.config_json", "UTF-8"),  # half a surrogate pair
    (field(1, 2, varint(100) + b"short"), "request_id", "length of 100 bytes; 5 are left"),
    (field(3, 2, varint(3) + field(8, 0) + b"\x80\x80"), "sampling_config.seed", "ends within"),
    (field(5, 0, b"\xff" * 10 + b"\x01"), "max_tokens", "longer than 10 bytes"),
    (field(5, 0), "max_tokens", "ends within"),
    (text(3, field(9, 5, b"\0\0")), "sampling_config.temperature", "ends within"),
    (text(12, b"12345"), "embedding_bias", "5 bytes are no whole number of 4-byte values"),
    (text(22, b"\x80"), "stop_token_ids", "ends within"),
    (text(22, b"\x01" * 1_000_000 + b"\x80"), "stop_token_ids", "ends within"),
    (text(22, b"\x01" + b"\x80" * 10 + b"\x01"), "stop_token_ids", "longer than 10"),
    (text(21, b"a") * 100_000 + b"\x80", "GenerateRequest", "behind its first 20000 fields"),
    (b"\x80", "GenerateRequest", "ends within a field's tag"),
    (b"\x00\x00", "GenerateRequest", "number 0"),
    (field(1, 6), "request_id", "wire type 6"),
    (field(999, 2, varint(50)), "field 999", "length of 50"),
]


@pytest.mark.parametrize(("data", "path", "problem"), BROKEN)
def test_the_malformed_field_is_named(data: bytes, path: str, problem: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(trtllm.GenerateRequest, data)
    assert caught.value.field == path
    assert problem in str(caught.value)


def test_maps_are_named_too() -> None:
    entry = text(4, text(1, b"\xff"))
    found = explain(kserve.ModelInferRequest.DESCRIPTOR, entry)
    assert found is not None and found[0] == "parameters[0].key"


def test_nothing_is_found_in_good_messages() -> None:
    message = trtllm.GenerateRequest(
        request_id="ä", max_tokens=3, stop=["x", "y"], embedding_bias=[1.0, 2.0], stop_token_ids=[1, 1 << 31],
        tokenized=trtllm.TokenizedInput(input_token_ids=range(300)), cache_salt_id=-1, arrival_time=1.5)
    data = message.SerializeToString() + field(999, 0, b"\x05") + field(998, 1, bytes(8))
    assert explain(REQUEST, data) is None
    assert parse(trtllm.GenerateRequest, data).request_id == "ä"


def test_every_cut_is_explained() -> None:
    """Whatever the library refuses, a field is named."""
    message = trtllm.GenerateRequest(
        request_id="request", tokenized=trtllm.TokenizedInput(input_token_ids=range(200)), max_tokens=300,
        sampling_config=trtllm.SamplingConfig(temperature=0.5, seed=1 << 60))
    data = message.SerializeToString()
    refused = 0
    for length in range(len(data)):
        try:
            trtllm.GenerateRequest.FromString(data[:length])
        except Exception:
            refused += 1
            assert explain(REQUEST, data[:length]) is not None, length
    assert refused > 100

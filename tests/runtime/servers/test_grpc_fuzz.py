"""Thousands of broken and hostile messages through a real server: each gets an answer or a refusal that says why.

Three kinds: random bytes; valid messages of which bytes were changed, cut, doubled or removed; valid messages with
hostile values in random fields (extremes, NaN, ids out of range, text of every plane). Seeds are fixed.
"""

import math
import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from smg_grpc_proto import trtllm_service_pb2 as trtllm
from smg_grpc_proto import vllm_engine_pb2 as vllm

from ingot.runtime.servers.proto import kserve_v2_pb2 as kserve
from tests.runtime.mock_engine import VOCAB_SIZE
from tests.runtime.servers import test_kserve, test_trtllm, test_vllm
from tests.runtime.servers.grpc_replica import MODEL, Replica, replica

Code = grpc.StatusCode
# What a client may be told of a message that is wrong; anything else would be a fault of the server.
REFUSALS = {Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.NOT_FOUND}
TIMEOUT_S = 20

GENERATE = "/trtllm.TrtllmService/Generate"
VLLM_GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
HEALTH = "/grpc.health.v1.Health/Check"

VALID: dict[str, list[Message]] = {
    GENERATE: [
        test_trtllm.ask(max_tokens=2, stop=["zz", "ü"], stop_token_ids=[3], streaming=True,
                        sampling_config=trtllm.SamplingConfig(temperature=0.5, top_k=4, top_p=0.5, seed=3)),
        test_trtllm.ask(max_tokens=2, cache_salt_id=4, bad=["q"], kv_cache_retention=trtllm.KvCacheRetentionConfig(
            config_json='{"decode_retention_priority": 3}'), embedding_bias=[0.0] * VOCAB_SIZE),
    ],
    VLLM_GENERATE: [
        test_vllm.ask(max_tokens=2, stop=["zz"], logit_bias={3: 1.0}, n=2, stream=True, seed=3, top_k=3),
        vllm.GenerateRequest(text="Grüße", sampling_params=vllm.SamplingParams(max_tokens=2)),
    ],
    INFER: [
        test_kserve.ask(test_kserve.TEXT, ("max_tokens", "INT32", [2]), ("temperature", "FP32", [0.5]), id="x",
                        outputs=("text_output",)),
        kserve.ModelInferRequest(
            model_name=MODEL, raw_input_contents=[struct.pack("<3q", 65, 66, 67), struct.pack("<i", 2)],
            inputs=[kserve.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[3]),
                    kserve.ModelInferRequest.InferInputTensor(name="max_tokens", datatype="INT32", shape=[1])]),
        test_kserve.ask(test_kserve.IDS, ("sampling_parameters", "BYTES", [b'{"max_tokens": 2, "top_p": 0.5}']),
                        parameters={"seed": kserve.InferParameter(int64_param=3)}),
    ],
}

MESSAGES: dict[str, Descriptor] = {
    GENERATE: trtllm.GenerateRequest.DESCRIPTOR, VLLM_GENERATE: vllm.GenerateRequest.DESCRIPTOR,
    INFER: kserve.ModelInferRequest.DESCRIPTOR, STREAM_INFER: kserve.ModelInferRequest.DESCRIPTOR}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def names_a_field(details: str, kind: Descriptor) -> bool:
    """Whether details begin with the path of a field: of a known one, of an unknown one by its number, or at least with
    the name of the message, where not even that can be told."""
    first = re.match(r"\w+", details)
    return first is not None and ": " in details and first[0] in {*kind.fields_by_name, kind.name, "field"}


class Client:
    """Sends bytes as messages and judges what comes back."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.codes: Counter[str] = Counter()

    def send(self, method: str, data: bytes) -> None:
        try:
            if method == STREAM_INFER:
                responses = list(self._channel.stream_stream(method, None, None)(iter([data]), timeout=TIMEOUT_S))
            elif method.endswith("Generate"):
                responses = list(self._channel.unary_stream(method, None, None)(data, timeout=TIMEOUT_S))
            else:
                responses = [self._channel.unary_unary(method, None, None)(data, timeout=TIMEOUT_S)]
        except grpc.RpcError as error:
            assert error.code() in REFUSALS, (method, data, error)
            assert names_a_field(error.details(), MESSAGES[method]), (method, data, error.details())
            self.codes[error.code().name] += 1
        else:
            assert responses
            self.codes["OK"] += 1


@pytest.fixture
def client(served: Replica) -> Iterator[Client]:
    """After the test the server must be as it was: serving, with nothing running and no block held."""
    with served.channel() as channel:
        yield Client(channel)
        assert channel.unary_unary(HEALTH, None, health_pb2.HealthCheckResponse.FromString)(
            b"").status == health_pb2.HealthCheckResponse.SERVING
        stub = channel.unary_stream(GENERATE, None, trtllm.GenerateResponse.FromString)
        (response,) = stub(test_trtllm.ask().SerializeToString())
        assert list(response.complete.output_token_ids) == test_trtllm.answer_to(test_trtllm.PROMPT, 5)
    test_trtllm.wait_until(lambda: served.executor.stats().num_used_blocks == 0)
    assert served.executor.health == "serving"


def test_the_valid_messages_are_valid(client: Client) -> None:
    for method, messages in VALID.items():
        for message in messages:
            client.send(method, message.SerializeToString())
    assert client.codes == {"OK": 7}


def test_random_bytes(client: Client) -> None:
    """1,200 messages."""
    random_ = random.Random(1)
    for number in range(1200):
        method = random_.choice([*VALID, STREAM_INFER])
        client.send(method, random_.randbytes(random_.choice([1, 2, 3, 5, 10, 30, 100, number])))
    assert client.codes["INVALID_ARGUMENT"] > 1000, client.codes


def mutated(random_: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice([1, 1, 2, 5])):
        if not changed:
            break
        begin = random_.randrange(len(changed))
        end = min(len(changed), begin + random_.choice([1, 2, 8, 40]))
        match random_.randrange(6):
            case 0:
                changed[begin] ^= 1 << random_.randrange(8)
            case 1:
                changed[begin:end] = random_.randbytes(end - begin)
            case 2:
                del changed[begin:end]
            case 3:
                changed[end:end] = changed[begin:end]
            case 4:
                changed[begin] = random_.choice([0, 0x7F, 0x80, 0xFF])
            case _:
                del changed[begin:]
    return bytes(changed)


def test_mutated_messages(client: Client) -> None:
    """2,400 messages."""
    random_ = random.Random(2)
    for _ in range(2400):
        method = random_.choice(list(VALID))
        client.send(method, mutated(random_, random_.choice(VALID[method]).SerializeToString()))
    assert client.codes["INVALID_ARGUMENT"] > 800 and client.codes["OK"] > 200, client.codes


Values = Callable[[random.Random], Any]
_FLOATS: list[float] = [0.0, -0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
_TEXTS = ["", "a", "\0", "ü", "\U0001F600", "x" * 2000, "{", "[]", "null", "\u202e", MODEL, "../../etc", "%s%n", "\r\n"]


def integer(bits: int, signed: bool) -> Values:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return lambda random_: random_.choice([0, 1, least, most, VOCAB_SIZE, random_.randint(least, most),
                                           random_.randint(0, 5)])


_TYPE = FieldDescriptor
_HOSTILE: dict[int, Values] = {
    _TYPE.TYPE_FLOAT: lambda random_: random_.choice(_FLOATS),
    _TYPE.TYPE_DOUBLE: lambda random_: random_.choice(_FLOATS),
    _TYPE.TYPE_INT32: integer(32, True), _TYPE.TYPE_INT64: integer(64, True), _TYPE.TYPE_UINT32: integer(32, False),
    _TYPE.TYPE_UINT64: integer(64, False), _TYPE.TYPE_ENUM: integer(3, False),
    _TYPE.TYPE_BOOL: lambda random_: random_.random() < 0.5, _TYPE.TYPE_STRING: lambda random_: random_.choice(_TEXTS),
    _TYPE.TYPE_BYTES: lambda random_: random_.randbytes(random_.choice([0, 1, 4, 50])),
}


def spoil(random_: random.Random, message: Message, depth: int = 0) -> None:
    """Sets one field somewhere in the message to a hostile value."""
    descriptor: Descriptor = message.DESCRIPTOR
    field = random_.choice(descriptor.fields)
    if field.message_type is None:
        hostile = _HOSTILE[field.type]
        if field.is_repeated:
            values = getattr(message, field.name)
            values.extend(hostile(random_) for _ in range(random_.choice([1, 2, 600])))
        else:
            setattr(message, field.name, hostile(random_))
    elif field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        entries = getattr(message, field.name)
        if value.message_type is None:
            entries[_HOSTILE[key.type](random_)] = _HOSTILE[value.type](random_)
        else:
            spoil(random_, entries[random_.choice([*_TEXTS, "seed", "stop", "top_p"])], depth + 1)
    elif field.is_repeated:
        inside = getattr(message, field.name)
        spoil(random_, random_.choice(inside) if inside and random_.random() < 0.7 else inside.add(), depth + 1)
    else:
        getattr(message, field.name).SetInParent()
        spoil(random_, getattr(message, field.name), depth + 1)


def test_hostile_fields(client: Client) -> None:
    """2,000 messages."""
    random_ = random.Random(3)
    for _ in range(2000):
        method = random_.choice(list(VALID))
        message = random_.choice(VALID[method])
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(random_.choice([1, 1, 2, 4])):
            spoil(random_, copy)
        client.send(method, copy.SerializeToString())
    assert min(client.codes[name] for name in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED")) > 100, client.codes


def test_huge_prompts(client: Client) -> None:
    huge = [1] * 5_000_000  # 5 MB on the wire
    client.send(GENERATE, test_trtllm.ask(prompt=huge).SerializeToString())
    client.send(VLLM_GENERATE, test_vllm.ask(prompt=huge).SerializeToString())
    client.send(INFER, test_kserve.ask(("input_ids", "INT64", huge)).SerializeToString())
    client.send(INFER, test_kserve.ask(("text_input", "BYTES", [b"word " * 1_000_000])).SerializeToString())
    client.send(GENERATE, test_trtllm.ask(bad_token_ids=huge).SerializeToString())
    client.send(INFER, test_kserve.raw("BYTES", bytes(4_000_000), "stop", [1_000_000]).SerializeToString())
    client.send(GENERATE, test_trtllm.ask(stop=["x"] * 1_000_000).SerializeToString()[:-1])
    assert client.codes == {"INVALID_ARGUMENT": 7}

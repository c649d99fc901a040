"""inference.GRPCInferenceService through a real server, by our own stubs (tritonclient: tests/test_real_clients.py)."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ingot.runtime.executor.request import RequestOutput
from ingot.runtime.sampling import SamplingError
from ingot.runtime.servers.proto import kserve_v2_pb2 as pb
from ingot.runtime.servers.proto import kserve_v2_pb2_grpc as rpc
from tests.runtime.mock_engine import VOCAB_SIZE
from tests.runtime.servers.grpc_replica import LIMITS, MODEL, Replica, replica, tokenizer
from tests.runtime.servers.scripted_grpc import ScriptedRunner, scripted
from tests.runtime.servers.test_trtllm import NAN, PROMPT, answer_to, refused, wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("kserve")) as running:
        yield running


@pytest.fixture
def stub(served: Replica) -> Iterator[Any]:
    with served.channel() as channel:
        yield rpc.GRPCInferenceServiceStub(channel)


Given = tuple[str, str, list[Any]]
"""Name, data type, elements of an input."""

_FIELDS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents",
           "FP32": "fp32_contents", "UINT64": "uint64_contents", "INT8": "int_contents", "FP64": "fp64_contents"}


def ask(*given: Given, outputs: tuple[str, ...] = (), model: str = MODEL, **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    for name, datatype, values in given:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        getattr(tensor.contents, _FIELDS[datatype]).extend(values)
    for name in outputs:
        request.outputs.add(name=name)
    return request


IDS: Given = ("input_ids", "INT64", PROMPT)
FIVE: Given = ("max_tokens", "INT32", [5])
TEXT: Given = ("text_input", "BYTES", [b"Hello"])


def contents(response: pb.ModelInferResponse, name: str) -> list[Any]:
    tensor = next(each for each in response.outputs if each.name == name)
    ((_, values),) = tensor.contents.ListFields() or ((None, []),)
    assert list(tensor.shape) == [len(values)]
    return list(values)


def test_token_ids_in_typed_contents(stub: Any) -> None:
    response = stub.ModelInfer(ask(IDS, FIVE, id="mine"))
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "mine")
    assert contents(response, "output_ids") == answer_to(PROMPT, 5)
    assert contents(response, "text_output") == [tokenizer().decode(answer_to(PROMPT, 5)).encode()]
    assert contents(response, "finish_reason") == [b"length"]
    assert (contents(response, "num_input_tokens"), contents(response, "num_output_tokens")) == ([3], [5])


def test_text_in_raw_contents(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
    request.inputs.add(name="temperature", datatype="FP32", shape=[1])
    request.raw_input_contents.extend([struct.pack("<I", 5) + b"Hello", struct.pack("<i", 4), struct.pack("<f", 0)])
    request.outputs.add(name="output_ids")
    request.outputs.add(name="text_output")
    response = stub.ModelInfer(request)
    answer = answer_to(tokenizer().encode("Hello"), 4)
    assert [each.name for each in response.outputs] == ["output_ids", "text_output"]
    assert list(struct.unpack("<4q", response.raw_output_contents[0])) == answer
    text = tokenizer().decode(answer).encode()
    assert response.raw_output_contents[1] == struct.pack("<I", len(text)) + text


def test_the_same_parameter_by_its_three_ways(stub: Any) -> None:
    by_tensor = stub.ModelInfer(ask(IDS, FIVE))
    by_parameter = stub.ModelInfer(ask(IDS, parameters={"max_tokens": pb.InferParameter(int64_param=5)}))
    by_json = stub.ModelInfer(ask(IDS, ("sampling_parameters", "BYTES", [b'{"max_tokens": 5, "temperature": 0}'])))
    by_alias = stub.ModelInfer(ask(IDS, ("request_output_len", "INT32", [5])))
    assert contents(by_tensor, "output_ids") == answer_to(PROMPT, 5)
    assert by_tensor == by_parameter == by_json == by_alias


def test_stop_strings_and_tokens(stub: Any) -> None:
    answer = answer_to(PROMPT, 5)
    word = tokenizer().decode(answer[2:4]).encode()
    response = stub.ModelInfer(ask(IDS, FIVE, ("stop", "BYTES", [b"never", word])))
    assert contents(response, "finish_reason") == [b"stop"]
    assert contents(response, "text_output") == [tokenizer().decode(answer[:2]).encode()]
    response = stub.ModelInfer(ask(IDS, FIVE, ("stop_words", "BYTES", [word]), outputs=("finish_reason",)))
    assert contents(response, "finish_reason") == [b"stop"]
    response = stub.ModelInfer(ask(IDS, FIVE, ("stop_token_ids", "INT32", [answer[1]])))
    assert contents(response, "output_ids") == answer[:2]


def test_log_probabilities(tmp_path: Path) -> None:
    with scripted(tmp_path, ScriptedRunner()) as address, grpc.insecure_channel(address) as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(ask(IDS, ("max_tokens", "INT32", [4]), ("return_log_probs", "BOOL", [True])))
        assert contents(response, "output_log_probs") == [-0.5] * 4
        assert contents(response, "cum_log_probs") == [-2.0]
        response = stub.ModelInfer(ask(IDS, ("max_tokens", "INT32", [4]), outputs=("cum_log_probs",)))
        assert contents(response, "cum_log_probs") == [-2.0]


def test_a_stream_gives_an_answer_in_pieces(stub: Any) -> None:
    request = ask(TEXT, FIVE, ("stream", "BOOL", [True]), id="s",
                  parameters={"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)})
    responses = [each.infer_response for each in stub.ModelStreamInfer(iter([request]))]
    prompt = tokenizer().encode("Hello")
    assert [contents(each, "output_ids") for each in responses] == [[token] for token in answer_to(prompt, 5)]
    assert b"".join(contents(each, "text_output")[0] for each in responses) == tokenizer().decode(
        answer_to(prompt, 5)).encode()
    assert [contents(each, "finish_reason") for each in responses] == [[b""]] * 4 + [[b"length"]]
    assert [each.parameters["triton_final_response"].bool_param for each in responses] == [False] * 4 + [True]


def test_a_stream_answers_many_requests_and_bad_ones_alone(stub: Any) -> None:
    requests = [ask(IDS, FIVE, id=f"r{number}") for number in range(5)]
    requests.insert(2, ask(IDS, ("temperature", "FP32", [-1.0]), id="bad"))
    requests.insert(4, ask(IDS, FIVE, id="nobody", model="other"))
    responses = list(stub.ModelStreamInfer(iter(requests)))
    by_id = {each.infer_response.id: each for each in responses}
    assert len(responses) == len(by_id) == 7
    assert "(temperature)" in by_id["bad"].error_message and "model_name" in by_id["nobody"].error_message
    for number in range(5):
        assert contents(by_id[f"r{number}"].infer_response, "output_ids") == answer_to(PROMPT, 5)


def test_a_client_that_leaves_a_stream_frees_its_blocks(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as slow, slow.channel() as channel:
        requests = [ask(IDS, ("max_tokens", "INT32", [250]), ("stream", "BOOL", [True])) for _ in range(4)]
        responses = rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests))
        next(responses)
        wait_until(lambda: slow.executor.stats().num_running == 4)
        responses.cancel()
        wait_until(lambda: slow.executor.stats().num_used_blocks == 0)


def test_unary_calls_end_with_their_deadline_and_client(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as slow, slow.channel() as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        long = ask(IDS, ("max_tokens", "INT32", [250]))
        code, _ = refused(lambda: [stub.ModelInfer(long, timeout=0.2)])
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        call = stub.ModelInfer.future(long)
        wait_until(lambda: slow.executor.stats().num_running == 1)
        call.cancel()
        wait_until(lambda: slow.executor.stats().num_used_blocks == 0)


BAD: list[tuple[str, pb.ModelInferRequest]] = [
    ("inputs: ", ask()),
    ("inputs: ", ask(IDS, TEXT)),
    ("inputs[0] (nonsense): ", ask(("nonsense", "BYTES", [b"x"]))),
    ("inputs[1] (input_ids): input_ids is given twice", ask(IDS, IDS)),
    ("inputs[0].datatype: ", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="FP16", shape=[1])])),
    ("inputs[0] (text_input): has data type INT32", ask(("text_input", "INT32", [3]))),
    ("inputs[0] (text_input): has 2 elements", ask(("text_input", "BYTES", [b"a", b"b"]))),
    ("inputs[0] (text_input): is not valid UTF-8 at byte 1", ask(("text_input", "BYTES", [b"a\xff"]))),
    ("inputs[1] (temperature): ", ask(IDS, ("temperature", "FP32", [-1.0]))),
    ("inputs[1] (temperature): ", ask(IDS, ("temperature", "FP32", [NAN]))),
    ("inputs[1] (top_p): ", ask(IDS, ("top_p", "FP64", [math.inf]))),
    ("inputs[1] (top_k): ", ask(IDS, ("top_k", "INT32", [-1]))),
    ("inputs[1] (max_tokens): ", ask(IDS, ("max_tokens", "INT32", [0]))),
    ("inputs[1] (max_tokens): has 0 elements", ask(IDS, ("max_tokens", "INT32", []))),
    ("inputs[1] (stop): ", ask(IDS, ("stop", "BYTES", [b""]))),
    ("inputs[1] (stop): is not valid UTF-8", ask(IDS, ("stop", "BYTES", [b"ok", b"\xc3"]))),
    ("inputs[1] (priority): ", ask(IDS, ("priority", "INT64", [1 << 40]))),
    ("inputs[0] (input_ids): ", ask(("input_ids", "INT64", []))),
    ("inputs[0] (input_ids): ", ask(("input_ids", "INT64", [1, VOCAB_SIZE]))),
    ("inputs[0] (input_ids): ", ask(("input_ids", "INT64", [-1]))),
    ("inputs[0] (input_ids): ", ask(("input_ids", "INT64", [1] * (LIMITS.max_seq_len + 1)))),
    ("inputs[1] (stream): ", ask(IDS, ("stream", "BOOL", [True]))),
    ("inputs[1] (sampling_parameters): is not valid JSON", ask(IDS, ("sampling_parameters", "BYTES", [b"{"]))),
    ("inputs[1] (sampling_parameters).temperature: ", ask(IDS, ("sampling_parameters", "BYTES",
                                                                [b'{"temperature": "hot"}']))),
    ("inputs[1] (sampling_parameters).top_p: ", ask(IDS, ("sampling_parameters", "BYTES", [b'{"top_p": NaN}']))),
    ("inputs[1] (sampling_parameters).lora: ", ask(IDS, ("sampling_parameters", "BYTES", [b'{"lora": 1}']))),
    ("parameters['nonsense']: ", ask(IDS, parameters={"nonsense": pb.InferParameter(bool_param=True)})),
    ("parameters['seed']: ", ask(IDS, parameters={"seed": pb.InferParameter()})),
    ("parameters['seed']: is of the wrong kind", ask(IDS, parameters={"seed": pb.InferParameter(string_param="1")})),
    ("outputs[0].name: ", ask(IDS, outputs=("logits",))),
    ("inputs[0].contents.int_contents: ", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[1],
                                              contents=pb.InferTensorContents(int_contents=[1]))])),
    ("inputs[0].contents.int_contents: holds a value outside INT8", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT8", shape=[1],
                                              contents=pb.InferTensorContents(int_contents=[500]))])),
    ("inputs[0]: input_ids has shape [7]", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[7],
                                              contents=pb.InferTensorContents(int64_contents=[1]))])),
    ("inputs[0].shape: ", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[-1])])),
    ("inputs[0].shape: ", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[1 << 62] * 50_000)])),
    ("inputs[0].parameters: ", pb.ModelInferRequest(model_name=MODEL, inputs=[
        pb.ModelInferRequest.InferInputTensor(
            name="input_ids", datatype="INT64", shape=[1],
            parameters={"shared_memory_region": pb.InferParameter(string_param="x")})])),
    ("outputs[0].parameters: ", pb.ModelInferRequest(model_name=MODEL, inputs=ask(IDS).inputs, outputs=[
        pb.ModelInferRequest.InferRequestedOutputTensor(
            name="output_ids", parameters={"classification": pb.InferParameter(int64_param=3)})])),
]


def raw(datatype: str, data: bytes, name: str = "input_ids", shape: list[int] | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[data])
    request.inputs.add(name=name, datatype=datatype, shape=[1] if shape is None else shape)
    return request


BAD += [
    ("inputs[1] (cache_salt): cache_salt has 1025 characters", ask(IDS, ("cache_salt", "BYTES", [b"s" * 1025]))),
    ("raw_input_contents[0]: has 7 bytes", raw("INT64", b"1234567")),
    ("raw_input_contents[0]: element 0: expected a length", raw("BYTES", b"12", "text_input")),
    ("raw_input_contents[0]: element 1 has a length of 9 bytes; 1 are left",
     raw("BYTES", struct.pack("<I", 1) + b"a" + struct.pack("<I", 9) + b"b", "text_input")),
    ("raw_input_contents: has 1 entries; expected one for each of the 2 inputs",
     pb.ModelInferRequest(model_name=MODEL, inputs=ask(IDS, FIVE).inputs, raw_input_contents=[b""])),
    ("inputs[0].contents: must be left out",
     pb.ModelInferRequest(model_name=MODEL, inputs=ask(IDS).inputs, raw_input_contents=[b"12345678"])),
]


@pytest.mark.parametrize(("beginning", "request_"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_request_is_refused_by_its_field(stub: Any, beginning: str, request_: pb.ModelInferRequest) -> None:
    code, details = refused(lambda: [stub.ModelInfer(request_)])
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    assert details.startswith(beginning), details


def test_the_prompt_is_never_part_of_the_output(stub: Any) -> None:
    response = stub.ModelInfer(ask(IDS, FIVE, ("exclude_input_in_output", "BOOL", [True])))
    assert contents(response, "output_ids") == answer_to(PROMPT, 5)
    code, details = refused(lambda: [stub.ModelInfer(ask(IDS, ("exclude_input_from_output", "BOOL", [False])))])
    assert code == grpc.StatusCode.UNIMPLEMENTED and "exclude_input_from_output" in details


@pytest.mark.parametrize(("name", "version", "field"), [("other", "", "model_name"), (MODEL, "7", "model_version")])
def test_another_model_is_not_found(stub: Any, name: str, version: str, field: str) -> None:
    code, details = refused(lambda: [stub.ModelInfer(ask(IDS, model=name, model_version=version))])
    assert code == grpc.StatusCode.NOT_FOUND and details.startswith(field + ": ")
    assert not stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)).ready
    for method, request in (("ModelMetadata", pb.ModelMetadataRequest), ("ModelConfig", pb.ModelConfigRequest),
                            ("ModelStatistics", pb.ModelStatisticsRequest)):
        code, _ = refused(lambda method=method, request=request: [  # type: ignore[misc]
            getattr(stub, method)(request(name=name, version=version))])
        assert code == grpc.StatusCode.NOT_FOUND


def test_liveness_and_metadata(stub: Any, served: Replica) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live and stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name=MODEL)).ready
    assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "ingot"
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    inputs = {each.name: (each.datatype, list(each.shape)) for each in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [1]) and inputs["input_ids"] == ("INT64", [-1])
    assert inputs["max_tokens"] == ("INT32", [1]) and inputs["temperature"] == ("FP32", [1])
    assert {each.name: each.datatype for each in metadata.outputs}["output_ids"] == "INT64"
    config = stub.ModelConfig(pb.ModelConfigRequest(name=MODEL)).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert {each.name: each.data_type for each in config.input}["text_input"] == pb.TYPE_STRING
    assert config.parameters["precision"].string_value == "fp32"
    assert len(config.parameters["engine_hash"].string_value) == 64
    (model,) = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
    assert (model.name, model.state) == (MODEL, "READY")


def test_statistics_count(tmp_path: Path) -> None:
    with replica(tmp_path) as fresh, fresh.channel() as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        for _ in range(3):
            stub.ModelInfer(ask(IDS, FIVE))
        (model,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=MODEL)).model_stats
        assert (model.name, model.inference_count, model.inference_stats.success.count) == (MODEL, 3, 3)
        assert model.inference_stats.success.ns > 0 and model.inference_stats.fail.count == 0
        assert model.execution_count >= 15 // LIMITS.max_batch_size


def test_a_draining_server_is_live_but_not_ready(tmp_path: Path) -> None:
    with replica(tmp_path) as draining, draining.channel() as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        draining.executor.refuse_new()
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name=MODEL)).ready
        assert not stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
        (model,) = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert model.state == "UNAVAILABLE" and "draining" in model.reason
        code, _ = refused(lambda: [stub.ModelInfer(ask(IDS))])
        assert code == grpc.StatusCode.UNAVAILABLE
        (response,) = stub.ModelStreamInfer(iter([ask(IDS, id="x")]))
        assert "no new requests" in response.error_message and response.infer_response.id == "x"


def test_guided_decoding(stub: Any) -> None:
    kind: Given = ("guided_decoding_guide_type", "BYTES", [b"regex"])
    response = stub.ModelInfer(ask(IDS, kind, ("guided_decoding_guide", "BYTES", [b"left|right"]), FIVE))
    assert contents(response, "text_output")[0] in (b"left", b"right")
    for given, field in (((kind,), "guided_decoding_guide_type"),
                         ((("guided_decoding_guide", "BYTES", [b"a"]),), "guided_decoding_guide"),
                         ((kind, ("guided_decoding_guide", "BYTES", [b"("])), "guided_decoding_guide"),
                         ((("guided_decoding_guide_type", "BYTES", [b"xml"]),), "guided_decoding_guide_type")):
        code, details = refused(lambda given=given: [stub.ModelInfer(ask(IDS, *given))])  # type: ignore[misc]
        assert code == grpc.StatusCode.INVALID_ARGUMENT and f"({field}): " in details, details


def test_a_guide_that_leaves_nothing_is_the_clients_fault(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.script = lambda request: [RequestOutput(request.request_id, 0, [], "", 3, 0, 0, finish_reason="error",
                                                   error=SamplingError("guide", "no token can follow token 2"))]
    with scripted(tmp_path, runner) as address, grpc.insecure_channel(address) as channel:
        request = ask(IDS, ("guided_decoding_guide_type", "BYTES", [b"regex"]),
                      ("guided_decoding_guide", "BYTES", [b"a"]))
        (response,) = rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]))
    assert response.error_message.endswith("(guided_decoding_guide): no token can follow token 2")


def test_cache_salt_and_other_settings_are_taken(stub: Any) -> None:
    options = {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "temperature": 1.0, "repetition_penalty": 1.1,
               "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 2, "ignore_eos": True,
               "bad_words": ["zzz"], "stop": "zz", "cache_salt": "tenant", "priority": 3, "max_tokens": 3,
               "skip_special_tokens": False}
    response = stub.ModelInfer(ask(IDS, ("sampling_parameters", "BYTES", [json.dumps(options).encode()])))
    assert contents(response, "num_output_tokens") == [3]

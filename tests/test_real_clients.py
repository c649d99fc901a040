"""Clients that others wrote, unmodified, against `ingot serve` as a process, on a real (tiny) engine:

the SMG gateway in front of two replicas, reached by the openai package; Triton's client; a reflection client; a health
client. And the ends of it all: a killed client, SIGTERM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import trtllm_service_pb2 as trtllm
from smg_grpc_proto import trtllm_service_pb2_grpc as trtllm_rpc

from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.servers.proto import control_pb2, control_pb2_grpc
from tools.bench.replicas import Server, gateway, serve
from tools.bench.routing import Workload, measure

CHAT_TEMPLATE = ("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
                 "{% if add_generation_prompt %}<assistant>{% endif %}")
MAX_SEQ_LEN = 2048
NUM_PRINTABLE = 94
"""Of the tokenizer's tokens, a byte each, the first ones: ! to ~."""
OPTIONS = ("--kv-cache-tokens", "16384", "--num-workers", "1")
PROMPT = "The sea is"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine_path(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a chat template and room for chats, and a head that prefers printable ASCII: gateways
    decode text themselves, each in its own way where it is none."""
    from safetensors.torch import load_file, save_file

    from ingot.compiler.build import BuildRequest, build

    folder = tmp_path_factory.mktemp("talking")
    checkpoint = folder / "tiny-llama"
    shutil.copytree(speaking_checkpoint, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_SEQ_LEN}))
    (checkpoint / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"][NUM_PRINTABLE:] = 0
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    build(BuildRequest(str(checkpoint), "cpu", "fp32", folder / "tiny.engine", max_batch_size=8, max_num_tokens=32,
                       calibrate=False))
    return folder / "tiny.engine"


@pytest.fixture(scope="module")
def answers(engine_path: Path) -> Callable[[str], list[int]]:
    """The greedy answer of 12 tokens, computed in this process."""
    with Engine.load(engine_path, kv_cache_tokens=4096, num_workers=1) as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        known = {text: engine.generate(text, params) for text in (PROMPT, "<user>Hello<assistant>")}
    return lambda text: known[text].token_ids


@pytest.fixture(scope="module")
def replicas(engine_path: Path) -> Iterator[list[Server]]:
    with serve(engine_path, *OPTIONS) as first, serve(engine_path, *OPTIONS) as second:
        yield [first, second]


def text_of(engine_path: Path, ids: list[int]) -> str:
    from ingot.runtime.engine_file import EngineFile
    from ingot.runtime.tokenizer import Tokenizer

    with EngineFile.open(engine_path) as file:
        tokenizer = Tokenizer.of(file)
    assert tokenizer is not None
    return tokenizer.decode(ids)


# The SMG gateway and openai


@pytest.fixture(scope="module")
def client(replicas: list[Server]) -> Iterator[openai.OpenAI]:
    with gateway([each.grpc for each in replicas], "round_robin") as base, \
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def greedy(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=12, temperature=0,
                                     extra_body={"ignore_eos": True}, **options)


def test_openai_through_the_gateway(client: openai.OpenAI, answers: Callable[[str], list[int]],
                                    engine_path: Path) -> None:
    expected = text_of(engine_path, answers(PROMPT))
    assert [each.id for each in client.models.list()] == ["tiny-llama"]
    for _ in range(2):  # each replica in turn
        completion = greedy(client)
        assert completion.choices[0].text == expected
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(PROMPT), 12)
    streamed = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].text for each in streamed if each.choices) == expected
    assert sum(bool(each.choices and each.choices[0].text) for each in streamed) > 3
    assert streamed[-1].usage.completion_tokens == 12


def test_openai_chats_through_the_gateway(client: openai.OpenAI, answers: Callable[[str], list[int]],
                                          engine_path: Path) -> None:
    options: dict[str, Any] = {"model": "tiny-llama", "messages": MESSAGES, "max_tokens": 12, "temperature": 0,
                               "extra_body": {"ignore_eos": True}}
    expected = text_of(engine_path, answers("<user>Hello<assistant>"))
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected
    pieces = client.chat.completions.create(**options, stream=True, n=2)
    by_index: dict[int, str] = {0: "", 1: ""}
    reasons = []
    for piece in pieces:
        for choice in piece.choices:
            by_index[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert by_index == {0: expected, 1: expected} and reasons == ["length"] * 2


def test_the_gateway_uses_both_replicas_and_tells_of_bad_requests(client: openai.OpenAI,
                                                                  replicas: list[Server]) -> None:
    before = [finished(each) for each in replicas]
    for _ in range(4):
        greedy(client)
    assert [finished(each) - count for each, count in zip(replicas, before, strict=True)] == [2, 2]
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=3, top_p=7)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=3, frequency_penalty=100)


def test_log_probabilities_through_the_gateway(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny-llama", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True})
    tokens = chat.choices[0].logprobs.content
    assert len(tokens) == 4 and "".join(each.token for each in tokens) == chat.choices[0].message.content
    for each in tokens:
        assert each.logprob == each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob


def test_a_gateway_may_speak_tensorrt_llms_protocol(engine_path: Path, answers: Callable[[str], list[int]]) -> None:
    with serve(engine_path, *OPTIONS, "--grpc-services", "trtllm,control") as replica, \
            gateway([replica.grpc], "round_robin", "--model-path", "tiny-llama") as base, \
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60) as client:
        expected = text_of(engine_path, answers(PROMPT))
        assert greedy(client).choices[0].text == expected
        assert "".join(each.choices[0].text for each in greedy(client, stream=True) if each.choices) == expected


def test_cache_aware_routing_finds_more_than_round_robin(engine_path: Path) -> None:
    """Counted by the replicas."""
    workload = Workload(sessions=9, turns=4, document_words=60, turn_words=5, max_tokens=4, concurrency=3)
    aware, robin = (measure(engine_path, policy, workload, OPTIONS) for policy in ("cache_aware", "round_robin"))
    assert sum(aware.requests) == sum(robin.requests) == 36 and robin.requests == (18, 18)
    assert aware.prompt_tokens == pytest.approx(robin.prompt_tokens, rel=0.02)
    assert aware.hit_rate > robin.hit_rate + 0.1, (aware, robin)


# Triton's client, in processes of its own: it registers the same protocol buffers as the server's modules

_TRITON = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as triton

def tensor(name, datatype, values):
    array = np.array(values, dtype=np.dtype(
        {"BYTES": object, "INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "BOOL": bool}[datatype]))
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given

client = triton.InferenceServerClient(sys.argv[1])
prompt = [tensor("text_input", "BYTES", [sys.argv[2].encode()]), tensor("max_tokens", "INT32", [12]),
          tensor("temperature", "FP32", [0.0]), tensor("ignore_eos", "BOOL", [True])]
wanted = [triton.InferRequestedOutput(name) for name in ("text_output", "output_ids", "finish_reason")]
facts = {"live": client.is_server_live(), "ready": client.is_server_ready(),
         "model_ready": client.is_model_ready("tiny-llama"), "other_ready": client.is_model_ready("other"),
         "metadata": client.get_model_metadata("tiny-llama", as_json=True)["name"],
         "decoupled": client.get_model_config("tiny-llama").config.model_transaction_policy.decoupled,
         "index": [(each.name, each.state) for each in client.get_model_repository_index().models]}

def read(result):
    return {"text": result.as_numpy("text_output")[0].decode(), "ids": result.as_numpy("output_ids").tolist(),
            "reason": result.as_numpy("finish_reason")[0].decode(), "id": result.get_response().id}

facts["infer"] = read(client.infer("tiny-llama", prompt, outputs=wanted, request_id="one"))

answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
for number in range(3):
    client.async_stream_infer("tiny-llama", [*prompt, tensor("stream", "BOOL", [True])], outputs=wanted,
                              request_id=str(number), enable_empty_final_response=True)
client.async_stream_infer("tiny-llama", [*prompt, tensor("top_p", "FP32", [-1.0])], request_id="bad")
pieces, finals, errors = {}, 0, []
while finals < 3 or not errors:
    result, error = answers.get(timeout=60)
    if error is not None:
        errors.append(error.message())
        continue
    piece = read(result)
    pieces.setdefault(piece["id"], []).append(piece)
    finals += result.get_response().parameters["triton_final_response"].bool_param
client.stop_stream()
facts["pieces"], facts["errors"] = pieces, errors
try:
    client.infer("tiny-llama", [tensor("text_input", "BYTES", [b"x"]), tensor("temperature", "FP32", [-3.0])])
except triton.InferenceServerException as error:
    facts["refused"] = [error.status(), error.message()]
facts["statistics"] = client.get_inference_statistics("tiny-llama").model_stats[0].inference_stats.success.count
json.dump(facts, sys.stdout)
"""


def test_tritons_client(replicas: list[Server], answers: Callable[[str], list[int]], engine_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _TRITON, replicas[0].grpc, PROMPT], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    ids, text = answers(PROMPT), text_of(engine_path, answers(PROMPT))
    assert [facts[name] for name in ("live", "ready", "model_ready", "other_ready", "decoupled")] == [
        True, True, True, False, True]
    assert facts["metadata"] == "tiny-llama" and facts["index"] == [["tiny-llama", "READY"]]
    assert facts["infer"] == {"text": text, "ids": ids, "reason": "length", "id": "one"}
    assert sorted(facts["pieces"]) == ["0", "1", "2"]
    for pieces in facts["pieces"].values():
        assert [token for each in pieces for token in each["ids"]] == ids
        assert "".join(each["text"] for each in pieces) == text
        assert [each["reason"] for each in pieces] == [""] * (len(pieces) - 1) + ["length"]
    assert len(facts["errors"]) == 1 and "top_p" in facts["errors"][0]
    status, message = facts["refused"]
    assert status == "StatusCode.INVALID_ARGUMENT" and "temperature" in message
    assert facts["statistics"] >= 4


# Reflection and health


def test_a_reflection_client_can_call_what_it_has_never_seen(replicas: list[Server]) -> None:
    with grpc.insecure_channel(replicas[0].grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        assert {"trtllm.TrtllmService", "vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService",
                "ingot.v1.Control", "grpc.health.v1.Health"} <= names
        pool = DescriptorPool(database)
        for name in names:
            assert pool.FindServiceByName(name).methods
        assert [each.name for each in pool.FindMessageTypeByName("trtllm.SamplingConfig").fields][:3] == [
            "beam_width", "num_return_sequences", "top_k"]


def test_a_health_client(replicas: list[Server]) -> None:
    with grpc.insecure_channel(replicas[0].grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "trtllm.TrtllmService", "inference.GRPCInferenceService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


# Ends

_KILLED = """
import sys, time
import grpc
from smg_grpc_proto import trtllm_service_pb2 as pb, trtllm_service_pb2_grpc as rpc
stub = rpc.TrtllmServiceStub(grpc.insecure_channel(sys.argv[1]))
prompt = pb.TokenizedInput(input_token_ids=range(65, 90))
request = pb.GenerateRequest(tokenized=prompt, max_tokens=2000, streaming=True, ignore_eos=True)
streams = [stub.Generate(request) for _ in range(4)]
for stream in streams:
    next(stream)
print("streaming", flush=True)
time.sleep(60)
"""


def statistics(server: Server) -> control_pb2.Statistics:
    with grpc.insecure_channel(server.grpc) as channel:
        answer: control_pb2.Statistics = control_pb2_grpc.ControlStub(channel).GetStatistics(
            control_pb2.GetStatisticsRequest())
        return answer


def finished(server: Server) -> int:
    return sum(statistics(server).requests_finished.values())


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def test_killed_clients_leave_nothing_behind(replicas: list[Server]) -> None:
    with subprocess.Popen([sys.executable, "-c", _KILLED, replicas[0].grpc], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"streaming\n"
            before = statistics(replicas[0])
            assert before.num_running == 4 and before.num_used_blocks > 0
        finally:
            os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: statistics(replicas[0]).num_used_blocks == 0)
    after = statistics(replicas[0])
    assert after.requests_finished["cancelled"] == before.requests_finished["cancelled"] + 4


def test_a_signal_lets_requests_finish_and_refuses_new_ones(engine_path: Path) -> None:
    with serve(engine_path, *OPTIONS) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = trtllm_rpc.TrtllmServiceStub(channel)
        request = trtllm.GenerateRequest(tokenized=trtllm.TokenizedInput(input_token_ids=[65, 66]), max_tokens=2000,
                                         streaming=True, ignore_eos=True)
        running = stub.Generate(request)
        next(running)
        server.terminate()
        refused: list[grpc.StatusCode] = []

        def ask_until_refused() -> None:
            while not refused:
                try:
                    list(stub.Generate(trtllm.GenerateRequest(
                        tokenized=trtllm.TokenizedInput(input_token_ids=[65]), max_tokens=1)))
                except grpc.RpcError as error:
                    refused.append(error.code())

        asking = threading.Thread(target=ask_until_refused)
        asking.start()
        last = list(running)[-1]
        assert (last.complete.completion_tokens, last.complete.finish_reason) == (2000, "length")
        asking.join(30)
        assert refused == [grpc.StatusCode.UNAVAILABLE]
        assert server.wait() == 0

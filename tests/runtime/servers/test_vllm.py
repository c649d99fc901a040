"""vllm.grpc.engine.VllmEngine through a real server."""

import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2

from ingot.runtime.executor.request import RequestOutput
from ingot.runtime.sampling import SamplingError
from ingot.runtime.servers.loads import Throughput
from tests.runtime.mock_engine import EOS, TEMPLATE, VOCAB_SIZE, tokenizer_json
from tests.runtime.servers.grpc_replica import BLOCK_SIZE, LIMITS, MODEL, Replica, replica, tokenizer
from tests.runtime.servers.scripted_grpc import ScriptedRunner, scripted
from tests.runtime.servers.test_trtllm import NAN, PROMPT, answer_to, refused, wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture
def stub(served: Replica) -> Iterator[Any]:
    with served.channel() as channel:
        yield rpc.VllmEngineStub(channel)


def ask(request_id: str = "", prompt: list[int] = PROMPT, stream: bool = False, fields: dict[str, Any] | None = None,
        **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_ids=prompt), stream=stream,
                              sampling_params=pb.SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **params}),
                              **(fields or {}))


def test_a_whole_answer(stub: Any) -> None:
    (response,) = stub.Generate(ask())
    complete = response.complete
    assert list(complete.output_ids) == answer_to(PROMPT, 5)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 5)


def test_an_answer_in_chunks_that_count_their_own_tokens(stub: Any) -> None:
    *chunks, last = stub.Generate(ask(stream=True))
    assert [list(each.chunk.token_ids) for each in chunks] == [[token] for token in answer_to(PROMPT, 5)]
    assert [each.chunk.completion_tokens for each in chunks] == [1] * 5
    assert list(last.complete.output_ids) == answer_to(PROMPT, 5)


def test_a_text_is_tokenized_here(stub: Any) -> None:
    request = ask()
    request.text = "Hello"
    (response,) = stub.Generate(request)
    prompt = tokenizer().encode("Hello")
    assert list(response.complete.output_ids) == answer_to(prompt, 5)
    assert response.complete.prompt_tokens == 5


def test_a_prompt_may_be_cut_from_the_left(stub: Any) -> None:
    (response,) = stub.Generate(ask(prompt=list(range(60, 100)), truncate_prompt_tokens=7))
    assert response.complete.prompt_tokens == 7
    assert response.complete.output_ids[0] == answer_to(list(range(93, 100)), 1)[0]
    (response,) = stub.Generate(ask(prompt=[65] * 1000, truncate_prompt_tokens=-1))
    assert response.complete.prompt_tokens == LIMITS.max_seq_len - 1


def test_unset_fields_mean_vllms_defaults(stub: Any) -> None:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    (response,) = stub.Generate(request)  # no max_tokens: as many as fit
    assert response.complete.completion_tokens == LIMITS.max_seq_len - len(PROMPT)
    (response,) = stub.Generate(ask(seed=-1))
    assert response.complete.finish_reason == "length"
    (response,) = stub.Generate(ask(seed=-5))
    assert response.complete.finish_reason == "length"


def test_stop_tokens_stay_and_are_told(stub: Any) -> None:
    answer = answer_to(PROMPT, 5)
    (response,) = stub.Generate(ask(stop_token_ids=[answer[3]]))
    assert list(response.complete.output_ids) == answer[:4]
    assert (response.complete.finish_reason, response.complete.matched_token_id) == ("stop", answer[3])



@pytest.mark.parametrize(("field", "request_"), [
    ("sampling_params.temperature", ask(temperature=-0.5)),
    ("sampling_params.temperature", ask(temperature=NAN)),
    ("sampling_params.top_p", ask(top_p=-1.0)),
    ("sampling_params.top_p", ask(top_p=1.5)),
    ("sampling_params.min_p", ask(min_p=NAN)),
    ("sampling_params.frequency_penalty", ask(frequency_penalty=-9.0)),
    ("sampling_params.presence_penalty", ask(presence_penalty=math.inf)),
    ("sampling_params.repetition_penalty", ask(repetition_penalty=-1.0)),
    ("sampling_params.max_tokens", ask(max_tokens=0)),
    ("sampling_params.min_tokens", ask(min_tokens=9)),
    ("sampling_params.n", ask(n=4_000_000_000)),
    ("sampling_params.logprobs", ask(logprobs=-1)),
    ("sampling_params.logprobs", ask(logprobs=21)),
    ("sampling_params.prompt_logprobs", ask(prompt_logprobs=21)),
    ("sampling_params.stop", ask(stop=[""])),
    ("sampling_params.stop_token_ids", ask(stop_token_ids=[VOCAB_SIZE])),
    ("sampling_params.logit_bias", ask(logit_bias={-1: 1.0})),
    ("sampling_params.logit_bias", ask(logit_bias={VOCAB_SIZE: 1.0})),
    ("sampling_params.logit_bias", ask(logit_bias={3: NAN})),
    ("sampling_params.truncate_prompt_tokens", ask(truncate_prompt_tokens=0)),
    ("sampling_params.choice.choices", ask(choice=pb.ChoiceConstraint())),
    ("sampling_params.choice.choices", ask(choice=pb.ChoiceConstraint(choices=["a", ""]))),
    ("sampling_params.regex", ask(regex="")),
    ("sampling_params.json_schema", ask(json_schema="")),
    ("tokenized.input_ids", ask(prompt=[])),
    ("tokenized.input_ids", ask(prompt=[VOCAB_SIZE])),
    ("tokenized.input_ids", ask(prompt=[1] * 10_000)),
    ("tokenized.input_ids", pb.GenerateRequest()),
    ("data_parallel_rank", ask(fields={"data_parallel_rank": 2})),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_value_is_refused_by_its_field(stub: Any, field: str, request_: pb.GenerateRequest) -> None:
    code, details = refused(lambda: stub.Generate(request_))
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    assert details.startswith(field + ": "), details


@pytest.mark.parametrize(("field", "request_"), [
    ("kv_transfer_params", ask(fields={"kv_transfer_params": pb.KvTransferParams(remote_host="x")})),
    ("kv_transfer_params_json", ask(fields={"kv_transfer_params_json": "{}"})),
    ("mm_inputs", ask(fields={"mm_inputs": pb.MultimodalInputs()})),
    ("extra_mm_inputs", ask(fields={"extra_mm_inputs": [pb.MultimodalInputs()]})),
    ("media_refs", ask(fields={"media_refs": pb.MediaRefs()})),
    ("sampling_params.structural_tag", ask(structural_tag="{}")),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_engine_cannot_do_is_refused_by_its_field(stub: Any, field: str, request_: pb.GenerateRequest) -> None:
    code, details = refused(lambda: stub.Generate(request_))
    assert code == grpc.StatusCode.UNIMPLEMENTED, details
    assert details.startswith(field + ": "), details


def test_log_probabilities(tmp_path: Path) -> None:
    with scripted(tmp_path, ScriptedRunner()) as address, grpc.insecure_channel(address) as channel:
        stub = rpc.VllmEngineStub(channel)
        *chunks, last = stub.Generate(ask(stream=True, logprobs=2, prompt_logprobs=1))
        assert [list(each.chunk.output_logprobs.token_ids) for each in chunks] == [
            list(each.chunk.token_ids) for each in chunks]
        first = chunks[0].chunk.input_logprobs
        assert [each.HasField("value") for each in first.token_logprobs] == [False, True, True]
        assert list(first.token_ids) == PROMPT
        assert not chunks[1].chunk.HasField("input_logprobs")
        complete = last.complete
        assert list(complete.output_logprobs.token_logprobs) == [-0.5] * 5
        assert len(complete.output_logprobs.top_logprobs) == 5
        assert list(complete.input_logprobs.token_ids) == PROMPT


@pytest.mark.parametrize("constraint", [
    {"choice": pb.ChoiceConstraint(choices=["left", "right"])}, {"regex": "left|right"},
    {"grammar": 'start: "left" | "right"'}, {"json_schema": '{"enum": ["left"]}'}, {"json_object": True},
], ids=lambda constraint: next(iter(constraint)))
def test_constraints(stub: Any, constraint: dict[str, Any]) -> None:
    (response,) = stub.Generate(ask(max_tokens=20, **constraint))
    text = tokenizer().decode(list(response.complete.output_ids))
    assert text in ("left", "right", '"left"') or (text.startswith("{") and "json_object" in constraint)


def test_a_constraint_that_is_none_is_refused(stub: Any) -> None:
    code, details = refused(lambda: stub.Generate(ask(regex="(")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("sampling_params.regex: "), details
    assert len(list(stub.Generate(ask(json_object=False)))) == 1


def test_a_constraint_that_leaves_nothing_is_the_clients_fault(tmp_path: Path) -> None:
    """Which is known when the answer is under way."""
    runner = ScriptedRunner()
    runner.script = lambda request: [RequestOutput(request.request_id, 0, [], "", 3, 0, 0, finish_reason="error",
                                                   error=SamplingError("guide", "no token can follow token 2"))]
    with scripted(tmp_path, runner) as address, grpc.insecure_channel(address) as channel:
        code, details = refused(lambda: rpc.VllmEngineStub(channel).Generate(ask(regex="a", min_tokens=5)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == "sampling_params.regex: no token can follow token 2"


def test_abort(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as slow, slow.channel() as channel:
        stub = rpc.VllmEngineStub(channel)
        running = stub.Generate(ask("victim", max_tokens=200, stream=True))
        next(running)
        stub.Abort(pb.AbortRequest(request_ids=["victim", "nobody"]))
        assert list(running)[-1].complete.finish_reason == "abort"


def test_the_cache_is_flushed_when_nothing_runs(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as slow, slow.channel() as channel:
        stub = rpc.VllmEngineStub(channel)
        running = stub.Generate(ask(max_tokens=20, stream=True))
        next(running)
        assert not stub.FlushCache(common_pb2.FlushCacheRequest()).success
        assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10)).success
        assert slow.executor.stats().num_running == 0
        code, details = refused(lambda: [stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=NAN))])
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("timeout_s")


def test_what_the_server_tells_about_itself(stub: Any, served: Replica) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    model = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == (MODEL, VOCAB_SIZE,
                                                                                     LIMITS.max_seq_len)
    assert list(model.eos_token_ids) == [EOS] and model.is_generation
    assert list(model.architectures) == ["MockForCausalLM"]
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs, server.active_requests) == (BLOCK_SIZE, LIMITS.max_batch_size, 0)
    assert server.uptime_seconds > 0 and server.data_parallel_size == 1


def test_loads(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01, num_blocks=64) as slow, slow.channel() as channel:
        stub = rpc.VllmEngineStub(channel)
        running = stub.Generate(ask(max_tokens=200, stream=True))
        next(running)
        (load,) = stub.GetLoads(pb.GetLoadsRequest()).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
        assert load.max_total_num_tokens == 64 * BLOCK_SIZE
        assert 0 < load.token_usage <= 1 and load.num_used_tokens % BLOCK_SIZE == 0
        running.cancel()
        wait_until(lambda: stub.GetLoads(pb.GetLoadsRequest()).loads[0].num_used_tokens == 0)
        code, _ = refused(lambda: [stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))])
        assert code == grpc.StatusCode.INVALID_ARGUMENT


def test_throughput_is_of_a_second_at_least() -> None:
    now, count = 0.0, 0
    meter = Throughput(lambda: count, lambda: now)
    now, count = 0.5, 100
    assert meter.per_second() == 0
    now, count = 2.0, 200
    assert meter.per_second() == 100
    now, count = 2.1, 900
    assert meter.per_second() == 100
    now = 4.0
    assert meter.per_second() == 350


def test_profiling_and_embeddings_are_refused(stub: Any) -> None:
    for call in (lambda: stub.Embed(pb.EmbedRequest()),
                 lambda: stub.StartProfile(common_pb2.StartProfileRequest()),
                 lambda: stub.StopProfile(common_pb2.StopProfileRequest())):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_tokenizer_comes_as_an_archive(stub: Any) -> None:
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(each.data for each in chunks)
    assert [each.sha256 for each in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files["tokenizer.json"] == tokenizer_json()
    assert files["chat_template.jinja"].decode() == TEMPLATE
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["chat_template"]) == ("<s>", TEMPLATE)
    assert json.loads(files["config.json"])["eos_token_id"] == EOS


def test_an_engine_without_tokenizer_says_so(tmp_path: Path) -> None:
    with replica(tmp_path, with_tokenizer=False) as bare, bare.channel() as channel:
        stub = rpc.VllmEngineStub(channel)
        request = ask()
        request.text = "Hello"
        code, details = refused(lambda: stub.Generate(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("text: ")
        (response,) = stub.Generate(ask())
        assert list(response.complete.output_ids) == answer_to(PROMPT, 5)


def test_the_executor_is_told_when_a_call_ends_early(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as slow:
        begin = time.monotonic()
        with slow.channel() as channel:
            running = rpc.VllmEngineStub(channel).Generate(ask(max_tokens=250, stream=True), timeout=30)
            next(running)
            running.cancel()
            wait_until(lambda: slow.executor.stats().num_used_blocks == 0)
        assert time.monotonic() - begin < 5

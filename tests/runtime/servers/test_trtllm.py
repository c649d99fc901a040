"""trtllm.TrtllmService through a real server: answers, every refusal by its field, cancellation, deadlines."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import trtllm_service_pb2 as pb
from smg_grpc_proto import trtllm_service_pb2_grpc as rpc

from tests.runtime.mock_engine import EOS, TABLE, VOCAB_SIZE
from tests.runtime.servers.grpc_replica import LIMITS, MODEL, Replica, next_token, replica, tokenizer

PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("trtllm")) as running:
        yield running


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("trtllm_slow"), step_s=0.01) as running:
        yield running


@pytest.fixture
def stub(served: Replica) -> Iterator[Any]:
    with served.channel() as channel:
        yield rpc.TrtllmServiceStub(channel)


def ask(request_id: str = "", prompt: list[int] = PROMPT, max_tokens: int = 5, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_token_ids=prompt),
                              max_tokens=max_tokens, **fields)


def answer_to(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(len(tokens) - 1, tokens[-1]))
    return tokens[len(prompt):]


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    return caught.value.code(), caught.value.details()


def test_a_whole_answer(stub: Any) -> None:
    (response,) = stub.Generate(ask("r1"))
    complete = response.complete
    assert response.request_id == "r1"
    assert list(complete.output_token_ids) == answer_to(PROMPT, 5)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 5)


def test_an_answer_in_chunks(stub: Any) -> None:
    *chunks, last = stub.Generate(ask("r2", streaming=True))
    assert [list(each.chunk.token_ids) for each in chunks] == [[token] for token in answer_to(PROMPT, 5)]
    assert [each.chunk.completion_tokens for each in chunks] == [1, 2, 3, 4, 5]
    assert {each.chunk.prompt_tokens for each in chunks} == {3}
    assert list(last.complete.output_token_ids) == answer_to(PROMPT, 5)
    assert all(each.request_id == "r2" for each in [*chunks, last])


def test_several_answers(stub: Any) -> None:
    responses = list(stub.Generate(ask(sampling_config=pb.SamplingConfig(num_return_sequences=3), streaming=True)))
    completes = [each.complete for each in responses if each.WhichOneof("response") == "complete"]
    assert sorted(each.sequence_index for each in completes) == [0, 1, 2]
    assert all(list(each.output_token_ids) == answer_to(PROMPT, 5) for each in completes)


def test_a_request_without_an_id_gets_one(stub: Any) -> None:
    first, second = next(stub.Generate(ask())), next(stub.Generate(ask()))
    assert first.request_id and second.request_id and first.request_id != second.request_id


def test_stop_tokens_are_stripped_unless_asked_for(stub: Any) -> None:
    answer = answer_to(PROMPT, 5)
    (response,) = stub.Generate(ask(stop_token_ids=[answer[3]]))
    complete = response.complete
    assert list(complete.output_token_ids) == answer[:3]
    assert (complete.finish_reason, complete.matched_token_id, complete.completion_tokens) == ("stop", answer[3], 3)
    (response,) = stub.Generate(ask(stop_token_ids=[answer[3]], include_stop_token_in_output=True))
    assert list(response.complete.output_token_ids) == answer[:4]


def test_stop_strings(stub: Any) -> None:
    answer = answer_to(PROMPT, 5)
    word = tokenizer().decode(answer[2:4])
    (response,) = stub.Generate(ask(stop=[word], prompt=PROMPT))
    assert (response.complete.finish_reason, response.complete.matched_stop_str) == ("stop", word)
    assert list(response.complete.output_token_ids) == answer[:4]


def test_a_long_answer_ends_at_the_engines_length(stub: Any) -> None:
    (response,) = stub.Generate(ask(max_tokens=10_000))
    assert response.complete.finish_reason == "length"
    assert response.complete.completion_tokens == LIMITS.max_seq_len - len(PROMPT)


NAN = math.nan
BAD_VALUES: list[tuple[str, pb.GenerateRequest]] = [
    ("sampling_config.temperature", ask(sampling_config=pb.SamplingConfig(temperature=-1.0))),
    ("sampling_config.temperature", ask(sampling_config=pb.SamplingConfig(temperature=NAN))),
    ("sampling_config.temperature", ask(sampling_config=pb.SamplingConfig(temperature=math.inf))),
    ("sampling_config.top_p", ask(sampling_config=pb.SamplingConfig(top_p=0.0))),
    ("sampling_config.top_p", ask(sampling_config=pb.SamplingConfig(top_p=NAN))),
    ("sampling_config.top_k", ask(sampling_config=pb.SamplingConfig(top_k=-3))),
    ("sampling_config.min_p", ask(sampling_config=pb.SamplingConfig(min_p=1.5))),
    ("sampling_config.min_p", ask(sampling_config=pb.SamplingConfig(min_p=NAN))),
    ("sampling_config.repetition_penalty", ask(sampling_config=pb.SamplingConfig(repetition_penalty=-1.0))),
    ("sampling_config.presence_penalty", ask(sampling_config=pb.SamplingConfig(presence_penalty=NAN))),
    ("sampling_config.frequency_penalty", ask(sampling_config=pb.SamplingConfig(frequency_penalty=math.inf))),
    ("sampling_config.min_tokens", ask(sampling_config=pb.SamplingConfig(min_tokens=6))),
    ("sampling_config.prompt_ignore_length", ask(sampling_config=pb.SamplingConfig(prompt_ignore_length=-1))),
    ("sampling_config.num_return_sequences", ask(sampling_config=pb.SamplingConfig(num_return_sequences=10_000))),
    ("output_config.logprobs", ask(output_config=pb.OutputConfig(logprobs=-2))),
    ("output_config.prompt_logprobs", ask(output_config=pb.OutputConfig(prompt_logprobs=1000))),
    ("max_tokens", ask(max_tokens=0)),
    ("tokenized.input_token_ids", ask(prompt=[])),
    ("tokenized.input_token_ids", ask(prompt=[1, VOCAB_SIZE])),
    ("tokenized.input_token_ids", ask(prompt=[4_294_967_295])),
    ("tokenized.input_token_ids", ask(prompt=[1] * (LIMITS.max_seq_len + 1))),
    ("stop_token_ids", ask(stop_token_ids=[VOCAB_SIZE])),
    ("bad_token_ids", ask(bad_token_ids=[4_000_000_000])),
    ("stop", ask(stop=[""])),
    ("bad", ask(bad=[""])),
    ("embedding_bias", ask(embedding_bias=[1.0])),
    ("embedding_bias", ask(embedding_bias=[NAN] * VOCAB_SIZE)),
    ("guided_decoding.guide_type", ask(guided_decoding=pb.GuidedDecodingParams(guide="a"))),
    ("guided_decoding.guide", ask(guided_decoding=pb.GuidedDecodingParams(guide_type=3))),
    ("kv_cache_retention.config_json", ask(kv_cache_retention=pb.KvCacheRetentionConfig(config_json="{"))),
    ("arrival_time", ask(arrival_time=NAN)),
    ("request_id", ask("x" * 513)),
]


@pytest.mark.parametrize(("field", "request_"), BAD_VALUES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_value_is_refused_by_its_field(stub: Any, field: str, request_: pb.GenerateRequest) -> None:
    code, details = refused(lambda: stub.Generate(request_))
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    assert details.startswith(field + ": "), details


UNSUPPORTED: list[tuple[str, pb.GenerateRequest]] = [
    ("sampling_config.beam_width", ask(sampling_config=pb.SamplingConfig(beam_width=4))),
    ("sampling_config.beam_width_array", ask(sampling_config=pb.SamplingConfig(beam_width_array=[2, 3]))),
    ("sampling_config.top_p_decay", ask(sampling_config=pb.SamplingConfig(top_p_decay=0.5))),
    ("sampling_config.top_p_min", ask(sampling_config=pb.SamplingConfig(top_p_min=0.5))),
    ("sampling_config.top_p_reset_ids", ask(sampling_config=pb.SamplingConfig(top_p_reset_ids=3))),
    ("sampling_config.no_repeat_ngram_size", ask(sampling_config=pb.SamplingConfig(no_repeat_ngram_size=3))),
    ("sampling_config.length_penalty", ask(sampling_config=pb.SamplingConfig(length_penalty=0.3))),
    ("sampling_config.length_penalty", ask(sampling_config=pb.SamplingConfig(length_penalty=NAN))),
    ("output_config.return_context_logits", ask(output_config=pb.OutputConfig(return_context_logits=True))),
    ("output_config.return_generation_logits", ask(output_config=pb.OutputConfig(return_generation_logits=True))),
    ("output_config.return_encoder_output", ask(output_config=pb.OutputConfig(return_encoder_output=True))),
    ("output_config.return_perf_metrics", ask(output_config=pb.OutputConfig(return_perf_metrics=True))),
    ("lora_config.weights", ask(lora_config=pb.LoraConfig(task_id=1, weights=b"x"))),
    ("lora_config.config_json", ask(lora_config=pb.LoraConfig(task_id=1, config_json="{}"))),
    ("prompt_tuning_config", ask(prompt_tuning_config=pb.PromptTuningConfig(embedding_table=b"x"))),
    ("multimodal_input", ask(multimodal_input=pb.MultimodalInput(image_data=[b"x"]))),
    ("lookahead_config", ask(lookahead_config=pb.LookaheadConfig(max_window_size=3))),
    ("disaggregated_params.request_type", ask(disaggregated_params=pb.DisaggregatedParams(request_type=1))),
    ("guided_decoding.guide_type", ask(guided_decoding=pb.GuidedDecodingParams(guide_type=5, guide="x"))),
    ("kv_cache_retention.policy", ask(kv_cache_retention=pb.KvCacheRetentionConfig(policy="lru"))),
    ("tokenized.query_token_ids", pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_token_ids=PROMPT, query_token_ids=[1]), max_tokens=3)),
]


@pytest.mark.parametrize(("field", "request_"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_engine_cannot_do_is_refused_by_its_field(stub: Any, field: str, request_: pb.GenerateRequest) -> None:
    code, details = refused(lambda: stub.Generate(request_))
    assert code == grpc.StatusCode.UNIMPLEMENTED, details
    assert details.startswith(field + ": "), details


def test_neutral_values_of_what_the_engine_cannot_do_are_taken(stub: Any) -> None:
    config = pb.SamplingConfig(beam_width=1, top_p_decay=1.0, length_penalty=1.0, beam_search_diversity_rate=0.0,
                               early_stopping=1, no_repeat_ngram_size=0, beam_width_array=[1])
    (response,) = stub.Generate(ask(sampling_config=config, output_config=pb.OutputConfig(
        exclude_input_from_output=True), arrival_time=time.time(), disaggregated_params=pb.DisaggregatedParams()))
    assert list(response.complete.output_token_ids) == answer_to(PROMPT, 5)


def test_retention_and_salt_reach_the_engine(stub: Any) -> None:
    config = ('{"token_range_retention_configs": [{"token_start": 0, "token_end": 2, "priority": 80, '
              '"duration_ms": 1000}], "decode_retention_priority": 10, "decode_duration_ms": 5}')
    (response,) = stub.Generate(ask(kv_cache_retention=pb.KvCacheRetentionConfig(config_json=config), cache_salt_id=-7))
    assert response.complete.completion_tokens == 5


@pytest.mark.parametrize(("config", "field"), [
    ('{"x": 1}', "config_json"), ("[]", "config_json"),
    ('{"decode_retention_priority": 101}', "decode_retention_priority"),
    ('{"token_range_retention_configs": 3}', "token_range_retention_configs"),
    ('{"token_range_retention_configs": [{"token_start": 0, "priority": true}]}', "configs[0].priority"),
    ('{"token_range_retention_configs": [{"token_start": 5, "token_end": 5, "priority": 1}]}', "configs[0].token_end"),
    ('{"token_range_retention_configs": [{"priority": 1, "duration_ms": -1}]}', "configs[0].duration_ms"),
    ('{"decode_duration_ms": 1.5}', "decode_duration_ms"), ("[" * 100_000, "config_json"),
])
def test_wrong_retention_is_refused(stub: Any, config: str, field: str) -> None:
    code, details = refused(lambda: stub.Generate(ask(kv_cache_retention=pb.KvCacheRetentionConfig(
        config_json=config))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("kv_cache_retention.config_json") and field in details.partition(": ")[0]


def test_log_probabilities(tmp_path: Path) -> None:
    """Of a scripted answer: what comes is what the executor gave."""
    from tests.runtime.servers.scripted_grpc import ScriptedRunner, scripted

    with scripted(tmp_path, ScriptedRunner()) as address, grpc.insecure_channel(address) as channel:
        stub = rpc.TrtllmServiceStub(channel)
        (response,) = stub.Generate(ask(output_config=pb.OutputConfig(logprobs=2, prompt_logprobs=1), max_tokens=3))
        complete = response.complete
        assert [each.token_id for each in complete.logprobs] == list(complete.output_token_ids)
        assert complete.logprobs[0].logprob == -0.5 and len(complete.logprobs[0].top_logprobs) == 2
        assert [each.token_id for each in complete.prompt_logprobs] == PROMPT[1:]  # the first token has none
        assert complete.cached_tokens == len(PROMPT) // 2


def test_a_duplicate_id_is_refused_while_the_first_runs(slow: Replica) -> None:
    with slow.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        first = stub.Generate(ask("twin", max_tokens=200, streaming=True))
        next(first)
        code, details = refused(lambda: stub.Generate(ask("twin")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("request_id: ")
        first.cancel()
        wait_until(lambda: slow.executor.stats().num_running == 0)
        assert len(list(stub.Generate(ask("twin")))) == 1


def test_abort_ends_a_request(slow: Replica) -> None:
    with slow.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        running = stub.Generate(ask("victim", max_tokens=200, streaming=True))
        next(running)
        assert stub.Abort(pb.AbortRequest(request_id="victim")).success
        assert list(running)[-1].complete.finish_reason == "cancelled"
        again = stub.Abort(pb.AbortRequest(request_id="victim"))
        assert not again.success and "victim" in again.message


def test_a_client_that_leaves_frees_its_blocks(slow: Replica) -> None:
    with slow.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        running = stub.Generate(ask(max_tokens=250, streaming=True))
        next(running)
        assert slow.executor.stats().num_used_blocks > 0
        running.cancel()
        wait_until(lambda: slow.executor.stats().num_used_blocks == 0)
    with slow.channel() as channel:  # and one that vanishes with its connection
        running = rpc.TrtllmServiceStub(channel).Generate(ask(max_tokens=250, streaming=True))
        next(running)
    wait_until(lambda: slow.executor.stats().num_used_blocks == 0)
    assert slow.executor.recorder.requests_finished["cancelled"] >= 2


def test_a_deadline_ends_a_request(slow: Replica) -> None:
    with slow.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        code, _ = refused(lambda: stub.Generate(ask(max_tokens=250), timeout=0.2))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: slow.executor.stats().num_used_blocks == 0)


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.02, max_queue_size=2) as full, full.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        running = []
        for number in range(LIMITS.max_batch_size):
            running.append(stub.Generate(ask(f"r{number}", max_tokens=250, streaming=True)))
            next(running[-1])
        waiting = [stub.Generate(ask(f"w{i}", max_tokens=1)) for i in range(2)]
        wait_until(lambda: full.executor.stats().num_waiting == 2)
        code, details = refused(lambda: stub.Generate(ask("late")))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "2 requests wait" in details
        for each in running:
            each.cancel()
        assert all(len(list(each)) == 1 for each in waiting)


def test_a_draining_server_refuses_and_finishes(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as draining, draining.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        running = stub.Generate(ask(max_tokens=30, streaming=True))
        next(running)
        thread = threading.Thread(target=draining.executor.drain)
        thread.start()
        wait_until(lambda: draining.executor.health == "draining")
        code, _ = refused(lambda: stub.Generate(ask()))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert stub.HealthCheck(pb.HealthCheckRequest()).status == "the engine is draining"
        assert list(running)[-1].complete.completion_tokens == 30
        thread.join()


def test_what_the_server_tells_about_itself(stub: Any) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest()).status == "OK"
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_id, info.vocab_size, info.max_seq_len) == (MODEL, VOCAB_SIZE, LIMITS.max_seq_len)
    assert (info.hidden_size, info.num_layers, info.num_heads) == (TABLE.shape[1], 1, 1)
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.backend == "ingot" and server.world_size == 1


def test_embeddings_are_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(pb.EmbedRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "Embed" in caught.value.details()


def test_guided_decoding(stub: Any) -> None:
    guided = pb.GuidedDecodingParams
    for kind, guide, pattern in ((guided.GUIDE_TYPE_REGEX, "(ab|cd)+x", r"(ab|cd)+x"),
                                 (guided.GUIDE_TYPE_JSON_SCHEMA, '{"enum": ["yes", "no"]}', r'"(yes|no)"'),
                                 (guided.GUIDE_TYPE_EBNF_GRAMMAR, 'start: "left" | "right"', r"left|right"),
                                 (guided.GUIDE_TYPE_JSON, "", r"\{.*")):
        (response,) = stub.Generate(ask(guided_decoding=guided(guide_type=kind, guide=guide), max_tokens=20))
        text = tokenizer().decode(list(response.complete.output_token_ids))
        assert re.match(pattern, text) or (pattern.startswith("(ab") and re.fullmatch(r"(ab|cd)*(a|c)?", text)), text
    for kind, guide in ((guided.GUIDE_TYPE_REGEX, "("), (guided.GUIDE_TYPE_JSON_SCHEMA, "{"),
                        (guided.GUIDE_TYPE_EBNF_GRAMMAR, "start: nothing")):
        code, details = refused(lambda kind=kind, guide=guide: stub.Generate(  # type: ignore[misc]
            ask(guided_decoding=guided(guide_type=kind, guide=guide))))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("guided_decoding: "), details


def test_the_models_own_end_is_stripped(tmp_path: Path) -> None:
    follow = lambda position, token: EOS if position == 4 else 65  # noqa: E731
    with replica(tmp_path, follow=follow) as ending, ending.channel() as channel:
        stub = rpc.TrtllmServiceStub(channel)
        (response,) = stub.Generate(ask())
        assert (list(response.complete.output_token_ids), response.complete.finish_reason) == ([65, 65], "stop")
        *chunks, last = stub.Generate(ask(streaming=True))
        assert [list(each.chunk.token_ids) for each in chunks] == [[65], [65]]
        assert list(last.complete.output_token_ids) == [65, 65]
        (response,) = stub.Generate(ask(ignore_eos=True))
        assert response.complete.completion_tokens == 5


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)

"""A GPU engine from `ingot build` to answers, on the emulator: arithmetic, requests in flight, a server, the verbs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.runtime.cli import main
from ingot.runtime.engine import Engine
from ingot.runtime.folders import cache_folder
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.servers.proto import control_pb2, control_pb2_grpc
from tools.bench.replicas import serve
from tools.emulate import Reference, relative
from tools.small_models import save_random, small_config

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 64}
RANDOM = [int(token) for token in np.random.default_rng(5).integers(0, 256, 60)]
PREFIX = RANDOM[:18]
PROMPTS = [PREFIX, RANDOM[20:48], [*PREFIX[:17], 3, 4, 5], RANDOM[32:60]]
NUM_NEW = [2, 8, 2, 8]
"""Two prompts begin alike; the others outgrow their two blocks of the cache while they are answered."""


def cached() -> BuildCache:
    """The user's own: a second run of the tests compiles nothing."""
    return BuildCache(cache_folder())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulated") / "small-llama"
    save_random(small_config("llama", vocab_size=256, num_key_value_heads=2), folder)
    return folder


@pytest.fixture(scope="module")
def engine_path(checkpoint: Path) -> Path:
    path = checkpoint.parent / "small.engine"
    build(BuildRequest(str(checkpoint), "h200", "bf16", path, calibrate=False, **LIMITS), cache=cached())
    return path


@pytest.fixture(scope="module")
def alone(engine_path: Path) -> list[list[int]]:
    """The greedy answer to each prompt, when nothing else runs and nothing is cached."""
    found = []
    for prompt, count in zip(PROMPTS, NUM_NEW, strict=True):
        with Engine.load(engine_path, device="emulator", kv_cache_tokens=64) as engine:
            answer = engine.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
            assert answer.num_cached_tokens == 0
            found.append(answer.token_ids)
    return found


@pytest.fixture(scope="module")
def graph(checkpoint: Path) -> Reference:
    return Reference.of(checkpoint, "h200", "bf16", LIMITS["max_seq_len"], cached())


def assert_same(got: list[int], expected: list[int], prompt: list[int], graph: Reference) -> None:
    """Equal up to a near tie: a context that is computed in other pieces is rounded to bf16 otherwise."""
    at = next((number for number, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]), None)
    if at is not None:
        logits = graph.logits([*prompt, *expected[:at]])[-1]
        gap = abs(logits[got[at]] - logits[expected[at]])
        assert gap < 0.05 * logits.std(), f"token {at} is {got[at]}, alone {expected[at]}; their logits differ by {gap}"


def test_logits_are_those_of_the_graph(engine_path: Path, graph: Reference) -> None:
    """In pieces of four tokens: the positions, the cache and every bucket's launches take part."""
    tokens = [*PREFIX, *PREFIX[::-1]][:30]
    reference = graph.logits(tokens)
    with Engine.load(engine_path, device="emulator", kv_cache_tokens=64) as engine:
        logits = engine.logits(tokens)
        assert relative(logits, reference) < 2e-2
        last = engine.program.inputs[0]
        for begin, end in ((0, 16), (16, 29), (29, 30)):  # the largest bucket, a full one and one that is not
            with engine._private(tokens) as sequence:
                for position, count in ((0, begin), (begin, end - begin)):
                    for first in range(position, position + count, 16):
                        stop = min(first + 16, position + count)
                        last = engine._inputs(sequence, first, stop, 1)
                        engine.program.launch(last)
                        engine.program.wait()
                        engine.kv.advance(sequence, stop)
            assert relative(engine.program.logits()[0], reference[end - 1]) < 3e-2


def test_requests_in_flight_answer_as_alone(engine_path: Path, alone: list[list[int]], graph: Reference) -> None:
    """Context and generation in one step, prompts longer than a step, a prefix that is found in the cache."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with Engine.load(engine_path, device="emulator", kv_cache_tokens=256) as engine:
        together = engine.generate(PROMPTS, params)
        again = engine.generate(PROMPTS[2], params)
        assert again.num_cached_tokens >= 16
        for answer, number in zip([*together, again], [0, 1, 2, 3, 2], strict=True):
            assert_same(answer.token_ids, alone[number][:2], PROMPTS[number], graph)


def complete(stub: Any, number: int) -> list[int]:
    request = pb.GenerateRequest(
        request_id=f"r{number}", tokenized=pb.TokenizedInput(input_ids=PROMPTS[number]), stream=True,
        sampling_params=pb.SamplingParams(max_tokens=NUM_NEW[number], temperature=0.0, ignore_eos=True))
    *chunks, last = stub.Generate(request)
    tokens = [token for each in chunks for token in each.chunk.token_ids]
    assert list(last.complete.output_ids) == tokens
    return tokens


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", pytest.param("GUARANTEED_NO_EVICT", marks=pytest.mark.slow)])
def test_a_server_on_the_emulator(engine_path: Path, alone: list[list[int]], graph: Reference, policy: str) -> None:
    """Clients at once over gRPC, in a cache of four blocks: two answers begin with two each, and either needs a third.
    With MAX_UTILIZATION one of them is paused, and goes on as it would have. What two prompts share, and a prompt
    that comes again, is found in the cache."""
    options = ("--device", "emulator", "--kv-cache-tokens", "64", "--scheduler-policy", policy)
    with serve(engine_path, *options) as server, grpc.insecure_channel(server.grpc) as channel, \
            ThreadPoolExecutor(2) as clients:
        stub, control = rpc.VllmEngineStub(channel), control_pb2_grpc.ControlStub(channel)
        for numbers in ((1, 3), (0, 2), (0,)):
            answers = clients.map(lambda number: complete(stub, number), numbers)
            for answer, number in zip(answers, numbers, strict=True):
                assert_same(answer, alone[number], PROMPTS[number], graph)
        statistics = control.GetStatistics(control_pb2.GetStatisticsRequest())
        assert statistics.requests_finished["length"] == 5 and statistics.prefix_cache.hit_tokens >= 16
        assert (statistics.requests_paused > 0) == (policy == "MAX_UTILIZATION")


@pytest.mark.slow
def test_verbs_on_the_emulator(engine_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: Any) -> Any:
        assert main([*map(str, arguments), "--device", "emulator", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    compared = run("compare", engine_path, checkpoint, "--tokens", 12, "--prompts", 1, "--new-tokens", 3,
                   "--max-relative-error", 0.02)
    assert not compared["failures"] and compared["top1_agreement"] >= 11 / 12
    assert [layer["name"] for layer in compared["layers"]] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    measured = run("bench", engine_path, "--isl", 5, "--osl", 2, "--num-requests", 2, "--kv-cache-tokens", 64)
    assert measured["requests"]["finished"] == 2

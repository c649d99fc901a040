"""A real model served with adapters, over HTTP and gRPC: its answers are those of engines whose weights were merged."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from smg_grpc_proto import trtllm_service_pb2 as trtllm
from smg_grpc_proto import trtllm_service_pb2_grpc as rpc

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.refit import RefitRequest, refit
from ingot.runtime.engine import Engine
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import SchedulerPolicy
from ingot.runtime.servers import grpc_server, http_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.served import ServedEngine
from tests.runtime.adapters.samples import matrices, write_adapter

NAMES = ("0", "1", "2")
RANK, SLOTS, COUNT = 4, 2, 12
SHAPES = {f"model.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 96), "mlp.up_proj": (64, 96), "mlp.down_proj": (96, 64),
}.items()}
CHANGED = {"0": ("q_proj", "v_proj"), "1": ("gate_proj", "up_proj", "down_proj", "k_proj"), "2": ("o_proj",)}
"""What each adapter changes."""
PROMPTS = [[5, 9, 200, 31], [250, 2, 2, 7, 19, 44], list(range(40, 60))]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """roomy.engine; of each adapter its folder, and NAME.engine, of the checkpoint that it was merged into."""
    folder = tmp_path_factory.mktemp("adapters")
    limits: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 8, "max_seq_len": 64, "calibrate": False}
    build(BuildRequest(str(tiny_checkpoint), "cpu", "fp32", folder / "roomy.engine", lora_max_rank=RANK,
                       lora_max_adapters=SLOTS, **limits))
    build(BuildRequest(str(tiny_checkpoint), "cpu", "fp32", folder / "base.engine", **limits))
    for number, name in enumerate(NAMES):
        shapes = {module: shape for module, shape in SHAPES.items() if module.endswith(CHANGED[name])}
        changes = matrices(shapes, rank=RANK - number % 2, seed=number, scale=0.25)
        write_adapter(folder / name, changes, "BF16", rank=RANK - number % 2, alpha=2 * (RANK - number % 2),
                      targets=CHANGED[name])
        merged = folder / f"merged-{name}" / tiny_checkpoint.name
        shutil.copytree(tiny_checkpoint, merged)
        tensors = load_file(merged / "model.safetensors")
        for module, (a, b) in changes.items():
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + 2 * np.asarray(b @ a, np.float32)
        save_file(tensors, merged / "model.safetensors", {"format": "pt"})
        refit(RefitRequest(folder / "base.engine", str(merged), folder / f"{name}.engine"))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[str, int], list[int]]:
    """(name of an adapter or "base", number of a prompt) -> the tokens of the engine with merged weights."""
    found = {}
    for name in (*NAMES, "base"):
        with Engine.load(folder / f"{name}.engine", kv_cache_tokens=256, num_workers=1) as engine:
            for number, prompt in enumerate(PROMPTS):
                found[name, number] = engine.generate(prompt, greedy()).token_ids
    assert len({tuple(tokens) for tokens in found.values()}) == len(found), "adapters that change nothing test nothing"
    return found


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=COUNT, ignore_eos=True)


class Served:
    def __init__(self, context: ServerContext, http: str, grpc_address: str) -> None:
        self.context = context
        self._http = http
        self._channel = grpc.insecure_channel(grpc_address)
        self._trtllm = rpc.TrtllmServiceStub(self._channel)

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"http://{self._http}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def load(self, name: str) -> None:
        self.post("/v1/load_lora_adapter", lora_name=name, lora_path=name)

    def unload(self, name: str) -> None:
        self.post("/v1/unload_lora_adapter", lora_name=name)

    def by_http(self, name: str, number: int) -> list[int]:
        answer = self.post("/v1/completions", model=name, prompt=PROMPTS[number], max_tokens=COUNT, temperature=0,
                           ignore_eos=True, return_token_ids=True)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def by_grpc(self, name: str, number: int) -> list[int]:
        request = trtllm.GenerateRequest(tokenized=trtllm.TokenizedInput(input_token_ids=PROMPTS[number]),
                                         max_tokens=COUNT, ignore_eos=True)
        if name != "base":
            request.lora_config.task_id = int(name)
        (response,) = self._trtllm.Generate(request, timeout=60)
        return list(response.complete.output_token_ids)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def begin() -> Any:
        loaded = LoadedEngine(folder / "roomy.engine", EngineOptions(kv_cache_tokens=512, num_workers=1, **options))
        context = ServerContext(ServedEngine.of(loaded), "base", ServerSettings(lora_folder=str(folder)))
        return (context, await http_server.start(context, "127.0.0.1:0"),
                await grpc_server.start(context, "127.0.0.1:0"))

    async def end() -> None:
        await http.stop(0)
        await grpc_.stop(0)
        await context.close()

    context, http, grpc_ = run(begin())
    served = Served(context, http.address, grpc_.address)
    try:
        yield served
    finally:
        served.close()
        run(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


@pytest.mark.parametrize("options", [
    {}, {"speculative_tokens": 3}, {"scheduler_policy": SchedulerPolicy.MAX_UTILIZATION, "max_batch_size": 2},
    {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}, {"prefix_reuse": False},
], ids=str)
def test_answers_are_those_of_merged_weights(folder: Path, answers: dict[tuple[str, int], list[int]],
                                             options: dict[str, Any]) -> None:
    """Three adapters and the model itself at once, with two slots, by two protocols; twice, so that prefixes are found
    in the cache."""
    with serving(folder, **options) as served, ThreadPoolExecutor(16) as pool:
        for name in NAMES:
            served.load(name)
        asks: list[Callable[[str, int], list[int]]] = [served.by_http, served.by_grpc]
        for _ in range(2):
            calls = [(key, pool.submit(ask, *key)) for ask in asks for key in answers]
            for key, call in calls:
                assert call.result(60) == answers[key], key
        totals = served.context.totals()
        assert totals.recorder.adapter_writes >= 3
        if options.get("prefix_reuse", True):
            assert totals.kv.hit_tokens > 0 and totals.kv.miss_tokens["lora"] > 0


def test_adapters_come_and_go_while_requests_run(folder: Path, answers: dict[tuple[str, int], list[int]]) -> None:
    """Under one and the same name one adapter follows another, and no answer is of two."""
    with serving(folder) as served, ThreadPoolExecutor(8) as pool:
        served.load("0")
        busy = threading.Event()

        def keep_asking() -> int:
            count = 0
            while not busy.is_set():
                number = count % len(PROMPTS)
                assert served.by_http("0", number) == answers["0", number]
                assert served.by_grpc("base", number) == answers["base", number]
                count += 1
            return count

        others = [pool.submit(keep_asking) for _ in range(2)]
        for turn in range(6):
            name = NAMES[1 + turn % 2]
            served.post("/v1/load_lora_adapter", lora_name="changing", lora_path=name)
            asked = [pool.submit(served.by_http, "changing", number) for number in range(len(PROMPTS))]
            got = [call.result(60) for call in asked]
            served.unload("changing")
            assert got == [answers[name, number] for number in range(len(PROMPTS))]
        busy.set()
        assert all(call.result(60) for call in others)


def test_in_process(folder: Path, answers: dict[tuple[str, int], list[int]]) -> None:
    with Engine.load(folder / "roomy.engine", kv_cache_tokens=256, num_workers=2) as engine:
        for name in NAMES:
            engine.load_adapter(name, folder / name)
        streams = {name: engine.stream(PROMPTS[0], greedy(), lora=name) for name in NAMES[:2]}
        first = {name: next(stream).token_id for name, stream in streams.items()}
        engine.unload_adapter("0")
        for name, stream in streams.items():
            assert [first[name], *(piece.token_id for piece in stream)] == answers[name, 0], "read in turn"
        for name in ("2", "1"):
            got = [each.token_ids for each in engine.generate(PROMPTS, greedy(), lora=name)]
            assert got == [answers[name, number] for number in range(len(PROMPTS))]
        assert engine.generate(PROMPTS[1], greedy()).token_ids == answers["base", 1]

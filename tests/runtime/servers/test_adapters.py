"""LoRA adapters through real servers: named as models, loaded and unloaded while requests run, or refused."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from smg_grpc_proto import trtllm_service_pb2 as trtllm

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.loaded import LoadedAdapters
from ingot.runtime.adapters.source import AdapterSource
from ingot.runtime.bench.drivers.driver import Facts, ServerUnreachable
from ingot.runtime.bench.drivers.http import HttpDriver
from ingot.runtime.cli import main
from ingot.runtime.devices.null_memory import NullMemory
from ingot.runtime.lora import LoraRoom
from ingot.runtime.servers import http_server
from ingot.runtime.servers.adapters import ServerAdapters
from ingot.runtime.servers.context import ServerSettings
from ingot.runtime.servers.proto import control_pb2 as pb
from ingot.runtime.servers.proto import kserve_v2_pb2 as kserve
from tests.runtime.adapters.samples import SHAPES, Q, matrices, room, seeded_adapter, write_adapter
from tests.runtime.mock_engine import VOCAB_SIZE
from tests.runtime.servers.grpc_replica import MODEL, Replica, replica

PROMPT = [70, 71, 72]


def test_loading_goes_on_when_the_client_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else changes adapters meanwhile: what is unloaded does not come back, and no engine leaves one behind."""
    seeded_adapter(tmp_path / "1", 1)
    started, gate = threading.Event(), threading.Event()
    read = AdapterSource.read

    def slow_read(self: AdapterSource, room: LoraRoom | None) -> Adapter:
        started.set()
        assert gate.wait(30)
        return read(self, room)

    monkeypatch.setattr(AdapterSource, "read", slow_read)
    loaded = LoadedAdapters(room())
    context: Any = SimpleNamespace(current=SimpleNamespace(engine=SimpleNamespace(adapters=loaded)), model_name=MODEL,
                                   is_draining=False)

    async def leave() -> None:
        adapters = ServerAdapters(context, str(tmp_path))
        call = asyncio.ensure_future(adapters.load("1", AdapterSource("1")))
        assert await asyncio.to_thread(started.wait, 30)
        call.cancel()
        unload = asyncio.ensure_future(adapters.unload("1"))
        await asyncio.wait([call, unload], timeout=0.05)
        assert call.cancelled() and not unload.done()
        gate.set()
        assert (await unload).name == "1" and not loaded.all()

    asyncio.run(leave())


class Served:
    """folder: what the server loads adapters from."""

    def __init__(self, replica: Replica, http: str, folder: Path, channel: grpc.Channel) -> None:
        self.replica = replica
        self.http = http
        self.folder = folder
        self._channel = channel

    def post(self, path: str, body: dict[str, Any], token: str | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        request = urllib.request.Request(f"http://{self.http}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as response:
            return json.load(response)

    def ask(self, model: str, count: int = 6, prompt: list[int] = PROMPT) -> list[int]:
        status, answer = self.post("/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True})
        assert status == 200 and answer["model"] == model, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def load(self, name: str, path: str, **more: Any) -> tuple[int, Any]:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    def unload(self, name: str) -> tuple[int, Any]:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def call(self, service: str, method: str, request: Any, kind: Any) -> Any:
        return self._channel.unary_unary(f"/{service}/{method}", lambda message: message.SerializeToString(),
                                         kind.FromString)(request, timeout=30)

    def generate(self, request: trtllm.GenerateRequest) -> list[int]:
        call = self._channel.unary_stream("/trtllm.TrtllmService/Generate", lambda message: message.SerializeToString(),
                                          trtllm.GenerateResponse.FromString)(request, timeout=30)
        return [token for message in call for token in message.complete.output_token_ids]


@contextmanager
def serving(folder: Path, allowed: bool = True, step_s: float = 0.0, token: str | None = None,
            lora: Any = room()) -> Iterator[Served]:  # noqa: B008 (immutable)
    adapters = folder / "adapters"
    for number in (1, 2, 3):
        seeded_adapter(adapters / str(number), number)
    settings = ServerSettings(lora_folder=str(adapters) if allowed else None, auth_token=token)
    with replica(folder, settings=settings, follow=None, lora=lora, step_s=step_s) as running:
        http = running.run(http_server.start(running.context, "127.0.0.1:0"))
        try:
            with running.channel() as channel:
                yield Served(running, http.address, adapters, channel)
        finally:
            running.run(http.stop(0))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as server:
        yield server


def expected(folder: Path | None, count: int = 6, prompt: list[int] = PROMPT) -> list[int]:
    """The answer with the adapter of a folder."""
    start = zlib.crc32(Adapter.read(folder).image(room()).tobytes()) if folder is not None else 0
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(NullMemory.next_token(tokens, VOCAB_SIZE, start))
    return tokens[len(prompt) :]


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_an_adapter_is_a_model(served: Served) -> None:
    status, told = served.load("one", "1")
    sha256 = Adapter.read(served.folder / "1").sha256
    assert (status, told) == (200, {"status": "loaded", "lora_name": "one", "sha256": sha256, "rank": 2,
                                    "num_modules": 2})
    assert served.load("org/two", str(served.folder / "2"))[0] == 200
    for model, folder in (("one", "1"), (MODEL, None), ("org/two", "2"), ("one", "1")):
        assert served.ask(model) == expected(None if folder is None else served.folder / folder), model
    base, one, two = served.get("/v1/models")["data"]
    assert (base["id"], one["id"], two["id"]) == (MODEL, "one", "org/two") and "parent" not in base
    assert (one["parent"], one["adapter"]) == (MODEL, {"sha256": sha256, "rank": 2, "num_modules": 2})
    assert served.get("/v1/models/org/two") == two
    assert served.post("/tokenize", {"model": "one", "prompt": "ab"})[0] == 200
    status, answer = served.post("/v1/chat/completions", {"model": "one", "max_tokens": 3, "messages": [
        {"role": "user", "content": "Hello"}]})
    assert (status, answer["model"]) == (200, "one")
    status, error = served.post("/v1/completions", {"model": "three", "prompt": PROMPT})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"].endswith(f"this server has '{MODEL}', 'one', 'org/two'")
    counts = dict(served.replica.executor.recorder.adapter_requests)
    assert counts == {"one": 3, "": 1, "org/two": 1}


def test_several_prompts_of_one_call_have_its_adapter(served: Served) -> None:
    served.load("one", "1")
    prompts = [[70, 71], [72, 73, 74]]
    _, answer = served.post("/v1/completions", {"model": "one", "prompt": prompts, "max_tokens": 4, "ignore_eos": True,
                                                "return_token_ids": True})
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        expected(served.folder / "1", 4, prompt) for prompt in prompts]


def test_loading_is_off_unless_allowed(tmp_path: Path) -> None:
    with serving(tmp_path, allowed=False) as server:
        for status, error in (server.load("one", "1"), server.unload("one")):
            assert (status, error["type"], error["code"]) == (403, "permission_error", "adapter_loading_off")
            assert "--lora-folder" in error["message"]
        for method, request in (("LoadAdapter", pb.LoadAdapterRequest(name="one", path="1")),
                                ("UnloadAdapter", pb.UnloadAdapterRequest(name="one"))):
            code, _ = refusal(lambda: server.call("ingot.v1.Control", method, request, pb.Adapter))  # noqa: B023
            assert code == grpc.StatusCode.PERMISSION_DENIED


def test_loading_needs_the_token(tmp_path: Path) -> None:
    with serving(tmp_path, token="secret") as server:
        assert server.load("one", "1")[0] == 401
        body = {"lora_name": "one", "lora_path": "1"}
        assert server.post("/v1/load_lora_adapter", body, "secret")[0] == 200
        code, _ = refusal(lambda: server.call("ingot.v1.Control", "LoadAdapter",
                                              pb.LoadAdapterRequest(name="two", path="2"), pb.Adapter))
        assert code == grpc.StatusCode.UNAUTHENTICATED


def test_only_from_below_the_folder(served: Served, tmp_path: Path) -> None:
    outside = seeded_adapter(tmp_path / "outside", 9)
    (served.folder / "link").symlink_to(outside)
    for path in (str(outside), "../outside", "link", ".", "", "/", "1/../.."):
        status, error = served.load("one", path)
        assert (status, error["code"]) == (403, "adapter_loading_off"), path
    assert served.load("one", "1\0")[0] == 400
    assert served.load("one", "1/../2")[0] == 200


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"lora_path": "1"}, 400, "lora_name: missing"),
    ({"lora_name": "one"}, 400, "lora_path: missing"),
    ({"lora_name": 1, "lora_path": "1"}, 400, "lora_name: expected a string"),
    ({"lora_name": "one", "lora_path": "1", "other": 1}, 400, "unknown field 'other'"),
    ({"lora_name": "a b", "lora_path": "1"}, 400, "cannot be the name"),
    ({"lora_name": MODEL, "lora_path": "1"}, 409, "the name of the model itself"),
    ({"lora_name": "two", "lora_path": "1"}, 409, "loaded already, with another content"),
    ({"lora_name": "one", "lora_path": "none"}, 400, "no folder"),
    ({"lora_name": "one", "lora_path": "wide"}, 400, "has rank 8; this engine has room for 4"),
    ({"lora_name": "one", "lora_path": "1", "sha256": "0" * 64}, 400, "expected 000"),
    ({"lora_name": "one", "lora_path": "1", "sha256": "A" * 64}, 400, "expected 64 hexadecimal digits"),
])
def test_what_is_not_loaded(served: Served, body: dict[str, Any], status: int, words: str) -> None:
    write_adapter(served.folder / "wide", matrices(rank=8), rank=8)
    assert served.load("two", "2")[0] == 200 == served.load("two", "2")[0]
    got, error = served.post("/v1/load_lora_adapter", body)
    assert got == status and words in error["message"], error
    assert str(served.folder) not in error["message"], "where things lie on the server is not told"
    assert [each["id"] for each in served.get("/v1/models")["data"]] == [MODEL, "two"]


def test_an_engine_without_room(tmp_path: Path) -> None:
    with serving(tmp_path, lora=None) as server:
        status, error = server.load("one", "1")
        assert status == 400 and "--lora-max-rank" in error["message"]
        listed = server.call("ingot.v1.Control", "ListAdapters", pb.ListAdaptersRequest(), pb.AdapterList)
        assert (listed.max_rank, listed.num_slots, len(listed.adapters)) == (0, 0, 0)


def test_unloading_while_requests_run(tmp_path: Path) -> None:
    """Two of them with one slot, so that one waits: both end as they began, new ones are refused at once."""
    with serving(tmp_path, step_s=0.02, lora=room(max_adapters=1)) as server:
        answers: dict[str, list[int]] = {}

        def ask(name: str, prompt: list[int]) -> None:
            answers[name] = server.ask("one", 20, prompt)

        for name, path in (("one", "1"), ("two", "2")):
            assert server.load(name, path)[0] == 200
        threads = [threading.Thread(target=ask, args=(name, prompt))
                   for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1]))]
        threads.append(threading.Thread(target=lambda: answers.update(two=server.ask("two", 20))))
        for thread in threads:
            thread.start()
        while server.replica.context.num_requests < 3:
            pass
        assert server.unload("one")[0] == 200
        assert server.post("/v1/completions", {"model": "one", "prompt": PROMPT})[0] == 404
        assert server.unload("one")[0] == 404
        assert server.replica.context.num_requests == 3, "they had ended before: the test tested nothing"
        for thread in threads:
            thread.join(30)
        assert answers == {"a": expected(server.folder / "1", 20),
                           "b": expected(server.folder / "1", 20, PROMPT[::-1]),
                           "two": expected(server.folder / "2", 20)}


def test_another_content_under_the_same_name(served: Served) -> None:
    """What the first had computed is not found by the second."""
    prompt = list(range(40))
    served.load("one", "1")
    assert served.ask("one", 4, prompt) == expected(served.folder / "1", 4, prompt)
    served.unload("one")
    served.load("one", "2")
    assert served.ask("one", 4, prompt) == expected(served.folder / "2", 4, prompt)


def test_by_grpc(served: Served) -> None:
    def control(method: str, request: Any, kind: Any = pb.Adapter) -> Any:
        return served.call("ingot.v1.Control", method, request, kind)

    sha256 = Adapter.read(served.folder / "1").sha256
    loaded = control("LoadAdapter", pb.LoadAdapterRequest(name="7", path="1", sha256=sha256))
    assert (loaded.name, loaded.sha256, loaded.rank, loaded.num_modules) == ("7", sha256, 2, 2)
    listed = control("ListAdapters", pb.ListAdaptersRequest(), pb.AdapterList)
    assert list(listed.adapters) == [loaded]
    assert (listed.max_rank, listed.num_slots, listed.bytes_per_slot) == (4, 2, room().bytes_per_adapter)
    for code, words, method, request in (
        ("ALREADY_EXISTS", "another content", "LoadAdapter", pb.LoadAdapterRequest(name="7", path="2")),
        ("PERMISSION_DENIED", "does not lie below", "LoadAdapter", pb.LoadAdapterRequest(name="8", path="/")),
        ("INVALID_ARGUMENT", "path: is empty", "LoadAdapter", pb.LoadAdapterRequest(name="8")),
        ("INVALID_ARGUMENT", "sha256: ", "LoadAdapter", pb.LoadAdapterRequest(name="8", path="2", sha256="x")),
        ("INVALID_ARGUMENT", "no folder", "LoadAdapter", pb.LoadAdapterRequest(name="8", path="8")),
        ("NOT_FOUND", "no adapter '8'", "UnloadAdapter", pb.UnloadAdapterRequest(name="8")),
    ):
        got, details = refusal(lambda: control(method, request))  # noqa: B023
        assert got.name == code and words in details
    request = trtllm.GenerateRequest(tokenized=trtllm.TokenizedInput(input_token_ids=PROMPT), max_tokens=6,
                                     ignore_eos=True, lora_config=trtllm.LoraConfig(task_id=7))
    assert served.generate(request) == expected(served.folder / "1")
    request.lora_config.task_id = 8
    code, details = refusal(lambda: served.generate(request))
    assert code == grpc.StatusCode.NOT_FOUND and details.startswith("lora_config.task_id: no adapter '8'")
    assert control("UnloadAdapter", pb.UnloadAdapterRequest(name="7")) == loaded
    assert not control("ListAdapters", pb.ListAdaptersRequest(), pb.AdapterList).adapters


def test_by_kserve(served: Served) -> None:
    served.load("one", "1")
    ids = kserve.ModelInferRequest.InferInputTensor(
        name="input_ids", datatype="INT64", shape=[3], contents=kserve.InferTensorContents(int64_contents=PROMPT))

    def ask(**parameters: kserve.InferParameter) -> list[int]:
        request = kserve.ModelInferRequest(model_name=MODEL, inputs=[ids], parameters={
            "max_tokens": kserve.InferParameter(int64_param=6), "ignore_eos": kserve.InferParameter(bool_param=True),
            **parameters})
        request.outputs.add(name="output_ids")
        response = served.call("inference.GRPCInferenceService", "ModelInfer", request, kserve.ModelInferResponse)
        return list(response.outputs[0].contents.int64_contents)

    assert ask(lora_name=kserve.InferParameter(string_param="one")) == expected(served.folder / "1")
    assert ask() == expected(None)
    code, details = refusal(lambda: ask(lora_name=kserve.InferParameter(string_param="two")))
    assert code == grpc.StatusCode.NOT_FOUND and details.startswith("parameters['lora_name']: no adapter 'two'")


def test_a_drained_server_loads_nothing(served: Served) -> None:
    served.replica.run(served.replica.context.drain(1))
    status, error = served.load("one", "1")
    assert (status, error["code"]) == (503, "draining")


def test_the_start_loads_from_anywhere(served: Served, tmp_path: Path) -> None:
    """Whoever starts a server may read its files."""
    adapters = served.replica.context.adapters
    outside = seeded_adapter(tmp_path / "outside", 9, {Q: SHAPES[Q]})
    adapters.start_with([("mine", AdapterSource(str(outside)))])
    assert adapters.models == [MODEL, "mine"] and served.ask("mine") == expected(outside)


def test_bench_asks_for_adapters_in_turn(served: Served) -> None:
    for name in ("1", "2"):
        served.load(name, name)

    async def ask(driver: HttpDriver) -> Facts:
        try:
            facts = await driver.facts()
            for number in range(5):
                async for _ in driver.generate(str(number), PROMPT, 3):
                    pass
            return facts
        finally:
            await driver.close()

    facts = asyncio.run(ask(HttpDriver(f"http://{served.http}", adapters=["1", "2"])))
    assert (facts.model, facts.vocab_size, facts.settings["adapters"]) == (MODEL, VOCAB_SIZE, "1, 2")
    assert dict(served.replica.executor.recorder.adapter_requests) == {"1": 3, "2": 2}
    assert asyncio.run(ask(HttpDriver(f"http://{served.http}", "2"))).vocab_size == VOCAB_SIZE
    with pytest.raises(ServerUnreachable, match="has no model '3'; it has mock, 1, 2"):
        asyncio.run(ask(HttpDriver(f"http://{served.http}", adapters=["1", "3"])))
    assert main(["bench", "--url", "grpc://127.0.0.1:1", "--lora", "1"]) == 2

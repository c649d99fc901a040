"""Another engine takes over: new requests go to it, old ones end where they are, and a bad one changes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from ingot.runtime.servers.context import ENGINE_HASH
from ingot.runtime.servers.proto import control_pb2 as pb
from ingot.runtime.servers.proto import kserve_v2_pb2 as kserve
from ingot.runtime.store import attestation, provenance
from ingot.runtime.store.policy import LoadPolicy
from ingot.runtime.store.store import Store
from tests.runtime.servers.swap_server import (
    OPTIONS,
    PROMPT,
    Swapping,
    answer_of,
    finished,
    refusal,
    swapping,
    swaps,
    until_freed,
)
from tests.runtime.servers.test_metrics_text import samples
from tests.runtime.store.test_signatures import write_key

LONG: dict[str, Any] = {"prompt": PROMPT, "count": 40}


@pytest.fixture
def server(filled: tuple[Store, dict[str, str]]) -> Iterator[Swapping]:
    with swapping(*filled) as running:
        yield running


def metrics(server: Swapping) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=20) as page:
        return samples(page.read().decode())


def test_an_engine_takes_over_by_name_and_by_hash(server: Swapping) -> None:
    hashes = server.hashes
    assert answer_of("a") != answer_of("b") != answer_of("c")
    assert server.ask() == (hashes["a"], answer_of("a"))
    done = server.load("b")
    assert (done.hash_before, done.hash) == (hashes["a"], hashes["b"])
    assert done.trial == pb.LoadEngineResponse.TRIAL_RECORDED and 0 < done.trial_s < done.load_s
    assert server.ask() == (hashes["b"], answer_of("b"))
    assert server.info().hash == hashes["b"]
    assert server.load(hashes["c"][:8]).trial == pb.LoadEngineResponse.TRIAL_SMOKE
    assert server.ask() == (hashes["c"], answer_of("c"))
    assert server.load("c").trial == pb.LoadEngineResponse.TRIAL_NONE
    until_freed(server)
    status = server.status()
    assert list(status.history) == [hashes["a"], hashes["b"], hashes["c"]]
    assert [engine.hash for engine in status.engines] == [hashes["c"]] and status.phase == pb.SwapStatus.PHASE_IDLE
    assert swaps(server) == {"done": 2, "unchanged": 1}


def test_rollback_goes_to_the_engine_before(server: Swapping) -> None:
    code, message = refusal(server.rollback)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "cannot go back 1 engines" in message
    server.load("b")
    server.load("c")
    assert server.rollback().hash == server.hashes["b"]
    assert server.rollback().hash == server.hashes["c"]  # a rollback is a move like any other
    assert server.rollback(3).hash == server.hashes["b"]
    assert server.ask() == (server.hashes["b"], answer_of("b"))


def test_http_and_kserve_tell_the_engine_too(server: Swapping) -> None:
    for name in ("a", "b"):
        server.load(name)
        hash = server.hashes[name]
        body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}).encode()
        for path, data in (("/v1/completions", body), ("/v1/models", None)):
            request = urllib.request.Request(f"http://{server.http}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as response:
                assert response.headers[ENGINE_HASH] == hash
                answer = json.load(response)
        assert answer["data"][0]["engine"]["hash"] == hash
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"http://{server.http}/v1/completions", b"{}"), timeout=20)
        assert caught.value.headers[ENGINE_HASH] == hash
        infer = server.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer",
                                           kserve.ModelInferRequest.SerializeToString,
                                           kserve.ModelInferResponse.FromString)
        request = kserve.ModelInferRequest(model_name="mock", inputs=[kserve.ModelInferRequest.InferInputTensor(
            name="input_ids", datatype="INT64", shape=[3],
            contents=kserve.InferTensorContents(int64_contents=PROMPT))])
        assert infer(request, timeout=20).parameters["engine_hash"].string_param == hash


def test_what_runs_ends_on_the_engine_that_began_it(server: Swapping) -> None:
    with server.held():
        call = server.start(**LONG, request_id="old")
        next(call)
        assert server.load("b").num_finishing == 1
        status = server.status()
        assert [engine.hash for engine in status.engines] == [server.hashes["b"], server.hashes["a"]]
        assert [engine.num_requests for engine in status.engines] == [0, 1]
        assert server.ask() == (server.hashes["b"], answer_of("b"))
        told = metrics(server)
        assert told["ingot_engines_finishing[]"] == told["ingot_requests_running[]"] == 1
        # An id is taken, whichever engine has it.
        code, message = refusal(lambda: list(server.start(request_id="old")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "'old'" in message
    assert finished(call) == (server.hashes["a"], answer_of("a", count=40))
    until_freed(server)


def test_a_request_of_the_old_engine_can_be_cancelled(server: Swapping) -> None:
    with server.held():
        call = server.start(**LONG, request_id="old")
        next(call)
        server.load("b")
        assert server.run(_cancel(server, "old")) and not server.run(_cancel(server, "nobody"))
    reasons = {message.complete.finish_reason for message in call if message.HasField("complete")}
    assert "cancelled" in reasons
    until_freed(server)


async def _cancel(server: Swapping, request_id: str) -> bool:
    return server.context.cancel(request_id)


def test_back_to_an_engine_that_still_finishes(server: Swapping) -> None:
    """Nothing is loaded: it is there."""
    with server.held():
        call = server.start(**LONG)
        next(call)
        engine = server.context.current
        server.load("b")
        done = server.rollback()
        assert done.trial == pb.LoadEngineResponse.TRIAL_RETURNED and server.context.current is engine
    assert finished(call) == (server.hashes["a"], answer_of("a", count=40))
    until_freed(server)
    assert server.ask() == (server.hashes["a"], answer_of("a"))


def test_an_engine_that_fails_its_self_test(server: Swapping) -> None:
    code, message = refusal(lambda: server.load("broken"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "other logits than were recorded" in message
    assert server.ask() == (server.hashes["a"], answer_of("a"))
    status = server.status()
    assert [engine.hash for engine in status.engines] == [server.hashes["a"]] == list(status.history)
    assert "SelfTestFailed" in status.last_error and status.loading == "" and swaps(server) == {"self_test_failed": 1}
    assert metrics(server)["ingot_engine_swaps_total[('result', 'self_test_failed')]"] == 1


def test_an_engine_that_is_not_there(server: Swapping) -> None:
    for reference, expected in (("nobody", grpc.StatusCode.NOT_FOUND), ("0" * 64, grpc.StatusCode.NOT_FOUND),
                                ("./a.engine", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
        assert refusal(lambda reference=reference: server.load(reference))[0] == expected
    assert server.ask()[0] == server.hashes["a"]


def test_damaged_code_is_not_loaded(filled: tuple[Store, dict[str, str]], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    shutil.copytree(filled[0].folder, store.folder)
    code = store.blobs.path(store.manifest(filled[1]["b"])["members"]["plan.json"]["sha256"])
    code.chmod(0o644)
    data = bytearray(code.read_bytes())
    data[100] ^= 1
    code.write_bytes(data)
    with swapping(store, filled[1]) as server:
        status, message = refusal(lambda: server.load("b"))
        assert status == grpc.StatusCode.INVALID_ARGUMENT and "SHA-256" in message
        assert server.ask()[0] == server.hashes["a"]


def test_only_engines_that_the_policy_allows(filled: tuple[Store, dict[str, str]]) -> None:
    hashes = filled[1]
    options = replace(OPTIONS, policy=LoadPolicy.of([hashes["a"], hashes["b"]], []))
    with swapping(*filled, options) as server:
        code, message = refusal(lambda: server.load("c"))
        assert code == grpc.StatusCode.PERMISSION_DENIED and hashes["c"] in message
        assert server.load("b").hash == hashes["b"] and swaps(server) == {"refused": 1, "done": 1}


def test_only_engines_that_are_signed(filled: tuple[Store, dict[str, str]], tmp_path: Path) -> None:
    """Refused before anything of it is loaded."""
    store = Store(tmp_path / "store")
    shutil.copytree(filled[0].folder, store.folder)
    private, public = write_key(tmp_path, "ours")
    other, _ = write_key(tmp_path, "theirs")
    for name, key in (("a", private), ("b", private), ("c", other)):
        made = provenance.statements(store.manifest(filled[1][name]), filled[1][name])
        store.add_attestations(filled[1][name], [attestation.sign(each, attestation.private_key(str(key)))
                                                 for each in made])
    with swapping(store, filled[1], replace(OPTIONS, policy=LoadPolicy.of([], [str(public)]))) as server:
        for name in ("c", "other"):  # signed by somebody else, by nobody
            status, message = refusal(lambda name=name: server.load(name))
            assert status == grpc.StatusCode.PERMISSION_DENIED and filled[1][name] in message
        assert server.load("b").hash == filled[1]["b"] and server.ask()[0] == filled[1]["b"]


def test_another_tokenizer_needs_a_word(server: Swapping) -> None:
    code, message = refusal(lambda: server.load("other"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "another tokenizer" in message
    assert server.load("other", allow_other_tokenizer=True).hash == server.hashes["other"]
    assert server.ask() == (server.hashes["other"], answer_of("a"))  # the weights are those of a


def test_only_if_it_serves_what_the_caller_thinks(server: Swapping) -> None:
    code, message = refusal(lambda: server.load("b", if_serving=server.hashes["c"]))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "not " + server.hashes["c"] in message
    assert server.load("b", if_serving=server.hashes["a"]).hash == server.hashes["b"]


def test_swaps_take_their_turns(server: Swapping) -> None:
    """Whoever asks meanwhile: each call does what it says, one after the other."""
    wanted = ["b", "c", "a", "b", "a", "c", "b", "a"]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(server.load, wanted))
    assert [report.hash for report in done] == [server.hashes[name] for name in wanted]
    changes = [report for report in done if report.hash != report.hash_before]
    history = list(server.status().history)
    assert len(history) == 1 + len(changes) and all(one != two for one, two in pairwise(history))
    assert sorted((report.hash_before, report.hash) for report in changes) == sorted(pairwise(history))
    until_freed(server)
    assert server.ask()[0] == history[-1]


def test_a_swap_goes_on_when_its_caller_leaves(server: Swapping) -> None:
    call = server.channel.unary_unary("/ingot.v1.Control/LoadEngine", pb.LoadEngineRequest.SerializeToString,
                                      pb.LoadEngineResponse.FromString).future(pb.LoadEngineRequest(engine="b"))
    while server.status().phase == pb.SwapStatus.PHASE_IDLE and not call.done():
        time.sleep(0.001)
    call.cancel()
    end = time.monotonic() + 20
    while server.info().hash != server.hashes["b"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_swap_while_draining(server: Swapping) -> None:
    server.run(server.context.drain())
    code, message = refusal(lambda: server.load("b"))
    assert code == grpc.StatusCode.UNAVAILABLE and "drains" in message
    assert len(server.status().engines) == 1


def test_a_drain_during_a_swap_ends_it(server: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, may_go_on = threading.Event(), threading.Event()
    load = server.swapper._load

    def slow(*arguments: Any) -> Any:
        loading.set()
        assert may_go_on.wait(20)
        return load(*arguments)

    monkeypatch.setattr(server.swapper, "_load", slow)
    with ThreadPoolExecutor(1) as pool:
        swap = pool.submit(refusal, lambda: server.load("b"))
        assert loading.wait(20)
        assert server.status().phase == pb.SwapStatus.PHASE_LOADING and server.status().loading == server.hashes["b"]
        server.run(server.context.drain())
        may_go_on.set()
        assert swap.result()[0] == grpc.StatusCode.UNAVAILABLE
    assert [engine.hash for engine in server.status().engines] == [server.hashes["a"]]


def test_a_drain_waits_for_the_old_engine_too(server: Swapping) -> None:
    with ThreadPoolExecutor(1) as pool, server.held():
        call = server.start(**LONG)
        next(call)
        server.load("b")
        drained = pool.submit(server.run, server.context.drain())
        time.sleep(0.1)
        assert not drained.done()
    assert drained.result()
    assert finished(call) == (server.hashes["a"], answer_of("a", count=40))


def test_a_failed_engine_can_be_replaced(server: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = server.context.current.engine._executor

    def broken() -> None:
        raise MemoryError("the device is gone")

    monkeypatch.setattr(executor._loop, "launch", broken)  # type: ignore[attr-defined]
    assert refusal(server.ask)[0] == grpc.StatusCode.UNAVAILABLE
    end = time.monotonic() + 20
    while str(server.context.health) != "failed":  # requests are told first
        assert time.monotonic() < end
    assert metrics(server)["ingot_engine_healthy[]"] == 0
    server.load("b")
    assert server.context.health == "serving" and server.ask() == (server.hashes["b"], answer_of("b"))
    until_freed(server)


def test_counters_go_on(server: Swapping) -> None:
    server.ask()
    before = metrics(server)
    server.load("b")
    server.ask()
    until_freed(server)
    after = metrics(server)
    assert before["ingot_generated_tokens_total[]"] == 10 and after["ingot_generated_tokens_total[]"] == 20
    assert after["ingot_requests_finished_total[('reason', 'length')]"] == 2
    assert after["ingot_prefix_cache_queries_total[]"] == 2 * len(PROMPT)
    assert after["ingot_request_seconds_count[]"] == 2
    identity = [name for name in after if name.startswith("ingot_engine_info")]
    assert len(identity) == 1 and server.hashes["b"] in identity[0]


def test_kv_events_begin_anew(server: Swapping) -> None:
    call = server.channel.unary_stream("/trtllm.TrtllmService/SubscribeKvEvents",
                                       common_pb2.SubscribeKvEventsRequest.SerializeToString,
                                       common_pb2.KvEventBatch.FromString)(common_pb2.SubscribeKvEventsRequest())
    told: list[Any] = []
    numbers: list[int] = []

    def read() -> None:
        try:
            for batch in call:
                numbers.append(batch.sequence_number)
                told.extend(batch.events)
        except grpc.RpcError:
            pass

    thread = threading.Thread(target=read)
    thread.start()
    server.ask(list(range(20, 32)), 4)
    server.load("b")
    server.ask(list(range(20, 32)), 4)
    end = time.monotonic() + 20

    def kinds() -> list[str]:
        return [event.WhichOneof("data") for event in told]

    while not ("cleared" in kinds() and "stored" in kinds()[kinds().index("stored") + 1:]
               and kinds()[-1] == "stored" and kinds().count("cleared") >= 1
               and kinds().index("stored") < len(kinds()) - 1 - kinds()[::-1].index("cleared")):
        assert time.monotonic() < end, kinds()
        time.sleep(0.01)
    call.cancel()
    thread.join(20)
    ids = [event.event_id for event in told]
    assert ids == sorted(ids) and len(set(ids)) == len(ids)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    last = len(kinds()) - 1 - kinds()[::-1].index("cleared")
    assert told[last + 1].stored.parent_block_hash == 0  # roots first: the new engine's cache began empty


def test_a_swap_that_nobody_foresaw(server: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any) -> Any:
        raise MemoryError("no pages")

    monkeypatch.setattr(server.swapper, "_load", load)
    code, message = refusal(lambda: server.load("b"))
    assert code == grpc.StatusCode.INTERNAL and "MemoryError: no pages" in message
    assert server.ask() == (server.hashes["a"], answer_of("a")) and swaps(server) == {"failed": 1}


def test_gateways_get_the_tokenizer_of_an_engine_in_the_store(server: Swapping) -> None:
    """Its members are blobs, not parts of a file."""
    call = server.channel.unary_stream("/trtllm.TrtllmService/GetTokenizer", None,
                                       common_pb2.GetTokenizerChunk.FromString)
    for name in ("a", "b"):
        server.load(name)
        data = b"".join(chunk.data for chunk in call(b"", timeout=20))
        assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(data)).namelist()
        assert server.info().tokenizer_sha256 == hashlib.sha256(data).hexdigest()

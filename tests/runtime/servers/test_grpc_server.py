"""The gRPC server itself: Control, health, reflection, encryption, token, sizes, addresses and its end."""

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import trtllm_service_pb2 as trtllm
from smg_grpc_proto import trtllm_service_pb2_grpc as trtllm_rpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_rpc
from smg_grpc_proto.generated import common_pb2

from ingot.runtime.errors import RequestError
from ingot.runtime.servers.context import ServerSettings
from ingot.runtime.servers.proto import control_pb2 as control
from ingot.runtime.servers.proto import control_pb2_grpc as control_rpc
from ingot.runtime.servers.proto import kserve_v2_pb2 as kserve
from ingot.runtime.servers.proto import kserve_v2_pb2_grpc as kserve_rpc
from tests.runtime.mock_engine import VOCAB_SIZE
from tests.runtime.servers.grpc_replica import BLOCK_SIZE, LIMITS, MODEL, Replica, replica
from tests.runtime.servers.test_trtllm import ask, refused, wait_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ["trtllm.TrtllmService", "vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService", "ingot.v1.Control"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_engine_info(served: Replica) -> None:
    with served.channel() as channel:
        info = control_rpc.ControlStub(channel).GetEngineInfo(control.GetEngineInfoRequest())
        archive = b"".join(each.data for each in vllm_rpc.VllmEngineStub(channel).GetTokenizer(
            common_pb2.GetTokenizerRequest()))
    assert len(info.hash) == 64 and (info.model_name, info.precision) == (MODEL, "fp32")
    assert info.target.startswith("cpu:") and info.architecture == "MockForCausalLM"
    limits = (info.limits.max_batch_size, info.limits.max_num_tokens, info.limits.max_seq_len, info.limits.vocab_size)
    assert limits == (LIMITS.max_batch_size, LIMITS.max_num_tokens, LIMITS.max_seq_len, VOCAB_SIZE)
    assert (info.kv_cache.block_size, info.kv_cache.num_blocks) == (BLOCK_SIZE, 256)
    assert info.kv_cache.guaranteed_requests == 256 // (LIMITS.max_seq_len // BLOCK_SIZE)
    assert info.tokenizer_sha256 == hashlib.sha256(archive).hexdigest()


def test_statistics(tmp_path: Path) -> None:
    with replica(tmp_path) as fresh, fresh.channel() as channel:
        stub = trtllm_rpc.TrtllmServiceStub(channel)
        prompt = list(range(60, 124))
        for _ in range(2):
            list(stub.Generate(ask(prompt=prompt)))
        refused(lambda: stub.Generate(ask(prompt=[])))
        statistics = control_rpc.ControlStub(channel).GetStatistics(control.GetStatisticsRequest())
    assert statistics.health == control.Statistics.HEALTH_SERVING and statistics.uptime_s > 0
    assert dict(statistics.requests_finished) == {"length": 2}
    assert dict(statistics.requests_refused) == {"PromptError": 1}
    assert (statistics.prompt_tokens, statistics.generated_tokens) == (128, 10)
    assert statistics.prefix_cache.query_tokens == 128
    assert statistics.prefix_cache.hit_tokens == 63  # of the second prompt; its last token is computed again
    assert statistics.prefix_cache.miss_tokens["cold"] == 64
    assert statistics.queue_time.count == 2 and statistics.time_to_first_token["hit"].count == 1


def test_drain(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.01) as running, running.channel() as channel:
        stub, operate = trtllm_rpc.TrtllmServiceStub(channel), control_rpc.ControlStub(channel)
        code, details = refused(lambda: [operate.Drain(control.DrainRequest(timeout_s=-1))])
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("timeout_s")
        short, long = (stub.Generate(ask(max_tokens=count, streaming=True)) for count in (10, 250))
        next(short), next(long)
        assert not operate.Drain(control.DrainRequest(timeout_s=0.5)).completed
        assert list(short)[-1].complete.finish_reason == "length"
        assert list(long)[-1].complete.finish_reason == "cancelled"
        assert operate.Drain(control.DrainRequest()).completed
        assert operate.GetStatistics(control.GetStatisticsRequest()).health == control.Statistics.HEALTH_DRAINING
        assert refused(lambda: stub.Generate(ask()))[0] == grpc.StatusCode.UNAVAILABLE


def test_health_of_each_service_follows_the_engine(tmp_path: Path) -> None:
    with replica(tmp_path) as running, running.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watched = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICES[0])]
        assert [next(each).status for each in watched] == [SERVING, SERVING]
        for name in ["", *SERVICES]:
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        running.executor.refuse_new()
        assert [next(each).status for each in watched] == [NOT_SERVING, NOT_SERVING]
        for name in ["", *SERVICES]:
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == NOT_SERVING


def test_reflection_tells_every_service_and_its_messages(served: Replica) -> None:
    with served.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services=""),
                 reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest"),
                 reflection_pb2.ServerReflectionRequest(file_containing_symbol="trtllm.TrtllmService"),
                 reflection_pb2.ServerReflectionRequest(file_containing_symbol="nothing.Here")]
        listed, message, service, nothing = stub.ServerReflectionInfo(iter(asked))
    names = {each.name for each in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert message.file_descriptor_response.file_descriptor_proto
    assert service.file_descriptor_response.file_descriptor_proto
    assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_services_can_be_left_out(tmp_path: Path) -> None:
    with replica(tmp_path, settings=ServerSettings(grpc_services=("trtllm",))) as small, small.channel() as channel:
        assert trtllm_rpc.TrtllmServiceStub(channel).HealthCheck(trtllm.HealthCheckRequest()).status == "OK"
        with pytest.raises(grpc.RpcError) as caught:
            vllm_rpc.VllmEngineStub(channel).HealthCheck(vllm.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(RequestError, match="no gRPC service 'nonsense'"), \
            replica(tmp_path, settings=ServerSettings(grpc_services=("nonsense",))):
        pass


def test_a_second_server_on_the_same_port_is_refused(served: Replica) -> None:
    from ingot.runtime.servers import grpc_server

    with pytest.raises(RequestError, match=f"cannot serve gRPC at {served.address}: the port is in use"):
        served.run(grpc_server.start(served.context, served.address))
    with pytest.raises(RequestError, match="cannot serve gRPC at nonsense: expected host:port"):
        served.run(grpc_server.start(served.context, "nonsense"))


def test_messages_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with replica(tmp_path, settings=ServerSettings(max_message_bytes=4096)) as small, small.channel() as channel:
        stub = trtllm_rpc.TrtllmServiceStub(channel)
        code, details = refused(lambda: stub.Generate(ask(stop=["x" * 5000])))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "4096" in details
        assert len(list(stub.Generate(ask()))) == 1


def test_a_long_error_fits_into_the_headers(served: Replica) -> None:
    with served.channel() as channel:
        stub = kserve_rpc.GRPCInferenceServiceStub(channel)
        request = kserve.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            ("[" + "ü" * 100_000).encode())
        code, _ = refused(lambda: [stub.ModelInfer(request)])
        assert code == grpc.StatusCode.INVALID_ARGUMENT


# Token


def metadata(value: str) -> list[tuple[str, str]]:
    return [("authorization", value)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("guarded"), settings=ServerSettings(auth_token="s3cret")) as running:
        yield running


def test_calls_need_the_token(guarded: Replica) -> None:
    with guarded.channel() as channel:
        stub = trtllm_rpc.TrtllmServiceStub(channel)
        for right in ("Bearer s3cret", "bearer s3cret"):
            assert len(list(stub.Generate(ask(), metadata=metadata(right)))) == 1
        for wrong in ("", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            code, _ = refused(lambda wrong=wrong: stub.Generate(ask(), metadata=metadata(wrong)))  # type: ignore[misc]
            assert code == grpc.StatusCode.UNAUTHENTICATED, wrong
        code, _ = refused(lambda: stub.Generate(ask()))
        assert code == grpc.StatusCode.UNAUTHENTICATED
        code, _ = refused(lambda: stub.Generate(ask(), metadata=metadata("Bearer s3cret") * 2))
        assert code == grpc.StatusCode.UNAUTHENTICATED


def test_every_kind_of_call_is_guarded_but_health(guarded: Replica) -> None:
    with guarded.channel() as channel:
        unary = lambda: [control_rpc.ControlStub(channel).GetStatistics(control.GetStatisticsRequest())]  # noqa: E731
        stream = lambda: kserve_rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([]))  # noqa: E731
        reflect = lambda: reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([]))  # noqa: E731
        for call in (unary, stream, reflect):
            assert refused(call)[0] == grpc.StatusCode.UNAUTHENTICATED
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == SERVING


# TLS


def openssl(folder: Path, *arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client certificates signed by it."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
            "-days", "2", "-subj", "/CN=test authority")
    for name in ("server", "client"):
        openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", "/CN=localhost")
        (folder / "san.txt").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "san.txt")
    return folder


def tls(folder: Path, with_clients: bool) -> ServerSettings:
    return ServerSettings(tls_certificate=(folder / "server.pem").read_bytes(),
                          tls_key=(folder / "server.key").read_bytes(),
                          tls_client_ca=(folder / "ca.pem").read_bytes() if with_clients else None)


def is_live(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with channel:
        try:
            stub = kserve_rpc.GRPCInferenceServiceStub(channel)
            answer: Any = stub.ServerLive(kserve.ServerLiveRequest(), timeout=5)
            return bool(answer.live)
        except grpc.RpcError as error:
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return False


def test_tls(tmp_path: Path, certificates: Path) -> None:
    ca = (certificates / "ca.pem").read_bytes()
    with replica(tmp_path, settings=tls(certificates, with_clients=False)) as running:
        assert is_live(running.address, grpc.ssl_channel_credentials(ca))
        assert not is_live(running.address, None)


def test_clients_may_have_to_show_a_certificate(tmp_path: Path, certificates: Path) -> None:
    ca, key, own = (
        (certificates / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    with replica(tmp_path, settings=tls(certificates, with_clients=True)) as running:
        assert is_live(running.address, grpc.ssl_channel_credentials(ca, key, own))
        assert not is_live(running.address, grpc.ssl_channel_credentials(ca))


def test_wrong_certificates_are_an_error_of_the_user(tmp_path: Path) -> None:
    settings = ServerSettings(tls_certificate=b"no certificate", tls_key=b"no key")
    with pytest.raises(RequestError, match="Are --tls-cert, --tls-key"), replica(tmp_path, settings=settings):
        pass


# End


def test_stop_ends_streams_without_an_end_at_once_and_lets_answers_finish(tmp_path: Path) -> None:
    with replica(tmp_path, step_s=0.005) as running, running.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        events = vllm_rpc.VllmEngineStub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        hold = threading.Event()
        infer = kserve_rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(hold.wait, True))
        answer = trtllm_rpc.TrtllmServiceStub(channel).Generate(ask(max_tokens=100, streaming=True))
        assert next(health).status == SERVING and next(events).sequence_number == 1  # the cache was created
        next(answer)
        begin = time.monotonic()
        running.run(running.server.stop(20))
        assert time.monotonic() - begin < 10
        assert list(answer)[-1].complete.completion_tokens == 100
        assert list(infer) == []
        assert all(each.events for each in events)
        assert [each.status for each in health] in ([], [NOT_SERVING])
        hold.set()
        wait_until(lambda: running.executor.stats().num_running == 0)

"""A server that speaks vllm.grpc.engine.VllmEngine: Ingot's, or a vLLM worker."""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from ...errors import RequestError
from ...servers.proto import control_pb2
from ...servers.proto.control_pb2_grpc import ControlStub
from .driver import CallFailed, Delivery, Facts, Refused, ServerUnreachable
from .http import fetch_metrics

_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class GrpcDriver:
    def __init__(self, address: str, token: str | None = None, ca_file: str | None = None, tls: bool = False,
                 metrics_url: str | None = None) -> None:
        """address: host:port. metrics_url: the page of the same server's metrics, by HTTP."""
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = grpc.ssl_channel_credentials(_read(ca_file)) if tls or ca_file else None
        self._metrics_url = metrics_url
        self._http_headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._channel: grpc.aio.Channel | None = None
        self._http: aiohttp.ClientSession | None = None

    def _stub(self) -> services.VllmEngineStub:
        if self._channel is None:  # must be made inside the event loop
            self._channel = (grpc.aio.insecure_channel(self._address, _OPTIONS) if self._credentials is None else
                             grpc.aio.secure_channel(self._address, self._credentials, _OPTIONS))
            self._engine = services.VllmEngineStub(self._channel)
            self._control = ControlStub(self._channel)
        return self._engine

    async def facts(self) -> Facts:
        engine = self._stub()
        try:
            info = await engine.GetModelInfo(messages.GetModelInfoRequest(), metadata=self._metadata, timeout=30)
            server = await engine.GetServerInfo(messages.GetServerInfoRequest(), metadata=self._metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise ServerUnreachable(f"grpc://{self._address}: {error.code().name}: {error.details()}") from None
        facts = Facts(f"grpc://{self._address}", info.served_model_name or info.model_path, None,
                      info.vocab_size or None, info.max_context_length or None, server.block_size or 16)
        try:
            mine = await self._control.GetEngineInfo(control_pb2.GetEngineInfoRequest(), metadata=self._metadata,
                                                     timeout=30)
        except grpc.aio.AioRpcError:  # not Ingot's, or without this service
            settings = {"max_batch_size": server.max_num_seqs, "kv_precision": server.kv_cache_dtype}
        else:
            facts.engine_hash, limits, kv = mine.hash, mine.limits, mine.kv_cache
            settings = {"target": mine.target, "precision": mine.precision, "max_batch_size": limits.max_batch_size,
                        "max_num_tokens": limits.max_num_tokens, "max_queue_size": limits.max_queue_size,
                        "kv_cache_blocks": kv.num_blocks, "guaranteed_requests": kv.guaranteed_requests}
        facts.settings = {key: value for key, value in settings.items() if value}
        return facts

    async def generate(self, request_id: str, prompt: list[int] | str,
                       output_tokens: int) -> AsyncGenerator[Delivery, None]:
        params = messages.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, n=1, ignore_eos=True,
                                         max_tokens=output_tokens)
        given: dict[str, Any] = ({"text": prompt} if isinstance(prompt, str) else
                                 {"tokenized": messages.TokenizedInput(input_ids=prompt)})
        request = messages.GenerateRequest(request_id=request_id, sampling_params=params, stream=True, **given)
        call = self._stub().Generate(request, metadata=self._metadata)
        seen = 0
        try:
            async for response in call:
                if response.HasField("chunk"):
                    chunk = response.chunk
                    seen += len(chunk.token_ids)
                    yield Delivery(len(chunk.token_ids), chunk.token_ids, chunk.prompt_tokens, chunk.cached_tokens)
                else:
                    done = response.complete
                    rest = done.output_ids[seen:]
                    yield Delivery(len(rest), rest, done.prompt_tokens, done.cached_tokens, done.completion_tokens)
                    if done.finish_reason not in ("stop", "length"):
                        raise CallFailed(f"finish reason {done.finish_reason!r}")
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            raise Refused(text) if error.code() in _REFUSALS else CallFailed(text) from None
        finally:
            call.cancel()  # of a finished call: nothing

    async def metrics(self) -> str | None:
        """By HTTP where a page is given, else over gRPC; a server that is not Ingot's has none there."""
        if self._metrics_url is None:
            try:
                answer = await self._control.GetMetrics(control_pb2.GetMetricsRequest(), metadata=self._metadata,
                                                        timeout=10)
            except grpc.aio.AioRpcError:
                return None
            return str(answer.text)
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._http_headers)
        return await fetch_metrics(self._http, self._metrics_url)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self._http is not None:
            await self._http.close()


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise RequestError(f"cannot read the certificates {path!r}: {error.strerror}") from None

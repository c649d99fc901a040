"""The gRPC server: which services it has, its address, encryption, token, health and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ..errors import RequestError
from . import control, kserve, trtllm, vllm
from .address import require_free
from .grpc_auth import BearerToken
from .kv_events import KvEventRelay
from .rpc import Call, Stopping, service_handler

if TYPE_CHECKING:
    from ..executor.stats import Health
    from .context import ServerContext, ServerSettings
    from .served import ServedEngine

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a share of the first one's calls
    ("grpc.max_send_message_length", -1),
    # A client that vanished without a word holds KV blocks: it is noticed within 40 seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Gateways keep idle connections alive by pings of their own.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


async def start(context: ServerContext, address: str) -> GrpcServer:
    """Binds to `address` (host:port; port 0: any) and takes calls. Raises RequestError if it cannot bind."""
    settings = context.settings
    interceptors = [] if settings.auth_token is None else [BearerToken(settings.auth_token)]
    server = aio.server(interceptors=interceptors,
                        options=(*_OPTIONS, ("grpc.max_receive_message_length", settings.max_message_bytes)))
    stopping = Stopping()
    names = []
    relay = _relay(context)
    for descriptor, servicer, endless in _services(context, relay, stopping):
        server.add_generic_rpc_handlers((service_handler(descriptor, servicer, stopping, endless),))
        names.append(descriptor.full_name)
    health_servicer = health.aio.HealthServicer()
    server.add_generic_rpc_handlers((
        service_handler(_HEALTH, health_servicer, stopping, endless=("Watch",)),
        service_handler(_REFLECTION, _Reflection([*names, _HEALTH.full_name, _REFLECTION.full_name]), stopping,
                        endless=("ServerReflectionInfo",)),
    ))
    port = _bind(server, address, settings)
    started = GrpcServer(server, f"{address.rpartition(':')[0]}:{port}", health_servicer, ["", *names], stopping)
    if relay is not None:
        started.keep_running(relay.run())
    await started.tell_health(context.health)
    context.on_health(started.on_health)
    await server.start()
    return started


def _relay(context: ServerContext) -> KvEventRelay | None:
    """Follows the cache of the engine that gets new requests; None if that records no events."""
    events = context.current.engine.events
    if events is None:
        return None
    relay = KvEventRelay(events, context.current.engine.stats().block_size)

    def follow(engine: ServedEngine) -> None:
        if engine.engine.events is not None:
            relay.follow(engine.engine.events, engine.engine.stats().block_size)

    context.on_engine(follow)
    return relay


class GrpcServer:
    """A server that takes calls.

    address  host:port that it is bound to
    """

    def __init__(self, server: aio.Server, address: str, health_servicer: health.aio.HealthServicer,
                 services: list[str], stopping: Stopping) -> None:
        self.address = address
        self._server = server
        self._health = health_servicer
        self._services = services
        self._stopping = stopping
        self._tasks: set[asyncio.Task[None]] = set()

    def keep_running(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Until it ends, or the server stops."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_health(self, state: Health) -> None:
        if not self._stopping.is_set:
            self.keep_running(self.tell_health(state))

    async def tell_health(self, state: Health) -> None:
        """Sets what grpc.health.v1 answers for each service."""
        kinds = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, kinds.SERVING if state == "serving" else kinds.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, ends those without an end of their own, gives the others grace_s seconds."""
        await self._health.enter_graceful_shutdown()
        self._stopping.set()
        await self._server.stop(grace_s)
        for task in self._tasks:
            task.cancel()


def _services(context: ServerContext, relay: KvEventRelay | None,
              stopping: Stopping) -> list[tuple[ServiceDescriptor, object, tuple[str, ...]]]:
    """(service, what answers it, its methods without an end) of those that the settings name."""
    every = {
        "trtllm": (trtllm.SERVICE, trtllm.TrtllmService(context, relay), trtllm.ENDLESS),
        "vllm": (vllm.SERVICE, vllm.VllmEngine(context, relay), vllm.ENDLESS),
        "kserve": (kserve.SERVICE, kserve.GRPCInferenceService(context, stopping), ()),
        "control": (control.SERVICE, control.Control(context), ()),
    }
    for name in context.settings.grpc_services:
        if name not in every:
            raise RequestError(f"there is no gRPC service {name!r}; the services are: {', '.join(every)}")
    return [every[name] for name in context.settings.grpc_services]


def _bind(server: aio.Server, address: str, settings: ServerSettings) -> int:
    require_free(address, "gRPC")
    try:
        if settings.tls_certificate is None or settings.tls_key is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(settings.tls_key, settings.tls_certificate)], root_certificates=settings.tls_client_ca,
            require_client_auth=settings.tls_client_ca is not None)
        return server.add_secure_port(address, credentials)
    except (RuntimeError, ValueError) as error:
        told = str(error).partition("; set GRPC_VERBOSITY")[0].rstrip(".")  # which tells no more than is told here
        step = ("Is the port in use? Port 0 takes any that is free." if settings.tls_certificate is None
                else "Are --tls-cert, --tls-key and --tls-client-ca PEM files, and the key that of the certificate?")
        raise RequestError(f"cannot serve gRPC at {address}: {told}.\n  {step}") from None


class _Reflection:
    """The library's servicer as a coroutine that writes."""

    def __init__(self, services: list[str]) -> None:
        self._servicer = reflection.aio.ReflectionServicer(services)

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], call: Call) -> None:
        async for response in self._servicer.ServerReflectionInfo(requests, call):
            await call.write(response)

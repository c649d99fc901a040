"""What the methods of all services share: parsing, errors as statuses, an end when the server stops.

A servicer is an object with a coroutine method for each method of its service, by the same name:

    unary request, unary response    async def HealthCheck(self, request, call) -> response
    unary request, many responses    async def Generate(self, request, call) -> None          await call.write(response)
    many requests, many responses    async def ModelStreamInfer(self, requests, call) -> None

They raise IngotError for what is the client's fault or the engine's state. Coroutines that write are used instead of
asynchronous generators because cancelling them reaches whatever they await at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.aio import AbortError
from grpc.aio import ServicerContext as Call

from .grpc_errors import Unsupported, abort_with
from .wire import parse

Result = TypeVar("Result")


class Stopping:
    """Whether the server is about to end. Calls without an end of their own wait for it beside everything else."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    async def or_result(self, awaitable: Awaitable[Result], default: Result) -> Result:
        """The result of `awaitable`; `default`, and it is cancelled, if the server stops before."""
        if self._event.is_set():
            return default
        task = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else default
        finally:
            for each in (task, stop):
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await each


def service_handler(service: ServiceDescriptor, servicer: object, stopping: Stopping,
                    endless: Collection[str] = ()) -> grpc.GenericRpcHandler:
    """Answers the calls of a service. Methods that `servicer` lacks are answered with UNIMPLEMENTED.

    endless  methods with many responses that end only when the client leaves, or the server stops
    """
    handlers = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is not None and method.name in endless:
            behaviour = _until_stopped(behaviour, stopping)
        handlers[method.name] = _method_handler(method, behaviour or _unimplemented(method))
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(method: MethodDescriptor, behaviour: Callable[..., Awaitable[Any]]) -> grpc.RpcMethodHandler:
    kind: type[Message] = GetMessageClass(method.input_type)

    async def unary(data: bytes, call: Call) -> Any:
        try:
            return await behaviour(parse(kind, data), call)
        except AbortError:
            raise
        except Exception as error:
            await abort_with(call, error)

    async def stream(requests: AsyncIterator[bytes], call: Call) -> None:
        try:
            await behaviour((parse(kind, data) async for data in requests), call)
        except AbortError:
            raise
        except Exception as error:
            await abort_with(call, error)

    # Without a deserializer methods get bytes, and malformed ones become an answer instead of an internal error.
    if method.client_streaming:
        assert method.server_streaming
        return grpc.stream_stream_rpc_method_handler(stream, None, _serialize)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(unary, None, _serialize)
    return grpc.unary_unary_rpc_method_handler(unary, None, _serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _until_stopped(behaviour: Callable[..., Awaitable[Any]], stopping: Stopping) -> Callable[..., Awaitable[Any]]:
    async def method(request: Any, call: Call) -> None:
        await stopping.or_result(behaviour(request, call), None)
    return method


def _unimplemented(method: MethodDescriptor) -> Callable[..., Awaitable[Any]]:
    async def refuse(request: Any, call: Call) -> None:
        raise Unsupported(method.full_name, "this engine generates text and has no such method")
    return refuse

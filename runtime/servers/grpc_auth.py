"""A bearer token on every call but health checks, which orchestrators send without any."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

_OPEN_SERVICE = "/grpc.health.v1.Health/"


class BearerToken(ServerInterceptor):
    """Refuses calls whose metadata `authorization` is not "Bearer <token>", with UNAUTHENTICATED."""

    def __init__(self, token: str) -> None:
        self._expected = token.encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICE):
            return handler
        if self._is_right(handler_call_details.invocation_metadata):
            return handler
        return _refusing(handler)

    def _is_right(self, metadata: Any) -> bool:
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return False
        scheme, _, token = given[0].partition(" ")
        # The comparison takes as long for a token that is nearly right as for any other of its length.
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._expected)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, call: ServicerContext) -> None:
        await call.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: expected \"Bearer\" and this server's token")

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)

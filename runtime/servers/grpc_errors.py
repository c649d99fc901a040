"""Errors as gRPC statuses: the code says who must act, the message what is wrong, where, and what to do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from grpc import StatusCode

from ..adapters.errors import AdapterExists, AdapterLoadingOff, UnknownAdapter
from ..errors import IngotError, RequestError
from ..executor.overlap import NoRoom
from ..executor.request import Draining, EngineFailed, QueueFull
from ..self_test import SelfTestFailed
from ..store.policy import EngineRefused
from ..store.store import NotInStore
from .swap_outcome import NotServing, OtherTokenizer

if TYPE_CHECKING:
    from grpc.aio import ServicerContext as Call

_log = logging.getLogger(__name__)

# Statuses travel in HTTP/2 headers, of which peers accept few kilobytes; other characters than ASCII take three each.
_MAX_DETAILS = 1500


class InvalidField(RequestError):
    """A field of a message holds what the engine cannot take. field: its path, as "sampling_config.top_p"."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Unsupported(RequestError):
    """A field, or a method, asks for something that this server does not do. Nothing is silently ignored."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NotFound(RequestError):
    """No such model, or adapter."""


class DeadlinePassed(IngotError):
    """A request did not end by its deadline."""


def status_code(error: IngotError) -> StatusCode:
    match error:
        case Unsupported():
            return StatusCode.UNIMPLEMENTED
        case NotFound() | NotInStore() | UnknownAdapter():
            return StatusCode.NOT_FOUND
        case AdapterExists():
            return StatusCode.ALREADY_EXISTS
        case EngineRefused() | AdapterLoadingOff():
            return StatusCode.PERMISSION_DENIED
        case NotServing() | OtherTokenizer() | SelfTestFailed():
            return StatusCode.FAILED_PRECONDITION
        case RequestError():
            return StatusCode.INVALID_ARGUMENT
        case QueueFull() | NoRoom():
            return StatusCode.RESOURCE_EXHAUSTED
        case Draining() | EngineFailed():
            return StatusCode.UNAVAILABLE
        case DeadlinePassed():
            return StatusCode.DEADLINE_EXCEEDED
        case _:
            return StatusCode.INTERNAL


def details(error: IngotError) -> str:
    text = str(error)
    return text if len(text) <= _MAX_DETAILS else text[: _MAX_DETAILS - 1] + "…"


async def abort_with(call: Call, error: Exception) -> None:
    """Ends a call by what its method raised."""
    if call.done() or call.cancelled():
        return  # the client has left, or its deadline passed: nobody reads a status
    if isinstance(error, IngotError):
        await call.abort(status_code(error), details(error))
    _log.error("a call failed by a fault of the server", exc_info=error)
    await call.abort(StatusCode.INTERNAL, f"internal error ({type(error).__name__}); the server's log tells more")

"""What all gRPC services do to have a prompt answered: parameters and errors by the names of their own fields."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..adapters.errors import UnknownAdapter
from ..errors import IngotError
from ..executor.request import Request, RequestFailed, RequestOutput
from ..sampling import SamplingError, SamplingParams
from .context import ENGINE_HASH
from .grpc_errors import DeadlinePassed, InvalidField, NotFound

if TYPE_CHECKING:
    from ..executor.async_engine import OutputStream
    from .context import ServerContext
    from .rpc import Call
    from .served import ServedEngine

MAX_REQUEST_ID_LENGTH = 512
# A text that takes longer to encode than to hand over to a thread, so that the loop can serve others meanwhile.
_LONG_TEXT = 2000

FieldNames = Mapping[str, str]
"""The engine's name of a parameter -> the path of the field that a service takes it from."""


def sampling_params(values: dict[str, Any], names: FieldNames) -> SamplingParams:
    """Raises InvalidField with the service's name of the field."""
    try:
        return SamplingParams(**values)
    except SamplingError as error:
        raise InvalidField(names.get(error.field, error.field), str(error)) from None


async def begin(context: ServerContext, engine: ServedEngine, call: Call, request_id: str, prompt: Sequence[int],
                params: SamplingParams, names: FieldNames, **options: Any) -> OutputStream:
    """Gives a request to an engine; it ends with the call's deadline. The caller must `aclose` the stream.

    request_id  empty: one is made
    options     further fields of Request
    Raises InvalidField, NotFound for an adapter that is not loaded, or what else the engine refuses a request with.
    """
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidField(names["request_id"], f"has {len(request_id)} characters; expected at most "
                                                f"{MAX_REQUEST_ID_LENGTH}")
    try:
        await engine.engine.prepare(params)
        deadline_s = call.time_remaining()
        return context.generate(engine, Request(request_id or uuid.uuid4().hex, prompt, params, deadline_s=deadline_s,
                                                **options))
    except UnknownAdapter as error:
        raise NotFound(f"{names[error.field]}: {error}") from None
    except IngotError as error:
        field = getattr(error, "field", None)
        if field is None:
            raise
        raise InvalidField(names.get(field, field), str(error)) from None


def raise_if_failed(output: RequestOutput, names: FieldNames) -> None:
    """For the last output of an answer: raises DeadlinePassed, or why it failed: InvalidField, if that is the client's
    fault."""
    if output.finish_reason == "timeout":
        raise DeadlinePassed(f"the deadline of {output.request_id} passed after {output.num_output_tokens} tokens")
    if output.finish_reason == "error":
        field = getattr(output.error, "field", None)
        if field is not None:
            raise InvalidField(names.get(field, field), str(output.error))
        raise output.error or RequestFailed(f"request {output.request_id} failed")


def token_ids(field: Sequence[int], longest: int) -> Sequence[int]:
    """A repeated field as a list; itself, to be refused, if it is too long: of millions no list is made."""
    return list(field) if len(field) <= longest else field


@contextmanager
def engine_for(context: ServerContext, call: Call) -> Iterator[ServedEngine]:
    """The engine for a call with one answer; the call's trailing metadata tell its hash, however the call ends."""
    with context.use() as engine:
        call.set_trailing_metadata(((ENGINE_HASH, engine.hash),))
        yield engine


async def tell_engine(call: Call, engine: ServedEngine) -> None:
    """The same at the beginning of an answer that is going to be written."""
    await call.send_initial_metadata(((ENGINE_HASH, engine.hash),))


async def encode(engine: ServedEngine, text: str, field: str) -> list[int]:
    """Raises InvalidField if the engine has no tokenizer, or for a text that is far too long."""
    tokenizer, longest = engine.tokenizer, engine.limits.max_seq_len
    if tokenizer is None:
        raise InvalidField(field, "this engine has no tokenizer; expected token ids")
    if tokenizer.surely_exceeds(text, longest):
        raise InvalidField(field, f"has {len(text)} characters, more than the {longest} tokens of this engine can hold")
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text)
    return await asyncio.to_thread(tokenizer.encode, text)

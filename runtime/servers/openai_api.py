"""OpenAI's HTTP interface: /v1/models, /v1/completions, /v1/chat/completions (docs/http.md)."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..adapters.errors import UnknownAdapter
from ..adapters.loaded import LoadedAdapter
from ..chat_template import ChatTemplateError, Message
from ..errors import IngotError, RequestError
from ..executor.async_engine import OutputStream
from ..executor.request import (
    Draining,
    DuplicateRequest,
    EngineFailed,
    QueueFull,
    Request,
    RequestOutput,
)
from .context import ServerContext
from .openai_errors import ApiError, invalid
from .openai_forms import ChatForms
from .openai_request import Call, parse_chat, parse_completion, unknown_model
from .openai_response import DONE, Answer, Envelope, EventWriter, Usage, to_json
from .served import ServedEngine

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
                   "X-Accel-Buffering": "no"}
ANSWERED_BY = web.RequestKey("answered_by", str)
"""Of a request that was given to an engine: its hash."""
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class OpenAiApi:
    """The handlers. Every error leaves them as ApiError, for the server to write."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._forms = ChatForms(context.settings)
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/models", self.models), web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chat)]

    async def models(self, request: web.Request) -> web.Response:
        with self._engine(request) as engine:
            adapters = engine.engine.adapters.all()
            return json_response({"object": "list", "data": [
                self._entry(engine), *(self._adapter_entry(engine, each) for each in adapters)]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        with self._engine(request) as engine:
            if name == self._context.model_name:
                return json_response(self._entry(engine))
            for adapter in engine.engine.adapters.all():
                if adapter.name == name:
                    return json_response(self._adapter_entry(engine, adapter))
        raise unknown_model(name, self._context.adapters.models)

    def _entry(self, engine: ServedEngine) -> dict[str, Any]:
        """As OpenAI tells a model; max_model_len as vLLM does; engine: what only Ingot has."""
        manifest = engine.file.manifest
        return {"id": self._context.model_name, "object": "model", "created": self._created, "owned_by": "ingot",
                "max_model_len": engine.limits.max_seq_len,
                "engine": {"hash": engine.hash, "target": manifest["target"]["name"],
                           "precision": manifest["precision"], "vocab_size": engine.vocab_size,
                           "kv_block_size": engine.engine.stats().block_size, **engine.facts}}

    def _adapter_entry(self, engine: ServedEngine, loaded: LoadedAdapter) -> dict[str, Any]:
        """As vLLM tells an adapter, but where it lies; adapter: what only Ingot has."""
        adapter = loaded.adapter
        return {"id": loaded.name, "object": "model", "created": self._created, "owned_by": "ingot",
                "parent": self._context.model_name, "max_model_len": engine.limits.max_seq_len,
                "adapter": {"sha256": adapter.sha256, "rank": adapter.rank, "num_modules": len(adapter.modules)}}

    @contextmanager
    def _engine(self, request: web.Request) -> Iterator[ServedEngine]:
        """The engine for a request; the answer's headers tell its hash."""
        with self._context.use() as engine:
            request[ANSWERED_BY] = engine.hash
            yield engine

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        with self._engine(request) as engine:
            call = parse_completion(body, self._context.adapters.models, _sampling_defaults(engine.generation_config),
                                    engine.limits.max_seq_len)
            _check_count(engine, len(call.prompts))
            prompts = [prompt if isinstance(prompt, list) else await text_ids(
                engine, prompt, f"prompt[{index}]" if len(call.prompts) > 1 else "prompt", engine.limits.max_seq_len)
                       for index, prompt in enumerate(call.prompts)]
            return await self._answer(request, engine, call, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        with self._engine(request) as engine:
            call = parse_chat(body, self._context.adapters.models, _sampling_defaults(engine.generation_config),
                              engine.limits.max_seq_len)
            form = None if call.tools is None else await self._forms.tools(engine)
            prompt = await chat_ids(engine, call.messages, call.template, engine.limits.max_seq_len)
            call = await self._forms.read(engine, call, form, prompt)
            if call.fills_room:
                room = max(1, engine.default_len - len(prompt))
                call = replace(call, params=replace(call.params, max_tokens=room))
            return await self._answer(request, engine, call, [prompt])

    async def _answer(self, http: web.Request, engine: ServedEngine, call: Call,
                      prompts: list[list[int]]) -> web.StreamResponse:
        prefix = "chatcmpl" if call.is_chat else "cmpl"
        given = http.headers.get("X-Request-Id", "")
        # The client's own id, to be found in the log; made unique, as a client may send it again.
        parts = [prefix, given, uuid.uuid4().hex[:12]] if _REQUEST_ID.fullmatch(given) else [prefix, uuid.uuid4().hex]
        envelope = Envelope("-".join(parts), int(time.time()), call.lora or self._context.model_name,
                            f"ingot-{engine.hash[:12]}", call.is_chat)
        async with AsyncExitStack() as stack:
            streams = []
            for number, prompt in enumerate(prompts):
                request_id = envelope.response_id + (f"-{number}" if len(prompts) > 1 else "")
                streams.append(await self._start(engine, call, request_id, prompt,
                                                 number if len(prompts) > 1 else None))
                # Whatever happens from here on, disconnected clients included, no request goes on without a reader.
                stack.push_async_callback(streams[-1].aclose)
            outputs = await stack.enter_async_context(aclosing(_merged(streams)))
            if call.stream:
                return await self._stream(http, engine, call, envelope, outputs)
            return await self._whole(engine, call, envelope, prompts, outputs)

    async def _start(self, engine: ServedEngine, call: Call, request_id: str, prompt: list[int],
                     number: int | None) -> OutputStream:
        try:
            request = Request(request_id, prompt, call.params, call.priority, call.timeout_s, call.cache_salt,
                              lora=call.lora)
            await engine.engine.prepare(call.params)
            return self._context.generate(engine, request)
        except IngotError as error:
            api_error = _api_error(error, call)
            if api_error.param == "prompt_token_ids":
                where = "messages" if call.is_chat else "prompt" if number is None else f"prompt[{number}]"
                api_error.param = where
                if len(prompt) >= engine.limits.max_seq_len:
                    api_error.code = "context_length_exceeded"
            raise api_error from None

    async def _whole(self, engine: ServedEngine, call: Call, envelope: Envelope, prompts: list[list[int]],
                     outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> web.Response:
        n, usage = call.params.n, Usage()
        answers = [Answer(_echoed(engine, call, number), prompt, call.new_answer and call.new_answer())
                   for number, prompt in enumerate(prompts) for _ in range(n)]
        prompt_logprobs: dict[int, Sequence[Any]] = {}
        async for number, output in outputs:
            answers[number * n + output.index].add(output)
            if output.prompt_logprobs is not None:
                prompt_logprobs[number] = output.prompt_logprobs
            if output.finish_reason is not None:
                _raise_if_failed(output, call)
                usage.add(output)
        if call.no_answer:
            usage.completion_tokens = 0
        choices = [answer.choice(index, call, prompt_logprobs.get(index // n), engine.token_names)
                   for index, answer in enumerate(answers)]
        return json_response({**envelope.head(in_stream=False), "choices": choices, "usage": usage.to_json()})

    async def _stream(self, http: web.Request, engine: ServedEngine, call: Call, envelope: Envelope,
                      outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> web.StreamResponse:
        n, usage, writer = call.params.n, Usage(), EventWriter(call, envelope, engine.token_names)
        begun: set[int] = set()
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        try:
            async for number, output in outputs:
                index = number * n + output.index
                data = b""
                _raise_if_failed(output, call)
                if index not in begun:
                    begun.add(index)
                    data = writer.first(index)
                data += writer.output(index, output)
                if output.finish_reason is not None:
                    usage.add(output)
                if not response.prepared:
                    # Not before: what fails until here is told by the status.
                    await response.prepare(http)
                if data:
                    await response.write(data)
            if call.include_usage:
                await response.write(writer.usage(usage))
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(writer.error(error))
        except ConnectionError:
            raise  # the client has gone
        except Exception:
            if not response.prepared:
                raise
            _log.exception("%s failed", envelope.response_id)
            await response.write(writer.error(ApiError(500, "internal error; the server's log tells more",
                                                       code="internal_error")))
        await response.write(DONE)
        await response.write_eof()
        return response


def _echoed(engine: ServedEngine, call: Call, number: int) -> str | None:
    if not call.echo:
        return None
    prompt = call.prompts[number]
    if isinstance(prompt, str):
        return prompt
    return "" if engine.tokenizer is None else engine.tokenizer.decode(prompt, skip_special_tokens=False)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gets that says nothing: the model's own recommendation, else OpenAI's values."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {"temperature": 1.0, **{name: generation[name] for name in ("temperature", "top_k", "top_p")
                                   if generation.get(name) is not None}}


async def _merged(streams: list[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(number of the stream, output) as they come."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def copy(number: int) -> None:
        async for output in streams[number]:
            queue.put_nowait((number, output))
        queue.put_nowait(None)

    tasks = [asyncio.create_task(copy(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_if_failed(output: RequestOutput, call: Call) -> None:
    if output.finish_reason == "error":
        raise _api_error(output.error, call) if output.error is not None else ApiError(500, "the request failed")
    if output.finish_reason == "timeout":
        raise ApiError(408, f"the deadline passed after {output.num_output_tokens} tokens", "timeout_s", "timeout")
    if output.finish_reason == "cancelled":
        raise ApiError(503, "the request was cancelled by the server", code="cancelled")


def _api_error(error: IngotError, call: Call) -> ApiError:
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="draining")
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, DuplicateRequest):
        return ApiError(409, str(error), code="duplicate_request")
    if isinstance(error, UnknownAdapter):  # unloaded since the request was read
        return ApiError(404, str(error), "model", "model_not_found")
    if isinstance(error, RequestError):
        field = getattr(error, "field", None)
        return ApiError(400, str(error), call.guide_field if field == "guide" else field, "invalid_value")
    return ApiError(500, str(error), code="request_failed")


def _check_count(engine: ServedEngine, num_prompts: int) -> None:
    """Raises ApiError for more prompts than could ever wait together, before the work of encoding them."""
    most = engine.engine.stats().max_queue_size
    if num_prompts > most:
        raise invalid("prompt", f"prompt: {num_prompts} prompts; this server takes {most} in a request at most "
                                "(ingot serve --max-queue-size)")


async def text_ids(engine: ServedEngine, text: str, name: str, longest: int | None = None,
                   add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text; name: the field that it stands in. Raises ApiError, for one that has surely more than
    `longest` tokens too: megabytes take minutes to encode."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise invalid(name, f"{name}: this engine has no tokenizer; give token ids")

    def ids() -> list[int]:
        _check_length(tokenizer, text, name, longest)
        return tokenizer.encode(text, add_special_tokens)

    # Long texts take long, and the loop has other requests to serve.
    return await asyncio.to_thread(ids)


def _check_length(tokenizer: Tokenizer, text: str, name: str, longest: int | None) -> None:
    if longest is not None and tokenizer.surely_exceeds(text, longest):
        raise invalid(name, f"{name}: {len(text):,} characters are more than the {longest:,} tokens that this engine "
                            "takes at most can hold.\n  Shorten it, or build the engine with a larger --max-seq-len.",
                      "context_length_exceeded")


async def chat_ids(engine: ServedEngine, messages: Sequence[Message] | None, template: Mapping[str, Any],
                   longest: int | None = None) -> list[int]:
    """The token ids of a chat. Templates come with models: they run on a thread of their own. longest: as text_ids.
    Raises ApiError."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template or messages is None:
        raise invalid("messages", "messages: this engine has no chat template; use /v1/completions with the whole "
                                  "text as prompt", "no_chat_template")

    def ids() -> list[int]:
        # The template writes BOS and its like itself.
        text = tokenizer.chat(messages, **template)
        text.encode()  # the tokenizer does not say what is wrong with half a character
        _check_length(tokenizer, text, "messages", longest)
        return tokenizer.encode(text, add_special_tokens=False)

    try:
        return await asyncio.to_thread(ids)
    except ChatTemplateError as error:
        raise invalid("messages", f"messages: {error}") from None
    except UnicodeEncodeError:
        raise invalid("messages", "messages: hold half of a surrogate pair, which is no character") from None


def json_response(value: Any) -> web.Response:
    return web.Response(text=to_json(value), content_type="application/json")

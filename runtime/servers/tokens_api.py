"""/tokenize, /detokenize and /version: what clients count tokens with, in the form that vLLM gave it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from . import openai_fields as fields
from .openai_api import ANSWERED_BY, chat_ids, json_response, text_ids
from .openai_errors import invalid
from .openai_forms import check_template
from .openai_messages import chat_message
from .openai_request import asked_adapter, known_fields, template_variables
from .openai_tools import definitions
from .versions import runtime_version

if TYPE_CHECKING:
    from .context import ServerContext
    from .served import ServedEngine

_TOKENIZE: dict[str, fields.Check] = {
    "model": fields.text, "prompt": fields.text, "messages": fields.list_of(fields.mapping),
    "add_special_tokens": fields.boolean, "add_generation_prompt": fields.boolean,
    "chat_template_kwargs": fields.mapping, "tools": fields.list_of(fields.mapping)}
_DETOKENIZE: dict[str, fields.Check] = {"model": fields.text, "tokens": fields.list_of(fields.integer)}


class TokensApi:
    """The handlers. Every error leaves them as ApiError."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize),
                web.get("/version", self.version)]

    async def tokenize(self, request: web.Request) -> web.Response:
        """A prompt, or the messages of a chat, as the completions would compute them."""
        body = known_fields(fields.parse_body(await request.read()), _TOKENIZE)
        asked_adapter(body, self._context.adapters.models)
        if ("prompt" in body) == ("messages" in body):
            raise invalid("prompt", "prompt: expected this or messages, one of the two", "missing_field")
        with self._context.use() as engine:
            request[ANSWERED_BY] = engine.hash
            ids = await _ids(engine, body)
            return json_response({"count": len(ids), "max_model_len": engine.limits.max_seq_len, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids, special ones included."""
        body = known_fields(fields.parse_body(await request.read()), _DETOKENIZE)
        asked_adapter(body, self._context.adapters.models)
        if "tokens" not in body:
            raise invalid("tokens", "tokens: missing; expected token ids", "missing_field")
        with self._context.use() as engine:
            request[ANSWERED_BY] = engine.hash
            tokenizer, ids = engine.tokenizer, body["tokens"]
            if tokenizer is None:
                raise invalid("tokens", "tokens: this engine has no tokenizer")
            for index, token in enumerate(ids):
                if not 0 <= token < engine.vocab_size:
                    raise invalid(f"tokens[{index}]", f"tokens[{index}]: {token} is no token; there are "
                                                      f"{engine.vocab_size}")
            text = await asyncio.to_thread(tokenizer.decode, ids, False)
            return json_response({"prompt": text})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": runtime_version()})


async def _ids(engine: ServedEngine, body: dict[str, Any]) -> list[int]:
    if "prompt" in body:
        if {"add_generation_prompt", "chat_template_kwargs", "tools"} & set(body):
            raise invalid("messages", "messages: missing; add_generation_prompt, chat_template_kwargs and tools are "
                                      "for chats")
        return await text_ids(engine, body["prompt"], "prompt", None, body.get("add_special_tokens", True))
    if body.get("add_special_tokens"):
        raise invalid("add_special_tokens", "add_special_tokens: the chat template writes them itself")
    messages = [chat_message(f"messages[{index}]", message) for index, message in enumerate(body["messages"])]
    if not messages:
        raise invalid("messages", "messages: empty; expected at least one message", "missing_field")
    template = template_variables(body)
    if tools := definitions(body.get("tools", [])):
        await asyncio.to_thread(check_template, engine.tokenizer)
        template["tools"] = tools
    return await chat_ids(engine, messages, template)

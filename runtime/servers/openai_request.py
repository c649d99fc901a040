"""The bodies of /v1/completions and /v1/chat/completions: checked, and turned into what the engine takes.

A field that is not known is an error that names it, as at OpenAI: a misspelt one must not be ignored. A field that is
null counts as absent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..sampling import SamplingError, SamplingParams
from . import openai_fields as fields
from .openai_chat_answer import ChatAnswer
from .openai_errors import ApiError, invalid
from .openai_fields import Check
from .openai_guides import guide
from .openai_messages import chat_message
from .openai_tools import ToolUse, tool_use

# Taken over as they are; the left are names of SamplingParams.
_SAMPLING: dict[str, Check] = {
    "temperature": fields.number,
    "top_p": fields.number,
    "top_k": fields.integer,
    "min_p": fields.number,
    "repetition_penalty": fields.number,
    "presence_penalty": fields.number,
    "frequency_penalty": fields.number,
    "n": fields.integer,
    "min_tokens": fields.integer,
    "ignore_eos": fields.boolean,
    "skip_special_tokens": fields.boolean,
    "stop_token_ids": fields.token_ids,
    "bad_words": fields.list_of(fields.text),
}
_COMMON: dict[str, Check] = {
    **_SAMPLING,
    "model": fields.text,
    "max_tokens": fields.integer,
    "seed": fields.integer,
    "stop": lambda name, value: value,  # a string or a list
    "logit_bias": fields.mapping,
    "include_stop_str_in_output": fields.boolean,
    "prompt_logprobs": fields.integer,
    "stream": fields.boolean,
    "stream_options": fields.mapping,
    "response_format": fields.mapping,
    "structured_outputs": fields.mapping,
    "return_token_ids": fields.boolean,
    "priority": fields.integer,
    "cache_salt": fields.text,
    "timeout_s": fields.number,
    # They mean nothing to an engine, or ask for what it does anyway.
    "user": fields.text,
    "safety_identifier": fields.text,
    "prompt_cache_key": fields.text,
    "metadata": fields.mapping,
    "service_tier": fields.text,
    "store": fields.boolean,
}
_COMPLETION: dict[str, Check] = {
    **_COMMON,
    "prompt": lambda name, value: value,
    "echo": fields.boolean,
    "logprobs": fields.integer,
    "best_of": fields.integer,
}
_CHAT: dict[str, Check] = {
    **_COMMON,
    "messages": fields.list_of(fields.mapping),
    "max_completion_tokens": fields.integer,
    "logprobs": fields.boolean,
    "top_logprobs": fields.integer,
    "add_generation_prompt": fields.boolean,
    "chat_template_kwargs": fields.mapping,
    "tools": fields.list_of(fields.mapping),
    "tool_choice": lambda name, value: value,  # a word or a function
    "parallel_tool_calls": fields.boolean,
}
# Known at OpenAI, and not done here; what leaves the answer as it is may be said.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Of the Completions interface; a chat's answer takes what room there is.
_COMPLETION_MAX_TOKENS = 16
# How many names of models an error tells.
_SHOWN = 20


@dataclass(frozen=True)
class Call:
    """A checked request.

    prompts        of a completion: texts or token ids
    messages       of a chat, None for a completion
    params         what the engine is asked for; each prompt gets n answers
    echo           the prompt is part of the answer
    num_logprobs   alternatives told for each token; None: no logprobs
    no_answer      max_tokens was 0: only the prompt is echoed or scored
    fills_room     max_tokens was not given: the answer may become as long as there is room
    lora           name of the LoRA adapter that was given as the model; None: the model itself
    tools          functions that may be called
    guide_field    which field has asked for params.guide
    new_answer     makes what reads an answer that may hold calls or thoughts; None: answers are plain text
    """

    params: SamplingParams
    prompts: tuple[str | list[int], ...] = ()
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    no_answer: bool = False
    fills_room: bool = False
    num_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    lora: str | None = None
    tools: ToolUse | None = None
    guide_field: str = "structured_outputs"
    new_answer: Callable[[], ChatAnswer] | None = None

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def parse_completion(data: bytes, models: Sequence[str], defaults: Mapping[str, Any], max_seq_len: int) -> Call:
    """models: the model's own name, and those of its adapters. defaults: of sampling, as the engine's generation config
    has them. Raises ApiError."""
    body = known_fields(fields.parse_body(data), _COMPLETION)
    lora = asked_adapter(body, models)
    if "prompt" not in body:
        raise invalid("prompt", "prompt: missing; expected a text, token ids, or a list of either", "missing_field")
    max_tokens = body.get("max_tokens", _COMPLETION_MAX_TOKENS)
    echo = body.get("echo", False)
    num_logprobs = body.get("logprobs")
    options: dict[str, Any] = {"logprobs": num_logprobs}
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise invalid("best_of", f"best_of is {body['best_of']}; expected n, for answers are not ranked")
    no_answer = max_tokens == 0 and echo
    if echo and num_logprobs is not None:
        options["prompt_logprobs"] = num_logprobs
    if echo and body.get("stream"):
        raise invalid("echo", "echo: not with stream; the prompt is known")
    params = _params(body, {**defaults, **options, "max_tokens": 1 if no_answer else max_tokens})
    return Call(params, _prompts(body["prompt"]), echo=echo, no_answer=no_answer, num_logprobs=num_logprobs,
                lora=lora, **_delivery(body))


def parse_chat(data: bytes, models: Sequence[str], defaults: Mapping[str, Any], max_seq_len: int) -> Call:
    """As parse_completion."""
    body = known_fields(fields.parse_body(data), _CHAT)
    lora = asked_adapter(body, models)
    if not body.get("messages"):
        raise invalid("messages", "messages: missing or empty; expected at least one message", "missing_field")
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise invalid("max_tokens", "max_tokens: not together with max_completion_tokens, its newer name")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", max_seq_len))
    num_logprobs = body.get("top_logprobs")
    if num_logprobs is not None and not body.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs: only with logprobs: true")
    if body.get("logprobs") and num_logprobs is None:
        num_logprobs = 0
    params = _params(body, {**defaults, "logprobs": num_logprobs, "max_tokens": max_tokens})
    template, tools = template_variables(body), tool_use(body)
    if tools is not None:
        template["tools"] = list(tools.definitions)
    messages = [chat_message(f"messages[{index}]", message) for index, message in enumerate(body["messages"])]
    return Call(params, messages=messages, template=template, num_logprobs=num_logprobs,
                fills_room=not {"max_tokens", "max_completion_tokens"} & set(body), tools=tools,
                lora=lora, **_delivery(body))


def template_variables(body: dict[str, Any]) -> dict[str, Any]:
    """What the chat template gets beside the messages. Raises ApiError."""
    template = body.get("chat_template_kwargs", {})
    if reserved := {"messages", "add_generation_prompt", "tools"} & set(template):
        raise invalid("chat_template_kwargs", f"chat_template_kwargs: {reserved.pop()} is a field of its own")
    return {**template, "add_generation_prompt": body.get("add_generation_prompt", True)}


def known_fields(body: dict[str, Any], known: dict[str, Check]) -> dict[str, Any]:
    """The fields that are not null, of the right types. Raises ApiError."""
    checked = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in _UNSUPPORTED:
            if value not in _UNSUPPORTED[name]:
                raise invalid(name, f"{name}: not supported by this server", "unsupported_parameter")
        elif name not in known:
            near = get_close_matches(name[:100], known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise invalid(name[:100], f"unknown field {name[:100]!r}{meant}", "unknown_parameter")
        else:
            checked[name] = known[name](name, value)
    return checked


def asked_adapter(body: dict[str, Any], models: Sequence[str]) -> str | None:
    """The adapter that a request names as its model. models: as for parse_completion. Raises ApiError for others."""
    model = body.get("model", models[0])
    if model not in models:
        raise unknown_model(model, models)
    return None if model == models[0] else str(model)


def unknown_model(name: str, models: Sequence[str]) -> ApiError:
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    known = ", ".join(map(repr, models[:_SHOWN]))
    return ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {known}{more}", "model",
                    "model_not_found")


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    if type(prompt) is str:
        return (fields.text("prompt", prompt),)
    if type(prompt) is not list or not prompt:
        raise fields.wrong_type("prompt", "a text, token ids, or a list of either, not empty", prompt)
    if type(prompt[0]) not in (str, list):
        return (fields.token_ids("prompt", prompt),)
    check = fields.text if type(prompt[0]) is str else fields.token_ids
    return tuple(check(f"prompt[{index}]", item) for index, item in enumerate(prompt))


def _params(body: dict[str, Any], options: dict[str, Any]) -> SamplingParams:
    given = {name: body[name] for name in _SAMPLING if name in body}
    if given.get("top_k") == -1:  # as vLLM's clients say "all"
        given["top_k"] = 0
    if "seed" in body:
        given["seed"] = body["seed"] % (1 << 64)
    if "stop" in body:
        stop = body["stop"]
        given["stop"] = (fields.text("stop", stop),) if type(stop) is str else \
            tuple(fields.list_of(fields.text)("stop", stop))
    if "logit_bias" in body:
        given["logit_bias"] = {_token(key): fields.number(f"logit_bias.{key}", value)
                               for key, value in body["logit_bias"].items()}
    if "include_stop_str_in_output" in body:
        given["include_stop"] = body["include_stop_str_in_output"]
    if "prompt_logprobs" in body:
        given["prompt_logprobs"] = body["prompt_logprobs"]
    try:
        return SamplingParams(**{**options, **given, "guide": guide(body)})
    except SamplingError as error:
        name = error.field
        if name == "max_tokens" and "max_completion_tokens" in body:
            name = "max_completion_tokens"
        if name == "logprobs" and "top_logprobs" in body:
            name = "top_logprobs"
        if name == "guide":
            name = _guide_field(body)
        raise invalid(name, str(error)) from None


def _guide_field(body: Mapping[str, Any]) -> str:
    if body.get("tools") and body.get("tool_choice") != "none":
        return "tools"  # an answer is bound by both
    return "response_format" if "response_format" in body else "structured_outputs"


def _token(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise invalid("logit_bias", f"logit_bias: {key[:40]!r} is no token id")
    return int(key)


def _delivery(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of Call that do not change the answer."""
    stream = body.get("stream", False)
    options = body.get("stream_options", {})
    if "stream_options" in body and not stream:
        raise invalid("stream_options", "stream_options: only with stream: true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(f"stream_options.{name[:100]}", f"unknown field stream_options.{name[:100]}",
                          "unknown_parameter")
        fields.boolean(f"stream_options.{name}", value)
    timeout_s = body.get("timeout_s")
    if timeout_s is not None and not 0 < timeout_s < math.inf:  # 1e999 is a number in JSON
        raise invalid("timeout_s", f"timeout_s is {timeout_s:g}; expected seconds, more than 0")
    return {"stream": stream, "include_usage": options.get("include_usage", False),
            "return_token_ids": body.get("return_token_ids", False), "priority": body.get("priority", 0),
            "cache_salt": body.get("cache_salt"), "timeout_s": timeout_s, "guide_field": _guide_field(body)}

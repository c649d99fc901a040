"""Answers in OpenAI's form: whole, and as the events of a stream."""

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..executor.request import RequestOutput, TokenLogprobs
from .openai_chat_answer import ChatAnswer
from .openai_errors import ApiError
from .openai_request import Call
from .token_names import TokenNames

DONE = b"data: [DONE]\n\n"


# Made once: json.dumps would make an encoder a call, and there is a call a token.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {to_json(value)}\n\n".encode()


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common."""

    response_id: str
    created: int
    model: str
    fingerprint: str
    is_chat: bool

    def head(self, in_stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if in_stream else "chat.completion"
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint}


@dataclass
class Usage:
    """Tokens of one HTTP request, over all its prompts and answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count an answer by its last output; a prompt counts once, however many answers it gets."""
        if output.index == 0:
            self.prompt_tokens += output.num_prompt_tokens
            self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += output.num_output_tokens

    def to_json(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


def chat_logprobs(tokens: Sequence[TokenLogprobs], count: int, names: TokenNames) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token_id), "logprob": _finite(logprob), "bytes": list(names.bytes(token_id))}

    return {"content": [{**entry(token.token_id, token.logprob), "top_logprobs": [
        entry(*top) for top in zip(token.top_ids[:count], token.top_logprobs, strict=False)]} for token in tokens]}


class Offsets:
    """Where in a text its tokens begin: counts characters that are whole, for a token may hold part of one."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, token: bytes) -> int:
        begin = self._num_chars
        self._num_chars += len(self._utf8.decode(token))
        return begin


def completion_logprobs(tokens: Sequence[TokenLogprobs | None], token_ids: Sequence[int], count: int, names: TokenNames,
                        offsets: Offsets) -> dict[str, Any]:
    """offsets: those of the answer, moved on. Of a None only the token is told: it has no probability."""
    tops = [None if token is None else {
        names.whole(token.token_id): _finite(token.logprob),
        **{names.whole(top): _finite(logprob)
           for top, logprob in zip(token.top_ids[:count], token.top_logprobs, strict=False)},
    } for token in tokens]
    return {"tokens": [names.whole(token_id) for token_id in token_ids],
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": tops, "text_offset": [offsets.next(names.bytes(token_id)) for token_id in token_ids]}


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token that cannot come is told as very improbable, as at OpenAI."""
    return max(logprob, -9999.0)


@dataclass
class Answer:
    """One answer while it comes in. reader: of an answer that may hold calls or thoughts."""

    prompt: str | None
    prompt_ids: Sequence[int]
    reader: ChatAnswer | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        if self.reader is not None:
            self.reader.add(output.text, output.finish_reason is not None)
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.finish_reason = output.finish_reason if self.reader is None else \
            self.reader.finish_reason(output.finish_reason)
        self.matched_stop = output.matched_stop

    def choice(self, index: int, call: Call, prompt_logprobs: Sequence[TokenLogprobs | None] | None,
               names: TokenNames) -> dict[str, Any]:
        text, token_ids = "".join(self.text), self.token_ids
        logprobs: Sequence[TokenLogprobs | None] = self.logprobs
        if call.no_answer:
            text, token_ids, logprobs = "", [], []
        choice: dict[str, Any] = {"index": index}
        if call.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None} if self.reader is None else \
                self.reader.message()
            choice["logprobs"] = None if call.num_logprobs is None else \
                chat_logprobs(self.logprobs, call.num_logprobs, names)
        else:
            choice["text"] = (self.prompt or "") + text if call.echo else text
            choice["logprobs"] = None
            if call.num_logprobs is not None:
                told: Sequence[int] = token_ids
                if call.echo:
                    told, logprobs = [*self.prompt_ids, *told], [*(prompt_logprobs or ()), *logprobs]
                choice["logprobs"] = completion_logprobs(logprobs, told, call.num_logprobs, names, Offsets())
        choice["finish_reason"] = "length" if call.no_answer else self.finish_reason
        choice["stop_reason"] = self.matched_stop
        if call.params.prompt_logprobs is not None and not call.echo:
            choice["prompt_logprobs"] = [None if token is None else _prompt_entry(token, names)
                                         for token in prompt_logprobs or ()]
        if call.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = list(self.prompt_ids)
        return choice


def _prompt_entry(token: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    """As vLLM tells a prompt's logprobs: by token id."""
    ranked = enumerate(zip(token.top_ids, token.top_logprobs, strict=True), 1)
    entries = {str(top): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(top)}
               for rank, (top, logprob) in ranked}
    own = {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": names.text(token.token_id)}
    return {**entries, str(token.token_id): own}


class EventWriter:
    """The events of a stream. What is the same in all of them is encoded once."""

    def __init__(self, call: Call, envelope: Envelope, names: TokenNames) -> None:
        self._call = call
        self._names = names
        self._envelope = envelope
        self._head = f'data: {to_json(envelope.head(in_stream=True))[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if call.include_usage else "]}\n\n"
        self._offsets: dict[int, Offsets] = {}
        self._readers: dict[int, ChatAnswer] = {}

    def first(self, index: int) -> bytes:
        """Before the first output of a choice: a chat's role."""
        if not self._call.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return f"{self._head}{to_json(choice)}{self._tail}".encode()

    def output(self, index: int, output: RequestOutput) -> bytes:
        """Empty where an output shows nothing: no text, no logprobs, no end."""
        call = self._call
        if call.new_answer is not None:
            return self._read(index, output, call.new_answer)
        if not output.text and self._shows_nothing(output):
            return b""
        text = to_json(output.text)
        content = f'"text":{text}'
        if call.is_chat:
            content = f'"delta":{{"content":{text}}}' if output.text else '"delta":{}'
        return self._event(index, content, output, output.finish_reason)

    def _read(self, index: int, output: RequestOutput, new_answer: Callable[[], ChatAnswer]) -> bytes:
        """An event for each thing that the output turns out to be; the last one tells the rest of it."""
        if index not in self._readers:
            self._readers[index] = new_answer()
        reader = self._readers[index]
        deltas = reader.add(output.text, output.finish_reason is not None)
        if not deltas and self._shows_nothing(output):
            return b""
        *before, last = deltas or [{}]
        events = [f'{self._head}{{"index":{index},"delta":{to_json(delta)},"logprobs":null,"finish_reason":null}}'
                  f"{self._tail}".encode() for delta in before]
        return b"".join([*events, self._event(index, f'"delta":{to_json(last)}', output,
                                              reader.finish_reason(output.finish_reason))])

    def _shows_nothing(self, output: RequestOutput) -> bool:
        return output.finish_reason is None and self._call.num_logprobs is None and not self._call.return_token_ids

    def _event(self, index: int, content: str, output: RequestOutput, reason: str | None) -> bytes:
        call = self._call
        logprobs = "null" if call.num_logprobs is None or not output.logprobs else \
            to_json(self._logprobs(index, output, output.logprobs, call.num_logprobs))
        end = "null" if reason is None else f'"{reason}"'
        more = ""
        if output.matched_stop is not None:
            more = f',"stop_reason":{to_json(output.matched_stop)}'
        if call.return_token_ids:
            more += f',"token_ids":{to_json(output.token_ids)}'
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{end}{more}}}'
        return f"{self._head}{choice}{self._tail}".encode()

    def _logprobs(self, index: int, output: RequestOutput, logprobs: Sequence[TokenLogprobs],
                  count: int) -> dict[str, Any]:
        if self._call.is_chat:
            return chat_logprobs(logprobs, count, self._names)
        offsets = self._offsets.setdefault(index, Offsets())
        return completion_logprobs(logprobs, output.token_ids, count, self._names, offsets)

    def usage(self, usage: Usage) -> bytes:
        return event({**self._envelope.head(in_stream=True), "choices": [], "usage": usage.to_json()})

    @staticmethod
    def error(error: ApiError) -> bytes:
        return event(error.body())

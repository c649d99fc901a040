"""A server that speaks OpenAI's HTTP interface: Ingot's, or another that takes `ignore_eos`."""

import itertools
import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from ...errors import RequestError
from .driver import CallFailed, Delivery, Facts, Refused, ServerUnreachable

_REFUSALS = (429, 503)
# Bytes of one line of an answer; usage and token ids make them longer than text alone.
_FACTS_TIMEOUT = aiohttp.ClientTimeout(total=30)
_MAX_LINE_BYTES = 1 << 20


class HttpDriver:
    def __init__(self, url: str, model: str | None = None, token: str | None = None,
                 ca_file: str | None = None, adapters: Sequence[str] = ()) -> None:
        """url: http[s]://host:port, without /v1. model: by default the first that the server names. adapters: LoRA
        adapters that requests name in turn, in place of the model."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._adapters = tuple(adapters)
        self._asked = itertools.cycle(self._adapters)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = _trusting(ca_file) if ca_file else True
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # must be made inside the event loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls), headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30), read_bufsize=_MAX_LINE_BYTES)
        return self._session

    async def facts(self) -> Facts:
        try:
            async with self._client().get(f"{self._url}/v1/models", timeout=_FACTS_TIMEOUT) as response:
                if response.status != 200:
                    raise ServerUnreachable(f"{self._url}/v1/models answers with status {response.status}: "
                                            f"{_message(await response.text())}")
                entries = (await response.json())["data"]
                names = [entry["id"] for entry in entries]
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise ServerUnreachable(f"{self._url}/v1/models: {_reason(error)}") from None
        wanted = [*([self._model] if self._model is not None else []), *self._adapters]
        if not names or (missing := set(wanted) - set(names)):
            lacks = f"no model {min(missing)!r}" if names else "no model"
            raise ServerUnreachable(f"{self._url} has {lacks}; it has {', '.join(names) or 'none'}")
        entry = entries[names.index(self._model)] if self._model else entries[0]
        self._model = entry["id"]
        # An adapter tells the model that it belongs to, and that the engine.
        parent: dict[str, Any] = next((each for each in entries if each["id"] == entry.get("parent")), {})
        engine: dict[str, Any] = entry.get("engine") or parent.get("engine") or {}
        settings = {key: value for key, value in engine.items() if key not in ("hash", "vocab_size", "max_seq_len")}
        if self._adapters:
            settings["adapters"] = ", ".join(self._adapters)
        return Facts(self._url, entry["id"], engine.get("hash"), engine.get("vocab_size"), entry.get("max_model_len"),
                     engine.get("kv_block_size") or 16, settings)

    async def generate(self, request_id: str, prompt: list[int] | str,
                       output_tokens: int) -> AsyncGenerator[Delivery, None]:
        body = {"model": next(self._asked, self._model), "prompt": prompt, "max_tokens": output_tokens,
                "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                "return_token_ids": True}
        try:
            async with self._client().post(f"{self._url}/v1/completions", json=body,
                                           headers={"X-Request-Id": request_id}) as response:
                if response.status != 200:
                    text = f"status {response.status}: {_message(await response.text())}"
                    raise Refused(text) if response.status in _REFUSALS else CallFailed(text)
                async for line in response.content:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield _delivery(json.loads(data))
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CallFailed(f"not understood: {error}") from None

    async def metrics(self) -> str | None:
        return await fetch_metrics(self._client(), f"{self._url}/metrics")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError too
        raise RequestError(f"cannot read the certificates {ca_file!r}: {error.strerror or error}") from None


async def fetch_metrics(client: aiohttp.ClientSession, url: str) -> str | None:
    """The page at `url`; None where it can't be had."""
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def _delivery(event: dict[str, Any]) -> Delivery:
    """Raises CallFailed for an error in mid-stream, and KeyError and its like for what is no completion."""
    if "error" in event:
        raise CallFailed(str(event["error"].get("message", event["error"])))
    num_tokens, token_ids = 0, None
    for choice in event["choices"]:
        token_ids = choice.get("token_ids")
        num_tokens = len(token_ids) if token_ids is not None else int(bool(choice.get("text")))
    usage = event.get("usage")
    if usage is None:
        return Delivery(num_tokens, token_ids)
    details = usage.get("prompt_tokens_details") or {}
    return Delivery(num_tokens, token_ids, usage["prompt_tokens"], details.get("cached_tokens"),
                    usage["completion_tokens"])


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError) and isinstance(error.__cause__, HttpProcessingError):
        return "what answers there speaks no HTTP.\n  Is it a port of gRPC? --url grpc://HOST:PORT"
    return str(error) or type(error).__name__


def _message(text: str) -> str:
    """The message of an OpenAI error object, or the beginning of what else it is."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]

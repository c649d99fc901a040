"""The HTTP server: OpenAI's interface, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import ssl
import tempfile
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from ..errors import RequestError
from .adapters_api import AdaptersApi
from .address import cannot_serve, host_and_port
from .context import ENGINE_HASH
from .metrics_text import CONTENT_TYPE, render
from .openai_api import ANSWERED_BY, OpenAiApi
from .openai_errors import ApiError
from .openai_response import to_json
from .tokens_api import TokensApi

if TYPE_CHECKING:
    from .context import ServerContext

# Whoever watches over the process asks these and has no token.
_OPEN_PATHS = ("/health", "/ready")
# What a call that outlived the grace gets to see that it is cancelled.
_CLOSING_S = 0.2
_log = logging.getLogger(__name__)


class _WithoutMalformed(logging.Filter):
    """Bytes that are not HTTP, as of a gRPC client at the wrong port, and bodies that are not what their headers say,
    have got their 400: no trace of this server."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_http_log = logging.getLogger(f"{__name__}.connections")
_http_log.addFilter(_WithoutMalformed())


class HttpServer:
    """A server that takes requests. address: host:port, with the port that the system chose for 0."""

    def __init__(self, runner: web.AppRunner, address: str, calls: _Calls) -> None:
        self._runner = runner
        self._calls = calls
        self.address = address

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets calls that run end within grace_s seconds, then closes them."""
        for site in list(self._runner.sites):
            await site.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._calls.none.wait(), grace_s)
        await self._runner.cleanup()


class _Calls:
    """Counts the calls that run. none: set while there is none."""

    def __init__(self) -> None:
        self._count = 0
        self.none = asyncio.Event()
        self.none.set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._count += 1
        self.none.clear()
        try:
            return await handler(request)
        finally:
            self._count -= 1
            if not self._count:
                self.none.set()


async def start(context: ServerContext, address: str) -> HttpServer:
    """Bind `address` (host:port; port 0: any) and serve. Raises RequestError if it cannot be bound."""
    host, port = host_and_port(address, "HTTP")
    calls = _Calls()
    app = web.Application(client_max_size=context.settings.max_message_bytes,
                          middlewares=[calls.middleware, _errors, _authentication(context.settings.auth_token)])
    app.on_response_prepare.append(_tell_engine)
    api, probes = OpenAiApi(context), _Probes(context)
    app.add_routes([*api.routes(), *TokensApi(context).routes(), *AdaptersApi(context).routes(),
                    web.get("/health", probes.health),
                    web.get("/ready", probes.ready), web.get("/metrics", probes.metrics)])
    # A client that goes away cancels its handler, and so its requests.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, handle_signals=False, logger=_http_log,
                           shutdown_timeout=_CLOSING_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, port, ssl_context=_tls(context))
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_serve("HTTP", address, error) from None
    except BaseException:
        await runner.cleanup()
        raise
    bound = runner.addresses[0][1]
    return HttpServer(runner, f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}", calls)


def _tls(context: ServerContext) -> ssl.SSLContext | None:
    certificate, key = context.settings.tls_certificate, context.settings.tls_key
    if certificate is None or key is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    # The module reads files only. The folder is for this user alone, and gone again at once.
    with tempfile.TemporaryDirectory(prefix="ingot-tls-") as folder:
        names = [os.path.join(folder, name) for name in ("certificate.pem", "key.pem")]
        for name, data in zip(names, (certificate, key), strict=True):
            with open(name, "wb") as file:
                file.write(data)
        try:
            tls.load_cert_chain(*names)
        except ssl.SSLError as error:
            raise RequestError(f"the TLS certificate and key do not fit together, or are no PEM: {error.reason}"
                               ) from None
    if (client_ca := context.settings.tls_client_ca) is not None:
        try:
            tls.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise RequestError(f"the certificate that clients' certificates must be signed by is no PEM: {error}"
                               ) from None
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


class _Probes:
    """For those who watch the server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def health(self, request: web.Request) -> web.Response:
        """200 while the process does its work, draining included: whoever restarts it asks here."""
        health = self._context.health
        return _status(200 if health in ("serving", "draining") else 503, health)

    async def ready(self, request: web.Request) -> web.Response:
        """200 while new requests are taken: whoever routes to it asks here."""
        health = self._context.health
        return _status(200 if health == "serving" else 503, health)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=render(self._context), headers={"Content-Type": CONTENT_TYPE})


async def _tell_engine(request: web.Request, response: web.StreamResponse) -> None:
    """Which engine answered, or refused, a request that was given to one."""
    if engine_hash := request.get(ANSWERED_BY):
        response.headers[ENGINE_HASH] = engine_hash


def _status(status: int, health: str) -> web.Response:
    return web.Response(status=status, text=to_json({"status": health}), content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as an OpenAI error object; what nobody foresaw is logged, not shown."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(ApiError(413, f"the body is larger than {request.client_max_size} bytes, the most that "
                                             f"this server takes; it has {request.content_length or 'more'}",
                                        code="request_too_large"))
    except web.HTTPException as error:
        allowed = error.headers.get("Allow")
        text = f"{request.method} {request.path[:200]}: {error.reason}{f'; expected {allowed}' if allowed else ''}"
        return _error_response(ApiError(error.status, text, code="unknown_url" if error.status == 404 else None),
                               {"Allow": allowed} if allowed else {})
    except web.RequestPayloadError:  # nothing that follows on this connection can be understood
        return _error_response(ApiError(400, "the body cannot be read: it is not what its Content-Encoding or "
                                             "Transfer-Encoding says"), {"Connection": "close"})
    except ConnectionError:
        raise  # the client has gone
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return _error_response(ApiError(500, "internal error; the server's log tells more", code="internal_error"))


def _error_response(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=error.status, text=to_json(error.body()), content_type="application/json",
                        headers={**error.headers, **(headers or {})})


def _authentication(token: str | None) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in _OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                why = "the token is not the one that this server wants" if given else \
                    "this server wants a token: send the header Authorization: Bearer TOKEN"
                raise ApiError(401, why, code="invalid_api_key")
        return await handler(request)
    return check

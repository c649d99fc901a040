"""HTTP to a registry: one kept connection a host, redirects, credentials; broken connections become Broken."""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import WorkFailed
from .login import Challenge, Login
from .remote import Broken

TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 20
_MAX_REDIRECTS = 5
_MAX_BODY_BYTES = 16 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Part:
    """A part of a file as the body of a request, read when it is sent."""

    file: io.FileIO
    offset: int
    size: int

    def __iter__(self) -> Iterator[bytes]:
        for begin in range(self.offset, self.offset + self.size, _CHUNK_BYTES):
            yield os.pread(self.file.fileno(), min(_CHUNK_BYTES, self.offset + self.size - begin), begin)


class Answer:
    """An answer whose body has not been read; the next request of the same client throws the rest away."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self.url = url
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._size = response.length  # of the body, 0 after HEAD whatever the headers say; None if not announced

    def chunks(self) -> Iterator[bytes]:
        """The body. Raises Broken; it may also end early."""
        try:
            while chunk := self._response.read(_CHUNK_BYTES):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise Broken(_reason(error)) from None

    def body(self, max_bytes: int = _MAX_BODY_BYTES) -> bytes:
        """Raises Broken, also where the body is shorter than announced, WorkFailed for one that is too long."""
        try:
            data = self._response.read(max_bytes + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(_reason(error)) from None
        if len(data) > max_bytes:
            raise WorkFailed(f"{self.url}: the answer has more than {max_bytes} bytes")
        if self._size is not None and len(data) < self._size:
            raise Broken(f"the answer ended after {len(data)} of {self._size} bytes")
        return data

    def explain(self) -> str:
        """Status, and what a registry says about it."""
        try:
            errors = json.loads(self.body())["errors"]
            text = "; ".join(f"{error.get('code', '')} {error.get('message', '')}".strip() for error in errors)
        except (Broken, ValueError, KeyError, TypeError, AttributeError):
            text = ""
        return f"HTTP {self.status} {http.client.responses.get(self.status, '')} {text}".rstrip()


class HttpClient:
    """One request at a time. base: scheme and host; all paths are relative to it."""

    def __init__(self, base: str, login: Login) -> None:
        self._base = base
        self._login = login
        self._host = urllib.parse.urlsplit(base).netloc
        self._connections: dict[tuple[str, str], http.client.HTTPConnection] = {}
        self._last: dict[http.client.HTTPConnection, http.client.HTTPResponse] = {}
        self._authorization: dict[str, str] = {}  # scope -> header

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._last.clear()

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None,
                body: bytes | Part | None = None, *, scope: str = "") -> Answer:
        """path: relative, or a whole URL. scope: what a token must be for, if the registry wants one.

        Raises Broken for a connection that fails or a registry that is busy, WorkFailed if it refuses to be asked.
        Other answers than 2xx are returned.
        """
        url = urllib.parse.urljoin(self._base, path)
        answer = self._follow(method, url, headers or {}, body, scope)
        if answer.status == 401 and (challenge := Challenge.parse(answer.headers.get("WWW-Authenticate", ""))):
            answer.body()
            self._authorization[scope] = self._authorize(challenge, scope)
            answer = self._follow(method, url, headers or {}, body, scope)
        if answer.status in _BUSY:
            raise Broken(answer.explain())
        if answer.status in (401, 403):
            raise WorkFailed(f"{self._base} refuses {method} {urllib.parse.urlsplit(url).path}: {answer.explain()}\n"
                             f"  {self._login.advice()}")
        return answer

    def _follow(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Part | None,
                scope: str) -> Answer:
        for _ in range(_MAX_REDIRECTS):
            answer = self._send(method, url, headers, body, scope)
            location = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or location is None:
                return answer
            answer.body()
            url = urllib.parse.urljoin(url, location)
        raise WorkFailed(f"{url}: more than {_MAX_REDIRECTS} redirects")

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Part | None,
              scope: str) -> Answer:
        parts = urllib.parse.urlsplit(url)
        sent = {"User-Agent": "ingot", **headers}
        if body is not None or method in ("POST", "PUT", "PATCH"):
            sent["Content-Length"] = str(body.size if isinstance(body, Part) else len(body or b""))
        if parts.netloc == self._host and scope in self._authorization:  # never to where a redirect leads
            sent["Authorization"] = self._authorization[scope]
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection = self._connection(parts)
        kept = connection.sock is not None
        try:
            try:
                connection.request(method, path, body=body, headers=sent)
                response = connection.getresponse()
            except ConnectionError:
                if not kept or isinstance(body, Part):  # of a part, nobody knows how much has arrived
                    raise
                connection.close()  # a kept connection that the other side has closed meanwhile
                connection.request(method, path, body=body, headers=sent)
                response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, (ssl.SSLCertVerificationError, socket.gaierror)):  # no time heals that
                raise WorkFailed(f"{parts.netloc}: {_reason(error)}") from None
            raise Broken(f"{parts.netloc}: {_reason(error)}") from None
        self._last[connection] = response
        return Answer(url, response)

    def _connection(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        """A connection that is ready for a request."""
        key = parts.scheme, parts.netloc
        connection = self._connections.get(key)
        if connection is None:
            if parts.scheme == "https":
                connection = http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S,
                                                         context=ssl.create_default_context())
            elif parts.scheme == "http" and (parts.netloc == self._host or self._base.startswith("http:")):
                connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
            else:
                raise WorkFailed(f"{self._base} leads to {parts.scheme}://{parts.netloc}, without TLS; not followed")
            self._connections[key] = connection
        last = self._last.get(connection)
        if last is not None and not last.isclosed():
            connection.close()  # nobody has read that answer to its end
        return connection

    def _authorize(self, challenge: Challenge, scope: str) -> str:
        """The Authorization header that answers a challenge. Raises WorkFailed."""
        if challenge.scheme == "basic":
            return self._login.basic(self._base)
        url, headers, body = self._login.token_request(challenge, scope)
        client = HttpClient(urllib.parse.urljoin(url, "/"), self._login)
        try:
            answer = client._follow("POST" if body else "GET", url, headers, body, "")
            if answer.status != 200:
                raise WorkFailed(f"{url} gives no token: {answer.explain()}\n  {self._login.advice()}")
            token: Any = json.loads(answer.body())
            return f"Bearer {token.get('token') or token['access_token']}"
        except (ValueError, KeyError, AttributeError):
            raise WorkFailed(f"{url}: the answer holds no token") from None
        finally:
            client.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

"""A registry in this process that follows the OCI distribution API, and misbehaves where it is told to."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Registry:
    """uploads: what has arrived of blobs. requests: (method, path) of each request.

    cut_uploads    the next uploads break after so many bytes of the body each
    cut_downloads  for some blobs: the next answers with it break after so many bytes each
    flip           digests of blobs that are sent with one bit wrong
    ranges         whether parts of blobs can be asked for
    forgets        whether an upload that broke cannot be continued
    user, password basic authentication; with `tokens`, they buy a token
    elsewhere      host:port that blobs are redirected to
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    received_bytes: int = 0
    sent_bytes: int = 0
    cut_uploads: list[int] = field(default_factory=list)
    cut_downloads: dict[str, list[int]] = field(default_factory=dict)
    flip: set[str] = field(default_factory=set)
    ranges: bool = True
    forgets: bool = False
    user: str | None = None
    password: str = ""
    tokens: bool = False
    elsewhere: str | None = None
    address: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"oci://{self.address}/team/engines"

    def num(self, method: str, pattern: str) -> int:
        return sum(method == asked and re.search(pattern, path) is not None for asked, path in self.requests)


@contextlib.contextmanager
def serve(registry: Registry, tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    class Bound(_Handler):
        pass

    Bound.registry = registry
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    registry: Registry

    def log_message(self, *arguments: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PATCH = do_PUT = do_GET

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.registry.requests.append((self.command, url.path))
        self.registry.authorizations.append(self.headers.get("Authorization"))
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/token":
            self._token(query)
        elif not self._allowed():
            self._body()
            challenge = f'Bearer realm="http://{self.registry.address}/token",service="test"' if self.registry.tokens \
                else 'Basic realm="test"'
            self._answer(401, {"WWW-Authenticate": challenge}, _error("UNAUTHORIZED"))
        elif match := re.fullmatch(r"/v2/team/engines/manifests/(\S+)", url.path):
            self._manifest(match[1])
        elif match := re.fullmatch(r"/v2/team/engines/blobs/(sha256:[0-9a-f]{64})", url.path):
            self._blob(match[1])
        elif match := re.fullmatch(r"/v2/team/engines/blobs/uploads/(\d*)", url.path):
            self._upload(match[1], query)
        else:
            self._body()
            self._answer(404, {}, _error("NAME_UNKNOWN"))

    def _allowed(self) -> bool:
        registry = self.registry
        if registry.user is None:
            return True
        return self.headers.get("Authorization") == ("Bearer let-me-in" if registry.tokens else self._basic())

    def _basic(self) -> str:
        pair = f"{self.registry.user}:{self.registry.password}"
        return "Basic " + base64.b64encode(pair.encode()).decode()

    def _token(self, query: dict[str, str]) -> None:
        body = dict(urllib.parse.parse_qsl(self._body().decode()))
        by_identity = body.get("refresh_token") == self.registry.password
        if self.headers.get("Authorization") != self._basic() and not by_identity:
            self._answer(401, {}, _error("UNAUTHORIZED"))
        else:
            assert {**query, **body}["scope"].startswith("repository:team/engines:pull")
            self._answer(200, {}, b'{"token":"let-me-in"}')

    def _manifest(self, tag: str) -> None:
        if self.command == "PUT":
            data = self._body()
            document = json.loads(data)
            named = [document["config"], *document["layers"]]
            if missing := [layer for layer in named if layer["digest"] not in self.registry.blobs]:
                self._answer(400, {}, _error("MANIFEST_BLOB_UNKNOWN", str(missing)))
                return
            assert all(len(self.registry.blobs[layer["digest"]]) == layer["size"] for layer in named)
            self.registry.manifests[tag] = data
            self._answer(201, {"Location": self.path})
        elif tag in self.registry.manifests:
            self._answer(200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"},
                         self.registry.manifests[tag])
        else:
            self._answer(404, {}, _error("MANIFEST_UNKNOWN"))

    def _blob(self, digest: str) -> None:
        registry = self.registry
        if digest not in registry.blobs:
            self._answer(404, {}, _error("BLOB_UNKNOWN"))
            return
        if registry.elsewhere is not None and self.command == "GET":
            self._answer(307, {"Location": f"http://{registry.elsewhere}{self.path}"})
            return
        data, status, headers = registry.blobs[digest], 200, {}
        if digest in registry.flip:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if registry.ranges and (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            begin = int(match[1])
            status, headers = 206, {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
            data = data[begin:]
        cuts = registry.cut_downloads.get(digest.removeprefix("sha256:"))
        cut = cuts.pop(0) if cuts and self.command == "GET" else None
        self._answer(status, headers, data, cut)

    def _upload(self, number: str, query: dict[str, str]) -> None:
        registry, location = self.registry, f"/v2/team/engines/blobs/uploads/{number}"
        if self.command == "POST":
            self._body()
            number = str(next(registry.numbers))
            registry.uploads[number] = bytearray()
            self._answer(202, {"Location": f"{location}{number}"})
            return
        if number not in registry.uploads:
            self._body()
            self._answer(404, {}, _error("BLOB_UPLOAD_UNKNOWN"))
            return
        upload = registry.uploads[number]
        if self.command == "GET":
            self._answer(204, {"Location": location, "Range": f"0-{max(0, len(upload) - 1)}"})
            return
        if (begin := self.headers.get("Content-Range", "").partition("-")[0]) and int(begin) != len(upload):
            self._body()
            self._answer(416, {}, _error("BLOB_UPLOAD_INVALID"))
            return
        cut = registry.cut_uploads.pop(0) if registry.cut_uploads else None
        upload += self._body(cut)
        if cut is not None:
            if registry.forgets:
                del registry.uploads[number]
            self._break()
        elif self.command == "PATCH":
            self._answer(202, {"Location": location, "Range": f"0-{len(upload) - 1}"})
        elif f"sha256:{hashlib.sha256(upload).hexdigest()}" != query["digest"]:
            self._answer(400, {}, _error("DIGEST_INVALID"))
        else:
            registry.blobs[query["digest"]] = bytes(registry.uploads.pop(number))
            self._answer(201, {"Location": f"/v2/team/engines/blobs/{query['digest']}"})

    def _body(self, limit: int | None = None) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(size if limit is None else min(limit, size))
        self.registry.received_bytes += len(data)
        return data

    def _answer(self, status: int, headers: dict[str, str], data: bytes = b"", cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
            self.registry.sent_bytes += len(data[:cut])
        if cut is not None:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _error(code: str, message: str = "") -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()

"""A remote that is a repository of an OCI registry (OCI distribution 1.1; every registry that takes artifacts).

An engine is an artifact. Its config is manifest.json, so that the digest of the config is the engine's hash; its layers
are the members and the signed statements. It is tagged with its hash, and with each of its names.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ...errors import RequestError, WorkFailed
from .http import Answer, HttpClient, Part
from .login import Login
from .remote import MAX_FAILURES, Broken, backoff_s

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.ingot.engine.v1"
CONFIG_TYPE = "application/vnd.ingot.engine.manifest.v1+json"
MEMBER_TYPE = "application/vnd.ingot.engine.member.v1"
STATEMENT_TYPE = "application/vnd.dsse.envelope.v1+json"
TITLE = "org.opencontainers.image.title"
MAX_MANIFEST_BYTES = 4 << 20
"""Of an OCI manifest: registries take no larger ones."""
UPLOAD_BYTES = 16 << 20
_MAX_CONFIG_BYTES = 256 << 20
_URL = re.compile(r"oci(?:\+(?P<scheme>https?))?://(?P<registry>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)"
                  r"/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)/?")
_LOOPBACK = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?")
_HASH = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class OciRemote:
    """url: oci://REGISTRY/REPOSITORY; TLS unless the registry is this machine. oci+https://, oci+http://: say which."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise RequestError(f"{url}: expected oci://REGISTRY[:PORT]/REPOSITORY, the repository in lower case")
        self.url = url
        self._repository = match["repository"]
        scheme = match["scheme"] or ("http" if _LOOPBACK.fullmatch(match["registry"]) else "https")
        self._client = HttpClient(f"{scheme}://{match['registry']}", Login(match["registry"]))
        self._manifests: dict[str, dict[str, Any] | None] = {}

    def close(self) -> None:
        self._client.close()

    def resolve(self, reference: str) -> str | None:
        manifest = self._oci_manifest(reference)
        if manifest is None:
            return None
        config = manifest.get("config")
        digest = config.get("digest") if isinstance(config, dict) else None
        if config is None or config.get("mediaType") != CONFIG_TYPE or not isinstance(digest, str):
            raise WorkFailed(f"{self.url}:{reference} is no engine: its config is of type "
                             f"{config.get('mediaType') if isinstance(config, dict) else None!r}")
        return digest.removeprefix("sha256:")

    def manifest(self, hash: str) -> bytes:
        return self._blob(hash, _MAX_CONFIG_BYTES)

    def attestations(self, hash: str) -> list[bytes]:
        layers = (self._oci_manifest(hash) or {}).get("layers", [])
        found = []
        for layer in layers:
            if layer.get("mediaType") == STATEMENT_TYPE:
                sha256 = layer["digest"].removeprefix("sha256:")
                data = self._blob(sha256, MAX_MANIFEST_BYTES)
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise WorkFailed(f"{self.url}: statement {sha256} was damaged on its way or there; it was refused")
                found.append(data)
        return found

    def has(self, sha256: str, size: int) -> bool:
        answer = self._ask("HEAD", self._blob_path(sha256))
        if answer.status == 404:
            return False
        _expect(self.url, answer, 200)
        length = answer.headers.get("Content-Length")
        return length is None or length == str(size)

    def upload(self, sha256: str, path: Path, size: int) -> int:
        """In chunks; after a break, from where the registry says that it stands, else from the start."""
        retries = failures = offset = 0
        location: str | None = None
        with open(path, "rb", buffering=0) as file:
            while True:
                try:
                    if location is None:
                        location, offset = self._begin_upload(), 0
                    while size - offset > UPLOAD_BYTES:
                        location = self._send_part(location, Part(file, offset, UPLOAD_BYTES))
                        offset, failures = offset + UPLOAD_BYTES, 0
                    self._end_upload(location, sha256, Part(file, offset, size - offset))
                    return retries
                except Broken as error:
                    retries, failures = retries + 1, failures + 1
                    if failures == MAX_FAILURES:
                        raise WorkFailed(f"{self.url}: blob {sha256} cannot be sent: {error}, {failures} times in a "
                                         "row; the blobs sent before it are there") from None
                    time.sleep(backoff_s(failures))
                    if self.has(sha256, size):  # all of it arrived, only the answer did not
                        return retries
                    if location is not None:
                        location, offset = self._resume_upload(location, size)

    def download(self, sha256: str, size: int, offset: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        answer = self._request("GET", self._blob_path(sha256), headers)
        skip = 0
        if answer.status == 206 and offset:
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise WorkFailed(f"{self.url}: asked for blob {sha256} from byte {offset}, got "
                                 f"{answer.headers.get('Content-Range')!r}")
        else:
            _expect(self.url, answer, 200)
            skip = offset  # a registry that gives no parts
        for chunk in answer.chunks():
            kept = chunk[skip:]
            skip -= len(chunk) - len(kept)
            if kept:
                yield kept

    def publish(self, hash: str, manifest: bytes, attestations: list[bytes]) -> None:
        self._put_bytes(manifest)
        for statement in attestations:
            self._put_bytes(statement)
        layers = [{"mediaType": MEMBER_TYPE, "digest": f"sha256:{entry['sha256']}", "size": entry["size"],
                   "annotations": {TITLE: name}} for name, entry in json.loads(manifest)["members"].items()]
        layers += [_descriptor(STATEMENT_TYPE, statement) for statement in attestations]
        document = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE,
                    "config": _descriptor(CONFIG_TYPE, manifest), "layers": layers}
        self._tag(hash, document)

    def set_name(self, name: str, hash: str) -> None:
        document = self._oci_manifest(hash)
        assert document is not None, "an engine is published before it is named"
        self._tag(name, document)

    def _tag(self, tag: str, document: dict[str, Any]) -> None:
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) > MAX_MANIFEST_BYTES:
            raise WorkFailed(f"{self.url}: the engine has {len(document['layers'])} members; their list of {len(data)} "
                             f"bytes is longer than the {MAX_MANIFEST_BYTES} that registries take")
        answer = self._ask("PUT", f"manifests/{tag}", {"Content-Type": MANIFEST_TYPE}, data)
        _expect(self.url, answer, 201)
        answer.body()
        self._manifests[tag] = document

    def _oci_manifest(self, tag: str) -> dict[str, Any] | None:
        """None where there is none. Whether it tells the truth is seen when what it names arrives."""
        if tag not in self._manifests:
            answer = self._ask("GET", f"manifests/{tag}", {"Accept": MANIFEST_TYPE})
            if answer.status == 404:
                answer.body()
                self._manifests[tag] = None
            else:
                _expect(self.url, answer, 200)
                try:
                    document = json.loads(answer.body())
                except ValueError:
                    document = None
                if not isinstance(document, dict) or document.get("mediaType", MANIFEST_TYPE) != MANIFEST_TYPE:
                    raise WorkFailed(f"{self.url}:{tag} is no OCI manifest")
                self._manifests[tag] = document
        return self._manifests[tag]

    def _put_bytes(self, data: bytes) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        if not self.has(sha256, len(data)):
            def put() -> Answer:
                return self._request("PUT", _with_digest(self._begin_upload(), sha256),
                                     {"Content-Type": "application/octet-stream"}, data)
            answer = _again(self.url, put)
            _expect(self.url, answer, 201)
            answer.body()

    def _blob(self, sha256: str, max_bytes: int) -> bytes:
        def get() -> bytes:
            answer = self._request("GET", self._blob_path(sha256))
            _expect(self.url, answer, 200)
            return answer.body(max_bytes)
        return _again(self.url, get)

    def _begin_upload(self) -> str:
        answer = self._request("POST", "blobs/uploads/")
        _expect(self.url, answer, 202)
        return self._location(answer)

    def _send_part(self, location: str, part: Part) -> str:
        answer = self._request("PATCH", location, _part_headers(part), part)
        if answer.status == 416:
            raise Broken("the registry stands at another place of the blob")
        _expect(self.url, answer, 202, 204)
        return self._location(answer)

    def _resume_upload(self, location: str, size: int) -> tuple[str | None, int]:
        """(location, offset) to go on from; (None, 0): from the start."""
        try:
            answer = self._request("GET", location)
        except Broken:
            return None, 0
        match = re.fullmatch(r"(?:bytes=)?0-(\d+)", answer.headers.get("Range", ""))
        answer.body()
        if answer.status not in (200, 202, 204) or match is None or not 0 < int(match[1]) < size:
            return None, 0  # 0-0 may mean that there is one byte, or none
        return urllib.parse.urljoin(answer.url, answer.headers.get("Location", location)), int(match[1]) + 1

    def _end_upload(self, location: str, sha256: str, rest: Part) -> None:
        answer = self._request("PUT", _with_digest(location, sha256), _part_headers(rest), rest)
        if answer.status in (404, 416):
            raise Broken("the registry has forgotten the upload")
        _expect(self.url, answer, 201)
        answer.body()

    def _location(self, answer: Answer) -> str:
        answer.body()
        location = answer.headers.get("Location")
        if location is None:
            raise WorkFailed(f"{self.url}: the registry does not say where to send a blob")
        return urllib.parse.urljoin(answer.url, location)

    def _ask(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = None) -> Answer:
        return _again(self.url, lambda: self._request(method, path, headers, body))

    def _request(self, method: str, path: str, headers: dict[str, str] | None = None,
                 body: bytes | Part | None = None) -> Answer:
        if "://" not in path:
            path = f"/v2/{self._repository}/{path}"
        actions = "pull" if method in ("GET", "HEAD") and "/uploads/" not in path else "pull,push"
        return self._client.request(method, path, headers, body, scope=f"repository:{self._repository}:{actions}")

    def _blob_path(self, sha256: str) -> str:
        return f"blobs/sha256:{sha256}"


def _again(url: str, action: Callable[[], T]) -> T:
    """The result of an action that is tried again when the connection breaks. Raises WorkFailed in the end."""
    failures = 0
    while True:
        try:
            return action()
        except Broken as error:
            failures += 1
            if failures == MAX_FAILURES:
                raise WorkFailed(f"{url}: {error}; tried {failures} times") from None
            time.sleep(backoff_s(failures))


def _expect(url: str, answer: Answer, *status: int) -> None:
    if answer.status not in status:
        raise WorkFailed(f"{url}: {answer.explain()}, at {urllib.parse.urlsplit(answer.url).path}")


def _part_headers(part: Part) -> dict[str, str]:
    headers = {"Content-Type": "application/octet-stream"}
    if part.size:
        headers["Content-Range"] = f"{part.offset}-{part.offset + part.size - 1}"
    return headers


def _with_digest(location: str, sha256: str) -> str:
    return f"{location}{'&' if '?' in location else '?'}{urllib.parse.urlencode({'digest': f'sha256:{sha256}'})}"


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}

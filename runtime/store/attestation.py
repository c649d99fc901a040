"""Signed statements about engines: in-toto statements in DSSE envelopes, signed with Ed25519.

They lie beside the engine as lines of JSON, an envelope a line, in a file that ends with .intoto.jsonl. Signing the
same statement with the same key gives the same bytes, so that statements of several stores can simply be united.
Formats: github.com/in-toto/attestation (Statement v1), github.com/secure-systems-lab/dsse (version 1).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..manifest import canonical_json
from .blobs import write_atomic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
MAX_BYTES = 16 << 20
"""Of all statements about an engine."""


class BadKey(RequestError):
    """A key file holds no Ed25519 key of the kind that is needed."""


def private_key(path: str) -> Ed25519PrivateKey:
    """From a PEM file (`openssl genpkey -algorithm ed25519 -out FILE`). Raises BadKey."""
    serialization, ed25519, _ = _cryptography()
    try:
        key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise BadKey(f"{path}: cannot read a private key: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise BadKey(f"{path}: expected an Ed25519 key, got another kind\n"
                     "  Make one: openssl genpkey -algorithm ed25519 -out FILE")
    return key


def public_key(path: str) -> Ed25519PublicKey:
    """From a PEM file (`openssl pkey -in PRIVATE -pubout -out FILE`). Raises BadKey."""
    serialization, ed25519, _ = _cryptography()
    try:
        key = serialization.load_pem_public_key(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise BadKey(f"{path}: cannot read a public key: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise BadKey(f"{path}: expected an Ed25519 key, got another kind")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of the key's SubjectPublicKeyInfo."""
    serialization = _cryptography()[0]
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def sign(statement: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    """The envelope, a line of JSON without its end."""
    payload = canonical_json(statement)
    signature = key.sign(_signed_bytes(PAYLOAD_TYPE, payload))
    return canonical_json({
        "payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}]})


def verify(envelope: bytes, keys: Sequence[Ed25519PublicKey]) -> dict[str, Any] | None:
    """The statement, if one of the keys has signed it; None for all else, malformed envelopes too."""
    invalid_signature = _cryptography()[2]
    try:
        parsed = json.loads(envelope)
        kind, payload = parsed["payloadType"], base64.b64decode(parsed["payload"], validate=True)
        signatures = [base64.b64decode(signature["sig"], validate=True) for signature in parsed["signatures"]]
        message = _signed_bytes(kind, payload)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error):
        return None
    for signature in signatures:
        for key in keys:
            with contextlib.suppress(invalid_signature):
                key.verify(signature, message)
                return _statement(kind, payload)
    return None


def is_about(statement: dict[str, Any], engine_hash: str) -> bool:
    subjects = statement.get("subject")
    return isinstance(subjects, list) and any(
        isinstance(subject, dict) and subject.get("digest") == {"sha256": engine_hash} for subject in subjects)


def read(path: Path) -> list[bytes]:
    """The envelopes of a file; none where there is no file. Raises RequestError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{path} has more than {MAX_BYTES} bytes; these are no statements about an engine")
        return [line for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None


def add(path: Path, envelopes: Iterable[bytes]) -> int:
    """Adds those that are not yet there; how many that were. One process at a time."""
    there = read(path)
    new = [envelope for envelope in dict.fromkeys(envelopes) if envelope not in there]
    if new:
        write_atomic(path, b"".join(envelope + b"\n" for envelope in (*there, *new)))
    return len(new)


def _signed_bytes(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def _statement(kind: str, payload: bytes) -> dict[str, Any] | None:
    try:
        statement = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    good = kind == PAYLOAD_TYPE and isinstance(statement, dict) and statement.get("_type") == STATEMENT_TYPE
    return statement if good else None


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise RequestError("signatures need the package cryptography, which is not installed here.\n"
                           "  Install it: pip install 'ingot-llm[store]'") from None
    return serialization, ed25519, InvalidSignature

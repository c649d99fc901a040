"""push and pull: engines between the store and a remote. Only blobs that the other side lacks travel."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RequestError, WorkFailed
from .lock_file import check_name
from .remotes.remote import MAX_FAILURES, Broken, Remote, backoff_s
from .store import OnBytes, Store, read_manifest

_HASH = re.compile(r"[0-9a-f]{64}")


class NameTaken(RequestError):
    """The name means another engine at the remote."""


@dataclass
class Transferred:
    """num_sent, sent_bytes: blobs that travelled, of num_blobs; num_retries: how often a connection broke."""

    hash: str
    num_blobs: int = 0
    num_sent: int = 0
    sent_bytes: int = 0
    num_retries: int = 0


def push(store: Store, remote: Remote, hash: str, name: str | None = None, move: bool = False,
         on_bytes: OnBytes = lambda done: None) -> Transferred:
    """Sends an engine, its signed statements, and its name if it has one.

    Raises NameTaken unless `move`, if the name means another engine there; NotInStore, WorkFailed.
    """
    if name is not None and not move and (there := remote.resolve(name)) not in (None, hash):
        raise NameTaken(f"{name} is the name of engine {there} at {remote.url}, not of {hash}.\n  To move it: --move")
    with store.blobs.adding():  # nothing is removed meanwhile
        manifest = store.manifest(hash)
        blobs = {entry["sha256"]: entry["size"] for entry in manifest["members"].values()}
        done = Transferred(hash, len(blobs))
        for sha256, size in blobs.items():
            path = store.find_blob(sha256)
            if path is None or path.stat().st_size != size:
                raise WorkFailed(f"engine {hash}: blob {sha256} is not in {store.folder}, or damaged; "
                                 "see `ingot engines verify`")
            if not remote.has(sha256, size):
                done.num_retries += remote.upload(sha256, path, size)
                done.num_sent, done.sent_bytes = done.num_sent + 1, done.sent_bytes + size
            on_bytes(size)
        statements = dict.fromkeys([*remote.attestations(hash), *store.attestations(hash)])
        remote.publish(hash, store.manifest_path(hash).read_bytes(), list(statements))
        if name is not None:
            remote.set_name(name, hash)
    return done


def pull(store: Store, remote: Remote, reference: str, on_bytes: OnBytes = lambda done: None,
         on_hash: Callable[[str], None] = lambda hash: None) -> Transferred:
    """Gets an engine and its signed statements. reference: a hash, or a name there; on_hash: called with the hash when
    the engine is in the store, before anything could remove it again.

    Every blob is checked before it is one of the store's. Raises RequestError, WorkFailed (BlobMismatch).
    """
    if not _HASH.fullmatch(reference):
        check_name(reference)
    hash = remote.resolve(reference)
    if hash is None:
        raise RequestError(f"{remote.url} has no engine of the name or the whole hash {reference}")
    data = remote.manifest(hash)
    if (found := hashlib.sha256(data).hexdigest()) != hash:
        raise WorkFailed(f"{remote.url}: the manifest of engine {hash} has the hash {found}; it was refused")
    blobs = {entry["sha256"]: entry["size"]
             for entry in read_manifest(data, f"{remote.url}: {hash}")["members"].values()}
    done = Transferred(hash, len(blobs))
    with store.blobs.adding():
        for sha256, size in blobs.items():
            with store.blobs.receive(sha256, size) as file:
                if file is not None:
                    before = file.tell()
                    done.num_retries += _download(remote, sha256, size, file)
                    done.num_sent, done.sent_bytes = done.num_sent + 1, done.sent_bytes + size - before
            on_bytes(size)
        store.publish(hash, data)
        store.add_attestations(hash, remote.attestations(hash))
        on_hash(hash)
    return done


def _download(remote: Remote, sha256: str, size: int, file: io.FileIO) -> int:
    """Appends to `file` what it lacks of the blob; how often the connection broke. Raises WorkFailed."""
    retries = failures = 0
    while (offset := file.seek(0, os.SEEK_END)) < size:
        try:
            for chunk in remote.download(sha256, size, offset):
                file.write(chunk[: max(0, size - file.tell())])
            if file.tell() < size:
                raise Broken(f"the answer ended after {file.tell() - offset} bytes")
        except Broken as error:
            retries += 1
            failures = failures + 1 if file.tell() == offset else 1
            if failures == MAX_FAILURES:
                raise WorkFailed(f"{remote.url}: blob {sha256}: {error}, {failures} times without a byte more; "
                                 f"{file.tell():,} of {size:,} bytes have arrived, and the next pull continues "
                                 "there") from None
            time.sleep(backoff_s(failures))
    return retries

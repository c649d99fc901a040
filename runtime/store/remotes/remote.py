"""What a place that engines are pushed to and pulled from can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

MAX_FAILURES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0


class Broken(Exception):
    """A connection broke, or the other side is busy: to be tried again."""


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    wait: float = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4 ** (failures - 1))
    return wait


class Remote(Protocol):
    """What can be tried again is, but for `download`. All raise WorkFailed when the other side refuses or stays away.

    url  for messages
    """

    url: str

    def resolve(self, reference: str) -> str | None:
        """The hash of the engine that a name or a whole hash means there."""

    def manifest(self, hash: str) -> bytes:
        """Unchecked."""

    def attestations(self, hash: str) -> list[bytes]:
        """The signed statements about an engine, unchecked; none if it is not there."""

    def has(self, sha256: str, size: int) -> bool:
        """Whether the blob is there."""

    def upload(self, sha256: str, path: Path, size: int) -> int:
        """Sends the blob; how often the connection broke."""

    def download(self, sha256: str, size: int, offset: int) -> Iterator[bytes]:
        """The blob's bytes from `offset` on, unchecked; it may end early. Raises Broken."""

    def publish(self, hash: str, manifest: bytes, attestations: list[bytes]) -> None:
        """Makes an engine, all of whose blobs are there, one that can be pulled by its hash."""

    def set_name(self, name: str, hash: str) -> None:
        """Lets a name mean an engine that was published."""

"""Where an adapter comes from, as users write it: NAME=PATH@sha256:HASH."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from .adapter import Adapter, require_room
from .errors import AdapterError
from .loaded import check_name

if TYPE_CHECKING:
    from ..lora import LoraRoom

_PIN = "@sha256:"


class AdapterSource(NamedTuple):
    """sha256: what its content must have; None: whatever it has. shown: what errors call the path; None: as it is."""

    path: str
    sha256: str | None = None
    shown: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of PATH or PATH@sha256:HASH. Raises AdapterError."""
        path, pin, sha256 = text.partition(_PIN)
        if pin:
            check_sha256(sha256, text)
        return cls(path, sha256 if pin else None)

    def read(self, room: LoraRoom | None) -> Adapter:
        """room: of the engine that it is for. Raises AdapterError, for an engine without room too."""
        return Adapter.read(self.path, self.sha256, shown=self.shown, room=require_room(room))


def parse_named(text: str) -> tuple[str, AdapterSource]:
    """Of NAME=PATH or NAME=PATH@sha256:HASH. Raises AdapterError."""
    name, equals, source = text.partition("=")
    if not equals or not source:
        raise AdapterError(f"{text[:200]!r}: expected NAME=PATH, or NAME=PATH@sha256:HASH")
    check_name(name)
    return name, AdapterSource.parse(source)


def check_sha256(text: str, where: str) -> None:
    """Raises AdapterError for what is no SHA-256."""
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise AdapterError(f"{where[:200]}: the SHA-256 is {text[:80]!r}; expected 64 hexadecimal digits in lower case")

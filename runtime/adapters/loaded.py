"""The adapters of one engine, by name. Any thread; requests find theirs here (docs/lora.md)."""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import AdapterError, AdapterExists, UnknownAdapter

if TYPE_CHECKING:
    import numpy as np

    from ..lora import LoraRoom
    from .adapter import Adapter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_numbers = itertools.count(1)
"""Never given twice in a process: what the KV cache holds of an adapter that has gone, nobody finds any more."""


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """number  stands for it in the KV cache (CacheKey.lora) and in slots
    image   u8 [bytes_per_adapter]: what a slot of the engine holds for it; of `adapter` the matrices are parts
    Lives as long as anything refers to it: requests that began before it was unloaded run to their end.
    """

    name: str
    number: int
    adapter: Adapter
    image: np.ndarray


class LoadedAdapters:
    """room: that of the engine; None: it has none, and every adapter is refused."""

    def __init__(self, room: LoraRoom | None) -> None:
        self.room = room
        self._lock = threading.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}

    def load(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """From now on requests may name it. The same content under the same name again changes nothing.

        Raises AdapterError, or AdapterExists for a name that another one has. Takes the time of copying it.
        """
        check_name(name)
        adapter.check(self.room)
        assert self.room is not None
        if (known := self._same(name, adapter)) is not None:
            return known
        image = adapter.image(self.room)
        loaded = LoadedAdapter(name, next(_numbers), adapter.within(image, self.room), image)
        with self._lock:
            return self._same(name, adapter) or self._by_name.setdefault(name, loaded)

    def _same(self, name: str, adapter: Adapter) -> LoadedAdapter | None:
        """The one that has the name already."""
        known = self._by_name.get(name)
        if known is not None and known.adapter.sha256 != adapter.sha256:
            raise AdapterExists(f"adapter {name!r} is loaded already, with another content "
                                f"({known.adapter.sha256[:12]}; this one has {adapter.sha256[:12]}).\n"
                                "  Unload it first, or take another name.")
        return known

    def unload(self, name: str) -> LoadedAdapter:
        """New requests that name it are refused. Raises UnknownAdapter."""
        with self._lock:
            loaded = self._by_name.pop(name, None)
        if loaded is None:
            raise self._unknown(name)
        return loaded

    def get(self, name: str) -> LoadedAdapter:
        """Raises UnknownAdapter."""
        loaded = self._by_name.get(name)
        if loaded is None:
            raise self._unknown(name)
        return loaded

    def _unknown(self, name: str) -> UnknownAdapter:
        known = ", ".join(each.name for each in self.all()[:20])
        return UnknownAdapter(f"no adapter {name[:200]!r} is loaded; loaded are: {known or 'none'}")

    def all(self) -> list[LoadedAdapter]:
        """In the order in which they were loaded."""
        with self._lock:
            return list(self._by_name.values())


def check_name(name: str) -> None:
    """Raises AdapterError for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise AdapterError(f"{name[:200]!r} cannot be the name of an adapter; expected up to 128 letters, digits and "
                           "any of . _ : / - behind the first")

"""The LoRA adapters of a server: they come, go, and move along when another engine takes over (docs/lora.md)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapters.errors import AdapterError, AdapterExists, AdapterLoadingOff
from ..adapters.loaded import LoadedAdapter, check_name
from ..executor.request import Draining

if TYPE_CHECKING:
    from ..adapters.source import AdapterSource
    from ..lora import LoraRoom
    from .context import ServerContext
    from .served import ServedEngine


class ServerAdapters:
    """Belongs to the context's loop."""

    def __init__(self, context: ServerContext, folder: str | None) -> None:
        """folder: adapters may come and go while it serves, from below it; None: it keeps those that it starts with."""
        self._context = context
        self._folder = folder
        # Held while adapters change, and while an engine takes over: none is lost between the two.
        self.changing = asyncio.Lock()
        self._loading: set[asyncio.Task[LoadedAdapter]] = set()

    def all(self) -> list[LoadedAdapter]:
        """Those that requests may name."""
        return self._context.current.engine.adapters.all()

    @property
    def models(self) -> list[str]:
        """What requests may name as their model: the model itself first."""
        return [self._context.model_name, *(each.name for each in self.all())]

    @property
    def room(self) -> LoraRoom | None:
        """Of the engine that gets new requests."""
        return self._context.current.engine.adapters.room

    def start_with(self, sources: Iterable[tuple[str, AdapterSource]]) -> None:
        """Before the first request. Raises AdapterError, AdapterExists."""
        for name, source in sources:
            self._check_name(name)
            adapters = self._context.current.engine.adapters
            adapters.load(name, source.read(adapters.room))

    async def load(self, name: str, source: AdapterSource) -> LoadedAdapter:
        """From now on requests may name it. Once begun it goes on to its end, even if whoever asked leaves: the thread
        that reads would anyway, and must not outlive `changing`.

        Raises AdapterLoadingOff, AdapterError, AdapterExists, Draining.
        """
        # Where the folder lies on this machine is nobody's business: errors call it as the client does.
        found = source._replace(path=self._allowed(source.path), shown=source.path[:200])
        self._check_name(name)
        task = asyncio.ensure_future(self._load(name, found))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)
        return await asyncio.shield(task)

    async def _load(self, name: str, source: AdapterSource) -> LoadedAdapter:
        async with self.changing:
            if self._context.is_draining:
                raise Draining("the server drains: no adapter is loaded any more")
            adapters = self._context.current.engine.adapters
            loaded = await asyncio.to_thread(lambda: adapters.load(name, source.read(adapters.room)))
        _say(f"{name} is loaded: rank {loaded.adapter.rank}, {loaded.adapter.sha256}")
        return loaded

    async def unload(self, name: str) -> LoadedAdapter:
        """New requests that name it are refused; those that run or wait end as they began.

        Raises AdapterLoadingOff, UnknownAdapter.
        """
        self._check_on()
        async with self.changing:
            unloaded = self._context.current.engine.adapters.unload(name)
        _say(f"{name} is unloaded")
        return unloaded

    def carry_over(self, engine: ServedEngine) -> None:
        """Gives another engine the adapters of the current one, and no others. On any thread, with `changing` held.

        Raises AdapterError if it has no room for one of them.
        """
        mine, theirs = self._context.current.engine.adapters, engine.engine.adapters
        wanted = {each.name: each for each in mine.all()}
        for each in theirs.all():
            if each.name not in wanted or wanted[each.name].adapter.sha256 != each.adapter.sha256:
                theirs.unload(each.name)
        for name, each in wanted.items():
            theirs.load(name, each.adapter)

    def check_room(self, room: LoraRoom | None, engine: str) -> None:
        """Whether another engine could have all of them. Raises AdapterError. engine: its name in the error."""
        for each in self.all():
            try:
                each.adapter.check(room)
            except AdapterError as error:
                raise AdapterError(f"{engine} cannot take over adapter {each.name!r}: {error}\n"
                                   "  Unload the adapter first, if nobody needs it.") from None

    def _check_name(self, name: str) -> None:
        check_name(name)
        if name == self._context.model_name:
            raise AdapterExists(f"{name!r} is the name of the model itself; take another one for the adapter")

    def _check_on(self) -> Path:
        if self._folder is None:
            raise AdapterLoadingOff("this server keeps the adapters that it was started with.\n"
                                    "  ingot serve --lora-folder FOLDER lets it load others from there")
        return Path(os.path.realpath(self._folder))

    def _allowed(self, path: str) -> str:
        """The folder itself is on the server: what clients name must lie below it, wherever links lead."""
        folder = self._check_on()
        try:
            found = Path(os.path.realpath(folder / path))
        except ValueError:  # a NUL in it
            raise AdapterError(f"{path[:200]!r} is no path") from None
        if folder not in found.parents:
            raise AdapterLoadingOff(f"{path[:200]!r} does not lie below the folder that this server loads adapters "
                                    "from (ingot serve --lora-folder)")
        return str(found)


def _say(text: str) -> None:
    print(f"ingot: adapter {text}", file=sys.stderr, flush=True)

"""Work in a process of its own, while this one does something else: threads would share the interpreter's lock."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from ..host import available_cores


class Beside:
    """Work that is under way elsewhere."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    @classmethod
    def start(cls, work: Callable[[], Any]) -> Self | None:
        """work: what it gives must be JSON.

        None where it would not pay, or not be safe: a single core, or a process that is no fresh one (its libraries may
        have threads, and a fork has none of them).
        """
        if not hasattr(os, "fork") or available_cores() < 2 or "numpy" in sys.modules or "tokenizers" in sys.modules:
            return None
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            return None
        if pid == 0:
            _work(work, write)
        os.close(write)
        return cls(pid, read)

    def result(self) -> Any:
        """Waits for it. None if it failed, whatever the reason: whoever asks does the work again, and sees why."""
        with open(self._pipe, "rb") as pipe:
            data = pipe.read()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        return json.loads(data) if data else None


def _work(work: Callable[[], Any], pipe: int) -> None:
    """In the process of its own, which ends here and says nothing but the result."""
    try:
        data = json.dumps(work()).encode()
        with open(pipe, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)

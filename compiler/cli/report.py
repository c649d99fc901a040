"""Stages of long work on stderr: a line for each, and what it is at in a line that is rewritten."""

import sys
from typing import Self

from ingot.runtime.cli.output import Progress


class Report:
    """A Progress of the compiler; a context manager that clears its last line."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._line = Progress(enabled)
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._line.clear()

    def __call__(self, stage: str, detail: str) -> None:
        if stage != self._stage:
            self._line.clear()
            self._stage = stage
            if self._enabled:
                print(f"{stage:<9} {detail}", file=sys.stderr, flush=True)
        else:
            self._line.show(f"{stage:<9} {detail}")

"""What the verbs print, for people and for machines."""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False))


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), indent: str = "") -> str:
    """Columns aligned with blanks: numbers (and what ends in a unit) to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    if not cells:
        return ""
    body = cells[1:] if header else cells
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(body) and all(not row[i] or row[i][0] in "0123456789-+." for row in body) for i in range(len(widths))]
    lines = [
        "  ".join(cell.rjust(width) if to_right else cell.ljust(width)
                  for cell, width, to_right in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(indent + line for line in lines)


def size(num_bytes: float) -> str:
    """1234567 -> "1.23 MB". Decimal units, as disks and bandwidths are told in."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"
    units = ("kB", "MB", "GB", "TB")
    power = min(int(math.log10(abs(num_bytes))) // 3, len(units))
    return f"{num_bytes / 1000**power:#.4g} {units[power - 1]}"


class Progress:
    """One line on stderr that is rewritten in place; nothing at all where stderr is no terminal."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._shown = False

    def show(self, text: str) -> None:
        if self._enabled:
            # Cut to the usual width: a line that wraps cannot be rewritten.
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False

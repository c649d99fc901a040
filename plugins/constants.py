"""How constants of a kernel are written: in C, and in the kernel's symbol."""
from __future__ import annotations

import hashlib
import struct

Rows = int | str
"""A number of rows: an integer, or that of the step's tokens "T" or rows of logits "L", with a factor: "9*T"."""

_SYMBOLS = {"T": "step->num_tokens", "L": "step->num_logits"}


def rows_in_c(rows: Rows) -> str:
    """9*T -> 9 * step->num_tokens."""
    if isinstance(rows, int):
        return str(rows)
    factor, _, symbol = rows.rpartition("*")
    assert symbol in _SYMBOLS and (not factor or factor.isdigit()), f"malformed number of rows {rows!r}"
    return f"{factor} * {_SYMBOLS[symbol]}" if factor else _SYMBOLS[symbol]


def float_in_c(value: float) -> str:
    """The float32 nearest to value, exactly: 0.125 -> 0x1.0000000000000p-3f."""
    rounded, = struct.unpack("<f", struct.pack("<f", value))
    return f"{rounded.hex()}f"


def symbol(name: str, *constants: int | float | str | bool) -> str:
    """An identifier that differs whenever a constant does: the integers and words readable, floats as a digest.

    symbol("rms_norm", "9*T", 64, 1e-6) -> "rms_norm_9T_64_3c1f2a90"
    """
    words = [str(int(c)) if isinstance(c, int) else c.replace("*", "") for c in constants if not isinstance(c, float)]
    floats = [struct.pack("<f", c).hex() for c in constants if isinstance(c, float)]
    digest = [hashlib.sha256("".join(floats).encode()).hexdigest()[:8]] if floats else []
    return "_".join([name, *(word for word in words if word), *digest])

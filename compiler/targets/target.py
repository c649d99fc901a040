"""Target: a machine as the compiler sees it."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ingot.runtime.errors import RequestError

from ..cpu.isa import host_isa, host_isas

HOST = "cpu"
"""The target that stands for the machine that builds."""


class UnknownTarget(RequestError):
    """No target of that name."""


class UnsupportedPrecision(RequestError):
    """The target cannot compute in the precision asked for."""


@dataclass(frozen=True)
class Target:
    """name        "cpu:x86-64-v4-vnni"
    kind        "cpu" (GPU kinds follow)
    isa         instruction set, key of compiler/cpu/isa.py
    precisions  what engines may be built in: precision -> the instruction that does the arithmetic
    kv_precisions  element types of the KV cache
    note        one line for `ingot targets`
    """

    name: str
    kind: str
    isa: str
    precisions: dict[str, str]
    kv_precisions: tuple[str, ...]
    note: str

    def require_precision(self, precision: str) -> None:
        if precision not in self.precisions:
            raise UnsupportedPrecision(
                f"{self.name} has no precision {precision!r}; it has: {', '.join(self.precisions)}.\n"
                f"  Choose one with --precision, or another target: ingot targets")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "isa": self.isa, "precisions": self.precisions,
                "kv_precisions": list(self.kv_precisions), "note": self.note}


@cache
def _load() -> dict[str, Target]:
    entries = yaml.safe_load((Path(__file__).parent / "cpu.yaml").read_text())
    return {name: Target(name=name, kv_precisions=tuple(entry.pop("kv_precisions")), **entry)
            for name, entry in entries.items()}


def list_targets() -> list[Target]:
    """All known targets; the host's own comes first, under its full name."""
    runnable = host_isas()
    host = f"cpu:{runnable[-1].name}" if runnable else ""
    return sorted(_load().values(), key=lambda target: (target.name != host, target.kind))


def find_target(name: str) -> Target:
    """The target of that name; "cpu" is the best CPU target that this machine can run.

    Raises UnknownTarget with the nearest names.
    """
    targets = _load()
    if name == HOST:
        name = f"cpu:{host_isa().name}"
    if name in targets:
        return targets[name]
    near = difflib.get_close_matches(name, [HOST, *targets], n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UnknownTarget(f"unknown target {name!r}.{hint}\n  Known: {', '.join([HOST, *targets])}. See: ingot targets")

"""A kernel of the CPU target: the C text that defines one function with every shape filled in."""
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INCLUDE_DIR = Path(__file__).parent
"""The folder that the include paths of kernels start from."""

_INCLUDED = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)

_SIGNATURE = "INGOT_EXPORT void {}(const ingot_step *step, void *const *args, int worker, int num_workers)"


@dataclass(frozen=True)
class CpuKernel:
    """symbol   C identifier; derived from the operator and every constant, so that equal symbols are equal kernels
    include  header below plugins/ with the generic functions that the body calls, or ""
    body     statements of the function; `step`, `args`, `worker` and `num_workers` are its parameters
    prelude  C text before the function: its own static helpers and tables, named after the symbol
    choice   the problem that it solves, with the tactic chosen for it, where there are several ways; see `tune`
    """

    symbol: str
    include: str
    body: str
    prelude: str = ""
    choice: Any = field(default=None, compare=False)

    @property
    def definition(self) -> str:
        body = "".join(f"    {line}\n" if line else "\n" for line in self.body.splitlines())
        prelude = self.prelude.rstrip() + "\n" if self.prelude else ""
        return f"{prelude}{_SIGNATURE.format(self.symbol)} {{\n{body}}}\n"


def translation_unit(kernels: Iterable[CpuKernel]) -> str:
    """One C file that defines the kernels, in the given order; equal ones once."""
    distinct = list(dict.fromkeys(kernels))
    assert len({kernel.symbol for kernel in distinct}) == len(distinct), "two different kernels share a symbol"
    includes = dict.fromkeys(["cpu/ingot_kernel.h", "cpu/pool.h", *(k.include for k in distinct if k.include)])
    head = "".join(f'#include "{include}"\n' for include in includes)
    return head + "".join("\n" + kernel.definition for kernel in distinct)


def source_digest(include: str) -> str:
    """SHA-256 over a header below plugins/ and all that it includes from there: what a measurement of its kernels
    depends on, but for the compiler."""
    found: dict[Path, str] = {}
    waiting = [INCLUDE_DIR / include]
    while waiting:
        path = waiting.pop().resolve()
        if path in found:
            continue
        found[path] = path.read_text()
        for name in _INCLUDED.findall(found[path]):
            beside = path.parent / name
            waiting.append(beside if beside.exists() else INCLUDE_DIR / name)
    texts = sorted((str(path.relative_to(INCLUDE_DIR.resolve())), text) for path, text in found.items())
    return hashlib.sha256(repr(texts).encode()).hexdigest()

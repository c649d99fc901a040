"""A kernel of the CPU target: the C text that defines one function with every shape filled in."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INCLUDE_DIR = Path(__file__).parent
"""The folder that the include paths of kernels start from."""

_SIGNATURE = "INGOT_EXPORT void {}(const ingot_step *step, void *const *args, int worker, int num_workers)"


@dataclass(frozen=True)
class CpuKernel:
    """symbol   C identifier; derived from the operator and every constant, so that equal symbols are equal kernels
    include  header below plugins/ with the generic functions that the body calls, or ""
    body     statements of the function; `step`, `args`, `worker` and `num_workers` are its parameters
    prelude  C text before the function: its own static helpers and tables, named after the symbol
    """

    symbol: str
    include: str
    body: str
    prelude: str = ""

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

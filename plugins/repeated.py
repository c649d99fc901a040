"""Two kernels as one: every worker runs the first one as a whole, for itself, then its part of the second."""
from __future__ import annotations

import hashlib
from collections.abc import Mapping

from .kernel import CpuKernel


def repeated(first: CpuKernel, num_first: int, outputs: Mapping[int, int], second: CpuKernel, num_second: int,
             passed: Mapping[int, tuple[int, int]]) -> CpuKernel:
    """args: those of the first kernel, then those of the second that are not passed.

    outputs  which arguments the first kernel writes -> their size in bytes. The first worker writes to them, the others
             to memory of their own; they must lie apart from all that either kernel reads or writes besides.
    passed   argument of the second -> (argument of the first, bytes from its beginning): what it reads of the outputs
    """
    assert first.prelude.lstrip()[:2] in ("", "/*", "//"), "helpers of the first kernel would be defined twice"
    lines = [f"void *first[{num_first}], *second[{num_second}];",
             f"for (int i = 0; i < {num_first}; i++) first[i] = args[i];"]
    for number, size in outputs.items():
        lines += [f"_Alignas(64) char own{number}[{size}];", f"if (worker > 0) first[{number}] = own{number};"]
    taken = num_first
    for number in range(num_second):
        if number in passed:
            source, offset = passed[number]
            lines.append(f"second[{number}] = (char *)first[{source}] + {offset};")
        else:
            lines.append(f"second[{number}] = args[{taken}];")
            taken += 1
    lines += ["{", "    void *const *args = first;", "    const int worker = 0, num_workers = 1;",
              *_indented(first.body), "}", "{", "    void *const *args = second;", *_indented(second.body), "}"]
    constants = f"{sorted(outputs.items())} {sorted(passed.items())}"
    digest = hashlib.sha256(constants.encode()).hexdigest()[:8]
    return CpuKernel(f"{first.symbol}__{second.symbol}_{digest}", "cpu/repeated.h", "\n".join(lines),
                     first.prelude + second.prelude, second.choice or first.choice)


def _indented(body: str) -> list[str]:
    return [f"    {line}" for line in body.splitlines()]

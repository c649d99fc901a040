"""What linear kernels compile to: python -m tools.gpu_table [ARCH ...] [--layer N K] [--tokens A B]
    [--precisions P …]

For every precision of an architecture and for a generation step and a context step: the candidate that the cost model
prefers, its matrix instructions by disassembly, registers, spilled registers, shared memory and blocks a multiprocessor
holds. No GPU takes part, and nothing here is a measurement. Prints a Markdown table.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator

from ingot.compiler.gpu.select import Choice, choose, shortlist
from ingot.compiler.gpu.triton_compile import CompiledKernel, compile_kernels
from ingot.compiler.precision import find_precision
from ingot.compiler.targets import Gpu, architectures, list_targets
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.tactics import Problem, candidates
from ingot.runtime.cli.output import size

HEADER = ("arch", "precision", "tokens", "kernel", "matrix instructions", "registers", "spills", "shared", "blocks/SM")


def problem(precision: str, gpu: Gpu, tokens: int, n: int, k: int) -> Problem:
    """The linear layer of that precision: 8-bit activations come with a scale a token."""
    scheme = GPU_SCHEMES[find_precision(precision, gpu).scheme("linear")]
    eight = scheme.activation in ("fp8", "int8")
    return Problem(tokens, n, k, scheme.format, scheme.activation, token_scales=eight, scale=precision == "nvfp4")


def chosen(precision: str, gpu: Gpu, tokens: int, n: int, k: int) -> tuple[Choice, CompiledKernel]:
    legal = shortlist(candidates(problem(precision, gpu, tokens, n, k), gpu.device).legal, gpu, precision)
    code = compile_kernels([c.launches[0].kernel for c in legal], gpu.arch)
    choice = choose(legal, code, gpu, precision)
    return choice, code[choice.candidate.launches[0].kernel]


def rows(gpu: Gpu, tokens: list[int], n: int, k: int, precisions: list[str] | None = None,
         ) -> Iterator[tuple[str, ...]]:
    """precisions: None: all that the architecture has."""
    for precision in gpu.arch.precisions:
        if precisions is not None and precision not in precisions:
            continue
        for count in tokens:
            choice, code = chosen(precision, gpu, count, n, k)
            matrix = ", ".join(f"{number} {name}" for name, number in code.matrix.items()) or "none"
            yield (gpu.arch.name, precision, str(count), choice.candidate.name.partition(" ")[2], matrix,
                   str(code.registers), str(code.spill_stores), size(code.shared_bytes), str(code.occupancy(gpu.arch)))


def main() -> None:
    known = {target.gpu.arch.name: target.gpu for target in reversed(list_targets()) if target.gpu is not None}
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_table", description=__doc__.partition("\n")[0])
    parser.add_argument("arch", nargs="*", choices=[*architectures(), []], metavar="ARCH")
    parser.add_argument("--layer", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 2048])
    parser.add_argument("--precisions", nargs="+", default=None, help="all that the architecture has, if not told")
    arguments = parser.parse_args()
    n, k = arguments.layer
    print(*(" | ".join(("", *cells, "")).strip() for cells in (HEADER, ["---"] * len(HEADER))), sep="\n")
    for name in arguments.arch or architectures():
        for cells in rows(known[name], arguments.tokens, n, k, arguments.precisions):
            print(" | ".join(("", *cells, "")).strip(), flush=True)


if __name__ == "__main__":
    main()

"""Runs the tests of the GPU kernels on their compiled code (PTX), without a GPU.

    python -m tools.ptx_check                              every architecture, all cases
    python -m tools.ptx_check --arch sm_80 --filter linear.test_gates
    python -m tools.ptx_check --tiles --arch sm_90a        linear and attention kernels in tiles of engines instead
    python -m tools.ptx_check --lockstep warp --seed 3     each warp alone, in another order
    python -m tools.ptx_check -o report.md                 the tables, as Markdown, into a file too

Every case of tools/gpu_check/cases.py, and those of `select`, `matmul` and `lora`, compiles as for an engine and runs
on the machine of tools/ptx with the tolerances of a device. A case is skipped where Triton or the architecture refuses
a kernel. Exit status: 0 all others passed, 1 one failed, 2 the request was wrong.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.compiler.gpu.triton_compile import CompileError, PtxCompiler, PtxKernel
from ingot.compiler.targets import architectures
from ingot.plugins.gpu.kernel import GpuKernel, TensorMap

from .gpu_check.cases import MODULES, Case, list_cases
from .gpu_check.kernels import Outcome, device_tolerance
from .ptx.machine import Options
from .ptx.runner import PtxRunner

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
ALL_MODULES = (*MODULES, "test_select", "test_matmul", "test_lora")
_DESCRIPTORS_SINCE = 90


@dataclass
class Result:
    """Of one architecture. kernels: symbols that ran; executed: opcode -> warps that executed it; seconds: of running
    alone."""

    arch: str
    outcomes: list[Outcome] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    executed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)


def check(arch: str, cases: Sequence[Case], options: Options,
          progress: Callable[[str], None] = lambda text: None, cache: Path | None = None) -> Result:
    """Every case on one architecture."""
    result = Result(arch)
    with PtxCompiler(architectures()[arch], cache) as compiler:
        for case in cases:
            result.outcomes.append(outcome := run_case(case, compiler, options, result))
            progress(f"{arch} {outcome.status} {outcome.name} {outcome.seconds:.1f} s"
                     + (f": {outcome.detail}" if outcome.status == "failed" else ""))
    return result


def run_case(case: Case, compiler: PtxCompiler, options: Options, result: Result) -> Outcome:
    """One case; what it executed is added to the result."""
    runner = PtxRunner(_with_descriptors_only_where_there_are(compiler), options, compiler.arch.name)
    begin = time.perf_counter()
    status, detail = "passed", ""
    try:
        with device_tolerance(case, runner, compiler.arch.name):
            case.run(runner)
    except CompileError as error:
        status, detail = "skipped", _reason(error)
    except Exception as error:  # whatever a check raises is its result
        status, detail = "failed", f"{type(error).__name__}: {' | '.join(str(error).splitlines()[:4])}"[:600]
    result.kernels |= runner.kernels
    result.executed += runner.executed
    result.seconds += runner.seconds
    return Outcome(case.name, status, detail, time.perf_counter() - begin)


def _with_descriptors_only_where_there_are(compiler: PtxCompiler) -> Callable[[GpuKernel], PtxKernel]:
    def compile_one(kernel: GpuKernel) -> PtxKernel:
        if compiler.arch.capability < _DESCRIPTORS_SINCE and any(isinstance(kind, TensorMap)
                                                                 for _, kind in kernel.parameters):
            raise CompileError(f"{compiler.arch.name} has no descriptors")
        return compiler(kernel)
    return compile_one


def _reason(error: CompileError) -> str:
    text = " ".join(str(error).split())
    kernel, refused, _ = text.partition("does not compile for")
    if refused and "fp8" in kernel + text[-200:]:
        return "fp8 does not compile there"
    known = {"bytes of shared memory": "too much shared memory", "no descriptors": "no descriptors there"}
    return next((short for part, short in known.items() if part in text), text[-200:])


# Tables

def as_text(results: Sequence[Result]) -> str:
    """Markdown: cases and instructions of each architecture, what failed, and why cases were skipped."""
    rows: list[tuple[str, ...]] = [("arch", "passed", "failed", "skipped", "kernels", "instructions", "seconds")]
    rows += [(result.arch, *(str(result.count(status)) for status in ("passed", "failed", "skipped")),
              str(len(result.kernels)), f"{sum(result.executed.values()):,}", f"{result.seconds:.0f}")
             for result in results]
    parts = [_table(rows), _table(_instructions(results))]
    skipped = Counter((result.arch, outcome.detail) for result in results for outcome in result.outcomes
                      if outcome.status == "skipped")
    if skipped:
        parts.append("\n".join(f"- {arch}: {count} skipped: {why}" for (arch, why), count in skipped.items()))
    failed = [f"- {result.arch} {outcome.name}: {outcome.detail}" for result in results for outcome in result.outcomes
              if outcome.status == "failed"]
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])])


def _instructions(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Executions by warps of each kind: the opcode without its types; matrix instructions with their shape."""
    kinds: dict[str, Counter[str]] = {}
    for result in results:
        for opcode, count in result.executed.items():
            kinds.setdefault(_kind(opcode), Counter())[result.arch] += count
    rows = [("instruction", *(result.arch for result in results))]
    for name in sorted(kinds):
        rows.append((name, *(f"{kinds[name][result.arch]:,}" if kinds[name][result.arch] else ""
                             for result in results)))
    return rows


def _kind(opcode: str) -> str:
    parts = opcode.split(".")
    if parts[0] in ("mma", "wgmma", "ldmatrix", "stmatrix", "tcgen05"):
        return opcode
    if parts[0] in ("cp", "mbarrier", "redux", "shfl", "vote", "atom", "red"):
        return ".".join(part for part in parts if not part.startswith(("L1", "L2")))
    if parts[0] == "cvt":
        return ".".join(("cvt", *parts[-2:]))
    return ".".join(parts[:2]) if parts[0] in ("ld", "st", "mul", "mad", "div") else parts[0]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _cases(arch: str, tiles: bool) -> list[Case]:
    tests = list_cases(ALL_MODULES)
    if not tiles:
        return tests
    from .ptx_tiles import tile_cases  # imports tests, which list_cases has made possible without pytest
    return tile_cases(arch)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("ptx_check", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), metavar="ARCH")
    parser.add_argument("--filter", nargs="+", default=[""], metavar="NAME", help="cases whose name holds one of these")
    parser.add_argument("--tiles", action="store_true", help="not the tests of the kernels, which take small tiles, "
                        "but linear and attention kernels in each tile that engines may choose")
    parser.add_argument("--seed", type=int, default=0, help="of the order of warps and blocks")
    parser.add_argument("--lockstep", choices=("warp", "block", "grid"), default="grid",
                        help="which warps run side by side; grid is fastest")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    known = [name for name, arch in architectures().items() if arch.capability]
    if unknown := [name for name in arguments.arch if name not in known]:
        print(f"ptx_check: there is no architecture {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    cases = {arch: [case for case in _cases(arch, arguments.tiles)
                    if any(part in case.name for part in arguments.filter)] for arch in arguments.arch}
    if not any(cases.values()):
        print(f"ptx_check: no case has {' or '.join(map(repr, arguments.filter))} in its name; "
              "python -m tools.gpu_check --dry --only kernels lists them", file=sys.stderr)
        return 2
    options = Options(arguments.seed, arguments.lockstep)
    results = [check(arch, cases[arch], options, lambda text: print(text, file=sys.stderr, flush=True))
               for arch in arguments.arch]
    print(text := as_text(results))
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return 1 if any(result.count("failed") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

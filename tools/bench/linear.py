"""Speed of the linear kernels on this machine, beside what its memory and its arithmetic give in the same run.

    python -m tools.bench.linear [--isa NAME] [--scheme w4a8] [--shape 1536x576] [--tokens 1 8 512] [--workers 2]

One line a case: microseconds; GB/s of weights and their share of the memory's rate, the limit with few tokens; GOP/s
(a multiplication and an addition are two) and their share of the multiply-add instructions' rate, the limit with many
(of bf16_pairs that of float32's, of which there can be twice as much).
The launches of a run go through different matrices, 256 MB of them up to 8 tokens, so that no cache keeps them.

    python -m tools.bench.linear --turns 21 --scheme bf16 bf16_pairs --tokens 1 2 8 64 512

The schemes take turns round by round, one worker each: microseconds of processor time, which other work on the machine
lengthens least, and the median over the rounds of the ratio to the first scheme.
"""
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.tune.machine import Machine
from ingot.compiler.tune.workloads import Memory, linear_launches
from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.scheme import SCHEMES, Scheme

_COLD_BYTES = 256 << 20
_ARITHMETIC = {32: "float", 16: "float", 8: "int8", 4: "w4a8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--scheme", nargs="*", choices=sorted(SCHEMES), help="by default all that the target has")
    parser.add_argument("--act-group", type=int, help="activation group of the integer schemes")
    parser.add_argument("--shape", nargs="*", default=["3072x576", "576x1536", "4096x4096"], help="NxK")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, metavar="ROUNDS", help="compare the schemes")
    options = parser.parse_args()
    possible = [name for name, s in SCHEMES.items() if s.act_bits != 16 or ISAS[options.isa].multiplies_pairs]
    if missing := set(options.scheme or ()) - set(possible):
        parser.error(f"{options.isa} does not multiply pairs of bfloat16: it has no {', '.join(missing)}")
    schemes = [SCHEMES[name] for name in options.scheme or possible]
    if options.act_group is not None:
        schemes = [Scheme(s.name, s.weight_bits, s.act_bits, options.act_group) if s.is_integer else s for s in schemes]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    problems = [(Problem(n, k, scheme, m), m) for scheme in schemes for n, k in shapes for m in options.tokens]
    if options.turns:
        _compare(problems, options.isa, options.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine([emit(problem) for problem, _ in problems], options.isa, options.workers, folder)
        memory = Memory(_COLD_BYTES)
        print(f"{options.isa}, {options.workers} workers")
        for problem, tokens in problems:
            scheme, size = problem.scheme, packed_size(problem.n, problem.k, problem.scheme)
            # Measured beside each case, as other work on the machine comes and goes.
            read, peak = machine.read_bytes(), machine.multiply_adds(_ARITHMETIC[scheme.weight_bits])
            step, launches = linear_launches(problem, tokens, memory)
            seconds = machine.seconds(launches, step) / len(launches)
            done, rate = problem.n * problem.k * tokens, size / seconds
            print(f"{scheme.tag:9} {problem.n:6}x{problem.k:<6} T={tokens:<4} {seconds * 1e6:9.1f} us "
                  f"{rate / 1e9:6.1f} GB/s {rate / read:5.0%} of {read / 1e9:.0f} "
                  f"{2 * done / seconds / 1e9:7.0f} GOP/s {done / seconds / peak:5.0%} of {2 * peak / 1e9:.0f}",
                  flush=True)
        machine.close()


def _compare(problems: Sequence[tuple[Problem, int]], isa: str, rounds: int) -> None:
    cases: dict[tuple[int, int, int], list[Problem]] = {}
    for problem, tokens in problems:
        cases.setdefault((problem.n, problem.k, tokens), []).append(problem)
    with tempfile.TemporaryDirectory() as folder:
        machine, memory = Machine([emit(problem) for problem, _ in problems], isa, 1, folder), Memory(_COLD_BYTES // 2)
        for (n, k, tokens), ways in cases.items():
            steps = [linear_launches(problem, tokens, memory) for problem in ways]
            times: list[list[float]] = [[] for _ in ways]
            for _ in range(rounds):
                for found, (step, launches) in zip(times, steps, strict=True):
                    begin = time.process_time()
                    machine.seconds(launches, step, 1)
                    found.append((time.process_time() - begin) / len(launches))
            texts = []
            for problem, found in zip(ways, times, strict=True):
                ratio = statistics.median(one / first for one, first in zip(found, times[0], strict=True))
                texts.append(f"{problem.scheme.tag} {min(found) * 1e6:9.1f} us {ratio:5.2f} "
                             f"{2 * n * k * tokens / min(found) / 1e9:5.0f} GOP/s")
            print(f"{n:6}x{k:<6} T={tokens:<4} {' | '.join(texts)}", flush=True)
        machine.close()


if __name__ == "__main__":
    main()

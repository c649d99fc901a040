"""Speed of the linear kernels on this machine, beside what its memory and its arithmetic give in the same run.

    python -m tools.bench.linear [--isa NAME] [--scheme w4a8] [--shape 1536x576] [--tokens 1 8 512] [--workers 2]

One line a case: microseconds; GB/s of weights and their share of the memory's rate, the limit with few tokens; GOP/s
(a multiplication and an addition are two) and their share of the multiply-add instructions' rate, the limit with many
(of bf16_pairs that of float32's, of which there can be twice as much).
The launches of a run go through different matrices, 256 MB of them up to 8 tokens, so that no cache keeps them.
"""
from __future__ import annotations

import argparse
import tempfile

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
    options = parser.parse_args()
    possible = [name for name, s in SCHEMES.items() if s.act_bits != 16 or ISAS[options.isa].multiplies_pairs]
    if missing := set(options.scheme or ()) - set(possible):
        parser.error(f"{options.isa} does not multiply pairs of bfloat16: it has no {', '.join(missing)}")
    schemes = [SCHEMES[name] for name in options.scheme or possible]
    if options.act_group is not None:
        schemes = [Scheme(s.name, s.weight_bits, s.act_bits, options.act_group) if s.is_integer else s for s in schemes]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    problems = [(Problem(n, k, scheme, m), m) for scheme in schemes for n, k in shapes for m in options.tokens]
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


if __name__ == "__main__":
    main()

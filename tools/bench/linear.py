"""Speed of the linear kernels on this machine, beside what its memory and its arithmetic give in the same run.

    python -m tools.bench.linear [--isa NAME] [--scheme w4a8] [--shape 1536x576] [--tokens 1 8 512] [--workers 2]

One line a case: microseconds; GB/s of weights and their share of the memory's rate, the limit with few tokens; GOP/s
(a multiplication and an addition are two) and their share of the multiply-add instructions' rate, the limit with many.
The launches of a run go through different matrices, 256 MB of them up to 8 tokens, so that no cache keeps them.
"""
from __future__ import annotations

import argparse
import tempfile

import numpy as np

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.quantize.reference import row_bytes
from ingot.plugins.scheme import SCHEMES, Scheme
from ingot.runtime.devices.native_code import Step
from tools.bench.machine import Machine, aligned

_COLD_BYTES = 256 << 20
_ARITHMETIC = {32: "float", 16: "float", 8: "int8", 4: "w4a8"}


def seconds_of(machine: Machine, problem: Problem, tokens: int) -> float:
    """One launch."""
    n, k, scheme = problem.n, problem.k, problem.scheme
    size = packed_size(n, k, scheme)
    count = max(1, _COLD_BYTES // size) if tokens <= 8 else 1
    weights = aligned(size * count)
    weights[:] = np.resize(np.random.default_rng(0).integers(0, 60, 4099, dtype=np.uint8), weights.size)
    x, y = aligned(row_bytes(k, scheme) * tokens if scheme.is_integer else 4 * k * tokens), aligned(4 * n * tokens)
    launches = [(emit(problem), (x, weights[size * i:], y)) for i in range(count)]
    return machine.seconds(launches, Step(num_tokens=tokens)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--scheme", nargs="*", choices=sorted(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--act-group", type=int, help="activation group of the integer schemes")
    parser.add_argument("--shape", nargs="*", default=["3072x576", "576x1536", "4096x4096"], help="NxK")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    schemes = [SCHEMES[name] for name in options.scheme]
    if options.act_group is not None:
        schemes = [Scheme(s.name, s.weight_bits, s.act_bits, options.act_group) if s.is_integer else s for s in schemes]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    problems = [(Problem(n, k, scheme, m), m) for scheme in schemes for n, k in shapes for m in options.tokens]
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine([emit(problem) for problem, _ in problems], options.isa, options.workers, folder)
        print(f"{options.isa}, {options.workers} workers")
        for problem, tokens in problems:
            scheme, size = problem.scheme, packed_size(problem.n, problem.k, problem.scheme)
            # Measured beside each case, as other work on the machine comes and goes.
            read, peak = machine.read_bytes(), machine.multiply_adds(_ARITHMETIC[scheme.weight_bits])
            seconds = seconds_of(machine, problem, tokens)
            done, rate = problem.n * problem.k * tokens, size / seconds
            print(f"{scheme.tag:9} {problem.n:6}x{problem.k:<6} T={tokens:<4} {seconds * 1e6:9.1f} us "
                  f"{rate / 1e9:6.1f} GB/s {rate / read:5.0%} of {read / 1e9:.0f} "
                  f"{2 * done / seconds / 1e9:7.0f} GOP/s {done / seconds / peak:5.0%} of {2 * peak / 1e9:.0f}",
                  flush=True)
        machine.close()


if __name__ == "__main__":
    main()

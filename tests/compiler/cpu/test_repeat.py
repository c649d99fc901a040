"""Small launches joined to the matrix behind them: which ones, and that the results stay the same to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.repeat import repeat_small_launches
from ingot.compiler.plan.plan import NULL, Arg, Launch, Write
from ingot.plugins.kernel import CpuKernel
from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.linear.pack import pack
from ingot.plugins.norm.cpu import Norm, add_norm
from ingot.plugins.repeated import repeated
from ingot.plugins.scheme import SCHEMES
from tests.plugins.native import HOST_ISAS, Library, Step, aligned, placed

SIZES = dict.fromkeys("xrysz", 4 * 64) | {"big": 1 << 20}


def value(name: str, offset: int = 0) -> Arg:
    return Arg("value", name, offset)


def launch(op: str, read: list[Arg], written: list[str]) -> Launch:
    args = (*read, *map(value, written))
    writes = {name: Write(len(read) + i, ("T", 16), "f32") for i, name in enumerate(written)}
    reads = tuple(arg.name for arg in args if arg.kind == "value")
    return Launch(f"{op}_kernel", args, f"of {op}", reads, writes, op=op)


def joined(*launches: Launch, tokens: int = 1) -> list[Launch]:
    kernels = {entry.kernel: CpuKernel(entry.kernel, "", "") for entry in launches}
    found = repeat_small_launches(list(launches), kernels, SIZES, tokens)
    assert {entry.kernel for entry in found} <= set(kernels)
    return found


NORM = launch("add_rms_norm", [value("x"), value("r"), Arg("weight", "w")], ["y", "s"])
LINEAR = launch("linear", [value("y"), Arg("weight", "m")], ["z"])


def test_a_norm_joins_the_matrix_that_reads_it() -> None:
    one, = joined(NORM, LINEAR)
    assert one.op == "add_rms_norm+linear" and one.origin == "of linear"
    assert one.args == (*NORM.args, Arg("weight", "m"), value("z"))
    assert {name: write.arg for name, write in one.writes.items()} == {"z": 6, "y": 3, "s": 4}
    assert next(iter(one.writes)) == "z" and set(one.reads) == {"x", "r", "y", "s", "z"}


def test_chains_join_from_the_end() -> None:
    before = launch("rms_norm", [value("big")], ["x"])
    one, = joined(before, NORM, LINEAR)
    assert one.op == "rms_norm+add_rms_norm+linear"
    assert [arg.name for arg in one.args] == ["big", "x", "r", "w", "y", "s", "m", "z"]


@pytest.mark.parametrize(("first", "second"), [
    (NORM, launch("attention", [value("y")], ["z"])),
    (launch("rope", [value("x")], ["y"]), LINEAR),
    (NORM, launch("linear", [value("x"), Arg("weight", "m")], ["z"])),
    (launch("add_rms_norm", [value("x"), value("s")], ["y", "s"]), LINEAR),
    (launch("loop", [value("x")], ["big"]), launch("linear", [value("big"), NULL], ["z"])),
    (NORM, launch("linear", [value("y"), value("r")], ["r"])),
], ids=["no matrix", "no small one", "not read", "in place", "much work", "overwritten"])
def test_others_stay_apart(first: Launch, second: Launch) -> None:
    assert joined(first, second) == [first, second]


def test_more_tokens_are_shared_by_the_workers() -> None:
    assert joined(NORM, LINEAR, tokens=4) == [NORM, LINEAR]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("isa", HOST_ISAS)
def test_a_joined_kernel_gives_the_same_bits(isa: str, workers: int, tmp_path: Path) -> None:
    k, n, rng = 96, 80, np.random.default_rng(0)
    scheme = SCHEMES["w4a8"]
    norm, matrix = add_norm(Norm("rms_norm", "T", k, 1e-6)), emit(Problem(n, k, scheme, 2, float_input=True))
    size = 2 * k * 4
    both = repeated(norm, 6, {4: size, 5: size}, matrix, 3, {0: (4, 0)})
    library = Library([norm, matrix, both], isa, tmp_path)
    step = Step([(1, 1), (1, 1)])
    x, r = (placed(rng.normal(size=(2, k)).astype(np.float32)) for _ in range(2))
    weight, packed = placed(np.ones(k, np.float32)), placed(pack(rng.normal(size=(n, k)).astype(np.float32), scheme))
    y, s, z = aligned((2, k)), aligned((2, k)), aligned((2, n))
    library.run(norm, step, x, r, weight, None, y, s, workers=workers)
    library.run(matrix, step, y, packed, z, workers=workers)
    y2, s2, z2 = aligned((2, k)), aligned((2, k)), aligned((2, n))
    library.run(both, step, x, r, weight, None, y2, s2, packed, z2, workers=workers)
    for plain, other in ((y, y2), (s, s2), (z, z2)):
        assert np.isfinite(plain).all()
        np.testing.assert_array_equal(plain, other)

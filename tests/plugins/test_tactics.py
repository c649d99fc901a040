"""Every tactic that a tuner may choose, on the instruction set of this machine."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.cpu.isa import host_isas
from ingot.plugins.attention import cpu as attention_cpu
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, source_digest
from ingot.plugins.linear import cpu as linear_cpu
from ingot.plugins.linear.pack import pack
from ingot.plugins.quantize.reference import quantize
from tests.plugins.native import Library, Step, aligned, placed, relative_error, schemes_of
from tests.plugins.test_attention import PLAIN, PLAIN_I8, allowed_error, expected, make, run

N, K = 72, 1100
ISA = host_isas()[-1].name
LINEAR = [linear_cpu.Problem(N, K, scheme, m) for scheme in schemes_of(ISA) for m in (1, 64)]
FEW = [replace(p, m=8) for p in LINEAR if p.m == 1]
"""Their kernels differ from those of one token and of many in the numbers of a tile alone."""
TOKENS = {1: 1, 8: 7, 64: 45}


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    slow = request.config.getoption("--slow")
    matrices = [*LINEAR, *(FEW if slow else ())]
    kernels = [linear_cpu.emit(replace(p, tactic=tactic)) for p in matrices for tactic in linear_cpu.tactics(p)]
    for p in (PLAIN, PLAIN_I8) if slow else (PLAIN,):
        for tactic in attention_cpu.tactics(p):
            tuned = replace(p, tactic=tactic)
            kernels += [attention_cpu.attention(tuned), attention_cpu.attention_combine(tuned)]
    return Library(dict.fromkeys(kernels), ISA, tmp_path_factory.mktemp("tactics"))


@pytest.mark.parametrize("p", [*LINEAR, *(pytest.param(p, marks=pytest.mark.slow) for p in FEW)],
                         ids=lambda p: f"{p.scheme.name}-{p.m}")
def test_all_tactics_of_a_matrix_give_the_same_bits(library: Library, p: linear_cpu.Problem) -> None:
    rng, tokens = np.random.default_rng(0), TOKENS[p.m]
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, K), (tokens, K)))
    source = placed(quantize(x, p.scheme) if p.scheme.rounds_inputs else x)
    packed, results = placed(pack(w, p.scheme)), []
    for tactic in linear_cpu.tactics(p):
        y = aligned((tokens, N))
        library.run(linear_cpu.emit(replace(p, tactic=tactic)), Step.of_tokens(tokens), source, packed, y, workers=2)
        results.append(y)
    assert np.isfinite(results[0]).all() and len(results) > 6
    for tactic, y in zip(linear_cpu.tactics(p), results, strict=True):
        np.testing.assert_array_equal(y, results[0], err_msg=str(tactic))


@pytest.mark.parametrize("p", [PLAIN, pytest.param(PLAIN_I8, marks=pytest.mark.slow)], ids=lambda p: p.kv_dtype)
def test_all_tactics_of_attention_are_right(library: Library, p: attention_cpu.Attention) -> None:
    for sequences in ([(300, 300)], [(900, 1), (130, 4), (200, 33)]):
        case = make(p, sequences)
        want = expected(p, case, library.isa)
        for tactic in attention_cpu.tactics(p):
            tuned = replace(p, tactic=tactic)
            one = run(library, tuned, case)
            assert relative_error(one, want) < allowed_error(p, library.isa), tactic
            assert np.array_equal(run(library, tuned, case, 3), one), tactic


def test_symbols_tell_tactics_apart() -> None:
    for p in LINEAR:
        symbols([linear_cpu.emit(replace(p, tactic=tactic)) for tactic in linear_cpu.tactics(p)], linear_cpu.emit(p))
    symbols([attention_cpu.attention(replace(PLAIN, tactic=tactic)) for tactic in attention_cpu.tactics(PLAIN)],
            attention_cpu.attention(PLAIN))


def symbols(kernels: list[CpuKernel], by_model: CpuKernel) -> None:
    found = [kernel.symbol for kernel in kernels]
    assert len(set(found)) == len(found) and found[0] == by_model.symbol


def test_the_digest_of_a_source_is_that_of_all_it_includes(tmp_path_factory: pytest.TempPathFactory,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: source_digest(name) for name in ("linear/linear.h", "attention/attention.h", "norm/norm.h")}
    assert len(set(before.values())) == 3
    folder = tmp_path_factory.mktemp("plugins")
    for path in INCLUDE_DIR.rglob("*.h"):
        copy = folder / path.relative_to(INCLUDE_DIR)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr("ingot.plugins.kernel.INCLUDE_DIR", folder)
    assert {name: source_digest(name) for name in before} == before
    tiles = folder / "linear" / "tile_integer.h"
    tiles.write_text(tiles.read_text() + "/* changed */\n")
    after = {name: source_digest(name) for name in before}
    assert [name for name in before if after[name] != before[name]] == ["linear/linear.h"]

"""What LoRA adapters add, in the interpreter: slots found by token, matrices of any rank, column ranges of y."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.lora import reference
from ingot.plugins.lora.tactics import Expand, Shrink, expand, shrink, splits

from .support import ARCHITECTURES, assert_close, compiled, device, load, store

H200 = device("sm_90a")
SLOTS = 3
STEPS = {"mixed": ([5, 1, 6, 20], [1, -1, 0, 2]), "one token": ([1], [2]), "nobody": ([3, 1], [-1, -1])}
"""Tokens of each sequence, and the slots of their adapters."""


@dataclass(frozen=True)
class Case:
    """Modules that read the same x [T, k]; m: the most tokens of a step."""

    k: int
    rank: int
    widths: tuple[int, ...]
    m: int = 40
    x_gap: int = 0

    @property
    def module_bytes(self) -> int:
        return -(-2 * self.rank * self.k // 64) * 64

    def parts(self) -> tuple[tuple[int, int, int, int], ...]:
        """As the reference has them. The first eight columns of y belong to no module."""
        found, start, offset = [], 8, len(self.widths) * self.module_bytes
        for number, width in enumerate(self.widths):
            found.append((start, width, offset, number * self.rank))
            start, offset = start + width, offset + -(-2 * self.rank * width // 64) * 64
        return tuple(found)

    @property
    def slot_bytes(self) -> int:
        _, width, offset, _ = self.parts()[-1]
        return offset + -(-2 * self.rank * width // 64) * 64

    def slots(self) -> np.ndarray:
        values = np.random.default_rng(1).standard_normal(SLOTS * self.slot_bytes // 2)
        return store(values, "bf16").reshape(-1).view(np.uint8).reshape(SLOTS, -1)

    def problems(self, kind: str) -> tuple[Shrink, Expand]:
        first = self.parts()[0][2]
        modules, slot = len(self.widths), self.slot_bytes
        inner = Shrink(self.m, self.k, self.rank, modules, self.module_bytes, slot, SLOTS, kind,
                       self.k + self.x_gap if self.x_gap else 0)
        parts = tuple((start, width, offset - first, column) for start, width, offset, column in self.parts())
        return inner, Expand(self.m, 8 + sum(self.widths), modules * self.rank, splits(self.m, self.k), self.rank, slot,
                             SLOTS, kind, parts)


CASES = [Case(128, 16, (128, 64, 72)), Case(1100, 8, (96,)), Case(70, 5, (40, 24), x_gap=26), Case(64, 130, (64,)),
         Case(96, 16, (80, 80), m=2048), Case(520, 130, (72,), m=80)]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c.k}-r{c.rank}-{len(c.widths)}-m{c.m}")
def test_equals_reference(interpreter: Interpreter, case: Case, kind: str, name: str) -> None:
    counts, chosen = STEPS[name]
    rng, tokens = np.random.default_rng(5), sum(counts)
    inner, outer = case.problems(kind)
    x, y = (store(rng.standard_normal((tokens, width)), kind) for width in (case.k + case.x_gap, outer.n))
    token_seq = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    slots, adapters = case.slots(), np.array(chosen, np.int32)[token_seq]
    modules = [number * case.module_bytes for number in range(len(case.widths))]
    want_h = reference.shrink(load(x, kind)[:, :case.k], adapters, slots, case.rank, modules)
    want_y = reference.expand(load(y, kind), want_h, adapters, slots, case.rank, case.parts())

    one, = shrink(inner, H200).legal[0].launches
    two, = expand(outer, H200).legal[0].launches
    arrays = {"x": x, "y": y, "h": np.full((outer.splits, tokens, outer.h_width), np.nan, np.float32), "slots": slots,
              "adapters": np.array(chosen, np.int32), "token_seq": token_seq,
              "sizes": np.array([tokens, len(counts), 0], np.int32)}
    after = interpreter.run([(one, {"a": "slots"}), (two, {"b": ("slots", case.parts()[0][2])})], arrays)
    got_h, got_y = after["h"].sum(0), load(after["y"], kind)
    has = adapters >= 0
    assert np.isnan(got_h[~has]).all(), "tokens without adapter take no part"
    np.testing.assert_array_equal(after["y"].reshape(tokens, -1)[~has], y[~has])
    if has.any():
        np.testing.assert_allclose(got_h[has], want_h[has], rtol=1e-4, atol=1e-4)
        assert_close(got_y, want_y, kind, 1e-5)


def test_results_depend_on_no_other_sequence(interpreter: Interpreter) -> None:
    """Nor on numbers that are none in another one's adapter."""
    case = CASES[0]
    inner, outer = case.problems("bf16")
    rng = np.random.default_rng(5)
    x, y = (store(rng.standard_normal((12, width)), "bf16") for width in (case.k, outer.n))
    found = []
    for other, broken in ((0, False), (2, False), (0, True)):
        slots = case.slots()
        if broken:
            slots[0] = 0xFF
        one, = shrink(inner, H200).legal[0].launches
        two, = expand(outer, H200).legal[0].launches
        after = interpreter.run([(one, {"a": "slots"}), (two, {"b": ("slots", case.parts()[0][2])})], {
            "x": x, "y": y, "h": np.zeros((outer.splits, 12, outer.h_width), np.float32), "slots": slots,
            "adapters": np.array([other, 1], np.int32), "token_seq": np.array([0] * 7 + [1] * 5, np.int32),
            "sizes": np.array([12, 2, 0], np.int32)})
        found.append(after["y"].reshape(12, -1)[7:])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[] if arch == "sm_90a" else pytest.mark.slow)
                                  for arch in ARCHITECTURES])
def test_compiles_without_spills(arch: str) -> None:
    """One of the ways to compute each, where registers are too few for the first."""
    ways = []
    for tokens in (8, 2048):
        for kind, rank in (("bf16", 16), ("bf16", 64), ("fp16", 16), ("bf16", 256)):
            inner, outer = Case(4096, rank, (4096, 1024, 1024), m=tokens).problems(kind)
            ways += [[way.launches[0].kernel for way in found.legal]
                     for found in (shrink(inner, device(arch)), expand(outer, device(arch)))]
    while ways:
        code = compiled([kernels[0] for kernels in ways], arch)
        assert all(found.matrix for found in code.values())
        ways = [kernels[1:] for kernels in ways if code[kernels[0]].spill_stores]
        assert all(ways), "every way spills registers"

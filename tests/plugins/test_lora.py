"""What adapters add to linear layers, against the reference."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ingot.plugins.gpu.floats import to_bf16
from ingot.plugins.lora import cpu, reference

from .native import ALL_ISAS, Library, Step, aligned, placed, relative_error

SLOTS = 3
STEPS = {
    "mixed": Step([(5, 5), (9, 1), (6, 6), (20, 20), (3, 1)], adapters=[1, -1, 0, 2, 1]),
    "one token": Step([(4, 1)], adapters=[2]),
    "nobody": Step([(5, 5), (2, 1)], adapters=[-1, -1]),
}


@dataclass(frozen=True)
class Case:
    """Modules that read the same x [T, k], their matrices as add_lora lays them out."""

    k: int
    rank: int
    widths: tuple[int, ...]
    x_stride: int = 0

    @property
    def module_bytes(self) -> int:
        return -(-2 * self.rank * self.k // 64) * 64

    @property
    def b(self) -> list[int]:
        begin, found = len(self.widths) * self.module_bytes, []
        for width in self.widths:
            found.append(begin)
            begin += -(-2 * self.rank * width // 64) * 64
        return [*found, begin]

    @property
    def slot_bytes(self) -> int:
        return self.b[-1]

    @property
    def h_width(self) -> int:
        return len(self.widths) * self.rank

    @property
    def parts(self) -> list[tuple[int, int, int, int]]:
        """As the reference has them. The first three columns of y belong to no module."""
        starts = np.cumsum([3, *self.widths]).tolist()
        return [(start, width, offset, number * self.rank)
                for number, (start, width, offset) in enumerate(zip(starts, self.widths, self.b, strict=False))]

    @property
    def shrink(self) -> cpu.Shrink:
        return cpu.Shrink(self.k, self.rank, len(self.widths), self.module_bytes, self.slot_bytes, self.x_stride)

    @property
    def expand(self) -> cpu.Expand:
        return cpu.Expand(3 + sum(self.widths), self.h_width, self.rank, self.slot_bytes,
                          tuple((start, width, offset - self.b[0], column)
                                for start, width, offset, column in self.parts))

    def slots(self) -> np.ndarray:
        """u8 [SLOTS, slot_bytes]: numbers in the matrices, NaN between them. Bytes that may be read follow."""
        memory = aligned((SLOTS * self.slot_bytes + 64,), np.uint8)
        memory[:] = 0xFF
        slots = memory[:SLOTS * self.slot_bytes].reshape(SLOTS, -1)
        rng = np.random.default_rng(0)
        places = [(n * self.module_bytes, self.rank * self.k) for n in range(len(self.widths))]
        places += [(offset, self.rank * width) for offset, width in zip(self.b, self.widths, strict=False)]
        for slot in slots:
            for offset, count in places:
                values = rng.standard_normal(count).astype(np.float32)
                slot[offset:offset + 2 * count] = to_bf16(values).view(np.uint8)
        return slots


CASES = [Case(576, 16, (576, 192, 192)), Case(37, 5, (7,), x_stride=41), Case(64, 1, (130, 64)), Case(16, 256, (65,))]


@pytest.fixture(scope="module", params=ALL_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [kernel for case in CASES for kernel in (cpu.shrink(case.shrink), cpu.expand(case.expand))]
    return Library(kernels, request.param, tmp_path_factory.mktemp("lora"))


def inputs(case: Case, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """x [T, x_stride] and y [T, n]."""
    rng = np.random.default_rng(7)
    return (placed(rng.standard_normal((tokens, case.x_stride or case.k)).astype(np.float32)),
            placed(rng.standard_normal((tokens, case.expand.n)).astype(np.float32)))


def ran(library: Library, case: Case, step: Step, x: np.ndarray, y: np.ndarray, slots: np.ndarray, workers: int,
        ) -> tuple[np.ndarray, np.ndarray]:
    """h and y after both launches."""
    h, y = aligned((len(x), case.h_width)), placed(y)
    library.run(cpu.shrink(case.shrink), step, x, slots, h, workers=workers)
    library.run(cpu.expand(case.expand), step, y, h, slots.reshape(-1)[case.b[0]:], workers=workers)
    return h, y


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c.k}-r{c.rank}-{len(c.widths)}")
def test_equals_reference(library: Library, case: Case, name: str) -> None:
    step, slots = STEPS[name], case.slots()
    x, y = inputs(case, step.num_tokens)
    adapters = step.adapters[step.token_seq]
    modules = [number * case.module_bytes for number in range(len(case.widths))]
    want_h = reference.shrink(x[:, :case.k], adapters, slots, case.rank, modules)
    want_y = reference.expand(y, want_h, adapters, slots, case.rank, case.parts)
    for workers in (1, 2, 7):
        h, got = ran(library, case, step, x, y, slots, workers)
        chosen = adapters >= 0
        assert np.isnan(h[~chosen]).all(), "tokens without adapter take no part"
        assert np.array_equal(got[~chosen], y[~chosen])
        assert np.array_equal(got[:, :3], y[:, :3])
        if chosen.any():
            assert relative_error(h[chosen], want_h[chosen]) < 1e-5
            assert relative_error(got, want_y) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c.k}-r{c.rank}-{len(c.widths)}")
def test_results_depend_on_nobody_else(library: Library, case: Case) -> None:
    """To the bit: alone, in chunks, among others, by any number of workers."""
    slots = case.slots()
    x, y = inputs(case, 20)
    whole = ran(library, case, Step([(20, 20)], adapters=[1]), x, y, slots, 1)[1]
    for cut in (1, 3, 18):
        step = Step([(cut, cut), (20, 20 - cut)], adapters=[1, 1])
        assert np.array_equal(ran(library, case, step, x, y, slots, 3)[1], whole)
        other = Step([(cut, cut), (20, 20 - cut)], adapters=[0, 1])
        assert np.array_equal(ran(library, case, other, x, y, slots, 5)[1][cut:], whole[cut:])

"""Which candidate serves each request: by the model of the device, of the same kernels where they do as well.

Only what is chosen is compiled. Where a kernel spills registers or does not fit, the next candidate takes its place.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.plugins.gpu.kernel import Candidate

from ..errors import CannotCompile
from ..targets import Gpu
from .lower import Request
from .select import expected
from .triton_compile import CompiledKernel, CompileError, try_compile

_AS_GOOD = 1.05
"""A candidate whose kernels are there already is taken if its estimate is so many times the best one's at most."""


@dataclass(frozen=True)
class Choice:
    """seconds: what the model gives. refused: (candidate, reason) of those that are illegal, or were tried before."""

    candidate: Candidate
    seconds: float
    refused: tuple[tuple[str, str], ...]


@dataclass
class _Ranked:
    """Candidates of equal requests, the best first, with seconds."""

    candidates: tuple[tuple[Candidate, float], ...]


@dataclass
class Chooser:
    """Choices for the requests of all buckets. code: symbol -> what it compiled to."""

    gpu: Gpu
    cache: Path | None = None
    progress: Callable[[str], None] = lambda symbol: None
    code: dict[str, CompiledKernel] = field(default_factory=dict)
    _bad: dict[str, str] = field(default_factory=dict)
    _ranks: dict[tuple[int, str], _Ranked] = field(default_factory=dict)

    def choose(self, requests: Sequence[Request]) -> list[Choice]:
        """A choice for each, in order. Raises CannotCompile for a request that no candidate serves."""
        while True:
            choices, missing = self._round(requests)
            if not missing:
                return choices
            self._compile(missing)

    def _round(self, requests: Sequence[Request]) -> tuple[list[Choice], dict[str, Candidate]]:
        """Choices as far as is known, and the kernels that have to be compiled to know more."""
        taken: set[str] = set()
        done: dict[tuple[int, str], Choice] = {}
        for request in requests:
            key = id(request.candidates), request.precision
            if key not in done:
                done[key] = self._choice(request, taken)
                taken |= _symbols(done[key].candidate)
        missing = {}
        for choice in done.values():
            for symbol in _symbols(choice.candidate) - self.code.keys():
                missing[symbol] = choice.candidate
        return [done[id(request.candidates), request.precision] for request in requests], missing

    def _choice(self, request: Request, taken: set[str]) -> Choice:
        ranked = self._ranked(request)
        refused = [(c.name, self._why(c)) for c, _ in ranked if self._why(c)]
        good = [(c, seconds) for c, seconds in ranked if not self._why(c)]
        if not good:
            good = [(c, seconds) for c, seconds in ranked if _symbols(c) <= self.code.keys()]
            if not good:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
                raise CannotCompile(f"{request.op} has no kernel that fits {self.gpu.arch.name}: {reasons}\n"
                                    f"  in {request.origin}")
            good.sort(key=lambda pair: sum(self.code[symbol].spill_stores for symbol in _symbols(pair[0])))
            good = good[:1]
        best = good[0][1]
        candidate, seconds = next(((c, s) for c, s in good if s <= _AS_GOOD * best and _symbols(c) <= taken), good[0])
        return Choice(candidate, seconds, (*request.refused, *refused))

    def _ranked(self, request: Request) -> tuple[tuple[Candidate, float], ...]:
        key = id(request.candidates), request.precision
        if key not in self._ranks:
            pairs = [(c, expected(c, self.gpu, request.precision)) for c in request.candidates]
            self._ranks[key] = _Ranked(tuple(sorted(pairs, key=lambda pair: pair[1])))
        return self._ranks[key].candidates

    def _why(self, candidate: Candidate) -> str:
        """Why it will not do, as far as is known."""
        return next((self._bad[symbol] for symbol in sorted(_symbols(candidate)) if symbol in self._bad), "")

    def _compile(self, missing: Mapping[str, Candidate]) -> None:
        kernels = [launch.kernel for candidate in missing.values() for launch in candidate.launches
                   if launch.kernel.symbol not in self.code]
        found = try_compile(kernels, self.gpu.arch, self.cache, len(os.sched_getaffinity(0)), self.progress)
        for kernel, code in found.items():
            if isinstance(code, CompileError):
                self._bad[kernel.symbol] = " ".join(str(code).split())
                continue
            self.code[kernel.symbol] = code
            if code.spill_stores or code.spill_loads:
                self._bad[kernel.symbol] = f"spills registers ({code.spill_stores} stores, {code.spill_loads} loads)"


def _symbols(candidate: Candidate) -> set[str]:
    return {launch.kernel.symbol for launch in candidate.launches}

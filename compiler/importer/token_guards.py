"""Where a model's code asks how many tokens there are, and whether the answer matters.

The tracer follows one number of tokens and notes every condition on it that held. A condition that holds for every
number is harmless; so is one about the layout of memory, which does not change what is computed. Any other means that
the traced program is not the whole of the model.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True)
class Condition:
    """expr: on the tracer's symbols. place: "modeling_x.py:12 in forward", empty outside of model code."""

    expr: Any
    place: str

    def holds(self, tokens: int) -> bool:
        """For so many tokens. Symbols are the extents of ids and positions, which are both the number of tokens; one
        that stands for an unknown value makes the condition count as failing."""
        value = self.expr.xreplace(dict.fromkeys(self.expr.free_symbols, sympy.Integer(tokens)))
        unknown = any(s.name.startswith(("u", "zuf")) for s in self.expr.free_symbols)
        return not unknown and value == sympy.true


class GuardLog:
    """While it is entered, notes every condition that the tracer takes on, with the place that asked."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []

    def __enter__(self) -> GuardLog:
        self._log_guard = log_guard = ShapeEnv._log_guard

        def record(shapes: ShapeEnv, prefix: str, expr: Any, forcing_spec: bool) -> None:
            if "suppressed" not in prefix:
                frames = list(_frames(sys._getframe(1)))
                if not any("contiguous" in f.f_code.co_name or "stride" in f.f_code.co_name for f in frames):
                    self.conditions.append(Condition(expr, _model_place(frames)))
            log_guard(shapes, prefix, expr, forcing_spec)

        ShapeEnv._log_guard = record
        return self

    def __exit__(self, *_: object) -> None:
        ShapeEnv._log_guard = self._log_guard

    def differing_places(self, max_tokens: int) -> list[str]:
        """Places with a condition that fails for some number of tokens in [2, max_tokens], each once."""
        numbers = list(_sampled(max_tokens))
        # Conditions outside of model code come from traces of operators that were traced before, with their model's.
        failing = [c for c in dict.fromkeys(self.conditions) if c.place and not all(c.holds(n) for n in numbers)]
        return list(dict.fromkeys(c.place for c in failing))

    def last_places(self) -> list[str]:
        """For a trace that ended because the tokens became a certain number: the last places that asked for it."""
        return list(dict.fromkeys(c.place for c in self.conditions if c.place))[-2:]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _model_place(frames: list[FrameType]) -> str:
    for frame in frames:
        if "/transformers/" in frame.f_code.co_filename:
            return f"{base_name(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _sampled(max_tokens: int) -> Iterator[int]:
    """All small numbers, those near powers of two, the largest."""
    numbers = {*range(2, 130), *(2**k + d for k in range(7, 21) for d in (-1, 0, 1)), max_tokens - 1, max_tokens}
    return iter(sorted(n for n in numbers if 2 <= n <= max_tokens))


def base_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]

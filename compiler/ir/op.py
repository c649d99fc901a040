"""The operator registry: what each operator takes, what type it gives, what it means.

`reference` is the executable meaning in numpy (float32 arithmetic): the interpreter runs it, kernels are tested
against it. Operators register themselves with @operator in the modules ops_*.py beside this file.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import TensorType

Infer = Callable[[Sequence[TensorType], Mapping[str, Any]], tuple[TensorType, ...]]
Reference = Callable[..., Any]


@dataclass(frozen=True)
class OpDef:
    """arity: (least, most) number of operands.

    infer(types, attrs) -> types of the outputs; a literal operand comes as a TensorType of shape ().
    reference(*arrays, **attrs) -> array or tuple of arrays; attributes with symbols come already as numbers.
    kind: "elementwise" | "view" | "reduce" | "structured": what the loop fuser may do with it.
    """

    name: str
    arity: tuple[int, int]
    infer: Infer
    reference: Reference
    kind: str = "structured"


OPS: dict[str, OpDef] = {}


def operator(name: str, arity: int | tuple[int, int], infer: Infer, kind: str = "structured",
             ) -> Callable[[Reference], Reference]:
    """Register the decorated numpy function as the meaning of operator `name`."""
    def register(reference: Reference) -> Reference:
        assert name not in OPS, f"operator {name} is defined twice"
        OPS[name] = OpDef(name, (arity, arity) if isinstance(arity, int) else arity, infer, reference, kind)
        return reference
    return register


def as_tuple(result: Any) -> tuple[np.ndarray, ...]:
    return result if isinstance(result, tuple) else (result,)

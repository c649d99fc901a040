"""Only attention may mix tokens: one graph for each way to break that, and for each that only looks like it."""
from __future__ import annotations

from typing import Any

import pytest

from ingot.compiler.importer.builder import GraphBuilder
from ingot.compiler.importer.errors import ImportRefused
from ingot.compiler.importer.token_axis import check_token_axis
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.weights.expr import tensor

Step = tuple[str, tuple[Any, ...], dict[str, Any]]
"""operator, operands ("x", "ids", "w", a number of an earlier step), attributes."""


def check(*steps: Step) -> None:
    b = GraphBuilder()
    b.input("x", TensorType(("T", 8, 4)))
    b.input("ids", TensorType(("T",), DType.I32))
    b.constant(tensor("w", (8, 4)), "w")
    b.origin = "model.layers.0 (modeling.py:7)"
    results: list[str] = []
    for op, operands, attrs in steps:
        results.append(b.add(op, [results[o] if isinstance(o, int) else o for o in operands], **attrs)[0])
    check_token_axis(b.graph(results[-1:]))


def heads_first(*more: Step) -> tuple[Step, ...]:
    """[8, T, 4] as result 0."""
    return (("permute", ("x",), {"dims": (1, 0, 2)}), *more)


ALONE: dict[str, tuple[Step, ...]] = {
    "softmax over heads": (("softmax", ("x",), {"dim": 1}),),
    "sum over heads and features": (("reduce_sum", ("x",), {"dims": (1, 2), "keepdim": False}),),
    "norm": (("rms_norm", ("x",), {"eps": 1e-5}),),
    "embedding": (("embedding", ("w", "ids"), {}),),
    "table by token": (
        ("take", ("w", "ids"), {"dim": 0}), ("reshape", (0,), {"shape": ("T", 1, 4)}), ("add", ("x", 1), {})),
    "heads as more rows, and back": (
        ("reshape", ("x",), {"shape": ("8*T", 4)}), ("softmax", (0,), {"dim": 1}),
        ("reshape", (1,), {"shape": ("T", 8, 4)}), ("add", ("x", 2), {})),
    "heads first as more rows, and back": heads_first(
        ("reshape", (0,), {"shape": ("8*T", 4)}), ("reshape", (1,), {"shape": (8, "T", 4)}),
        ("permute", (2,), {"dims": (1, 0, 2)}), ("add", ("x", 3), {})),
    "heads in groups": heads_first(("softmax", (0,), {"dim": 2}), ("reshape", (1,), {"shape": (2, 4, "T", 4)})),
    "attention": (("attention", ("x", "x", "x"), {"slot": 0, "scale": 1.0}),),
    "gather among features": (
        ("reshape", ("x",), {"shape": ("T", 32)}), ("reshape", ("ids",), {"shape": ("T", 1)}),
        ("gather", (0, 1), {"dim": 1})),
    "products within a token": (("permute", ("x",), {"dims": (0, 2, 1)}), ("matmul", ("x", 0), {})),
    "a constant of as many rows": (
        ("full", (), {"shape": ("T", 8, 1), "value": 2.0, "dtype": DType.F32}), ("add", ("x", 0), {})),
}


@pytest.mark.parametrize("steps", list(ALONE.values()), ids=list(ALONE))
def test_each_token_by_itself(steps: tuple[Step, ...]) -> None:
    check(*steps)


MIXED: dict[str, tuple[Step, ...]] = {
    "softmax: works along the tokens": (("softmax", ("x",), {"dim": 0}),),
    "cumsum: works along the tokens": (("cumsum", ("x",), {"dim": 0}),),
    "reduce_max: works along the tokens": (("reduce_max", ("x",), {"dims": (0,), "keepdim": True}),),
    "argmax: works along the tokens": (("argmax", ("x",), {"dim": 0, "keepdim": False}),),
    "rms_norm: works along the tokens": (
        ("permute", ("x",), {"dims": (1, 2, 0)}), ("rms_norm", (0,), {"eps": 1e-5})),
    "reshape: lays tokens out anew": (("reshape", ("x",), {"shape": (8, "T", 4)}),),
    "reshape: lays tokens out anew, across": heads_first(
        ("reshape", (0,), {"shape": ("8*T", 4)}), ("reshape", (1,), {"shape": ("T", 8, 4)})),
    "matmul: each token meets every other": (
        ("permute", ("x",), {"dims": (1, 0, 2)}), ("permute", ("x",), {"dims": (1, 2, 0)}), ("matmul", (0, 1), {})),
    "matmul: sums over the tokens": (
        ("permute", ("x",), {"dims": (1, 2, 0)}), ("permute", ("x",), {"dims": (1, 0, 2)}), ("matmul", (0, 1), {})),
    "mul: each token meets every other": (
        ("reshape", ("ids",), {"shape": ("T", 1)}), ("mul", (0, "ids"), {})),
    "arange: counts the tokens of the step": (
        ("arange", (), {"start": 0, "step": 1, "length": "T", "dtype": DType.I32}), ("add", ("ids", 0), {})),
    "take: looks tokens up among the tokens": (("take", ("x", "ids"), {"dim": 0}),),
    "attention: attends along another axis": heads_first(
        ("reshape", (0,), {"shape": ("8*T", 1, 4)}), ("attention", (1, 1, 1), {"slot": 0, "scale": 1.0})),
}


@pytest.mark.parametrize(("steps", "message"), [(steps, message) for message, steps in MIXED.items()], ids=list(MIXED))
def test_mixing_is_refused(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ImportRefused, match=f"{message}.*\n  in model.layers.0 .modeling.py:7."):
        check(*steps)

"""What can be tuned in a program: its problems that have several ways, told apart by what decides which is fastest."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ingot.plugins.attention import cpu as attention_cpu
from ingot.plugins.kernel import CpuKernel
from ingot.plugins.linear import cpu as linear_cpu
from ingot.plugins.scheme import SCHEMES

from .workloads import BLOCK_SIZE, layer_bytes

Problem = linear_cpu.Problem | attention_cpu.Attention
P = TypeVar("P", bound=Problem)
Tactic = linear_cpu.Tactic | attention_cpu.Tactic

KERNELS = {"linear": "linear/linear.h", "attention": "attention/attention.h"}
"""Name in records -> the header whose kernels it is."""

_SIZES = {1: "1", 8: "2-8", 0: "9 and more"}
_LAYERS = 8
"""Layers in a block of the cache that attention is measured on."""


def name_of(problem: Problem) -> str:
    """A key of KERNELS."""
    return "linear" if isinstance(problem, linear_cpu.Problem) else "attention"


def key_of(problem: Problem) -> dict[str, Any]:
    """As JSON. Of a matrix: shape, scheme and the class of its number of tokens; of attention its shape and reach."""
    p = problem
    if isinstance(p, linear_cpu.Problem):
        return {"n": p.n, "k": p.k, "scheme": p.scheme.name, "tokens": _SIZES[p.size_class]}
    names = ("q_heads", "kv_heads", "key_dim", "value_dim", "window", "chunk", "kv_dtype")
    return {name: getattr(p, name) for name in names}


def problem_of(kernel: str, key: Mapping[str, Any]) -> Problem:
    """A problem to measure of such a key. Raises KeyError, TypeError or ValueError for what is no key."""
    if kernel == "linear":
        m = {tokens: size or 64 for size, tokens in _SIZES.items()}[key["tokens"]]
        return linear_cpu.Problem(int(key["n"]), int(key["k"]), SCHEMES[key["scheme"]], m)
    if kernel != "attention":
        raise ValueError(f"there is no kernel {kernel!r}; there are {', '.join(KERNELS)}")
    one = attention_cpu.Attention(block_size=BLOCK_SIZE, block_bytes=64, scale=int(key["key_dim"]) ** -0.5, **key)
    return replace(one, block_bytes=_LAYERS * layer_bytes(one))


def tactic_of(kernel: str, fields: Mapping[str, int]) -> Tactic:
    """Raises TypeError or AssertionError for fields that it does not have, or values that it cannot have."""
    return linear_cpu.Tactic(**fields) if kernel == "linear" else attention_cpu.Tactic(**fields)


def tactics_of(problem: Problem) -> tuple[Tactic, ...]:
    """What is worth measuring, the model's choice first."""
    return linear_cpu.tactics(problem) if isinstance(problem, linear_cpu.Problem) else attention_cpu.tactics(problem)


def with_tactic(problem: P, tactic: Tactic) -> P:
    return replace(problem, tactic=tactic)  # type: ignore[arg-type]  # the one of its kind


def kernels_of(problem: Problem) -> tuple[CpuKernel, ...]:
    """The launches that solve it."""
    if isinstance(problem, linear_cpu.Problem):
        return (linear_cpu.emit(problem),)
    return attention_cpu.attention(problem), attention_cpu.attention_combine(problem)


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """One problem of each key, in the order of their first appearance, as problem_of gives it."""
    found: dict[str, Problem] = {}
    for p in problems:
        found.setdefault(repr((name_of(p), key_of(p))), p)
    return [problem_of(name_of(p), key_of(p)) for p in found.values()]

"""Precisions as data: which scheme each linear layer and the KV cache get.

A precision is a short list of rules, tried in order; the first that matches a layer decides. GPU precisions and the
sensitivity search ("auto") add rules and schemes, not code.
"""
from __future__ import annotations

from dataclasses import dataclass

from ingot.runtime.errors import RequestError


@dataclass(frozen=True)
class Rule:
    """role    "head" (makes the logits), "router" (its output decides which experts run), "experts", "linear",
            "embedding", or "*"
    scheme  key of ingot.plugins.scheme.SCHEMES
    """

    role: str
    scheme: str

    def matches(self, role: str) -> bool:
        return self.role in ("*", role)


@dataclass(frozen=True)
class Precision:
    """name, the rules for the layers, the default element type of the KV cache, and one line for people."""

    name: str
    rules: tuple[Rule, ...]
    kv: str
    note: str

    def scheme(self, role: str) -> str:
        return next(rule.scheme for rule in self.rules if rule.matches(role))


_ROUTER = Rule("router", "fp32")  # a rounding that swaps two experts costs more than a router's few bytes

PRECISIONS = {p.name: p for p in (
    Precision("fp32", (Rule("*", "fp32"),), "fp32", "32-bit weights and arithmetic"),
    Precision("bf16", (_ROUTER, Rule("*", "bf16")), "bf16", "16-bit weights, 32-bit arithmetic"),
    Precision("int8", (_ROUTER, Rule("*", "int8")), "bf16", "8-bit weights and activations, integer arithmetic"),
    Precision("w4a8", (_ROUTER, Rule("head", "int8"), Rule("embedding", "int8"), Rule("*", "w4a8")), "bf16",
              "4-bit weights in groups of 32, 8-bit activations, integer arithmetic; head and embedding 8 bits"),
)}


def find_precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise RequestError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}.\n"
                           "  Which of them a target has: ingot targets")
    return PRECISIONS[name]

"""Precisions as data: which scheme each linear layer and the KV cache get.

A precision is a short list of rules, tried in order; the first that matches a layer decides. The sensitivity search
("auto") adds rules and schemes, not code.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ingot.plugins.linear.gpu_formats import GROUP, GROUPS
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES, regrouped
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.errors import RequestError

from .targets import Gpu

AUTO = "auto"
"""Names no precision: a search chooses one for each layer. See compiler/auto."""


@dataclass(frozen=True)
class Rule:
    """role    "head" (makes the logits), "router" (its output decides which experts run), "experts", "linear",
            "embedding", or "*"
    scheme  key of ingot.plugins.scheme.SCHEMES, for GPUs of GPU_SCHEMES
    """

    role: str
    scheme: str

    def matches(self, role: str) -> bool:
        return self.role in ("*", role)


@dataclass(frozen=True)
class LayerRule:
    """pattern  of names of layers, with * and ?: "model.layers.0.*"
    scheme   as of Rule
    """

    pattern: str
    scheme: str


@dataclass(frozen=True)
class Precision:
    """name, the rules for the layers, the default element type of the KV cache, and one line for people.

    floats: on GPUs, the type of the values that go from launch to launch
    layers: the user's own, tried in order before the rules
    """

    name: str
    rules: tuple[Rule, ...]
    kv: str
    note: str
    floats: str = "fp32"
    layers: tuple[LayerRule, ...] = ()

    def scheme(self, role: str) -> str:
        return next(rule.scheme for rule in self.rules if rule.matches(role))

    def is_named(self, names: Sequence[str], role: str) -> bool:
        """Whether the user's own rules say what a layer with these names has. A pattern with wildcards means no
        router."""
        return self._own(names, role) is not None

    def layer_scheme(self, names: Sequence[str], role: str) -> str:
        """Of a layer with these names."""
        return self._own(names, role) or self.scheme(role)

    def _own(self, names: Sequence[str], role: str) -> str | None:
        return next((rule.scheme for rule in self.layers if rule.pattern in names or (
            role != "router" and any(fnmatchcase(name, rule.pattern) for name in names))), None)


_ROUTER = Rule("router", "fp32")  # a rounding that swaps two experts costs more than a router's few bytes

PRECISIONS = {p.name: p for p in (
    Precision("fp32", (Rule("*", "fp32"),), "fp32", "32-bit weights and arithmetic"),
    Precision("bf16", (_ROUTER, Rule("*", "bf16")), "bf16",
              "16-bit weights, 32-bit sums; inputs 16-bit where pairs of bfloat16 are multiplied"),
    Precision("int8", (_ROUTER, Rule("*", "int8g32")), "bf16",
              "8-bit weights in groups of 32, 8-bit activations, integer arithmetic"),
    Precision("w4a8", (_ROUTER, Rule("head", "int8g32"), Rule("embedding", "int8g32"), Rule("*", "w4a8")), "bf16",
              "4-bit weights in groups of 32, 8-bit activations, integer arithmetic; head and embedding 8 bits"),
)}
"""Of CPU targets."""

# Logits of routers are float32 whatever their weights are. Heads and embeddings stay at 16 bits: a head is a small part
# of a step's bytes, and its errors are those of the answer.
_WHOLE = tuple(Rule(role, "bf16") for role in ("router", "head", "embedding"))

GPU_PRECISIONS = {p.name: p for p in (
    Precision("fp32", (Rule("*", "fp32"),), "fp32", "32-bit weights and arithmetic, no Tensor Cores"),
    Precision("bf16", (Rule("*", "bf16"),), "bf16", "16-bit weights and arithmetic", "bf16"),
    Precision("fp16", (Rule("*", "fp16"),), "fp16", "16-bit weights and arithmetic", "fp16"),
    Precision("fp8", (*_WHOLE, Rule("*", "fp8")), "bf16",
              "e4m3 weights by output channel, activations by token; head, embedding and routers bf16", "bf16"),
    Precision("int8", (*_WHOLE, Rule("*", "int8_token")), "bf16",
              "int8 weights by output channel, activations by token; head, embedding and routers bf16", "bf16"),
    Precision("int4", (*_WHOLE, Rule("*", "int4_g128m")), "bf16",
              "4-bit weights in groups of 128 (64, 32), bf16 arithmetic; head, embedding and routers bf16", "bf16"),
    Precision("w4a8", (*_WHOLE, Rule("*", "w4a8_fp8_g128m")), "bf16",
              "4-bit weights in groups of 128 (64, 32), 8-bit activations by token; head, embedding and routers bf16",
              "bf16"),
    Precision("nvfp4", (*_WHOLE, Rule("*", "nvfp4")), "bf16",
              "e2m1 weights and activations in groups of 16; head, embedding and routers bf16", "bf16"),
)}
"""Of GPU targets; w4a8 for those that have fp8."""


def find_precision(name: str, gpu: Gpu | None = None) -> Precision:
    """That precision on CPU targets, or on a GPU."""
    known = PRECISIONS if gpu is None else GPU_PRECISIONS
    if name not in known:
        raise RequestError(f"unknown precision {name!r}; known: {', '.join(known)}.\n"
                           "  Which of them a target has: ingot targets")
    precision = known[name]
    if gpu is not None and name == "w4a8" and gpu.operand_type(name) == "int8":
        rules = tuple(Rule(rule.role, rule.scheme.replace("w4a8_fp8", "w4a8_int8")) for rule in precision.rules)
        return replace(precision, rules=rules)
    return precision


def with_layers(precision: Precision, layers: Mapping[str, str], gpu: Gpu | None = None) -> Precision:
    """The precision, but layers that match a pattern get what linear layers have in the precision that is named for it.
    Of several patterns the most exact decides: a name, then that of more letters besides its wildcards.
    Raises RequestError for an unknown precision."""
    def vague(pattern: str) -> tuple[bool, int, str]:
        literal = pattern.replace("*", "").replace("?", "")
        return literal != pattern, -len(literal), pattern

    rules = tuple(LayerRule(pattern, find_precision(layers[pattern], gpu).scheme("linear"))
                  for pattern in sorted(layers, key=vague))
    return replace(precision, layers=rules)


def with_groups(precision: Precision, size: int | None, minimums: bool | None) -> Precision:
    """The precision of a GPU target, but four-bit integers have groups of so many input channels, and a minimum each or
    none. None: what default_groups says.

    Raises RequestError for another size than GROUPS, and for a precision without four-bit integers.
    """
    if size is None and minimums is None:
        return precision
    if size is not None and size not in GROUPS:
        raise RequestError(f"group_size is {size}; expected {', '.join(map(str, GROUPS))}")
    schemes = {rule.scheme for rule in precision.rules} | {rule.scheme for rule in precision.layers}
    if not any(scheme in GPU_SCHEMES and GPU_SCHEMES[scheme].weights.is_int4 for scheme in schemes):
        raise RequestError(f"group_size and group_minimums are for four-bit integers; {precision.name} has none.\n"
                           "  Precisions that have: int4, w4a8")
    groups = default_groups(size, minimums)
    return replace(precision, rules=tuple(replace(r, scheme=regrouped(r.scheme, *groups)) for r in precision.rules),
                   layers=tuple(replace(r, scheme=regrouped(r.scheme, *groups)) for r in precision.layers))


def default_groups(size: int | None = None, minimums: bool | None = None) -> tuple[int, bool]:
    """(channels, whether with minimums) where one of them, or both, is not said.

    128 is what others have, and what costs least. Minimums cost as many bytes as groups of half the channels would, and
    lose less: see docs/quantization.md.
    """
    return GROUP if size is None else size, True if minimums is None else minimums


def weight_bits(scheme: str) -> int:
    """Of a weight that a scheme stores."""
    return SCHEMES[scheme].weight_bits if scheme in SCHEMES else GPU_SCHEMES[scheme].weights.bits

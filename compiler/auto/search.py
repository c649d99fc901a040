"""From sensitivities and costs to a choice that has been measured to keep its budget."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ingot.runtime.errors import WorkFailed

from ..precision import Precision, find_precision, weight_bits
from ..targets import Target
from .choose import Option, choose
from .cost import Cost, unit_cost
from .units import Unit

SAME_COST = 0.03
"""Costs that differ by less count as equal: no cost model is nearer to the truth."""

MAX_MEASUREMENTS = 6
_MAX_STEPS = 40

NEAR = 0.7
"""A choice that uses so much of its budget is not made cheaper."""

MARGIN = 0.9
"""Part of the budget that the simulated model may use: the engine rounds in more places."""


@dataclass(frozen=True)
class Found:
    """schemes       of each unit
    predicted_nats  sum of the units' divergences
    increase        of the perplexity, as measured in simulation
    tried           (predicted nats, measured increase, bytes of the weights) of all choices, in turn
    """

    schemes: tuple[str, ...]
    predicted_nats: float
    increase: float
    cost: Cost
    tried: tuple[tuple[float, float, int], ...]


def allowed(unit: Unit, schemes: Sequence[str], base: Precision) -> list[str]:
    """What the user has said for one of its layers, and that alone; else all.

    But a head or an embedding gets no fewer bits than the base precision gives it: most of their rows are of tokens
    that no short text holds, so that nothing tells what they would lose."""
    asked = {base.layer_scheme(matrix.names, unit.role) for matrix in unit.matrices
             if base.is_named(matrix.names, unit.role)}
    if asked:
        return sorted(asked)
    if unit.role not in ("head", "embedding"):
        return list(schemes)
    least = weight_bits(base.scheme(unit.role))
    return [scheme for scheme in schemes if weight_bits(scheme) >= least]


def options_of(units: Sequence[Unit], losses: Sequence[Mapping[str, float]], candidates: Sequence[Sequence[str]],
               target: Target) -> list[list[tuple[Option, Cost]]]:
    """Of each unit. Its cost is that in bytes plus that in seconds, both as parts of what the cheapest choice takes of
    them in all: a hundredth of the memory weighs as much as a hundredth of the time.

    A unit whose losses are not known has one option, its cheapest.
    """
    costs = [{scheme: unit_cost(unit, scheme, target) for scheme in names}
             for unit, names in zip(units, candidates, strict=True)]
    size = sum(min(cost.size_bytes for cost in each.values()) for each in costs)
    seconds = sum(min(cost.seconds for cost in each.values()) for each in costs)
    found = []
    for each, known in zip(costs, losses, strict=True):
        options = [(Option(scheme, cost.size_bytes / size + cost.seconds / seconds, known.get(scheme, 0.0)), cost)
                   for scheme, cost in each.items()]
        found.append(options if known else [min(options, key=lambda pair: pair[0].cost)])
    return found


def search(options: Sequence[Sequence[tuple[Option, Cost]]], max_increase: float, margin: float,
           measure: Callable[[Sequence[str]], float], told: Callable[[str], None] = lambda line: None) -> Found:
    """measure: schemes of the units -> increase of the perplexity, 0.01 for one per cent. margin: part of max_increase
    that may be used.

    The budget of divergence is corrected by what is measured, until the choice keeps max_increase and uses most of it,
    or there is none cheaper. Raises WorkFailed if no choice keeps it.
    """
    limit, budget = margin * max_increase, math.log1p(margin * max_increase)
    low, high = 0.0, math.inf  # budgets that were kept, and that were not
    best: Found | None = None
    seen: dict[tuple[str, ...], float] = {}
    tried: list[tuple[float, float, int]] = []
    cheapest, safest = (_choice(options, at) for at in (math.inf, 0.0))
    for _ in range(_MAX_STEPS):
        names, predicted, cost = _choice(options, budget)
        if names not in seen:
            if len(seen) == MAX_MEASUREMENTS:
                break
            seen[names] = measure(names)
            tried.append((predicted, seen[names], cost.size_bytes))
            told(f"predicted {predicted:.2e} nats, {cost.size_bytes / 1e6:.1f} MB: measured {seen[names]:+.2%}")
        if seen[names] <= limit:
            low = budget
            if best is None or cost.size_bytes < best.cost.size_bytes:
                best = Found(names, predicted, seen[names], cost, ())
            if names == cheapest[0] or seen[names] >= NEAR * max_increase or budget * 1.01 > high:
                break
            growth = min(3.0, max(1.2, limit / seen[names])) if seen[names] > 0 else 3.0
            budget = min(budget * growth, math.sqrt(budget * high))
        else:
            high = budget
            if names == safest[0] or budget < 1.01 * low:
                break
            budget = max(budget * max(0.3, min(0.8, limit / seen[names])), math.sqrt(low * budget))
    if best is None:
        raise WorkFailed(f"no choice of precisions keeps an increase of the perplexity by {max_increase:.2%}: the best "
                         f"that was tried has {min(seen.values()):.2%}.\n  Allow more, or build in bf16 or fp32")
    return Found(best.schemes, best.predicted_nats, best.increase, best.cost, tuple(tried))


def _choice(options: Sequence[Sequence[tuple[Option, Cost]]], budget: float) -> tuple[tuple[str, ...], float, Cost]:
    """(schemes, predicted nats, cost)."""
    chosen = choose([[option for option, _ in unit] for unit in options], budget, SAME_COST)
    names = tuple(option.scheme for option in chosen)
    cost = sum((cost for unit, name in zip(options, names, strict=True)
                for option, cost in unit if option.scheme == name), Cost(0, 0.0))
    return names, sum(option.loss for option in chosen), cost


def candidate_schemes(target: Target) -> list[str]:
    """What linear layers can have on the target, each once: the schemes of its precisions."""
    return list(dict.fromkeys(find_precision(name, target.gpu).scheme("linear") for name in target.precisions))

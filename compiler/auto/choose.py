"""The cheapest scheme for each unit, such that what they lose together stays within a budget.

A knapsack with one choice from each unit. Of each unit only those schemes count that no mixture of two others beats:
the lower hull of loss over cost. Steps along the hulls are taken in the order of what they save for what they cost,
which is the optimum of the knapsack but for its last step (Sinha and Zoltners 1979); a pass over all units then takes
back what the budget leaves room for.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """cost: in any unit, added up over units. loss: nats."""

    scheme: str
    cost: float
    loss: float


def choose(options: Sequence[Sequence[Option]], budget: float, slack: float = 0.0) -> list[Option]:
    """One option of each unit. Where even the best lose more than the budget, these.

    slack: part of the cheapest's cost that may be added where it lowers the loss: what a cost model cannot tell apart.
    """
    hulls = [hull(unit) for unit in options]
    chosen = [0] * len(hulls)

    def loss() -> float:
        return sum(path[at].loss for path, at in zip(hulls, chosen, strict=True))

    steps = sorted(((path[at + 1].loss - path[at].loss) / (path[at + 1].cost - path[at].cost), number, at)
                   for number, path in enumerate(hulls) for at in range(len(path) - 1))
    taken = 0
    while taken < len(steps) and loss() > budget:  # along a hull steps get worse: they come in its order
        chosen[steps[taken][1]] += 1
        taken += 1
    # The dearest first: a step that the last one has made needless.
    for number in sorted(range(len(hulls)), key=lambda n: -_step(hulls[n], chosen[n])):
        while chosen[number] > 0 and loss() + hulls[number][chosen[number] - 1].loss \
                - hulls[number][chosen[number]].loss <= budget:
            chosen[number] -= 1
    room = slack * sum(path[at].cost for path, at in zip(hulls, chosen, strict=True))
    for _, number, at in steps:
        step = hulls[number][at + 1].cost - hulls[number][at].cost
        if at == chosen[number] and step <= room:
            chosen[number] += 1
            room -= step
    return [path[at] for path, at in zip(hulls, chosen, strict=True)]


def hull(options: Sequence[Option]) -> list[Option]:
    """From the cheapest to the best, each step saving less for its cost than the one before."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, o.loss)):
        if found and option.loss >= found[-1].loss:
            continue
        while len(found) > 1 and _slope(found[-2], option) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append(option)
    return found


def _slope(a: Option, b: Option) -> float:
    return (b.loss - a.loss) / (b.cost - a.cost)


def _step(path: Sequence[Option], at: int) -> float:
    return path[at].cost - path[at - 1].cost if at else 0.0


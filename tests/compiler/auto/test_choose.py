"""The knapsack: hulls, budgets, and the optimum of small cases by trying all."""
from __future__ import annotations

import itertools
import random

import pytest

from ingot.compiler.auto.choose import Option, choose, hull


def random_units(seed: int, count: int) -> list[list[Option]]:
    generator = random.Random(seed)
    return [[Option(f"s{number}", generator.uniform(1, 10), 0.0 if number == 3 else generator.expovariate(1))
             for number in range(4)] for _ in range(count)]


def best_by_trying(units: list[list[Option]], budget: float) -> float:
    return min(sum(o.cost for o in chosen) for chosen in itertools.product(*units)
               if sum(o.loss for o in chosen) <= budget)


def test_a_hull_has_only_what_no_mixture_beats() -> None:
    options = [Option("a", 1, 10), Option("b", 2, 9.5), Option("c", 3, 2), Option("worse", 3.5, 2.5),
               Option("d", 5, 1), Option("same", 5, 1)]
    assert [option.scheme for option in hull(options)] == ["a", "c", "d"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("part", [0.0, 0.05, 0.3, 0.8, 2.0])
def test_the_budget_is_kept_at_nearly_the_least_cost(seed: int, part: float) -> None:
    """All but the best choice's own step along one hull."""
    units = random_units(seed, 6)
    budget = part * sum(max(o.loss for o in unit) for unit in units) / 4
    chosen = choose(units, budget)
    assert sum(o.loss for o in chosen) <= budget + 1e-12
    cost, most = sum(o.cost for o in chosen), max(abs(a.cost - b.cost) for unit in units
                                                   for a, b in itertools.pairwise(hull(unit)) or [(unit[0], unit[0])])
    assert cost <= best_by_trying(units, budget) + most


def test_what_no_choice_keeps_is_the_best_there_is() -> None:
    units = [[Option("a", 1, 5), Option("b", 2, 3)], [Option("a", 1, 5), Option("b", 9, 4)]]
    assert [option.scheme for option in choose(units, 1.0)] == ["b", "b"]


def test_slack_buys_the_best_that_costs_no_more_than_it() -> None:
    units = [[Option("a", 50, 5), Option("b", 51, 1)], [Option("a", 50, 5), Option("b", 90, 0)]]
    assert [option.scheme for option in choose(units, 10.0)] == ["a", "a"]
    assert [option.scheme for option in choose(units, 10.0, slack=0.03)] == ["b", "a"]

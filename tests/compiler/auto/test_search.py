"""The search: what it may choose from, and that what is measured corrects what was predicted."""
from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ingot.compiler.auto.choose import Option
from ingot.compiler.auto.cost import Cost, unit_cost
from ingot.compiler.auto.layers import layers_of, recipe_text
from ingot.compiler.auto.search import MAX_MEASUREMENTS, allowed, candidate_schemes, options_of, search
from ingot.compiler.auto.units import Unit, find_units
from ingot.compiler.ir.types import DType
from ingot.compiler.precision import PRECISIONS, find_precision, with_layers
from ingot.compiler.targets import find_target, list_targets
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.errors import WorkFailed
from tests.compiler.graphs import Builder

CPU = find_target("cpu:x86-64-v3")
BASE = PRECISIONS["w4a8"]


def units_of(layers: int = 4) -> list[Unit]:
    """A tied head, and of each layer: q and k (one input), down, a router, experts."""
    b = Builder()
    table = b.weight("model.embed.weight", 640, 64)
    x = b.op("embedding", table, b.x("ids", "T", dtype=DType.I32))
    for number in range(layers):
        at = f"model.{number}"
        q = b.op("linear", x, b.weight(f"{at}.q_proj.weight", 64, 64))
        k = b.op("linear", x, b.weight(f"{at}.k_proj.weight", 64, 64))
        h = b.op("linear", b.op("mul", q, k), b.weight(f"{at}.down_proj.weight", 64, 64))
        _, chosen = b.add("topk", [b.op("linear", h, b.weight(f"{at}.gate.weight", 8, 64))], k=2, dim=1, largest=True)
        x = b.op("reduce_sum", b.op("expert_linear", h, chosen, b.weight(f"{at}.experts.up", 8, 64, 64)), dims=(1,),
                 keepdim=False)
    rows = b.op("gather_rows", x, b.x("logit_rows", "L", dtype=DType.I32), dim=0)
    return find_units(b.made(b.op("linear", rows, table)))


def simple(losses: Sequence[tuple[float, float]]) -> list[list[tuple[Option, Cost]]]:
    """Units of 4, 8 and 32 bits with these losses; 32 bits lose nothing."""
    return [[(Option(str(bits), bits, loss), Cost(bits, bits)) for bits, loss in ((4, four), (8, eight), (32, 0))]
            for four, eight in losses]


def test_units_are_what_is_merged_or_stored_once() -> None:
    found = units_of(1)
    assert [(unit.names, unit.role) for unit in found] == [
        (("model.embed",), "head"), (("model.0.q_proj", "model.0.k_proj"), "linear"),
        (("model.0.down_proj",), "linear"), (("model.0.experts.up",), "experts")]
    assert found[3].choices == 2 and found[1].weight.shape == (128, 64)


def test_heads_keep_their_bits_and_users_their_word() -> None:
    head, qk, down, _ = units_of(1)
    schemes = candidate_schemes(CPU)
    assert schemes == ["fp32", "bf16", "int8g32", "w4a8"]
    assert allowed(head, schemes, BASE) == ["fp32", "bf16", "int8g32"] and allowed(down, schemes, BASE) == schemes
    asked = with_layers(BASE, {"*.q_proj": "bf16"})
    assert allowed(qk, schemes, asked) == ["bf16"] and allowed(down, schemes, asked) == schemes


def test_costs_are_those_of_the_packed_weights() -> None:
    head, qk, _, experts = units_of(1)
    for scheme in candidate_schemes(CPU):
        assert unit_cost(qk, scheme, CPU).size_bytes == 2 * packed_size(64, 64, SCHEMES[scheme])
    order = [unit_cost(qk, scheme, CPU) for scheme in candidate_schemes(CPU)]
    assert [c.seconds for c in order] == sorted((c.seconds for c in order), reverse=True)
    of_experts = unit_cost(experts, "w4a8", CPU)
    assert of_experts.size_bytes == 8 * packed_size(64, 64, SCHEMES["w4a8"])
    assert of_experts.seconds < 8 * unit_cost(qk, "w4a8", CPU).seconds / 2
    assert unit_cost(head, "int8g32", CPU).seconds == unit_cost(head, "int8g32", CPU).size_bytes / 8e9  # no prompt


@pytest.mark.parametrize("target", [t.name for t in list_targets()])
def test_every_target_has_costs(target: str) -> None:
    found = find_target(target)
    for unit in units_of(1):
        for scheme in candidate_schemes(found):
            cost = unit_cost(unit, scheme, found)
            assert cost.size_bytes > 0 and 0 < cost.seconds < 1


def test_small_groups_cost_a_gpu_more_than_their_bytes() -> None:
    """The prompt's part of w4a8: products, and the scaling of each group's sum at the rate of FP32."""
    h200 = find_target("h200")
    assert h200.gpu is not None
    _, qk, *_ = units_of(1)
    seconds = {scheme: unit_cost(qk, scheme, h200).seconds for scheme in ("fp8", "w4a8_fp8", "w4a8_fp8_g32")}
    bytes_alone = {scheme: unit_cost(qk, scheme, h200).size_bytes / h200.gpu.bytes_per_s for scheme in seconds}
    beside = {scheme: seconds[scheme] - bytes_alone[scheme] for scheme in seconds}
    assert beside["fp8"] < beside["w4a8_fp8"] < beside["w4a8_fp8_g32"]


def test_a_unit_that_is_not_known_has_one_option() -> None:
    units = units_of(1)
    schemes = [["int8g32", "fp32"], ["w4a8", "fp32"], ["w4a8", "fp32"], ["w4a8"]]
    options = options_of(units, [{"int8g32": 1.0, "fp32": 0.0}, {"w4a8": 2.0, "fp32": 0.0}, {}, {}], schemes, CPU)
    assert [[option.scheme for option, _ in unit] for unit in options] == [["int8g32", "fp32"], ["w4a8", "fp32"],
                                                                           ["w4a8"], ["w4a8"]]


@pytest.mark.parametrize("truth", [0.2, 1.0, 5.0], ids=lambda t: f"measured {t} of predicted")
def test_the_budget_is_kept_and_used(truth: float) -> None:
    """Whatever the predictions are off by."""
    options = simple([(0.001 * (1 + number % 7), 0.0001) for number in range(40)])
    losses = [{option.scheme: option.loss for option, _ in unit} for unit in options]

    def measure(schemes: Sequence[str]) -> float:
        return truth * math.expm1(sum(known[scheme] for known, scheme in zip(losses, schemes, strict=True)))

    found = search(options, 0.01, 0.9, measure)
    assert found.increase <= 0.009 and len(found.tried) <= MAX_MEASUREMENTS
    all_floats, all_four = 40 * 32, 40 * 4
    assert all_four <= found.cost.size_bytes < 0.75 * all_floats
    assert found.increase > 0.004 or found.cost.size_bytes < 1.1 * all_four


def test_what_the_cheapest_keeps_is_the_cheapest() -> None:
    found = search(simple([(1e-5, 1e-6)] * 10), 0.01, 0.9, lambda schemes: 1e-4)
    assert found.schemes == ("4",) * 10 and len(found.tried) == 1


def test_a_budget_that_nothing_keeps_is_told() -> None:
    with pytest.raises(WorkFailed, match=r"no choice of precisions keeps an increase of the perplexity by 1.00%: the "
                                         r"best that was tried has 3.00%"):
        search(simple([(0.1, 0.01)] * 3), 0.01, 0.9, lambda schemes: 0.03)


@pytest.mark.parametrize("pinned", [{}, {"model.0.*": "bf16", "model.2.down_proj": "fp32"}], ids=["free", "pinned"])
def test_layers_say_exactly_what_was_chosen(pinned: dict[str, str]) -> None:
    units = units_of(6)
    wanted = with_layers(BASE, pinned)
    schemes = []
    for number, unit in enumerate(units):
        asked = [wanted.layer_scheme(unit.matrices[0].names, unit.role)] if wanted.is_named(
            unit.matrices[0].names, unit.role) else []
        free = "fp32" if unit.names[0] == "model.3.down_proj" else "int8g32" if "down" in unit.names[0] or number == 0 \
            else "w4a8"
        schemes.append((asked or [free])[0])
    layers = layers_of(units, schemes, BASE, CPU, pinned)
    made = with_layers(BASE, layers)
    assert [made.layer_scheme(m.names, m.role) for u in units for m in u.matrices] == [
        scheme for scheme, u in zip(schemes, units, strict=True) for _ in u.matrices]
    assert layers["*.down_proj"] == "int8" and layers["model.3.down_proj"] == "fp32"
    assert pinned.items() <= layers.items()
    assert len(layers) <= 2 + len(pinned) + (1 if pinned else 0)


def test_a_recipe_says_where_it_comes_from() -> None:
    text = recipe_text({"model": "./m", "builds": [{"layers": {"*.down_proj": "int8"}}]}, ["Found by auto."])
    assert text.startswith("# Found by auto.\nmodel: ./m\n") and "'*.down_proj': int8" in text


def test_the_base_has_the_fewest_bits_on_every_target() -> None:
    for target in list_targets():
        assert any(find_precision(name, target.gpu).scheme("linear") in candidate_schemes(target)
                   for name in target.precisions)

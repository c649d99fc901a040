"""Launches of the layers of models that are served, as imported from transformers."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.ir.graph import Graph
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.precision import find_precision

from .programs import LIMITS, gpu, program

_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3_moe": {}, "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"num_hidden_layers": 3}, "qwen2_moe": {}}
_TARGETS = {"bf16": "h200", "fp8": "h200", "int8": "a100", "w4a8": "h200", "int4": "l40s", "nvfp4": "b200"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graph]:
    """Family -> the graph of a model with two layers."""
    from tools.small_models import save_random, small_config

    folder = tmp_path_factory.mktemp("families")

    @cache
    def graph(family: str) -> Graph:
        config = small_config(family, hidden_size=128, head_dim=32, moe_intermediate_size=128, intermediate_size=128,
                              **_MODELS[family])
        save_random(config, folder / family)
        source, found = open_checkpoint_source(str(folder / family), None), BuildCache(folder / "cache")
        return source.graph(source.facts(found), LIMITS["max_seq_len"], found)[0]

    return graph


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", _TARGETS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_launches_a_layer_of_experts(imported: Callable[[str], Graph], family: str, precision: str) -> None:
    """Six for few tokens; for more as of a dense layer. The first layer and the last take no more than others."""
    target = _TARGETS[precision]
    made = program(imported(family), target, find_precision(precision, gpu(target)))
    many = 8 if precision in ("bf16", "int4") else 9
    for bucket in made.buckets:
        layers, _ = made.count_launches(bucket)
        assert layers == dict.fromkeys((0, 1), 6 if bucket.tokens <= 8 else many), bucket.tokens
    facts = made.facts()
    assert facts["launches_per_layer"] == {"1": 6, "2": 6, "4": 6, "8": 6, "16": many, "32": many}
    tables = 4 if family == "gpt_oss" else 2
    assert {facts["launches_outside_layers"][tokens] - tables for tokens in "1248"} == {4}, \
        "embedding; choice of rows; norm and head; sampling"
    assert {facts["launches_outside_layers"][tokens] - tables for tokens in ("16", "32")} == {5}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("family", "few", "many"), [("glm4_moe", 8, 10), ("qwen2_moe", 10, 12)])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_that_all_tokens_go_through(imported: Callable[[str], Graph], family: str, few: int, many: int,
                                            precision: str) -> None:
    """Two launches more, where they are added as they are; where a gate weighs them, two for that too. Of layers behind
    the first with experts: the norm of that one stands alone. Quantized, both results of gates take a launch."""
    target = _TARGETS[precision]
    made = program(imported(family), target, find_precision(precision, gpu(target)))
    for bucket in made.buckets:
        layers, _ = made.count_launches(bucket)
        assert layers[max(layers)] == (few if bucket.tokens <= 8 else many + 2 * (precision == "fp8")), bucket.tokens

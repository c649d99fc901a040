"""Launches of the layers of models that are served, as imported from transformers."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.precision import find_precision

from .programs import LIMITS, final, gpu, program

_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3_moe": {}, "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"num_hidden_layers": 3}, "deepseek_v3": {"num_hidden_layers": 3}, "qwen2_moe": {},
    "qwen2_moe wide": {"shared_expert_intermediate_size": 512}}
"""Family, and what distinguishes a variant of it -> changes of its configuration."""
_TARGETS = {"bf16": "h200", "fp8": "h200", "int8": "a100", "w4a8": "h200", "int4": "l40s", "nvfp4": "b200"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Family -> the checkpoint of a small model, and the model."""
    from tools.small_models import save_random, small_config

    folder = tmp_path_factory.mktemp("families")

    @cache
    def made(family: str) -> tuple[Path, Any]:
        config = small_config(family.split()[0], hidden_size=128, head_dim=32, moe_intermediate_size=128,
                              intermediate_size=128, **_MODELS[family])
        return folder / family, save_random(config, folder / family)

    return made


@pytest.fixture(scope="module")
def imported(saved: Callable[[str], tuple[Path, Any]]) -> Callable[[str], Graph]:
    """Family -> the graph of a model with two layers."""
    @cache
    def graph(family: str) -> Graph:
        folder, _ = saved(family)
        source, found = open_checkpoint_source(str(folder), None), BuildCache(folder.parent / "cache")
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
@pytest.mark.parametrize("precision", _TARGETS)
@pytest.mark.parametrize(("family", "few", "many"), [("glm4_moe", 0, 0), ("qwen2_moe wide", 0, 0),
                                                      ("deepseek_v3", 4, 6)])
def test_experts_that_all_tokens_go_through(imported: Callable[[str], Graph], family: str, few: int, many: int,
                                            precision: str) -> None:
    """A whole number of experts wide they take no launches of their own, nor does a gate that weighs them. Of layers
    behind the first with experts: the norm of that one stands alone. few, many: for latent attention. Both matrices
    behind the latent vectors, and the loops that make queries and keys of them; with many tokens both norms too."""
    target = _TARGETS[precision]
    made = program(imported(family), target, find_precision(precision, gpu(target)))
    many += 8 if precision in ("bf16", "int4") else 9
    for bucket in made.buckets:
        layers, _ = made.count_launches(bucket)
        assert layers[max(layers)] == (6 + few if bucket.tokens <= 8 else many), bucket.tokens


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_shared_experts_of_another_width(imported: Callable[[str], Graph], precision: str) -> None:
    """Two launches more, and two for the gate that weighs them. Quantized, both results of gates take a launch."""
    target = _TARGETS[precision]
    made = program(imported("qwen2_moe"), target, find_precision(precision, gpu(target)))
    for bucket in made.buckets:
        layers, _ = made.count_launches(bucket)
        assert layers[1] == (10 if bucket.tokens <= 8 else 12 + 2 * (precision == "fp8")), bucket.tokens


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen2_moe wide", "qwen2_moe"])
def test_shared_experts_are_those_of_the_model(imported: Callable[[str], Graph],
                                               saved: Callable[[str], tuple[Path, Any]], family: str) -> None:
    """The graph that is lowered against the model of transformers."""
    import torch

    folder, model = saved(family)
    graph = final(imported(family), find_precision("fp32", gpu("h200")))
    joined = [node.attrs["shared"] for node in graph.nodes if node.op == "route" and "shared" in node.attrs]
    assert set(joined) == {"qwen2_moe": set(), "qwen2_moe wide": {4}}.get(family, {1})
    ids = np.random.default_rng(0).integers(0, 512, 20).astype(np.int32)
    places = np.arange(20, dtype=np.int32)
    got = run(graph, {"token_ids": ids, "positions": places, "logit_rows": places}, open_checkpoint(folder))
    with torch.no_grad():
        want = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(got[graph.outputs[0]], want, atol=1e-5 * np.abs(want).max())

"""Launches of the layers of models that are served, as imported from transformers."""
from __future__ import annotations

from pathlib import Path

import pytest

from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.precision import find_precision

from .programs import LIMITS, gpu, program

_LAYERS = 4
_MODELS = {"mixtral": {}, "qwen3_moe": {},
           "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2)}}


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", _MODELS)
def test_launches_a_layer_of_experts(family: str, tmp_path: Path) -> None:
    """As the manifest tells them: six for few tokens, as of a dense layer for more. w4a8 with minimums quantizes by
    launches of their own what routers and sums over choices write."""
    from tools.small_models import save_random, small_config

    config = small_config(family, hidden_size=128, head_dim=32, moe_intermediate_size=128, intermediate_size=128,
                          num_hidden_layers=_LAYERS, **_MODELS[family])
    save_random(config, tmp_path / family)
    source, cache = open_checkpoint_source(str(tmp_path / family), None), BuildCache(tmp_path / "cache")
    graph, _ = source.graph(source.facts(cache), LIMITS["max_seq_len"], cache)
    for precision, target, many in (("bf16", "h200", 8), ("fp8", "h200", 9), ("int8", "a100", 9), ("int4", "l40s", 8),
                                    ("w4a8", "h200", 9), ("nvfp4", "b200", 9)):
        counts = program(graph, target, find_precision(precision, gpu(target))).facts()["launches_per_layer"]
        assert {counts[str(tokens)] for tokens in (1, 2, 4, 8)} == {6}, precision
        assert {counts[str(tokens)] for tokens in (16, 32)} == {many}, precision

"""A model with experts, for what is gathered and rounded by expert."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Experts a token -> folder of a random mixtral: one layer, hidden size 64, 4 experts of 96, vocabulary 256."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    @cache
    def saved(num_experts_per_tok: int) -> Path:
        config = MixtralConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                               num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
                               num_experts_per_tok=num_experts_per_tok, max_position_embeddings=64)
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("moe") / "mixtral"
        MixtralForCausalLM(config).save_pretrained(folder)
        return folder

    return saved

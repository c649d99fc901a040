"""The random model of tools/bench/peers: one network, as a checkpoint and as GGUF."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from ingot.runtime.errors import RequestError
from tests.runtime.mock_engine import tokenizer_json
from tools.bench.peers import random_model, workload
from tools.large_build import Llama

TINY = Llama(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, vocab=300)


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.float()(input_ids=torch.arange(5, 25)[None], use_cache=False).logits.numpy()


def test_both_forms_are_one_network(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(tokenizer_json())
    folder, gguf = tmp_path / "model", tmp_path / "tiny-F16.gguf"
    random_model.write_model(TINY, folder, tmp_path / "tokenizer")
    random_model.write_gguf(TINY, folder, gguf)
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert one.config.rope_parameters["rope_theta"] == 500_000 and one.config.rms_norm_eps == 1e-5
    other = AutoModelForCausalLM.from_config(one.config)
    other.load_state_dict(dequantized(gguf, one))
    want = logits(one)
    assert np.abs(logits(other) - want).max() < 1e-4 * np.abs(want).max()


def dequantized(path: Path, like: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The GGUF file's tensors under transformers' names, queries and keys turned back."""
    import gguf
    found = {tensor.name: np.array(tensor.data, np.float32) for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for name, value in like.state_dict().items():
        source = "model.embed_tokens.weight" if name == "lm_head.weight" else name  # tied
        data = found[random_model._gguf_name(source)].reshape(value.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = data.shape[0] // (TINY.hidden // TINY.heads)
            data = data.reshape(heads, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        state[name] = torch.from_numpy(data.copy())
    assert len(found) == len(state) - 1
    return state


def test_the_shape_is_that_of_llama_3_2_1b() -> None:
    assert random_model.SHAPE.parameters == 1_235_814_400


def test_unknown_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected one of smollm2, gemma3, llama-1b"):
        workload.model("llama-2b", tmp_path, print)

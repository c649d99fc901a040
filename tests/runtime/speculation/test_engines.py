"""Engines that compute: the same answers with drafts as without, by every parameter that decides about a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.runtime.engine import Engine, Generation
from ingot.runtime.executor import step_loop
from ingot.runtime.folders import cache_folder
from ingot.runtime.sampling import Guide, SamplingParams
from ingot.runtime.speculation import Speculator
from tests.runtime.mock_engine import EOS
from tools.small_models import save_random, small_config

pytestmark = pytest.mark.usefixtures("free_steps")
DRAFTS = 3
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 60, "seed": 5}
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(0, 200, 3 + 5 * seed)] for seed in range(4)]


class Known:
    """Proposes what an answer without drafts was, and errs in every third place."""

    certainty = 1

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        begin = len(tokens)
        for known in self._sequences:
            if known[:begin] == list(tokens):
                return [token if place % 3 else (token + 1) % 200
                        for place, token in enumerate(known[begin : begin + max_tokens], begin)]
        return []

    def accepted(self, count: int) -> None:
        pass


def load(path: Path, drafts: int, **options: Any) -> Engine:
    return Engine.load(path, kv_cache_tokens=512, num_workers=2, speculative_tokens=drafts, **options)


def with_and_without(path: Path, prompts: list[list[int]], params: SamplingParams, monkeypatch: pytest.MonkeyPatch,
                     **options: Any) -> tuple[list[Generation], list[Generation]]:
    with load(path, 0, **options) as engine:
        plain = engine.generate(prompts, params)
    known = [prompts[index // params.n] + answer.token_ids for index, answer in enumerate(plain)]
    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=lambda: Known(known)))
    with load(path, DRAFTS, **options) as engine:
        drafted = engine.generate(prompts, params)
        recorder = engine._loop._recorder
        engine.kv.check()
    assert 0 < recorder.accepted_draft_tokens < recorder.draft_tokens
    return plain, drafted


@pytest.mark.parametrize("options", [
    {}, SAMPLED, {**SAMPLED, "top_p": 0.8, "min_p": 0.01}, {"n": 2, **SAMPLED},
    {"repetition_penalty": 1.7}, {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {**SAMPLED, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "prompt_ignore_length": 2},
    {"min_tokens": 20, "logit_bias": {EOS: 30.0}}, {"logit_bias": {3: 4.0, 77: 3.0}},
    {"bad_token_ids": tuple((first, second) for first in range(0, 250, 2) for second in range(0, 250, 40))},
    {"logprobs": 5}, {**SAMPLED, "logprobs": 0, "prompt_logprobs": 3},
    {"guide": Guide("regex", "([a-z]{3}-)*[a-z]{3}")},
    {"guide": Guide("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 5}'), **SAMPLED},
    {"guide": Guide("json_object"), "repetition_penalty": 1.2},
])  # fmt: skip
def test_every_parameter(mock_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "guide" in options:
        pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=24, ignore_eos="min_tokens" not in options and "guide" not in options, **options)
    plain, drafted = with_and_without(mock_path, PROMPTS[:3], params, monkeypatch)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        for before, after in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (before is None) == (after is None)
            for row, same in zip(before or (), after or (), strict=True):
                if row is None or same is None:
                    assert row is same
                    continue
                assert (row.token_id, row.rank, row.top_ids) == (same.token_id, same.rank, same.top_ids)
                assert [row.logprob, *row.top_logprobs] == pytest.approx([same.logprob, *same.top_logprobs], abs=1e-4)


def test_a_stream_gives_each_token(mock_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
    with load(mock_path, 0) as engine:
        plain = engine.generate("Hello", params)
        known = [engine.encode("Hello") + plain.token_ids]
    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=lambda: Known(known)))
    with load(mock_path, DRAFTS) as engine:
        pieces = list(engine.stream("Hello", params))
        assert engine._loop._recorder.accepted_draft_tokens > 0
    assert [piece.token_id for piece in pieces] == plain.token_ids
    assert [piece.logprobs.token_id for piece in pieces if piece.logprobs is not None] == plain.token_ids
    assert "".join(map(str, pieces)) == plain.text
    assert [piece.finish_reason for piece in pieces] == [None] * 23 + ["length"]


def test_what_a_model_repeats_is_found_by_itself(mock_path: Path) -> None:
    """Without any help: an answer that a bias makes repeat itself."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={7: 1000.0})
    with load(mock_path, DRAFTS) as engine:
        answer = engine.generate([1, 2, 3], params)
        recorder = engine._loop._recorder
    assert answer.token_ids == [7] * 30
    assert recorder.accepted_draft_tokens == recorder.draft_tokens >= 15


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(kind of model, target, precision) -> an engine of a small random one."""
    folder = tmp_path_factory.mktemp("speculation")

    def engine(kind: str, target: str = "cpu", precision: str = "fp32", **config: Any) -> Path:
        path = folder / f"{kind}.{target}.{precision}.engine"
        if not path.exists():
            save_random(small_config(kind, vocab_size=256, **config), folder / target / kind)
            cache = BuildCache(cache_folder()) if target != "cpu" else None
            num_seqs, length = (8, 96) if target == "cpu" else (4, 64)
            build(BuildRequest(str(folder / target / kind), target, precision, path, calibrate=False,
                               max_batch_size=num_seqs, max_num_tokens=16, max_seq_len=length), cache=cache)
        return path
    return engine


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "sliding_attention",
                                                            "full_attention", "sliding_attention"]}),
]


@pytest.mark.parametrize(("kind", "config"), MODELS, ids=[kind for kind, _ in MODELS])
@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 1}])
def test_models(built: Callable[..., Path], kind: str, config: dict[str, Any], options: dict[str, Any],
                monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for one token and for several, and windows that are outgrown; prompts in the same steps."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    plain, drafted = with_and_without(built(kind, **config), PROMPTS, params, monkeypatch)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]


def test_a_gpu_engine_on_the_emulator(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine = built("llama", "h200", "bf16", num_key_value_heads=2)  # kernels of tests/test_emulated_engine.py
    plain, drafted = with_and_without(engine, PROMPTS[:1], params, monkeypatch, device="emulator")
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]

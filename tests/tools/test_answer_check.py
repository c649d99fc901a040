"""Answers of two engines, and of a cache that another engine has filled, are told from near ties."""

from __future__ import annotations

import ctypes
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams
from tests.runtime.mock_engine import TABLE, compile_code, write_engine
from tests.runtime.servers.swap_server import HEADS
from tools.bench.answer_check import LEAST_TOLERANCE, Answer, AnswerCheck, spliced
from tools.bench.swap import noticed

PROMPTS = [[(7 * place + 31 * number) % 250 for place in range(9)] for number in range(6)]
COUNT = 20


class Near:
    """Two tokens are nearly as probable as each other everywhere; `noise` is added to what was found in the cache."""

    def __init__(self, noise: float, other: int = 0) -> None:
        self.noise, self.other, self.seen = noise, other, set[tuple[int, ...]]()

    def logprobs(self, tokens: list[int], noise: float = 0.0) -> np.ndarray:
        rng = np.random.default_rng([zlib.crc32(bytes(tokens)), self.other])
        logits = rng.standard_normal(250)
        logits[rng.integers(250)] = logits.max() + self.noise * rng.uniform()
        logits += noise * np.random.default_rng(zlib.crc32(bytes(tokens[1:]))).uniform(-1, 1, 250)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    def generate(self, prompt: list[int], params: SamplingParams) -> Any:
        noise = self.noise if tuple(prompt) in self.seen else 0.0
        self.seen.add(tuple(prompt))
        if params.prompt_logprobs is not None:
            rows: list[Any] = [None]
            for end in range(1, len(prompt)):
                found = self.logprobs(prompt[:end])
                rows.append(SimpleNamespace(logprob=found[prompt[end]], top_logprobs=[found.max()]))
            return SimpleNamespace(prompt_logprobs=rows)
        tokens, logprobs = list(prompt), []
        for _ in range(params.max_tokens or 0):
            found = self.logprobs(tokens, noise)
            tokens.append(int(found.argmax()))
            logprobs.append(SimpleNamespace(logprob=found[tokens[-1]]))
        return SimpleNamespace(token_ids=tokens[len(prompt):], logprobs=logprobs)


def test_a_near_tie_is_no_mixed_answer() -> None:
    engine = Near(0.02)
    check = AnswerCheck(engine, PROMPTS, COUNT)  # type: ignore[arg-type]
    again = [check.answer(prompt) for prompt in PROMPTS]
    assert any(answer.tokens != alone.tokens for answer, alone in zip(again, check.alone, strict=True))
    verdicts = {check.verdict(number, answer) for number, answer in enumerate(again)}
    assert verdicts - {"as computed alone"} == {"a near tie fell otherwise"}
    assert 0.01 < check.measured.most < 0.05 and check.tolerance.gap == 6 * check.measured.most
    other = AnswerCheck(Near(0.02, other=1), PROMPTS, COUNT)  # type: ignore[arg-type]
    caught, planted = noticed({"a": check, "b": other}, PROMPTS)
    assert caught == planted == 6 * len(PROMPTS)


def test_what_came_with_the_tokens_counts() -> None:
    check = AnswerCheck(Near(0.0), PROMPTS[:1], COUNT)  # type: ignore[arg-type]
    right = check.alone[0]
    assert check.tolerance.most == LEAST_TOLERANCE and check.verdict(0, right) == "as computed alone"
    shifted = tuple(value - 0.01 for value in right.logprobs)
    for wrong in (replace(right, logprobs=shifted), replace(right, logprobs=right.logprobs[1:]), Answer((), ())):
        assert check.verdict(0, wrong) == "mixed"


def kept_cache(paths: list[Path], max_tokens: int) -> Iterator[tuple[int, Answer]]:
    """The fault that a swap must not have: the second engine finds prompts in a cache that the first one has filled."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(PROMPTS):
        with ExitStack() as stack:
            first, second = (stack.enter_context(Engine.load(path, kv_cache_tokens=256)) for path in paths)
            for engine in (first, second):  # both into the same blocks
                engine.generate(prompt, params)
            for part, (begin, size) in second.program._kv.items():  # type: ignore[attr-defined]
                ctypes.memmove(begin, first.program._kv[part][0], size)  # type: ignore[attr-defined]
            found = second.generate(prompt, params)
            assert found.num_cached_tokens > 0
            yield number, Answer(tuple(found.token_ids), tuple(row.logprob for row in found.logprobs or ()))


def require_told_apart(paths: list[Path], max_tokens: int) -> None:
    with ExitStack() as stack:
        checks = {path.name: AnswerCheck(stack.enter_context(Engine.load(path, kv_cache_tokens=2048)), PROMPTS,
                                         max_tokens) for path in paths}
        caught, planted = noticed(checks, PROMPTS)
        assert caught == planted == 6 * len(PROMPTS)
        second = list(checks.values())[1]
        for number, prompt in enumerate(PROMPTS):
            assert second.verdict(number, second.answer(prompt)) != "mixed"
            assert second.verdict(number, spliced(second, second, prompt, number)) != "mixed"
        for number, answer in kept_cache(paths, max_tokens):
            assert second.verdict(number, answer) == "mixed", (number, second.distance(number, answer))


def test_a_cache_that_another_engine_has_filled(tmp_path: Path) -> None:
    code = compile_code(tmp_path)
    require_told_apart([write_engine(tmp_path / "a.engine", code),
                        write_engine(tmp_path / "b.engine", code, head=HEADS["b"], table=TABLE[:, ::-1])], COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4a8", "int8"])
def test_engines_in_integers(tiny_checkpoint: Path, tmp_path: Path, precision: str) -> None:
    """Where what is found in the cache differs from what is computed."""
    from ingot.compiler.build import BuildRequest, build

    other = tmp_path / "other" / tiny_checkpoint.name
    shutil.copytree(tiny_checkpoint, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: np.ascontiguousarray(value[::-1]) for name, value in tensors.items()}, other / "model.safetensors",
              {"format": "pt"})
    paths = [tmp_path / "a.engine", tmp_path / "b.engine"]
    for checkpoint, path in zip((tiny_checkpoint, other), paths, strict=True):
        build(BuildRequest(str(checkpoint), "cpu", precision, path, max_batch_size=2, max_num_tokens=16,
                           calibrate=False))
    require_told_apart(paths, COUNT)

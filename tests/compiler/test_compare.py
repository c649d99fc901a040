"""The comparison of an engine with a reference, on the mock engine and a reference that can be made to err."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ingot.compiler.compare import Comparison, Difference, Greedy, GreedyDifference, compare, difference, kl_divergence
from ingot.compiler.reference_model import ReferenceModel
from ingot.runtime.engine import Engine
from ingot.runtime.errors import RequestError
from tests.runtime.mock_engine import TABLE, compile_code, reference_logits, reference_means, write_engine

PROMPTS = [[3, 200, 17, 4, 4, 91], [8] * 6]


class MockReference:
    """The mock model in numpy. layer_error: added to every element of the layer; bias: added to token 7's logit."""

    def __init__(self, layer_error: float = 0.0, bias: float = 0.0, vocab_size: int = 258, width: int = 16) -> None:
        self.layer_error, self.bias, self.vocab_size, self.width = layer_error, bias, vocab_size, width

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        logits = reference_logits(list(tokens))[:, : self.vocab_size].copy()
        logits[:, 7] += self.bias
        return logits

    def traced(self, token_ids: Sequence[int], modules: Collection[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        means = reference_means(list(token_ids)) + self.layer_error
        embedded = np.resize(TABLE[list(token_ids)], (len(token_ids), self.width))
        values: dict[str, np.ndarray] = {"embed": embedded, "layers.0": means}
        return self._logits(token_ids), {name: values[name] for name in modules}

    def responses(self, token_ids: Sequence[int], values: Mapping[str, np.ndarray],
                  ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The layer's input counts as zero, so that it changes all that it gives."""
        expected = reference_means(list(token_ids)) + self.layer_error
        return {"layers.0": (np.zeros_like(expected), expected)}

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, float]]:
        tokens = list(token_ids)
        for _ in range(num_tokens):
            row = self._logits(tokens)[-1]
            second, best = np.argsort(row)[-2:]
            tokens.append(int(best))
            yield int(best), float(row[best] - row[second])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("mock")
    with Engine.load(write_engine(folder / "mock.engine", compile_code(folder)), kv_cache_tokens=200) as engine:
        yield engine


def run(engine: Engine, reference: MockReference, new_tokens: int = 8, bound: float | None = None) -> Comparison:
    return compare(engine, cast(ReferenceModel, reference), PROMPTS, new_tokens, bound)


def test_equal(engine: Engine) -> None:
    found = run(engine, MockReference())
    assert [layer.name for layer in found.layers] == ["embed", "layers.0"]
    assert found.layers[0].relative == 0
    assert found.largest.relative < 1e-5
    assert (found.top1_agreement, found.num_tokens) == (1.0, 6)
    assert found.kl_divergence < 1e-9
    assert found.greedy == Greedy(16, ())
    assert found.bound == 1e-4  # the engine says fp32
    assert found.failures == []


def test_a_layer_that_errs(engine: Engine) -> None:
    found = run(engine, MockReference(layer_error=0.5))
    assert found.largest.name == "layers.0"
    assert [d.name for d in found.worst_layers] == ["layers.0"]
    assert found.worst_layers[0].own == pytest.approx(found.layers[1].relative, rel=1e-6)
    assert found.layers[1].max_abs == pytest.approx(0.5, rel=1e-3)
    assert found.failures == [f"relative error {found.largest.relative:.2e} of layers.0 exceeds 1.00e-04"]
    assert run(engine, MockReference(layer_error=0.5), bound=10.0).failures == []


def test_answers_that_differ_are_followed_to_the_end(engine: Engine) -> None:
    """Token 7 wins wherever the reference favours it; the engine, which does not, is set right after each."""
    found = run(engine, MockReference(bias=1e3), new_tokens=4, bound=1e-4)
    assert [(d.prompt, d.position) for d in found.greedy.differences] == [(p, i) for p in (0, 1) for i in range(4)]
    assert found.top1_agreement < 0.5
    assert found.kl_divergence > 1
    assert found.logits.relative > 0.5
    assert any("a greedy token differs" in failure for failure in found.failures)


def test_no_answers(engine: Engine) -> None:
    assert run(engine, MockReference(bias=1e3), new_tokens=0).greedy == Greedy(0, ())


def test_another_checkpoint(engine: Engine) -> None:
    with pytest.raises(RequestError, match="258 logits a token, the checkpoint 100; is it the one"):
        run(engine, MockReference(vocab_size=100))
    with pytest.raises(RequestError, match=r"embed gives \(6, 17\) in the checkpoint and \(1, 6, 16\) in the engine"):
        run(engine, MockReference(width=17))


def test_only_a_strict_bound_asks_for_equal_answers(engine: Engine) -> None:
    near = Greedy(10, (GreedyDifference(0, 3, 9e-4),))
    far = Greedy(10, (GreedyDifference(0, 3, 9e-4), GreedyDifference(1, 0, 2e-3)))
    found = run(engine, MockReference(), new_tokens=1)
    assert replace(found, greedy=near).failures == []
    assert "2.00e-03" in replace(found, greedy=far).failures[0]
    assert replace(found, greedy=far, bound=0.1).failures == []
    assert replace(found, greedy=far, bound=None).failures == []


def test_nan_fails(engine: Engine) -> None:
    found = run(engine, MockReference(), new_tokens=1)
    assert replace(found, logits=Difference("logits", float("nan"), 0.0, 1.0), layers=()).failures


@pytest.mark.parametrize(("got", "expected", "relative", "max_abs", "cosine"), [
    ([3, 4], [3, 4], 0, 0, 1), ([3, 5], [3, 4], 0.2, 1, 0.9947), ([-3, -4], [3, 4], 2, 8, -1),
    ([0, 0], [0, 0], 0, 0, 1), ([0, 1], [0, 0], np.inf, 1, 0), ([0, 0], [3, 4], 1, 4, 0),
])  # fmt: skip
def test_difference(got: Any, expected: Any, relative: float, max_abs: float, cosine: float) -> None:
    found = difference("x", np.array(got, np.float32), np.array([expected], np.float32))
    assert (found.relative, found.max_abs, found.cosine) == pytest.approx((relative, max_abs, cosine), abs=1e-4)


def test_kl_divergence() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    expected = float((p * np.log(p / q)).sum())
    # Of logits any constant may be added, as large as it may be.
    assert kl_divergence(np.log([p, p]) + 700, np.log([q, p]) - 700) == pytest.approx(expected / 2)

"""The engine on the mock model: answers, batches, streams, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime import Engine, Generation, SamplingParams
from ingot.runtime.engine import PromptError
from ingot.runtime.errors import IngotError
from ingot.runtime.loop import KvCacheBusy, KvCacheTooSmall
from tests.runtime.mock_engine import EOS, VOCAB_SIZE, reference_greedy, reference_logits, reference_means, write_engine

GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=1.5, top_k=40, seed=11)


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 256, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_greedy_equals_the_reference_alone_and_in_a_batch(mock: Engine) -> None:
    many = prompts(9)
    expected = [reference_greedy(prompt, 10) for prompt in many]
    assert [mock.generate(prompt, GREEDY).token_ids for prompt in many] == expected
    assert [answer.token_ids for answer in mock.generate(many, GREEDY)] == expected


def test_sampled_answers_do_not_depend_on_batch_mates(mock: Engine) -> None:
    many = prompts(7)
    alone = [mock.generate(prompt, SAMPLED).token_ids for prompt in many]
    assert [answer.token_ids for answer in mock.generate(many, SAMPLED)] == alone
    assert [answer.token_ids for answer in mock.generate(many[::-1], SAMPLED)] == alone[::-1]
    assert alone != [answer.token_ids for answer in mock.generate(many, SamplingParams(10, 1.5, 40, seed=12))]


def test_forms_of_a_prompt(mock: Engine) -> None:
    as_text, as_ids = mock.generate("Hello", GREEDY), mock.generate(mock.encode("Hello"), GREEDY)
    assert as_text == as_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert mock.tokenizer is not None
    assert mock.encode(chat) == mock.tokenizer.encode("u:Hi|<s>a:")
    assert mock.generate([chat, chat], GREEDY) == [mock.generate(chat, GREEDY)] * 2
    array: Any = np.array(mock.encode("Hello"))
    assert mock.generate(array, GREEDY) == as_text
    nothing: list[str] = []
    answers: list[Generation] = mock.generate(nothing, GREEDY)
    assert answers == []


def test_stream_gives_a_piece_for_each_token(mock: Engine) -> None:
    whole = mock.generate("Hello", SAMPLED)
    pieces = list(mock.stream("Hello", SAMPLED))
    assert [piece.token_id for piece in pieces] == whole.token_ids
    assert "".join(map(str, pieces)) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * 9 + ["length"]


def test_ends(mock: Engine) -> None:
    free = mock.generate([5, 6], GREEDY)
    assert (free.finish_reason, len(free.token_ids), free.num_prompt_tokens) == ("length", 10, 2)
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    stopped = mock.generate([5, 6], SamplingParams(max_tokens=10, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    # The limit of the engine ends an answer as max_tokens does.
    longest = mock.generate([1] * 40, SamplingParams(max_tokens=100, ignore_eos=True))
    assert (longest.finish_reason, len(longest.token_ids)) == ("length", 8)


def test_the_models_own_end(mock: Engine) -> None:
    assert mock.stop_token_ids == {EOS}
    params = SamplingParams(max_tokens=30, temperature=3.0, seed=1)
    many = prompts(12, 10)
    ended = [answer for answer in mock.generate(many, params) if answer.finish_reason == "stop"]
    assert ended, "no answer met EOS: choose another seed"
    assert all(answer.token_ids.index(EOS) == len(answer.token_ids) - 1 for answer in ended)
    ignored = mock.generate(many, SamplingParams(max_tokens=30, temperature=3.0, seed=1, ignore_eos=True))
    assert all(len(answer.token_ids) == 30 for answer in ignored)


def test_logits_and_trace(mock: Engine) -> None:
    tokens = prompts(1, 45)[0] + [1, 2, 3]
    assert mock.logits(tokens).shape == (len(tokens), VOCAB_SIZE)
    np.testing.assert_allclose(mock.logits(tokens), reference_logits(tokens), rtol=1e-3, atol=1e-4)
    values = mock.trace(tokens[:7], {"y", "logits"})
    np.testing.assert_allclose(values["y"], reference_means(tokens[:7]), rtol=1e-4, atol=1e-5)
    assert values["logits"].shape == (4, VOCAB_SIZE)
    np.testing.assert_allclose(values["logits"], reference_logits(tokens[:7])[3:], rtol=1e-3, atol=1e-4)


def test_streams_side_by_side_and_given_up(mock_path: Path) -> None:
    with Engine.load(mock_path, kv_cache_tokens=64) as engine:
        expected = [engine.generate([n], GREEDY).token_ids for n in range(2)]
        streams = [engine.stream([n], GREEDY) for n in range(2)]
        got: list[list[int]] = [[], []]
        for _ in range(10):
            for stream, tokens in zip(streams, got, strict=True):
                tokens.append(next(stream).token_id)
        assert got == expected

        # 16 blocks: a stream of 12 leaves too few for one of 5, until it is given up.
        large, small = SamplingParams(max_tokens=45), SamplingParams(max_tokens=19)
        stream = engine.stream([1, 2, 3], large)
        next(stream)
        with pytest.raises(KvCacheBusy, match="needs 5 KV blocks; 4 of 16 are free"):
            engine.generate([1], small)
        stream.close()
        assert isinstance(engine.generate([1], small), Generation)
        iterator = engine.iter_logits([1] * 40)
        next(iterator)
        iterator.close()
        assert engine._blocks.num_free == 16


def test_more_requests_than_blocks_wait_for_their_turn(mock_path: Path) -> None:
    many = prompts(6, 12)
    with Engine.load(mock_path, kv_cache_tokens=24) as engine:
        assert [answer.token_ids for answer in engine.generate(many, GREEDY)] == [
            reference_greedy(prompt, 10) for prompt in many]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers(mock_path: Path, mock: Engine, num_workers: int) -> None:
    many = prompts(5)
    with Engine.load(mock_path, kv_cache_tokens=200, num_workers=num_workers) as engine:
        assert engine.generate(many, GREEDY) == mock.generate(many, GREEDY)


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "no tokens"),
    ("", "no tokens"),
    ([3, 258], "token 1 of the prompt is 258; expected an id of 0 to 257"),
    ([-1], "token 0 of the prompt is -1"),
    ([1, "x"], "token 1 of the prompt is 'x'"),
    ([1] * 49, r"49 tokens; this engine takes sequences of 48 at most(.|\n)*--max-seq-len"),
    ([1] * 48, "no room for an answer"),
])  # fmt: skip
def test_prompts_that_are_refused(mock: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        mock.stream(prompt)  # at once, not at the first token
    assert mock.generate([1], GREEDY).token_ids == reference_greedy([1], 10)


def test_a_cache_that_is_too_small(mock_path: Path) -> None:
    with Engine.load(mock_path, kv_cache_tokens=8) as engine:
        with pytest.raises(KvCacheTooSmall, match=r"needs 3 KV blocks of 4 tokens; there are 2 \(8 tokens\)"):
            engine.stream([1] * 3, SamplingParams(max_tokens=8))
        with pytest.raises(KvCacheTooSmall, match="9 tokens need 3 KV blocks; 2 of 2 are free"):
            engine.logits([1] * 9)
        assert len(engine.generate([1] * 3, SamplingParams(max_tokens=6, ignore_eos=True)).token_ids) == 6


def test_an_engine_without_tokenizer(mock_code: bytes, tmp_path: Path) -> None:
    with Engine.load(write_engine(tmp_path / "x.engine", mock_code, with_tokenizer=False)) as engine:
        assert engine.generate([5], GREEDY).token_ids == reference_greedy([5], 10)
        assert engine.generate([5], GREEDY).text == ""
        with pytest.raises(PromptError, match="has no tokenizer: the prompt must be token ids, got a text"):
            engine.generate("Hello")


def test_the_default_cache_holds_the_largest_batch(mock_path: Path) -> None:
    with Engine.load(mock_path) as engine:
        assert engine.program.num_blocks * engine.program.block_size == 4 * 48


def test_load_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match=r"cannot open the engine .*No such file"):
        Engine.load(tmp_path / "none.engine")

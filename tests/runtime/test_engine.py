"""The engine on the mock model: answers, batches, streams, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime import Engine, Generation, SamplingParams
from ingot.runtime.engine import KvCacheBusy, PromptError
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.scheduler import NeverFits
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
    params = SamplingParams(max_tokens=30, temperature=3.0, seed=13)
    many = prompts(12, 10)
    ended = [answer for answer in mock.generate(many, params) if answer.finish_reason == "stop"]
    assert ended, "no answer met EOS: choose another seed"
    assert all(answer.token_ids.index(EOS) == len(answer.token_ids) - 1 for answer in ended)
    ignored = mock.generate(many, SamplingParams(max_tokens=30, temperature=3.0, seed=13, ignore_eos=True))
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

        # 16 blocks: a stream of 12 leaves too few for one of 5, which waits; the stream goes on unread meanwhile.
        large, small = SamplingParams(max_tokens=45, ignore_eos=True), SamplingParams(max_tokens=19)
        stream = engine.stream([1, 2, 3], large)
        first = next(stream).token_id
        assert engine.generate([1], small).token_ids == reference_greedy([1], 19)
        assert [first, *(piece.token_id for piece in stream)] == engine.generate([1, 2, 3], large).token_ids
        assert engine.kv.usage().num_used == 0


def test_streams_and_iterators_given_up(mock_path: Path) -> None:
    with Engine.load(mock_path, kv_cache_tokens=64) as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=45))
        next(stream)
        next(stream)
        with pytest.raises(KvCacheBusy, match="40 tokens need 10 KV blocks; only 4 of 16 are not held by open streams"):
            engine.logits([1] * 40)
        stream.close()
        iterator = engine.iter_logits([1] * 40)
        next(iterator)
        with pytest.raises(KvCacheBusy, match="1 sequences wait for KV blocks, which are held by logits"):
            engine.generate([1] * 3, SamplingParams(max_tokens=30))
        iterator.close()
        assert engine.generate([1], GREEDY).token_ids == reference_greedy([1], 10)
        engine.stream([1], GREEDY).close()  # never started
        assert engine.kv.usage().num_used == 0


def test_logits_in_the_middle_of_a_stream(mock: Engine) -> None:
    """Both use the device's inputs; neither disturbs the other."""
    stream = mock.stream([5, 6, 7], GREEDY)
    tokens = []
    for _ in range(10):
        tokens.append(next(stream).token_id)
        np.testing.assert_allclose(mock.logits([9, 8, 7]), reference_logits([9, 8, 7]), rtol=1e-3, atol=1e-4)
        assert "y" in mock.trace([9, 8], {"y"})
    assert tokens == reference_greedy([5, 6, 7], 10)


def test_prefixes_are_computed_once(mock: Engine) -> None:
    prompt = prompts(1, 30)[0] + [7] * 12
    first, second = mock.generate(prompt, GREEDY), mock.generate([*prompt, 3], GREEDY)
    assert (first.num_cached_tokens, first.token_ids) == (0, reference_greedy(prompt, 10))
    assert second.num_cached_tokens == len(prompt)
    assert second.token_ids == reference_greedy([*prompt, 3], 10)
    before = mock.kv.stats.queried_tokens
    mock.logits(prompt)  # computes everything anew, and leaves nothing behind
    assert mock.kv.stats.queried_tokens == before


def test_several_answers(mock: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.5, top_k=40, seed=11, n=3)
    answers = mock.generate([5, 6], params)
    assert isinstance(answers, list)
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert answers[0].token_ids == mock.generate([5, 6], SAMPLED).token_ids
    pairs = mock.generate([[5, 6], [7]], params)
    assert pairs[:3] == answers
    assert [answer.num_prompt_tokens for answer in pairs] == [2, 2, 2, 1, 1, 1]
    with pytest.raises(RequestError, match="a stream is one answer, n is 3"):
        mock.stream([5, 6], params)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def test_log_probabilities(mock: Engine) -> None:
    """Of every token of prompt and answer, against the logits of the reference; the prompt takes several steps."""
    prompt = prompts(1, 30)[0] + [3] * 9
    answer = mock.generate(prompt, SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True))
    tokens = prompt + answer.token_ids
    expected = log_softmax(reference_logits(tokens))
    assert answer.prompt_logprobs is not None and answer.logprobs is not None
    assert answer.prompt_logprobs[0] is None
    rows = [row for row in [*answer.prompt_logprobs[1:], *answer.logprobs] if row is not None]
    assert [row.token_id for row in rows] == tokens[1:]
    for place, row in enumerate(rows):
        assert row.logprob == pytest.approx(expected[place, row.token_id], abs=1e-3)
        assert row.rank == 1 + (expected[place] > expected[place, row.token_id]).sum()
        count = 2 if place < len(prompt) - 1 else 3
        assert row.top_ids == np.argsort(-expected[place], kind="stable")[:count].tolist()
        assert row.top_logprobs == pytest.approx(np.sort(expected[place])[::-1][:count], abs=1e-3)
    pieces = list(mock.stream(prompt, SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True)))
    assert [piece.logprobs.token_id for piece in pieces if piece.logprobs] == answer.token_ids


def test_stop_strings(mock: Engine) -> None:
    whole = mock.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True)).text
    stop = whole[3:6]
    answer = mock.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)))
    assert (answer.text, answer.finish_reason, answer.matched_stop) == (whole[: whole.index(stop)], "stop", stop)


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
        with pytest.raises(NeverFits, match=r"needs 3 KV blocks of 4 tokens; there are 2 \(8 tokens\)"):
            engine.stream([1] * 3, SamplingParams(max_tokens=8))
        with pytest.raises(NeverFits, match="needs 3 KV blocks of 4 tokens; there are 2"):
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

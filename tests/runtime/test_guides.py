"""Guides: which tokens they allow, that masks reach the device, and what is refused."""
from __future__ import annotations

import asyncio
import builtins
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime import guides as module
from ingot.runtime.devices.null import NullProgram
from ingot.runtime.engine import Engine
from ingot.runtime.errors import WorkFailed
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.executor.request import Request
from ingot.runtime.guides import Guides, Matcher, write_masks
from ingot.runtime.program import Limits
from ingot.runtime.sampling import Guide, SamplingError, SamplingParams
from ingot.runtime.sampling_inputs import SamplingInputs
from ingot.runtime.sampling_state import SequenceSampling
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import EOS, VOCAB_SIZE, tokenizer_json, write_engine

pytest.importorskip("llguidance")
TOKENIZER = Tokenizer(tokenizer_json(), {})
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(TOKENIZER, VOCAB_SIZE + 6, [EOS])  # logits are often wider than the vocabulary


def allowed(matcher: Matcher) -> set[int]:
    masks = np.full((3, -(-(VOCAB_SIZE + 6) // 32)), 0xFFFFFFFF, np.uint32)
    write_masks([(matcher, 1)], masks)
    assert (masks[[0, 2]] == 0xFFFFFFFF).all()
    return set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist())


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether the text can be written token by token, and the answer end there."""
    for token in encode(text):
        if token not in allowed(matcher):
            return False
        matcher.advance(token)
    return EOS in allowed(matcher)


@pytest.mark.parametrize(("guide", "right", "wrong"), [
    (Guide("regex", r"[a-c]+\d{2}"), ["abc12", "a00"], ["12", "abc1", "d12", "a123", ""]),
    (Guide("choice", choices=("yes", "no", 'a "b"\n', "ñö ")), ["yes", "no", 'a "b"\n', "ñö "], ["y", "nope", "ñ"]),
    (Guide("json_schema", json.dumps(SCHEMA)), ['{"name":"Bo","age":5}', '{"name": "",\n "age": -3}'],
     ['{"name":"Bo"}', '{"name":"Robert","age":5}', '{"name":"Bo","age":"5"}', "[]"]),
    (Guide("json_object"), ['{"a": [1, true, null, {"b": "c"}]}', "{}"], ["[1]", '"a"', "{"]),
    (Guide("grammar", 'start: "x" number\nnumber: /[0-9]+/'), ["x1", "x42"], ["x", "1", "xx"]),
    (Guide("grammar", 'root ::= "x" number\nnumber ::= [0-9]+'), ["x1", "x42"], ["x", "1", "xx"]),
])  # fmt: skip
def test_what_each_kind_allows(guides: Guides, guide: Guide, right: list[str], wrong: list[str]) -> None:
    assert all(accepts(guides.start(guide), text) for text in right)
    assert not any(accepts(guides.start(guide), text) for text in wrong)


def test_any_way_through_a_schema_fits_it(guides: Guides) -> None:
    rng = random.Random(3)
    for _ in range(5):
        matcher = guides.start(Guide("json_schema", json.dumps(SCHEMA)))
        tokens: list[int] = []
        while EOS not in (following := allowed(matcher)) and len(tokens) < 400:
            tokens.append(rng.choice(sorted(following)))
            matcher.advance(tokens[-1])
        found = json.loads(TOKENIZER.decode(tokens))
        assert len(found["name"]) <= 5
        assert isinstance(found["age"], int)


def test_the_end_is_all_that_follows_a_complete_text(guides: Guides) -> None:
    matcher = guides.start(Guide("choice", choices=("no",)))
    assert not matcher.is_done
    for token in encode("no"):
        matcher.advance(token)
    assert matcher.is_done
    assert allowed(matcher) == {EOS}
    assert matcher.num_tokens == 2


def test_answers_do_not_share_their_place(guides: Guides) -> None:
    first, second = (guides.start(Guide("regex", "ab")) for _ in range(2))
    first.advance(*encode("a"))
    assert (allowed(first), allowed(second)) == (set(encode("b")), set(encode("a")))


def test_many_masks_at_once(guides: Guides) -> None:
    matchers = [guides.start(Guide("regex", letter)) for letter in "abcdefgh"]
    masks = np.zeros((9, -(-(VOCAB_SIZE + 6) // 32)), np.uint32)
    write_masks([(matcher, 8 - i) for i, matcher in enumerate(matchers)], masks)
    for i, letter in enumerate("abcdefgh"):
        bits = np.unpackbits(masks[8 - i].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == encode(letter)
    assert not masks[0].any()


def test_a_token_that_is_not_allowed(guides: Guides) -> None:
    matcher = guides.start(Guide("regex", "ab"))
    matcher.advance(*encode("a"))
    assert matcher.allows_but({}) and not matcher.allows_but({*encode("b")})
    with pytest.raises(WorkFailed, match="cannot follow the answer beyond 1 tokens"):
        matcher.advance(*encode("x"))
    assert allowed(matcher) == set()  # no token can be chosen
    assert not matcher.allows_but({})


def test_a_guides_own_words_are_not_taken_for_the_librarys(guides: Guides) -> None:
    matcher = guides.start(Guide("regex", "(the max is 3)+"))
    with pytest.raises(WorkFailed, match="cannot follow the answer beyond 0 tokens"):
        matcher.advance(*encode("x"))


def test_a_guide_beyond_its_limits_is_the_requests_fault(guides: Guides) -> None:
    texts = [f"x{number}" for number in range(5000)]
    matcher = guides.start(Guide("choice", choices=tuple(texts[:1999])))
    matcher.advance(*encode("x"))
    matcher = guides.start(Guide("grammar", "start: " + " | ".join(f'"{text}"' for text in texts)))
    with pytest.raises(SamplingError, match=r"cannot follow the answer beyond 0 tokens: .*max is 2000"):
        matcher.advance(*encode("x"))


@pytest.mark.parametrize("options", [
    {"guide": Guide("choice", choices=("yes",)), "min_tokens": 5}, {"guide": Guide("regex", r"[^\s\S]")},
    {"guide": Guide("choice", choices=("a",)), "bad_token_ids": (tuple(encode("a")),)},
])
def test_a_guide_that_leaves_nothing_is_the_requests_fault(mock: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=r"no token can follow token .*: the guide, with .* allows none") as caught:
        list(mock.stream("Hello", SamplingParams(max_tokens=8, **options)))
    assert caught.value.field == "guide"


@pytest.mark.parametrize("guide", [
    Guide("regex", "((("), Guide("json_schema", '{"type":'), Guide("json_schema", "[1]"),
    Guide("json_schema", '{"type": "shape"}'), Guide("grammar", "start: (("), Guide("grammar", "nothing"),
    Guide("json_schema", "[" * 100000), Guide("json_schema", '{"$ref": "#/nowhere"}'),
])  # fmt: skip
def test_guides_that_cannot_be_followed(guides: Guides, guide: Guide) -> None:
    with pytest.raises(SamplingError, match=f"(?i)^guide is .*{guide.kind.partition('_')[0]}") as caught:
        guides.start(guide)
    assert caught.value.field == "guide"
    assert len(str(caught.value)) < 400


def test_without_a_token_that_ends_an_answer() -> None:
    with pytest.raises(SamplingError, match="no token that ends an answer"):
        Guides(TOKENIZER, VOCAB_SIZE, []).start(Guide("json_object"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WorkFailed, match=r"llguidance, which is not installed.\n  pip install 'ingot-llm\[serve\]'"):
        Guides(TOKENIZER, VOCAB_SIZE, [EOS]).start(Guide("json_object"))


def test_compiled_once(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    guides.start(Guide("regex", "a{7}"))
    monkeypatch.setattr(module, "_grammar", None)
    guides.start(Guide("regex", "a{7}"))


def test_masks_of_rows(guides: Guides) -> None:
    """Both sets of inputs in turn; a row gets its mask anew with each token, and only then."""
    params = SamplingParams(guide=Guide("regex", "abc"))
    states = [SequenceSampling(params, [1], [EOS], guide=guides.start(Guide("regex", "abc"))) for _ in range(2)]
    plain = SequenceSampling(SamplingParams(), [1])
    buffers = [SamplingInputs(4, VOCAB_SIZE + 6, 16) for _ in range(2)]
    for number, letter in enumerate("abc"):
        inputs = buffers[number % 2]
        inputs.fill([plain, *states])
        assert inputs.mask_wait_s > 0
        assert inputs.rows["mask_row"].tolist() == [-1, 1, 2, -1]
        for row in (1, 2):
            bits = np.unpackbits(inputs.masks[row].view(np.uint8), bitorder="little")
            assert np.flatnonzero(bits).tolist() == encode(letter)
        inputs.fill([plain, *states])
        assert inputs.mask_wait_s == 0
        for state in states:
            state.append(*encode(letter))
    inputs.fill([states[0], plain])
    assert inputs.rows["mask_row"][:2].tolist() == [0, -1]
    with pytest.raises(WorkFailed):
        states[1].append(5)


def test_answers_of_an_engine(mock: Engine) -> None:
    """A random model writes what it is bound to."""
    guided = SamplingParams(max_tokens=60, temperature=1.0, seed=2, guide=Guide("json_schema", json.dumps(SCHEMA)))
    for seed in range(3):
        params = SamplingParams(**{**vars(guided), "seed": seed})
        found = [answer for answer in mock.generate(["a", "b", "c"], params) if answer.finish_reason == "stop"]
        assert all(set(json.loads(answer.text)) == {"name", "age"} for answer in found)
    choice = SamplingParams(guide=Guide("choice", choices=("red", "blue")))
    answers = mock.generate(["x", "y", "z"], choice)
    assert {answer.text for answer in answers} <= {"red", "blue"}
    assert all(answer.token_ids[-1] == EOS for answer in answers)
    with pytest.raises(SamplingError, match="guide is no regex"):
        mock.generate("x", SamplingParams(guide=Guide("regex", "(")))


def test_an_engine_without_a_tokenizer(mock_code: bytes, tmp_path: Path) -> None:
    path = write_engine(tmp_path / "x.engine", mock_code, with_tokenizer=False)
    with Engine.load(path, kv_cache_tokens=64, num_workers=1) as engine:
        with pytest.raises(SamplingError, match="guide: this engine has no tokenizer") as caught:
            engine.generate([1, 2], SamplingParams(guide=Guide("json_object")))
        assert caught.value.field == "guide"


def test_guides_are_compiled_beside_the_loop(mock_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, threads = module._grammar, []

    def compile_guide(library: Any, guide: Guide) -> str:
        threads.append(threading.get_ident())
        return real(library, guide)

    async def main() -> str:
        with LoadedEngine(mock_path, EngineOptions(kv_cache_tokens=256)) as loaded:
            engine, guide = AsyncEngine(loaded.executor), Guide("choice", choices=("red", "blue"))
            await engine.prepare(SamplingParams(guide=guide))
            request = Request("a", encode("x"), SamplingParams(guide=guide))
            text = "".join([output.text async for output in engine.generate(request)])
            await engine.prepare(SamplingParams())
            with pytest.raises(SamplingError, match="guide is no regex"):
                await engine.prepare(SamplingParams(guide=Guide("regex", "((")))
            assert loaded.executor.recorder.guided_mask_wait.total == len(text) + 1
            return text

    monkeypatch.setattr(module, "_grammar", compile_guide)
    assert asyncio.run(main()) in ("red", "blue")
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_the_null_device_follows_guides(guides: Guides) -> None:
    program = NullProgram(Limits(4, 16, 64), VOCAB_SIZE + 6, 8, next_token=lambda position, token: 40)
    guide, text = Guide("regex", "[ax]b"), []
    state = SequenceSampling(SamplingParams(guide=guide), [1], [EOS], guide=guides.start(guide))
    for position in range(3):
        inputs = program.inputs[position % 2]
        inputs.clear()
        inputs.add([1], position, [[0]], 1)
        inputs.add([2], position, [[1]], 1)
        inputs.sampling.fill([SequenceSampling(SamplingParams(), [2]), state])
        program.launch(inputs)
        tokens = program.wait().tokens[:2].tolist()
        assert tokens[0] == 40
        text.append(tokens[1])
        state.append(tokens[1])
    assert text == [*encode("ab"), EOS]

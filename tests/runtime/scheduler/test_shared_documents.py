"""Prompts with shared documents that arrive together: what is computed twice, and what not."""

import json

import pytest

from tools.prefix_workload import (
    BlockHashing,
    count,
    hashed_one_by_one,
    hashed_together,
    ingot,
    main,
    prompts,
    radix_tokens,
)


def test_hardly_a_token_is_computed_twice() -> None:
    counts = count()
    assert (counts.requests, counts.prompt_tokens, counts.no_reuse) == (100, 2250, 225_000)
    assert 0.58 <= counts.shared_documents <= 0.62
    assert counts.ideal <= counts.ingot <= 1.02 * counts.ideal
    assert counts.ingot < counts.block_hashing < counts.no_reuse
    # Deterministic: another Python, machine or day gives the same.
    assert (counts.ideal, counts.block_hashing_warm, counts.block_hashing) == (117_489, 118_216, 121_624)
    assert counts.ingot == 117_489


@pytest.mark.parametrize("max_num_tokens", [512, 16384])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_the_size_of_a_step(seed: int, max_num_tokens: int) -> None:
    counts = count(requests=40, prompt_tokens=1130, max_num_tokens=max_num_tokens, seed=seed)
    assert counts.ideal <= counts.ingot <= 1.02 * counts.ideal


def test_prompts_are_as_asked_for() -> None:
    made, shared = prompts(40, 1000, seed=3)
    assert [len(prompt) for prompt in made] == [1000] * 40
    assert prompts(40, 1000, seed=3) == (made, shared)
    assert prompts(40, 1000, seed=4) != (made, shared)


def test_the_references_count_right() -> None:
    block = list(range(100, 116))
    made = [[*block, *block, 1], [*block, *block, 2], [*block, 3, 4]]
    assert radix_tokens(made) == 33 + 1 + 2
    assert radix_tokens([[1, 2, 3], [1, 2, 3], [1, 2]]) == 3 + 1
    # Hashing finds whole blocks: all of them one by one, none within a step.
    assert hashed_one_by_one(made) == 33 + 1 + 2
    assert hashed_together(made, 100) == 33 + 33 + 18
    assert hashed_together(made, 33) == 33 + 1 + 2
    assert hashed_together(made, 40) == 33 + 33 + 2
    assert hashed_one_by_one([block, block]) == 16 + 16  # the last token is computed, so its block is
    assert BlockHashing().cached(block) == 0
    assert ingot(made, 100) == 33 + 1 + 2


def test_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "10", "--prompt-tokens", "300"]
    main(arguments)
    assert "Ingot" in capsys.readouterr().out
    main([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["no_reuse"] == 3000
    assert printed["over_ideal"] == printed["ingot"] / printed["ideal"]

"""`ingot generate` with temperature on a built engine: a seed makes an answer repeatable, and only it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import main


@pytest.mark.parametrize("precision", ["fp32", "w4a8"])
def test_seeds(speaking_engine: Callable[..., Path], capsys: pytest.CaptureFixture[str], precision: str) -> None:
    engine = str(speaking_engine("cpu", precision))

    def answer(*options: str) -> dict[str, Any]:
        argv = ["generate", engine, "Hi", "--max-tokens", "24", "--ignore-eos", "--temperature", "1.5", *options]
        assert main([*argv, "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    seeds = ["0", "1", "2", "3", "18446744073709551615"]
    first, second = ([answer("--seed", seed)["token_ids"] for seed in seeds] for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == len(seeds)
    assert answer("--seed", "1", "--num-workers", "3")["token_ids"] == first[1]
    # Without a seed each has one of its own, which is told and gives the same again.
    one, other = answer(), answer()
    assert one["token_ids"] != other["token_ids"] and one["seed"] != other["seed"]
    assert answer("--seed", str(one["seed"]))["token_ids"] == one["token_ids"]
    assert answer("--seed", "5", "--top-k", "1")["token_ids"] == answer("--seed", "6", "--top-k", "1")["token_ids"]

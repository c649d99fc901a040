"""The model and the prompts: real text, as token ids, the same for every peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ingot.runtime.errors import RequestError

from ... import demo_models
from . import random_model
from .environments import Say
from .job import Job
from .prepare import Model

TEXT = Path(__file__).parents[3] / "compiler/calibration/text.txt"
PROMPT_TOKENS, CONTEXT_TOKENS, NUM_REQUESTS = 128, 512, 16
NUM_CONTEXTS = 3
"""Prompts of the context task: one to warm up, and two of which the median counts."""


def model(name: str, cache: Path, say: Say) -> Model:
    if name in demo_models.MODELS:
        provided = demo_models.provide(demo_models.MODELS[name], say=say)
        return Model(name, provided.checkpoint, provided.gguf)
    if name == random_model.NAME:
        return random_model.provide(cache, say)
    known = ", ".join([*demo_models.MODELS, random_model.NAME])
    raise RequestError(f"model {name!r} is unknown; expected one of {known}")


def job(checkpoint: Path, threads: int) -> Job:
    """Prompts differ from each other, so that no peer's prefix cache finds anything."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    needed = NUM_CONTEXTS * CONTEXT_TOKENS + (NUM_REQUESTS + 1) * PROMPT_TOKENS
    if len(ids) < needed:
        raise RequestError(f"{TEXT.name} has {len(ids)} tokens for this tokenizer, the prompts need {needed}")
    begin = json.loads((checkpoint / "config.json").read_text()).get("bos_token_id")
    taken = 0

    def take(count: int) -> list[int]:
        nonlocal taken
        taken += count
        return [*([begin] if isinstance(begin, int) else []), *ids[taken - count : taken]][:count]

    contexts = [take(CONTEXT_TOKENS) for _ in range(NUM_CONTEXTS)]
    return Job("", threads, take(PROMPT_TOKENS), contexts, [take(PROMPT_TOKENS) for _ in range(NUM_REQUESTS)])


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

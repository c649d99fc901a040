"""The self-test record of an engine that is being built: what it answers on this machine (runtime/self_test.py)."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.runtime.engine import Engine
from ingot.runtime.engine_format import SELF_TEST
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.host import cpu_features
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.self_test import NUM_TOKENS, NUM_TOP, SelfTest, prompt_of

from .engine_writer import EngineWriter

_KV_TOKENS = 256


def require_recordable(kind: str, machine: str, features: Sequence[str], strip_weights: bool) -> None:
    """Told before the work: raises RequestError where the engine cannot be run here."""
    missing = sorted(set(features) - cpu_features())
    if strip_weights:
        raise RequestError("an engine without weights cannot be run, so that no self-test can be recorded; leave one "
                           "of the two out")
    if kind != "cpu" or machine != platform.machine() or missing:
        needs = kind if kind != "cpu" else f"{machine} with {', '.join(missing)}" if missing else machine
        raise RequestError("a self-test is recorded by running the engine, which this machine cannot: it is for "
                           f"{needs}.\n  Leave it out: a server then tries the engine out without a record")


def record_self_test(writer: EngineWriter, manifest: Mapping[str, Any]) -> None:
    """Adds selftest.json to an engine that is complete but for it. Raises WorkFailed if the engine gives no answer."""
    with writer.preview(manifest) as path:
        record = self_test_of(path)
    writer.add(SELF_TEST, record.to_json())


def self_test_of(path: Path) -> SelfTest:
    """What the engine answers here."""
    with Engine.load(path, kv_cache_tokens=_KV_TOKENS) as engine:
        encode = engine.tokenizer.encode if engine.tokenizer is not None else None
        room = engine.limits.max_seq_len
        prompt = prompt_of(engine.program.vocab_size, encode)[: max(1, room - NUM_TOKENS)]
        count = min(NUM_TOKENS, room - len(prompt))
        answer = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=count, logprobs=NUM_TOP,
                                                        ignore_eos=True))
        if not answer.logprobs:
            raise WorkFailed(f"{path}: the engine gives no answer to its self-test")
        return SelfTest.of(prompt, answer.logprobs, engine.file.manifest["target"].get("kind", "cpu"))

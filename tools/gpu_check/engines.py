"""Section "engines": whole engines on the device against the emulator's logits and against transformers.

The models are small and random; each is built once, when the pack is made, and so are the emulator's results.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.compiler.targets import Target
from ingot.runtime.errors import IngotError, WorkFailed

from .code import CodeSource
from .emulate import NUM_NEW, TOKENS

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
_MODEL_LIMITS = ("--max-batch-size", "16", "--max-num-tokens", "512", "--max-seq-len", "1024")
TEXTS = ("The sea is never still. Even on a calm day the water rises and falls,",
         "A compiler reads a program and writes another one that does the same. First it")
"""Prompts of real models."""
NUM_NEW_OF_MODELS = 24
LIMITS = ("--max-batch-size", "16", "--max-num-tokens", "32", "--max-seq-len", "128")
_EMULATOR_BOUND, _QUANTIZED_BOUND, _BF16_BOUND = 2e-2, 8e-2, 3e-2
"""Relative error of the logits: against the emulator, where sums differ in their order, so that a value may be rounded
to the other of two neighbours, which are far apart in 8 and 4 bits; of bf16 against float32."""


@dataclass(frozen=True)
class EngineResult:
    """emulator_error, model_error: of the logits, against the emulator and transformers. top1: share of tokens with the
    same best next one. differing: greedy tokens of num_tokens that differ from transformers'. problem: or ""."""

    model: str
    precision: str
    emulator_error: float
    model_error: float
    top1: float
    differing: int
    num_tokens: int
    problem: str = ""


def combinations(target: Target) -> list[tuple[str, str]]:
    """(family, precision): every precision once, every family in bf16."""
    families = [("llama", "bf16"), ("qwen3", "bf16"), ("gemma3_text", "bf16"), ("mixtral", "bf16")]
    return families + [("llama", name) for name in target.precisions if name not in ("bf16", "fp16", "fp32")]


def make(folder: Path, target: Target, chosen: list[tuple[str, str]],
         progress: Callable[[str], None] = lambda text: None) -> Iterator[tuple[Path, str]]:
    """Checkpoints, engines and expected results, as (file or folder, name in the pack). What cannot be built is told
    and left out."""
    from ..small_models import save_random, small_config

    for family in dict.fromkeys(family for family, _ in chosen):
        save_random(small_config(family, **_SIZES), folder / "models" / family)
        yield folder / "models" / family, f"models/{family}"
    for family, precision in chosen:
        yield from build_and_emulate(folder / "models" / family, folder / f"{family}.{precision}.engine",
                                     f"{family}, {precision}", ("--target", target.name, "--precision", precision),
                                     progress)


def build_and_emulate(model: Path, path: Path, title: str, options: tuple[str, ...],
                      progress: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """An engine and what the emulator gives, as (file, name in the pack). If that fails it is told."""
    try:
        progress(f"build {title}")
        run("-m", "ingot.runtime.cli", "build", str(model), "-o", str(path), *options, *LIMITS)
        progress(f"emulate {title}")
        run("-m", "tools.gpu_check.emulate", str(path), str(path.with_suffix(".npz")))
    except WorkFailed as error:
        progress(f"left out: {title}: {error}")
        return
    for file in (path, path.with_suffix(".npz")):
        yield file, f"engines/{file.name}"


def make_model(folder: Path, target: Target, model: str) -> Iterator[tuple[Path, str]]:
    """Engines of a real checkpoint, without its weights: in bf16, and in the first of the quantized precisions."""
    for precision in model_precisions(target):
        path = folder / f"model.{precision}.engine"
        run("-m", "ingot.runtime.cli", "build", model, "--target", target.name, "--precision", precision,
             "--strip-weights", "-o", str(path), *_MODEL_LIMITS)
        yield path, f"engines/{path.name}"


def model_precisions(target: Target) -> list[str]:
    wanted: tuple[str, ...] = ("bf16", "fp8", "int8")
    return [name for name in wanted if name in target.precisions][:2]


def check_model(source: CodeSource, folder: Path, model: str, device: str,
                progress: Callable[[str], None] = lambda text: None) -> list[EngineResult]:
    """The engines of a real checkpoint, whose weights are put in here, against transformers."""
    found = []
    for precision in model_precisions(source.target):
        progress(f"{model}, {precision}")
        found.append(_check_model(source, folder, model, precision, device))
    return found


def _check_model(source: CodeSource, folder: Path, model: str, precision: str, device: str) -> EngineResult:
    from ingot.compiler.compare import compare
    from ingot.compiler.reference_model import ReferenceModel
    from ingot.compiler.refit import RefitRequest, refit
    from ingot.runtime.engine import Engine

    name, nan = Path(model).name, float("nan")
    stripped = source.member(f"engines/model.{precision}.engine", folder)
    if stripped is None:
        return EngineResult(name, precision, nan, nan, nan, 0, 0, "not in the pack: make one with --model")
    whole = folder / f"whole.model.{precision}.engine"
    try:
        refit(RefitRequest(stripped, model, whole, force=True))
        with Engine.load(whole, device=device) as engine:
            prompts = [engine.encode(text) for text in TEXTS]
            against = compare(engine, ReferenceModel(model), prompts, NUM_NEW_OF_MODELS)
    except IngotError as failure:
        return EngineResult(name, precision, nan, nan, nan, 0, 0, " ".join(str(failure).split())[:300])
    finally:
        whole.unlink(missing_ok=True)
    bound = _BF16_BOUND if precision == "bf16" else float("inf")
    problem = "" if against.logits.relative <= bound else f"logits are {against.logits.relative:.2g} off transformers'"
    return EngineResult(name, precision, nan, against.logits.relative, against.top1_agreement,
                        len(against.greedy.differences), against.greedy.num_tokens, problem)


def run(*arguments: str) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(root)})
    if done.returncode:
        raise WorkFailed(" | ".join((done.stderr or done.stdout).strip().splitlines()[-3:]))


def check_engines(source: CodeSource, folder: Path, chosen: list[tuple[str, str]], device: str,
                  progress: Callable[[str], None] = lambda text: None) -> list[EngineResult]:
    """Those of the pack. A model or engine that the pack lacks is a problem of its row."""
    found = []
    for family, precision in chosen:
        result = _check(source, folder, family, precision, device)
        found.append(result)
        progress(f"{family}, {precision}: {result.problem or f'{result.emulator_error:.1e} off the emulator'}")
    return found


def _check(source: CodeSource, folder: Path, family: str, precision: str, device: str) -> EngineResult:
    from ingot.compiler.compare import compare
    from ingot.compiler.reference_model import ReferenceModel
    from ingot.runtime.engine import Engine
    from ingot.runtime.sampling import SamplingParams

    names = f"engines/{family}.{precision}.engine", f"engines/{family}.{precision}.npz", f"models/{family}"
    path, expected, model = (source.member(name, folder) for name in names)
    nan = float("nan")
    if path is None or expected is None or model is None:
        return EngineResult(family, precision, nan, nan, nan, 0, 0, "not in the pack: it could not be built")
    try:
        with Engine.load(path, device=device, kv_cache_tokens=512) as engine:
            wanted = np.load(expected)
            logits = engine.logits(TOKENS)
            error = relative_error(logits, wanted["logits"])
            answer = engine.generate(list(TOKENS[:4]), SamplingParams(max_tokens=NUM_NEW, temperature=0.0))
            against = compare(engine, ReferenceModel(str(model)), [TOKENS[:16], TOKENS[4:12]], 8)
    except IngotError as failure:
        return EngineResult(family, precision, nan, nan, nan, 0, 0, " ".join(str(failure).split())[:300])
    problems = []
    bound = _EMULATOR_BOUND if precision == "bf16" else _QUANTIZED_BOUND
    if not error <= bound:
        problems.append(f"logits are {error:.2g} off the emulator's; allowed are {bound}")
    elif precision == "bf16" and answer.token_ids[0] != wanted["greedy"][0]:
        problems.append(f"greedy tokens {answer.token_ids}, in the emulator {wanted['greedy'].tolist()}")
    if precision == "bf16" and not against.logits.relative <= _BF16_BOUND:
        problems.append(f"logits are {against.logits.relative:.2g} off transformers'")
    return EngineResult(family, precision, error, against.logits.relative, against.top1_agreement,
                        len(against.greedy.differences), against.greedy.num_tokens, "; ".join(problems))


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))

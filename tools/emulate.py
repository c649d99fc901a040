"""GPU engines in the emulator, against the graph that they were compiled from and against Hugging Face.

    python -m tools.emulate [--model NAME …] [--target NAME …] [--precision NAME …] [--tokens N] [--new-tokens N]

Models: two layers of random weights of llama, qwen3, gemma3, mixtral and gpt_oss, and SmolLM2 cut to its first four
layers. Each is built for each target and precision, loaded from its file, and run as any other engine is. Exit status 1
if anything differs by more than it may.

    graph    relative error of the engine's logits, against its final graph interpreted in float32: matrices and their
             inputs quantized as the precision says, nothing else rounded
    float32  the same for an engine in which nothing else is rounded either: what remains is the order of sums. Of the
             middle token: now and then an input lies between two codes so exactly that the order of a sum decides, and
             that token and those behind it differ by what a code is worth; told as "codes differ in N"
    engine, scheme  relative errors of the engine and of that graph against Hugging Face's model in float32

In models with experts, tokens whose choice of experts is a near tie are left out: whoever rounds otherwise chooses
others, and either choice is right. The row says how many tokens were compared.

Engines keep values between launches in 16 bits. Where a matrix quantizes its inputs to 8 bits or fewer, such a rounding
decides now and then between two codes, and the error against the graph is of the size of the scheme's own. So of those
precisions the arithmetic is proven in float32, and the engine may not be worse than its scheme.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.compare import Greedy, compare_greedy
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import GPU_PRECISIONS, find_precision
from ingot.compiler.reference_model import ReferenceModel
from ingot.compiler.targets import find_target
from ingot.runtime.engine import Engine
from ingot.runtime.folders import cache_folder

FAMILIES = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text", "mixtral": "mixtral", "gpt_oss": "gpt_oss"}
"""Name -> model_type of transformers."""

SMOLLM2 = "smollm2-4"
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 128}
_SIZES: dict[str, int] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "sliding_window": 32}

QUANTIZES_INPUTS = ("fp8", "int8", "w4a8", "nvfp4")
BOUND, FLOAT32_BOUND = 2e-2, 1e-3
WORSE = 1.25
"""How much larger the error of an engine may be than that of its scheme: two draws of the same roundings."""

NEAR_TIE = 0.05
"""Between the last expert that a token gets and the next, in standard deviations of the router's logits."""

EXPLAINED = 6.0
"""A greedy token may differ where the two best logits are at most so many of the engine's typical errors apart."""


def random_checkpoint(family: str, folder: Path) -> Path:
    """Two layers of random weights; extents are multiples of the groups of every precision."""
    from .small_models import save_random, small_config

    save_random(small_config(FAMILIES[family], **_SIZES), folder)
    return folder


def first_layers(checkpoint: Path, count: int, folder: Path) -> Path:
    """A real model without its later layers, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint, num_hidden_layers=count, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """The final graph of an engine, to be interpreted in numpy."""

    graph: Graph
    source: Any

    @classmethod
    def of(cls, checkpoint: Path, target: str, precision: str, max_seq_len: int, cache: BuildCache) -> Reference:
        chosen = find_precision(precision, find_target(target).gpu)
        source = open_checkpoint_source(str(checkpoint), None)
        imported, _ = source.graph(source.facts(cache), max_seq_len, cache)
        return cls(run_passes(imported, gpu_pipeline(chosen, chosen.kv)), source.checkpoint)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """f32 [T, vocab], computed in one piece."""
        return self._values(tokens, ())[self.graph.outputs[0]]

    def is_clear(self, tokens: Sequence[int]) -> np.ndarray:
        """bool [T]: in no layer is the token's choice of experts a near tie."""
        routers = {node.inputs[0]: node.attrs["choices"] for node in self.graph.nodes if node.op == "route"}
        clear = np.ones(len(tokens), bool)
        for name, value in self._values(tokens, [str(name) for name in routers]).items():
            if name in routers:
                ordered = -np.sort(-value, axis=1)
                clear &= ordered[:, routers[name] - 1] - ordered[:, routers[name]] > NEAR_TIE * value.std()
        return clear

    def _values(self, tokens: Sequence[int], keep: Sequence[str]) -> dict[str, np.ndarray]:
        count = len(tokens)
        inputs = {"token_ids": np.array(tokens, np.int32), "positions": np.arange(count, dtype=np.int32),
                  "logit_rows": np.arange(count, dtype=np.int32)}
        return run(self.graph, inputs, self.source, keep)


@contextmanager
def in_float32(precision: str, target: str) -> Iterator[str]:
    """A precision whose matrices are quantized as in this one while everything else is float32, for as long as the
    block runs. Gives its name."""
    name, found = f"{precision}+fp32", find_target(target)
    given = find_precision(precision, found.gpu)
    rules = tuple(replace(rule, scheme="fp32" if rule.scheme in ("bf16", "fp16") else rule.scheme)
                  for rule in given.rules)
    GPU_PRECISIONS[name] = replace(given, name=name, rules=rules, floats="fp32", kv="fp32")
    found.precisions[name] = found.precisions[precision]
    try:
        yield name
    finally:
        del GPU_PRECISIONS[name], found.precisions[name]


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@dataclass(frozen=True)
class Exactness:
    """Relative errors of tokens: the median's, and how many of them have more than FLOAT32_BOUND; whole: all together.
    """

    median: float
    whole: float
    beyond: int

    @classmethod
    def of(cls, got: np.ndarray, wanted: np.ndarray) -> Exactness:
        each = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        return cls(float(np.median(each)), relative(got, wanted), int((each > FLOAT32_BOUND).sum()))

    def __str__(self) -> str:
        return f"{self.median:.1e}" + (f", codes differ in {self.beyond}" if self.beyond else "")


@dataclass(frozen=True)
class Row:
    """Errors over num_clear tokens of num_tokens. float32: None where the precision quantizes no inputs. greedy: where
    answers were compared; gap of those differences that no near tie of experts explains; logit_error: the engine's
    typical error of a logit.
    """

    model: str
    target: str
    precision: str
    graph: float
    float32: Exactness | None
    engine: float
    scheme: float
    greedy: Greedy | None
    gap: float
    logit_error: float
    num_clear: int
    num_tokens: int
    seconds: float

    @property
    def failures(self) -> list[str]:
        where, found = f"{self.model}, {self.target}, {self.precision}", []
        if self.float32 is None:
            bound = FLOAT32_BOUND if self.precision == "fp32" else BOUND
            if not self.graph <= bound:
                found.append(f"{where}: relative error {self.graph:.2e} against the graph exceeds {bound:.0e}")
        else:
            if not (self.float32.median <= FLOAT32_BOUND and self.float32.whole <= BOUND):
                found.append(f"{where}: relative error {self.float32.median:.2e} in float32 exceeds "
                             f"{FLOAT32_BOUND:.0e}, or {self.float32.whole:.2e} of all tokens {BOUND:.0e}")
            if not self.engine <= WORSE * self.scheme + BOUND:
                found.append(f"{where}: the engine's error {self.engine:.2e} is beyond its scheme's {self.scheme:.2e}")
        if self.gap > EXPLAINED * self.logit_error:
            found.append(f"{where}: a greedy token differs where the two best logits are {self.gap:.3f} apart; logits "
                         f"err by {self.logit_error:.3f}")
        if 2 * self.num_clear < self.num_tokens:
            found.append(f"{where}: only {self.num_clear} of {self.num_tokens} tokens choose their experts clearly")
        return found


def emulate(model: str, checkpoint: Path, target: str, precision: str, folder: Path, cache: BuildCache, *,
            num_tokens: int = 40, num_new_tokens: int = 8) -> Row:
    """Builds an engine and runs it. num_tokens: of the prompt whose logits are compared."""
    begin = time.perf_counter()
    path = _built(checkpoint, target, precision, folder, cache)
    reference = Reference.of(checkpoint, target, precision, LIMITS["max_seq_len"], cache)
    greedy, gap = None, 0.0
    with Engine.load(path, device="emulator", kv_cache_tokens=512) as engine:
        tokens = _prompt(engine, num_tokens)
        logits = engine.logits(tokens)
        hugging_face = ReferenceModel(str(checkpoint))
        if precision == "bf16" and num_new_tokens:
            prompts = [tokens[:20], [*tokens[:17], *tokens[5:12]]]  # the second begins as the first does
            greedy = compare_greedy(engine, hugging_face, prompts, num_new_tokens)
            gap = _unexplained(greedy, prompts, hugging_face, reference)
    clear = reference.is_clear(tokens)
    logits, graph, wanted = logits[clear], reference.logits(tokens)[clear], hugging_face.logits(tokens)[clear]
    float32 = None
    if precision in QUANTIZES_INPUTS:
        with in_float32(precision, target) as wide:
            path = _built(checkpoint, target, wide, folder, cache)
            exact = Reference.of(checkpoint, target, wide, LIMITS["max_seq_len"], cache).logits(tokens)
            with Engine.load(path, device="emulator", kv_cache_tokens=512) as engine:
                float32 = Exactness.of(engine.logits(tokens), exact)
    return Row(model, target, precision, relative(logits, graph), float32, relative(logits, wanted),
               relative(graph, wanted), greedy, gap, float(np.sqrt(np.mean((logits - wanted) ** 2))),
               int(clear.sum()), len(clear), time.perf_counter() - begin)


def _unexplained(greedy: Greedy, prompts: Sequence[list[int]], hugging_face: ReferenceModel,
                 reference: Reference) -> float:
    """The largest gap of the differences at tokens that choose their experts clearly."""
    gaps = [0.0]
    for difference in greedy.differences:
        prompt = prompts[difference.prompt]
        before = [token for token, _ in hugging_face.greedy(prompt, difference.position)] if difference.position else []
        if reference.is_clear([*prompt, *before])[-1]:
            gaps.append(difference.gap)
    return max(gaps)


def _built(checkpoint: Path, target: str, precision: str, folder: Path, cache: BuildCache) -> Path:
    """Weights are rounded to nearest, as the graph's are."""
    path = folder / f"{checkpoint.name}.{target}.{precision}.engine"
    build(BuildRequest(str(checkpoint), target, precision, path, calibrate=False, force=True, **LIMITS), cache=cache)
    return path


def _prompt(engine: Engine, count: int) -> list[int]:
    if engine.tokenizer is None:
        return [int(token) for token in np.random.default_rng(1).integers(0, engine.program.vocab_size, count)]
    text = " ".join((__doc__ or "").split())
    return engine.tokenizer.encode(text)[:count]


def report(rows: Sequence[Row]) -> str:
    lines = ["| model | target | precision | tokens | graph | float32 | engine | scheme | greedy tokens equal | s |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        float32 = "" if row.float32 is None else str(row.float32)
        greedy = ""
        if row.greedy is not None:
            count = row.greedy.num_tokens
            greedy = f"{count - len(row.greedy.differences)} of {count}"
            if row.greedy.differences:
                told = f"gap {row.gap:.3f}, error {row.logit_error:.3f}" if row.gap else "experts at a near tie"
                greedy += f" ({told})"
        clear = str(row.num_clear) if row.num_clear == row.num_tokens else f"{row.num_clear} of {row.num_tokens}"
        lines.append(f"| {row.model} | {row.target} | {row.precision} | {clear} | {row.graph:.1e} | {float32} | "
                     f"{row.engine:.1e} | {row.scheme:.1e} | {greedy} | {row.seconds:.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = (*FAMILIES, SMOLLM2)
    parser.add_argument("--model", nargs="+", choices=models, default=list(models), metavar="NAME",
                        help=f"of {', '.join(models)} (default: all)")
    parser.add_argument("--target", nargs="+", default=["h200"], metavar="NAME", help="default h200")
    parser.add_argument("--precision", nargs="+", default=["bf16"], metavar="NAME", help="default bf16")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="length of the prompt (default 40)")
    parser.add_argument("--new-tokens", type=int, default=8, metavar="N", help="length of greedy answers (default 8)")
    arguments = parser.parse_args(argv)
    # Transformers imports Triton, which then could only compile.
    os.environ["TRITON_INTERPRET"] = "1"
    rows, cache = [], BuildCache(cache_folder())
    with TemporaryDirectory(prefix="ingot-emulate-") as name:
        for model in arguments.model:
            folder = Path(name) / model
            checkpoint = _checkpoint(model, folder)
            for target in arguments.target:
                for precision in arguments.precision:
                    if precision not in find_target(target).precisions:
                        continue
                    rows.append(emulate(model, checkpoint, target, precision, Path(name), cache,
                                        num_tokens=arguments.tokens, num_new_tokens=arguments.new_tokens))
                    print(report(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(report(rows))
    failures = [failure for row in rows for failure in row.failures]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _checkpoint(model: str, folder: Path) -> Path:
    if model != SMOLLM2:
        return random_checkpoint(model, folder)
    from .demo_models import MODELS, provide

    return first_layers(provide(MODELS["smollm2"]).checkpoint, 4, folder)


if __name__ == "__main__":
    sys.exit(main())

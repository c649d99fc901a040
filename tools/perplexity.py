"""Perplexity of engines and of their checkpoint on a held-out text: how much a precision costs.

    python -m tools.perplexity CHECKPOINT x.fp32.engine x.int8.engine x.w4a8.engine

By default the text is the documentation that Python brings, cut to --tokens tokens; the SHA-256 of what was read is
printed with the figures. The increase is told against the checkpoint in float32 (Hugging Face's implementation), or
with --no-reference against the first engine.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from ingot.compiler.quality import (
    DEFAULT_WINDOW,
    Perplexity,
    documentation_text,
    engine_scorer,
    perplexity,
    reference_scorer,
)
from ingot.runtime.cli.output import Progress, print_json, table
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError, RequestError


def main() -> int:
    parser = argparse.ArgumentParser("perplexity", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("checkpoint", help="what the engines were built from")
    parser.add_argument("engines", nargs="+", help="engine files")
    parser.add_argument("--text", type=Path, help="text file (default: the documentation of Python)")
    parser.add_argument("--tokens", type=int, default=24_000, help="tokens of the text to use (default 24000)")
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help=f"tokens a window ({DEFAULT_WINDOW})")
    parser.add_argument("--no-reference", action="store_true", help="do not run the checkpoint")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        report = measure(arguments)
    except IngotError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return error.exit_status
    print_json(report) if arguments.json else print(_text(report))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    for path in arguments.engines:
        EngineFile.open(path).close()  # a wrong path shows now, not after minutes
    tokens, prefix, source = _tokens(arguments)
    results = []
    if not arguments.no_reference:
        from ingot.compiler.reference_model import ReferenceModel

        score = reference_scorer(ReferenceModel(arguments.checkpoint))
        results.append(_result("checkpoint (fp32)", score, tokens, prefix, arguments))
        del score
    for path in arguments.engines:
        with Engine.load(path, kv_cache_tokens=arguments.window) as engine:
            results.append(_result(f"{Path(path).name}", engine_scorer(engine), tokens, prefix, arguments))
    for result in results:
        result["increase"] = result["perplexity"] / results[0]["perplexity"] - 1
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return {"text": source, "num_tokens": len(tokens), "tokens_sha256": digest, "window": arguments.window,
            "results": results}


def _tokens(arguments: argparse.Namespace) -> tuple[list[int], list[int], str]:
    """The tokens, what the tokenizer puts in front of a text, and what the text is."""
    text, source = (documentation_text(), f"documentation of Python {platform.python_version()}")
    if arguments.text is not None:
        text, source = arguments.text.read_text(), str(arguments.text)
    with Engine.load(arguments.engines[0], kv_cache_tokens=arguments.window) as engine:
        if engine.tokenizer is None:
            raise RequestError(f"{arguments.engines[0]} has no tokenizer")
        prefix = engine.tokenizer.encode("")
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < arguments.tokens:
        raise RequestError(f"the text has {len(tokens)} tokens, --tokens asks for {arguments.tokens}")
    return tokens[: arguments.tokens], prefix, source


def _result(name: str, score: Any, tokens: list[int], prefix: list[int], arguments: argparse.Namespace,
            ) -> dict[str, Any]:
    progress, begin = Progress(not arguments.json), time.perf_counter()
    found: Perplexity = perplexity(score, tokens, arguments.window, prefix,
                                   lambda done, total: progress.show(f"{name}: {done} of {total} tokens"))
    progress.clear()
    return {"name": name, "perplexity": found.value, "mean_nll": found.mean_nll, "num_predicted": found.num_tokens,
            "seconds": round(time.perf_counter() - begin, 1)}


def _text(report: dict[str, Any]) -> str:
    rows = [(result["name"], f"{result['perplexity']:.4f}", f"{result['increase']:+.2%}", f"{result['seconds']} s")
            for result in report["results"]]
    return "\n".join([
        f"{report['text']}: {report['num_tokens']} tokens (SHA-256 {report['tokens_sha256'][:16]}…) in windows of "
        f"{report['window']}; {report['results'][0]['num_predicted']} predicted",
        table(rows, ("", "perplexity", "increase", "time")),
    ])


if __name__ == "__main__":
    sys.exit(main())

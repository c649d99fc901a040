"""ingot compare ENGINE CHECKPOINT: layer by layer against Hugging Face."""

import argparse
from dataclasses import asdict
from pathlib import Path

from ingot.runtime.cli.engine_options import add_device_argument, add_engine_argument
from ingot.runtime.cli.output import Progress, print_json, table
from ingot.runtime.engine import Engine
from ingot.runtime.errors import RequestError

from ..compare import Comparison, compare
from ..quality import documentation_text
from ..quality_gate import quality_of
from ..reference_model import ReferenceModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser)
    parser.add_argument("checkpoint", help="what it was built from: folder, hub name, or GGUF file")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="length of a prompt (default 64)")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="prompts to answer greedily (default 2)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="length of an answer (default 32)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text that the prompts are cut from (default: the "
                        "documentation of Python)")
    parser.add_argument("--max-relative-error", type=float, metavar="X",
                        help="fail above it (default: 1e-4 for fp32 engines, else only report)")
    add_device_argument(parser)
    parser.add_argument("--quality", action="store_true", help="measure perplexity, agreement and the worst layers "
                        "over the held-out text instead, as ingot build --measure-quality does")


def run(arguments: argparse.Namespace) -> int:
    if arguments.quality:
        return _quality(arguments)
    for name in ("tokens", "prompts"):
        if getattr(arguments, name) < 1:
            raise RequestError(f"--{name} is {getattr(arguments, name)}; expected at least 1")
    if arguments.new_tokens < 0:
        raise RequestError(f"--new-tokens is {arguments.new_tokens}; expected 0 or more")
    with Engine.load(arguments.engine, device=arguments.device, store=arguments.store) as engine:
        prompts = _prompts(engine, arguments)
        comparison = compare(engine, ReferenceModel(arguments.checkpoint), prompts, arguments.new_tokens,
                             arguments.max_relative_error)
    if arguments.json:
        print_json({**asdict(comparison), "failures": comparison.failures})
    else:
        print(_text(comparison))
    return 1 if comparison.failures else 0


def _quality(arguments: argparse.Namespace) -> int:
    progress = Progress(not arguments.json)
    quality = quality_of(arguments.engine, arguments.checkpoint,
                         lambda done, total: progress.show(f"{done} of {total} tokens"),
                         device=arguments.device, store=arguments.store)
    progress.clear()
    print_json(quality.to_json()) if arguments.json else print(table(quality.describe()))
    return 0


def _prompts(engine: Engine, arguments: argparse.Namespace) -> list[list[int]]:
    """Pieces of the text of equal length, spread evenly; of an engine without tokenizer, ids by a fixed rule."""
    count, length = arguments.prompts, arguments.tokens
    longest = min(engine.limits.max_num_tokens, engine.limits.max_seq_len - arguments.new_tokens)
    if length > longest:
        raise RequestError(f"--tokens is {length}; with --new-tokens {arguments.new_tokens} this engine takes at most "
                           f"{longest}")
    if engine.tokenizer is None:
        # A step that has no divisor in common with the vocabulary's size soon meets tokens of every region.
        return [[(7919 * (i + number * length) + 11) % engine.program.vocab_size for i in range(length)]
                for number in range(count)]
    text = documentation_text() if arguments.text is None else _read(arguments.text)
    stride = len(text) // count
    prompts = [engine.tokenizer.encode(text[number * stride : (number + 1) * stride][: 32 * length])[:length]
               for number in range(count)]
    if min(map(len, prompts)) < length:
        raise RequestError(f"the text is too short for {count} prompts of {length} tokens; lower --prompts or --tokens")
    return prompts


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from None


def _text(comparison: Comparison) -> str:
    rows = [(d.name, f"{d.relative:.2e}", "" if d.own is None else f"{d.own:.2e}", f"{d.max_abs:.2e}",
             f"{d.cosine:.8f}") for d in (*comparison.layers, comparison.logits)]
    greedy = comparison.greedy
    same = greedy.num_tokens - len(greedy.differences)
    lines = [
        table(rows, ("layer", "relative error", "own error", "max abs", "cosine")),
        "",
        f"over {comparison.num_tokens} tokens: best next token equal for {comparison.top1_agreement:.1%}, "
        f"KL divergence {comparison.kl_divergence:.2e} nats",
        f"greedy answers: {same} of {greedy.num_tokens} tokens equal" + (
            f"; where they differ, the reference's two best logits are at most {greedy.largest_gap:.2e} apart"
            if greedy.differences else ""),
        f"largest relative error {comparison.largest.relative:.2e} ({comparison.largest.name})",
    ]
    if worst := comparison.worst_layers[:3]:
        lines.append("layers that err most by themselves: " + ", ".join(f"{d.name} ({d.own:.2e})" for d in worst))
    if comparison.untraced:
        lines.append(f"not traced, fused into others: {', '.join(comparison.untraced)}")
    if comparison.bound is not None:
        lines += [f"FAILED: {failure}" for failure in comparison.failures] or [f"within {comparison.bound:.2e}"]
    return "\n".join(lines)

"""ingot generate ENGINE "prompt": one request, tokens as they come."""

import argparse
import gc
import resource
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .beside import Beside
from .engine_options import (
    add_device_argument,
    add_engine_argument,
    add_lora_argument,
    add_speculation_argument,
    load_adapter,
    open_engine,
)
from .output import print_json, size
from .sampling_options import add_sampling_arguments, sampling_params

if TYPE_CHECKING:
    from ..engine import Engine, Piece
    from ..tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser)
    parser.add_argument("prompt", help="text; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="as a message in a chat (default if it has a template)")
    form.add_argument("--raw", action="store_true", help="as a text that the model continues")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt; with a chat only")
    add_sampling_arguments(parser, max_tokens=256)
    parser.add_argument("--ignore-eos", action="store_true", help="do not end where the model ends")
    add_lora_argument(parser)
    add_device_argument(parser)
    parser.add_argument("--num-workers", type=int, metavar="N", help="threads (default: physical cores)")
    add_speculation_argument(parser)
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="room of the KV cache")
    parser.add_argument("--stats", action="store_true", help="print times, rates and memory to stderr")


def run(arguments: argparse.Namespace) -> int:
    gc.disable()  # while modules and a plan are read there is nothing to collect, and much to look through
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    beside = Beside.start(lambda: _token_ids(arguments, text))
    from ..engine import Engine

    params = sampling_params(arguments, arguments.ignore_eos).seeded()
    begin = time.perf_counter()
    with Engine.load(arguments.engine, device=arguments.device, kv_cache_tokens=arguments.kv_cache_tokens,
                     num_workers=arguments.num_workers, store=arguments.store,
                     speculative_tokens=arguments.speculative_tokens) as engine:
        loaded = time.perf_counter()
        gc.enable()
        lora = load_adapter(engine, arguments.lora)
        token_ids = beside.result() if beside is not None else None
        if token_ids is None:  # without a process of its own, or for the error that it met
            token_ids = engine.encode(_prompt(arguments, text, engine.tokenizer))
        pieces, times = _answer(engine.stream(token_ids, params, lora), not arguments.json)
        facts = _facts(engine, len(token_ids), pieces, [loaded - begin, *(moment - loaded for moment in times)])
    if arguments.json:
        print_json({"engine": engine.hash, "seed": params.seed, **facts})
    elif arguments.stats:
        print(_stats(facts), file=sys.stderr)
    return 0


def _token_ids(arguments: argparse.Namespace, text: str) -> list[int]:
    """Of the prompt, from the engine's file alone."""
    from ..prompt import encode
    from ..tokenizer import Tokenizer

    with open_engine(arguments) as file:
        tokenizer = Tokenizer.of(file, when_needed=True)
        return encode(_prompt(arguments, text, tokenizer), tokenizer, file.path)


def _prompt(arguments: argparse.Namespace, text: str, tokenizer: "Tokenizer | None") -> Any:
    has_template = tokenizer is not None and tokenizer.has_chat_template
    if arguments.raw or not (has_template or arguments.chat):
        if arguments.system is not None:
            raise RequestError("--system needs a chat; leave out --raw, or use an engine that has a chat template")
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]


def _answer(stream: "Iterator[Piece]", shown: bool) -> "tuple[list[Piece], list[float]]":
    """The pieces and the moment of each, printed as they come if `shown`."""
    pieces, times = [], []
    for piece in stream:
        times.append(time.perf_counter())
        pieces.append(piece)
        if shown:
            print(piece.text, end="", flush=True)
    if shown:
        print(flush=True)
    return pieces, times


def _facts(engine: "Engine", num_prompt_tokens: int, pieces: "list[Piece]", times: list[float]) -> dict[str, Any]:
    """`times`: of loading, then of each token since the request began, in seconds."""
    load_s, first_s, last_s = times[0], times[1], times[-1]
    later = len(pieces) - 1
    memory, program = engine.file.manifest["memory"], engine.program
    return {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [piece.token_id for piece in pieces],
        "finish_reason": pieces[-1].finish_reason,
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": len(pieces),
        "load_s": round(load_s, 4),
        "time_to_first_token_s": round(first_s, 4),
        "total_s": round(last_s, 4),
        "tokens_per_s": round(later / (last_s - first_s), 2) if later else None,
        "memory": {
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "weights_bytes": memory.get("weights_bytes"),
            "arena_bytes": memory.get("arena_bytes"),
            "kv_used_bytes": engine.kv.held(num_prompt_tokens + later) * program.block_bytes,
        },
    }


def _stats(facts: dict[str, Any]) -> str:
    rate = f", then {facts['tokens_per_s']:.1f} tokens/s" if facts["tokens_per_s"] else ""
    memory = facts["memory"]
    return (
        f"[{facts['num_prompt_tokens']} + {facts['num_tokens']} tokens, {facts['finish_reason']}; "
        f"loaded in {facts['load_s'] * 1e3:.0f} ms, "
        f"first token after {facts['time_to_first_token_s'] * 1e3:.0f} ms{rate}; "
        f"{size(memory['peak_resident_bytes'])} resident]"
    )

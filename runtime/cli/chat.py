"""ingot chat ENGINE: a conversation in the terminal, or one that is read from a file, a message a line.

What was said before stays in the KV cache, so that each turn computes its own message only.
"""

import argparse
import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .engine_options import (
    add_device_argument,
    add_engine_argument,
    add_lora_argument,
    add_speculation_argument,
    load_adapter,
)
from .sampling_options import add_sampling_arguments, sampling_params

if TYPE_CHECKING:
    from ..engine import Engine
    from ..sampling import SamplingParams

_PROMPT = "> "
_HELP = "/new begins another conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message before all others")
    add_sampling_arguments(parser, max_tokens=1024)
    add_lora_argument(parser)
    add_device_argument(parser)
    parser.add_argument("--num-workers", type=int, metavar="N", help="threads (default: physical cores)")
    add_speculation_argument(parser)
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="room of the KV cache")


def run(arguments: argparse.Namespace) -> int:
    """Until the end of the input. A message that cannot be answered is told, and it goes on without it."""
    from ..engine import Engine

    params = sampling_params(arguments)
    at_terminal = sys.stdin.isatty() and not arguments.json
    with Engine.load(arguments.engine, device=arguments.device, kv_cache_tokens=arguments.kv_cache_tokens,
                     num_workers=arguments.num_workers, store=arguments.store,
                     speculative_tokens=arguments.speculative_tokens) as engine:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise RequestError(f"{arguments.engine} has no chat template.\n  `ingot generate` continues a text")
        lora = load_adapter(engine, arguments.lora)
        begin = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        messages = list(begin)
        if at_terminal:
            print(_HELP, file=sys.stderr)
        while (text := _read(at_terminal)) is not None and text.strip() != "/quit":
            if text.strip() == "/new":
                messages = list(begin)
            elif text.strip():
                messages = _turn(engine, messages, text, params, lora, arguments.json)
    return 0


def _read(at_terminal: bool) -> str | None:
    """The next message; None at the end of the input."""
    if not at_terminal:
        return line.rstrip("\n") if (line := sys.stdin.readline()) else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (arrows and history, where the system has it)
    try:
        return input(_PROMPT)
    except EOFError:
        print()
        return None


def _turn(engine: "Engine", messages: list[dict[str, str]], text: str, params: "SamplingParams",
          lora: str | None, as_json: bool) -> list[dict[str, str]]:
    """The conversation with this message and its answer; without both if it cannot be answered."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        answer, reason, count = _answer(engine, asked, params, lora, not as_json)
    except RequestError as error:  # such as a conversation that has become too long
        print(f"ingot: {type(error).__name__}: {error}\n  /new begins another conversation", file=sys.stderr)
        return messages
    if as_json:
        facts = {"text": answer, "finish_reason": reason, "num_tokens": count}
        print(json.dumps(facts, ensure_ascii=False), flush=True)
    elif reason != "stop":
        print(f"[{reason}, {count} tokens]", file=sys.stderr)
    return [*asked, {"role": "assistant", "content": answer}]


def _answer(engine: "Engine", messages: list[dict[str, str]], params: "SamplingParams",
            lora: str | None, shown: bool) -> tuple[str, str, int]:
    """Text, "stop", "length" or "interrupted", and the number of tokens."""
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True

    stream = engine.stream(messages, params.seeded(), lora)
    pieces, reason = [], "interrupted"
    before = signal.signal(signal.SIGINT, interrupt)  # between two steps, not within one
    try:
        for piece in stream:
            pieces.append(piece.text)
            if shown:
                print(piece.text, end="", flush=True)
            if piece.finish_reason is not None:
                reason = piece.finish_reason
            elif interrupted:
                break
    finally:
        stream.close()
        signal.signal(signal.SIGINT, before)
        if shown:
            print(flush=True)
    return "".join(pieces), reason, len(pieces)

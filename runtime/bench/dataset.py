"""Requests from a file: one JSON object a line, in the form that trtllm-bench reads.

    {"task_id": 0, "prompt": "Write a short story.", "output_tokens": 128}
    {"task_id": 1, "input_ids": [1, 863, 22056], "output_tokens": 64}
"""

import json
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .workload import Session, Turn

_FIELDS = ("task_id", "prompt", "input_ids", "output_tokens")


def read_dataset(path: str, vocab_size: int | None = None, max_seq_len: int | None = None) -> list[Session]:
    """The sessions, of one request each, in the file's order; "-" is standard input's file, /dev/stdin.

    Raises RequestError with the line's number; token ids and lengths are held against the engine's where it is known.
    """
    try:
        lines = Path("/dev/stdin" if path == "-" else path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"cannot read the data set {path!r}: {reason}") from None
    sessions = [_session(line, f"{path}, line {number}", vocab_size, max_seq_len)
                for number, line in enumerate(lines, 1) if line.strip()]
    if not sessions:
        raise RequestError(f"{path}: no requests; expected one JSON object a line, with {', '.join(_FIELDS)}")
    return sessions


def _session(line: str, where: str, vocab_size: int | None, max_seq_len: int | None) -> Session:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise RequestError(f"{where}: expected an object, got {type(entry).__name__}")
    if unknown := sorted(set(entry) - set(_FIELDS)):
        raise RequestError(f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(_FIELDS)}")
    if ("prompt" in entry) == ("input_ids" in entry):
        raise RequestError(f"{where}: expected either prompt or input_ids")
    output_tokens = entry.get("output_tokens")
    if type(output_tokens) is not int or output_tokens < 1:
        raise RequestError(f"{where}: output_tokens is {output_tokens!r}; expected an integer of at least 1")
    prompt = _text(entry["prompt"], where) if "prompt" in entry else _ids(entry["input_ids"], where, vocab_size)
    if max_seq_len is not None and isinstance(prompt, list) and len(prompt) + output_tokens > max_seq_len:
        raise RequestError(f"{where}: {len(prompt)} + {output_tokens} tokens; sequences have {max_seq_len} at most")
    return Session(str(entry.get("task_id", where)), (Turn(prompt, output_tokens),))


def _text(prompt: Any, where: str) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(f"{where}: prompt is {prompt!r}; expected a text")
    return prompt


def _ids(ids: Any, where: str, vocab_size: int | None) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise RequestError(f"{where}: input_ids is {type(ids).__name__}; expected a list of token ids")
    for token in ids:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "" if vocab_size is None else f" below {vocab_size}"
            raise RequestError(f"{where}: input_ids holds {token!r}; expected token ids{limit}")
    return ids

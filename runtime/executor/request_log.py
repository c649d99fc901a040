"""One line of JSON for each request that has ended, with its life cycle."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import RequestError

if TYPE_CHECKING:
    from .answer import Running


class RequestLog:
    """Writes to a file, or to standard error for "-"."""

    def __init__(self, path: str) -> None:
        """Appends to the file. Raises RequestError if it cannot be opened."""
        self._file: TextIO
        if path == "-":
            self._file = sys.stderr
            return
        try:
            self._file = open(Path(path), "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open until `close`)
        except OSError as error:
            raise RequestError(f"cannot write the request log {path}: {error.strerror}") from None

    def write(self, running: Running, now: float) -> None:
        """now: time.monotonic()."""
        try:
            self._file.write(json.dumps(life_cycle(running, now), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError:  # a full disk must not stop the engine
            pass

    def close(self) -> None:
        if self._file is not sys.stderr:
            self._file.close()


def life_cycle(running: Running, now: float) -> dict[str, object]:
    """What the log tells of a request. Times in seconds, rounded to microseconds; null: it never came so far.

    arrival        seconds since 1970
    queue_s        until it was admitted; ttft_s: until the first token of any of its answers
    itl_mean_s, itl_max_s  between two tokens of one answer
    adapter        name of its LoRA adapter
    finish_reasons of each answer; error: why the first that failed did
    """
    request, answers = running.request, running.answers
    began = [answer for answer in answers if answer.first_token_at is not None]
    gaps = sum(answer.num_output - 1 for answer in began)
    spans = sum(answer.last_token_at - (answer.first_token_at or 0) for answer in began)
    first = min((answer.first_token_at for answer in began if answer.first_token_at is not None), default=None)
    error = next((answer.error for answer in answers if answer.error is not None), None)
    return {
        "request_id": request.request_id,
        "adapter": request.lora,
        "arrival": round(time.time() - (now - request.arrival), 6),
        "queue_s": _since(request.arrival, running.admitted_at),
        "ttft_s": _since(request.arrival, first),
        "itl_mean_s": round(spans / gaps, 6) if gaps else None,
        "itl_max_s": round(max(answer.longest_gap_s for answer in began), 6) if gaps else None,
        "total_s": _since(request.arrival, now),
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": answers[0].num_cached or 0,
        "output_tokens": sum(answer.num_output for answer in answers),
        "finish_reasons": [answer.finish_reason for answer in answers],
        "pauses": running.num_pauses,
        "error": None if error is None else str(error),
    }


def _since(begin: float, end: float | None) -> float | None:
    return None if end is None else round(end - begin, 6)

"""What goes into the executor, what comes out, and why a request may be refused."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import IngotError, RequestError, WorkFailed
from ..kv.sequence import DEFAULT_PRIORITY, RetentionRange

if TYPE_CHECKING:
    from ..sampling import SamplingParams

MAX_SALT_LENGTH = 1024
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class PromptError(RequestError):
    """A prompt that the engine cannot take. field: the name of the request's field that is wrong."""

    field = "prompt_token_ids"


class DuplicateRequest(RequestError):
    """A request has the id of one that has not ended."""

    field = "request_id"


class DeadlineError(RequestError):
    """A deadline that is no time to come."""

    field = "deadline_s"


class SaltError(RequestError):
    """A cache salt that is too long: it stays as long as anything is cached under it."""

    field = "cache_salt"


class QueueFull(WorkFailed):
    """As many requests wait as may wait: the client shall try again later, or elsewhere."""


class Draining(WorkFailed):
    """The engine finishes what it has and takes nothing new."""


class EngineFailed(WorkFailed):
    """The device, or the executor itself, failed: no request can be answered any more."""


class RequestFailed(WorkFailed):
    """One request failed; the others go on."""


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and what is wanted of its answer.

    request_id     unique among the requests that have not ended
    priority       higher ones are admitted first
    deadline_s     seconds after `arrival` at which the request ends with "timeout", however far it is
    cache_salt     only requests of the same salt share cached prefixes
    retention      how long and how firmly parts of the prompt stay in the KV cache
    decode_priority, decode_duration_s  the same for the answer
    lora           name of a LoRA adapter; only requests with the same share prefixes
    wants_text     False: the client takes token ids. Tokens become text then only if stop strings are looked for
    arrival        time.monotonic() when the request came
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str | int | None = None
    retention: tuple[RetentionRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None
    lora: str | None = None
    wants_text: bool = True
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises DeadlineError, SaltError."""
        if self.deadline_s is not None and not 0 <= self.deadline_s < math.inf:
            raise DeadlineError(f"deadline_s is {self.deadline_s!r}; expected seconds, 0 or more")
        if isinstance(self.cache_salt, str) and len(self.cache_salt) > MAX_SALT_LENGTH:
            raise SaltError(f"cache_salt has {len(self.cache_salt)} characters; expected at most {MAX_SALT_LENGTH}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model found a token, and which it found the most probable in its place.

    logprob   natural logarithm of the probability under the model's own distribution, before temperature and the like
    rank      1: no token is more probable
    top_ids, top_logprobs  as many as were asked for, the most probable first
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, eq=False)
class RequestOutput:
    """What a step adds to one answer of a request. The last one of each index has a finish_reason.

    index              which of the n answers
    token_ids          new tokens, with the one that ended the answer
    text               new text, whole characters only, and nothing that may be the beginning of a stop string; without
                       what ended the answer unless include_stop. Empty if the engine has no tokenizer, or if not wanted
    logprobs           of each new token, if asked for
    prompt_logprobs    of each token of the prompt but the first, which has None; once, in the first output of index 0
    matched_stop       the stop string or stop token id of the request that ended the answer; None for the model's own
    num_cached_tokens  tokens of the prompt whose KV was in the cache
    num_output_tokens  tokens of this answer until now
    error              why finish_reason is "error"
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: IngotError | None = None


def check_prompt(ids: Sequence[int], vocab_size: int, max_seq_len: int) -> None:
    """Raises PromptError unless `ids` are token ids that make a sequence of at most max_seq_len."""
    if not len(ids):
        raise PromptError("the prompt has no tokens; expected at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise PromptError(f"token {index} of the prompt is {ids[index]!r}; expected an id of 0 to {vocab_size - 1}")
    if len(ids) > max_seq_len:
        raise PromptError(f"the prompt has {len(ids)} tokens; this engine takes sequences of {max_seq_len} at most.\n"
                          "  Shorten it, or build the engine with a larger --max-seq-len.")


def check_room(ids: Sequence[int], max_seq_len: int) -> None:
    """Raises PromptError if a prompt that check_prompt has passed leaves no room for an answer."""
    if len(ids) == max_seq_len:
        raise PromptError(f"the prompt has {max_seq_len} tokens, as many as this engine takes; no room for an answer.\n"
                          "  Shorten it, or build the engine with a larger --max-seq-len.")

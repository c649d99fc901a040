"""What every device offers: an engine's code and weights, loaded, that computes one step at a time."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from .errors import RequestError
from .step import StepInputs

Float32Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class EngineMismatch(RequestError):
    """The engine was built for something that this machine or this runtime is not."""


@dataclass(frozen=True)
class Limits:
    """What an engine was built for.

    max_batch_size  sequences in a step, and rows of logits
    max_num_tokens  tokens in a step
    max_seq_len     tokens of a sequence, prompt and answer together
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Self:
        limits = manifest["limits"]
        return cls(limits["max_batch_size"], limits["max_num_tokens"], limits["max_seq_len"])


class Program(Protocol):
    """An engine on a device. One thread at a time.

    inputs      what the next step computes; the caller fills it
    num_blocks  KV blocks that the device has room for; a block table holds numbers below it
    block_size  tokens in a block
    """

    inputs: StepInputs
    num_blocks: int
    block_size: int
    vocab_size: int

    def step(self) -> Float32Array:
        """Computes `inputs`; the logits [num_logits, vocab_size], valid until the next step."""

    def trace(self, values: Collection[str]) -> dict[str, np.ndarray]:
        """As step, but copies the named values of the plan on the way, each when it has just been computed."""

    def close(self) -> None:
        """Ends the device's threads and frees its memory; arrays that step gave are invalid from then on."""

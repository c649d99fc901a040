"""What every device offers: an engine's code and weights, loaded, that computes one step at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from .errors import RequestError
from .lora import LoraRoom
from .sampling_inputs import Float32Array, StepOutputs
from .step import StepInputs

if TYPE_CHECKING:
    from .engine_file import EngineFile

PLAN_VERSION = 5
"""Of the member plan.json."""


class EngineMismatch(RequestError):
    """The engine was built for something that this machine or this runtime is not."""


def outdated(engine: EngineFile, difference: str) -> EngineMismatch:
    """The error for an engine of another version than this runtime."""
    manifest = engine.manifest
    return EngineMismatch(
        f"{engine.path} was built by Ingot {manifest['ingot_version']} for another version of the runtime: "
        f"{difference}.\n  Build it again: ingot build {manifest['model']['name']} --target "
        f"{manifest['target']['name']} --precision {manifest['precision']}"
    )


def check_plan_version(engine: EngineFile) -> None:
    """Raises EngineMismatch unless this runtime can read the engine's plan."""
    version = engine.plan.get("version")
    if version != PLAN_VERSION:
        raise outdated(engine, f"its plan has version {version!r}, this runtime reads {PLAN_VERSION}")


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

    num_blocks       KV blocks of the device: numbers 0 .. num_blocks - 1, which block tables may hold
    num_host_blocks  those of the host tier: the numbers that follow, only to copy from and to
    block_size       tokens in a block, block_bytes its bytes
    kv_windows       for each block table the positions, the token's own included, that its layers look back over;
                     None: all. Blocks of all tables come from the same pool
    inputs           two, so that one can be filled while the device reads the other
    lora             room for adapters; None without. Slots hold zeros at load
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    kv_windows: tuple[int | None, ...]
    vocab_size: int
    inputs: tuple[StepInputs, StepInputs]
    lora: LoraRoom | None

    def launch(self, inputs: StepInputs) -> None:
        """Starts a step and returns; `inputs`, one of the two, stays as it is until `wait`. At most one in flight."""

    def wait(self) -> StepOutputs:
        """Blocks until the step that was launched is done, other Python threads running meanwhile.

        The outputs of its inputs' sampling; those rows that it asks for are valid.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) of any tier, in order: after all steps that were launched before,
        before all that are launched later."""

    def write_adapter(self, slot: int, image: np.ndarray) -> None:
        """Fills a slot of `lora` with u8 [bytes_per_adapter]: after all steps that were launched before, before all
        that are launched later. `image` may be used again when this returns."""

    def logits(self) -> Float32Array:
        """[num_logits, vocab_size] of the step that was waited for last, valid until the next launch."""

    def trace(self, inputs: StepInputs, values: Collection[str]) -> dict[str, np.ndarray]:
        """A whole step; copies the named values of the plan on the way, each when it has just been computed."""

    def close(self) -> None:
        """Ends the device's threads and frees its memory; arrays that it gave are invalid from then on."""


def step_logits(program: Program, inputs: StepInputs) -> Float32Array:
    """Computes a step; its logits [num_logits, vocab_size], valid until the next launch."""
    program.launch(inputs)
    program.wait()
    return program.logits()

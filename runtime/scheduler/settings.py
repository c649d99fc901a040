"""The scheduler's options, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from ..errors import RequestError

if TYPE_CHECKING:
    from ..program import Limits


MAX_SPECULATIVE_TOKENS = 64


class SettingsError(RequestError):
    """An option of the scheduler that it or the engine cannot have."""


class SchedulerPolicy(Enum):
    """When a waiting sequence is admitted, and what happens when KV blocks run out."""

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"
    STATIC_BATCH = "STATIC_BATCH"


class ChunkingPolicy(Enum):
    """How the tokens that generation leaves free in a step are divided among prompts."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


@dataclass(frozen=True)
class SchedulerSettings:
    """Limits of a step and the rules by which it is filled.

    max_batch_size      sequences that run at once, and rows of logits in a step
    max_num_tokens      tokens in a step
    ageing_s            one level of priority is worth a head start of so many seconds in the queue
    wait_for_prefix     a sequence waits while another one computes what both begin with
    speculative_tokens  drafted tokens that a step may verify for a sequence, at most; 0: none (docs/speculation.md)
    """

    max_batch_size: int
    max_num_tokens: int
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    ageing_s: float = 1.0
    wait_for_prefix: bool = True
    speculative_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingsError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.max_num_tokens < self.max_batch_size:
            raise SettingsError(f"max_num_tokens {self.max_num_tokens} is below max_batch_size {self.max_batch_size}: "
                                f"each sequence that generates takes one token of every step")
        self._check_speculation()
        for name, kind in (("policy", SchedulerPolicy), ("chunking", ChunkingPolicy)):
            if not isinstance(getattr(self, name), kind):
                raise SettingsError(f"{name} must be one of {', '.join(kind.__members__)}, not {getattr(self, name)!r}")
        if not 0 < self.ageing_s < float("inf"):
            raise SettingsError(f"ageing_s must be a finite number of seconds above 0, not {self.ageing_s!r}: without "
                                f"ageing a stream of urgent requests would keep the others waiting for ever")

    def _check_speculation(self) -> None:
        count = self.speculative_tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_SPECULATIVE_TOKENS:
            raise SettingsError(f"speculative_tokens must be a whole number of 0 to {MAX_SPECULATIVE_TOKENS}, not "
                                f"{count!r}")
        if count and self.max_batch_size == 1:
            raise SettingsError(f"speculative_tokens is {count}, but max_batch_size is 1: each drafted token needs a "
                                "row of logits of its own, and a step has one.\n"
                                f"  Raise max_batch_size (ingot build --max-batch-size {count + 1}), or leave "
                                "speculation out.")

    @classmethod
    def within(cls, limits: Limits, max_batch_size: int | None = None, max_num_tokens: int | None = None,
               **options: Any) -> Self:
        """An engine's limits, lowered where asked. Raises SettingsError for more than the engine was built for."""
        values: dict[str, Any] = {}
        for name, asked in (("max_batch_size", max_batch_size), ("max_num_tokens", max_num_tokens)):
            built = getattr(limits, name)
            if isinstance(asked, int) and asked > built:
                raise SettingsError(f"{name} {asked} is above {built}, what the engine was built for.\n"
                                    f"  Lower it, or build the engine with --{name.replace('_', '-')} {asked}.")
            values[name] = built if asked is None else asked
        # Generation needs a token a sequence: whoever lowers the tokens alone means fewer sequences too.
        if max_batch_size is None and isinstance(max_num_tokens, int):
            values["max_batch_size"] = min(values["max_batch_size"], max(max_num_tokens, 1))
        return cls(**values, **options)

"""One prompt and the answer that grows behind it, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..adapters.loaded import LoadedAdapter
    from ..kv import KvSequence, Probe


MAX_PRIORITY = 100  # a bound on priorities is a bound on how long anybody waits


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # waits again: its blocks went back to the cache, its tokens stay
    FINISHED = "finished"


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """A list of tokens of which some are computed: their KV is in the cache.

    Context and generation phase are one path: a step computes some of the pending tokens. A sequence generates when
    exactly its last token is pending.

    The caller gives and owns:
    request_id     whose it is, for messages
    tokens         the prompt, then the answer; the caller appends. The same list object as kv.tokens
    max_len        how long `tokens` may become
    kv             its blocks, and the salt and retention they are cached with
    priority       higher comes first, -MAX_PRIORITY .. MAX_PRIORITY
    arrival        seconds on the scheduler's clock
    deadline       seconds on the scheduler's clock, after which nobody wants the answer
    prompt_logits  logits are wanted for every token of the prompt, so that none of it may come from the cache
    adapter        its LoRA adapter, whose number stands in kv.key

    The scheduler alone changes:
    num_computed   tokens whose KV is written. It follows `Scheduler.advance`
    num_cached     how many of them the first admission found in the cache
    num_scored     tokens whose logits were given before a pause: they are not given again
    slot           of the device that its adapter lies in while it runs; -1: it has none
    draft          tokens that a drafter expects behind `tokens`: the planned step verifies them
    """

    request_id: str
    tokens: list[int]
    max_len: int
    kv: KvSequence
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    prompt_logits: bool = False
    adapter: LoadedAdapter | None = None
    state: SequenceState = field(default=SequenceState.WAITING, init=False)
    num_computed: int = field(default=0, init=False)
    num_cached: int | None = field(default=None, init=False)
    num_scored: int = field(default=0, init=False)
    slot: int = field(default=-1, init=False)
    draft: list[int] = field(default_factory=list, init=False)
    # Place in the queue: (seconds, serial number). Never changes, so a paused sequence gets its old place back.
    rank: tuple[float, int] = field(default=(0.0, 0), init=False)
    # What it waits for: a prefix that another sequence is computing; and how often it began to wait.
    awaited: Probe | None = field(default=None, init=False)
    num_waits: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return (f"Sequence({self.request_id}: {self.state.value}, {self.num_computed} of {len(self.tokens)} tokens "
                f"computed, at most {self.max_len})")

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def generates(self) -> bool:
        return self.num_computed > 0 and self.num_pending == 1

    @property
    def max_computed(self) -> int:
        """Tokens whose KV it holds at its end: the last token of an answer is never computed, for none follows it."""
        return max(len(self.tokens), self.max_len - 1)

    def num_logits(self, count: int) -> int:
        """Rows of logits, counted from the end, that are wanted when the next `count` pending tokens are computed."""
        end = self.num_computed + count
        if self.prompt_logits:
            return max(end - max(self.num_computed, self.num_scored), 0)
        return int(end == len(self.tokens))


S = TypeVar("S", bound=Sequence)

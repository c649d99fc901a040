"""What one step computes."""

from dataclasses import dataclass, field
from typing import Generic

from .sequence import S


@dataclass(slots=True)
class StepPlan(Generic[S]):
    """Decided by Scheduler.plan or plan_steady; the caller launches it, waits, and hands it to Scheduler.advance.

    entries   (sequence, how many of its pending tokens, rows of logits counted from the end of these); empty when
              nothing can run. A sequence with a draft computes its last token and the draft, each with a row
    admitted  sequences that start with this step, or go on after a pause
    paused    sequences whose blocks others needed; they will be admitted again
    expired   sequences whose deadline has passed. They are finished; their blocks are free
    """

    entries: list[tuple[S, int, int]] = field(default_factory=list)
    admitted: list[S] = field(default_factory=list)
    paused: list[S] = field(default_factory=list)
    expired: list[S] = field(default_factory=list)

"""Decides what each step computes (docs/scheduling.md)."""

from .errors import InvalidPriority, NeverFits
from .plan import StepPlan
from .scheduler import Scheduler
from .sequence import MAX_PRIORITY, Sequence, SequenceState
from .settings import ChunkingPolicy, SchedulerPolicy, SchedulerSettings, SettingsError

__all__ = ["MAX_PRIORITY", "ChunkingPolicy", "InvalidPriority", "NeverFits", "Scheduler", "SchedulerPolicy",
           "SchedulerSettings", "Sequence", "SequenceState", "SettingsError", "StepPlan"]

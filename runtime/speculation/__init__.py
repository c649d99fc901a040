"""Drafts of what a sequence says next, verified by the model in one step (docs/speculation.md)."""

from .drafter import Drafter
from .ngram import NgramDrafter
from .speculator import Speculator

__all__ = ["Drafter", "NgramDrafter", "Speculator"]

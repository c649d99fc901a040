"""What can be wrong with a checkpoint."""
from __future__ import annotations

from ingot.runtime.errors import RequestError


class CheckpointError(RequestError):
    """A file that is missing, malformed or of an unknown kind: names the file, what was expected and what is there."""


class BadWeights(RequestError):
    """A tensor holds NaN or Inf: names it and the position of the first."""

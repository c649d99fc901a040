"""What the importer refuses, in the user's words."""
from __future__ import annotations

from ingot.runtime.errors import RequestError


class ImportRefused(RequestError):
    """The model cannot become an engine: what stands in the way, in which module and source line."""


class CheckpointMismatch(RequestError):
    """The checkpoint's tensors are not those that the model needs: names both sides."""

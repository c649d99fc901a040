"""What can come of an engine that is asked to take over; for the metrics too, which need no server's packages."""

from __future__ import annotations

from ..errors import RequestError

RESULTS = ("done", "unchanged", "refused", "no_room", "self_test_failed", "failed", "bad_lock")
"""refused: not found, not allowed, not fitting; failed: it could not be loaded; bad_lock: see follow.py."""


class OtherTokenizer(RequestError):
    """The engine reads token ids in another way than the one that clients know."""


class NotServing(RequestError):
    """The server does not serve the engine that it is said to serve."""

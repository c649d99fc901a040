"""Why an engine does not take over, beside what loading it can raise."""

from __future__ import annotations

from ..errors import RequestError


class OtherTokenizer(RequestError):
    """The engine reads token ids in another way than the one that clients know."""


class NotServing(RequestError):
    """The server does not serve the engine that it is said to serve."""

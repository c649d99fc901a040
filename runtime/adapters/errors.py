"""What can be wrong with an adapter, and with asking for one."""

from ..errors import RequestError


class AdapterError(RequestError):
    """An adapter that this engine cannot serve: malformed files, another kind, no room for what it changes."""


class UnknownAdapter(RequestError):
    """No adapter of this name is loaded. field: of a Request."""

    field = "lora"


class AdapterExists(RequestError):
    """The name is that of another adapter, or of the model itself."""


class AdapterLoadingOff(RequestError):
    """The server was not told that adapters may come and go, or not from there."""

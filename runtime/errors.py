"""The errors that a user sees: a message, no traceback, and an exit status."""


class IngotError(Exception):
    """Base of every error meant for a user: what, where, expected, got, next step.

    Other exceptions are faults of Ingot itself and keep their traceback.
    """

    exit_status = 1


class WorkFailed(IngotError):
    """The request was right, but the work failed: a quality gate, a comparison, a full disk, no network."""


class RequestError(IngotError):
    """The request was wrong: an unknown target, a malformed file, an option that the model lacks."""

    exit_status = 2

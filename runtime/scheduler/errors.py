"""Why the scheduler refuses a sequence at once."""

from ..errors import RequestError


class NeverFits(RequestError):
    """A sequence needs more KV blocks than there are, so that its turn could never come."""


class InvalidPriority(RequestError):
    """A priority outside the range in which ageing bounds everybody's waiting."""

    field = "priority"

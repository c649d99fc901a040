"""What every driver offers to the load generator."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...errors import WorkFailed


class Delivery(NamedTuple):
    """Output that came at one moment, or at the end what the server says about the whole answer.

    token_ids      None where they are not told
    prompt_tokens, cached_tokens, total_tokens (of the answer): None until the server tells them
    """

    num_tokens: int
    token_ids: Sequence[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    total_tokens: int | None = None


class Refused(Exception):
    """The server had no room for a request: RESOURCE_EXHAUSTED, UNAVAILABLE, status 429 or 503."""


class CallFailed(Exception):
    """A request failed in another way; the server's words."""


class ServerUnreachable(WorkFailed):
    """No server answers at the URL, or not as one that generates."""


@dataclass
class Facts:
    """What is measured. None: not told.

    block_size  tokens of a KV block; 16 is usual
    settings    everything else worth knowing: limits, policy, precision, …
    """

    where: str
    model: str
    engine_hash: str | None = None
    vocab_size: int | None = None
    max_seq_len: int | None = None
    block_size: int = 16
    settings: dict[str, Any] = field(default_factory=dict)


class Driver(Protocol):
    async def facts(self) -> Facts:
        """Raises ServerUnreachable. The first call."""

    def generate(self, request_id: str, prompt: list[int] | str,
                 output_tokens: int) -> AsyncGenerator[Delivery, None]:
        """One greedy answer of exactly so many tokens, EOS ignored. Raises Refused or CallFailed.

        Closing the generator cancels the request.
        """

    async def metrics(self) -> str | None:
        """The server's metrics in Prometheus' text format; None where they can't be reached."""

    async def close(self) -> None: ...

"""What every server is given, and what `ingot serve` asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..engine_file import EngineFile
    from ..executor.async_engine import AsyncEngine
    from ..program import Limits
    from ..tokenizer import Tokenizer

GRPC_SERVICES = ("trtllm", "vllm", "kserve", "control")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of `ingot serve`, resolved.

    grpc_address, http_address  host:port to bind, port 0: any; None: this server is not started
    grpc_services               which of GRPC_SERVICES are offered
    tls_certificate, tls_key    PEM; both or neither
    tls_client_ca               PEM: clients must show a certificate that it has signed
    auth_token                  what clients must send as a bearer token; None: nothing
    max_message_bytes           of one request, on either server
    scheduling                  the other settings by the names of their options, to be shown
    """

    grpc_address: str | None = None
    http_address: str | None = None
    grpc_services: tuple[str, ...] = GRPC_SERVICES
    tls_certificate: bytes | None = None
    tls_key: bytes | None = None
    tls_client_ca: bytes | None = None
    auth_token: str | None = None
    max_message_bytes: int = 32 << 20
    drain_timeout_s: float = 30.0
    scheduling: tuple[tuple[str, str | int | float | bool], ...] = ()


@dataclass(frozen=True)
class ServerContext:
    """limits: those that the engine is served with, at most those that it was built for.

    kv_len          tokens that a single sequence has room for in the KV cache; None: as many as the limits say
    stop_token_ids  the tokens that the model ends its answers with; the executor knows them
    """

    engine: AsyncEngine
    file: EngineFile
    tokenizer: Tokenizer | None
    limits: Limits
    vocab_size: int
    stop_token_ids: frozenset[int]
    model_name: str
    settings: ServerSettings
    kv_len: int | None = None

    @property
    def default_len(self) -> int:
        """How long a sequence may become whose request does not say it: what could run."""
        longest = self.limits.max_seq_len
        return longest if self.kv_len is None else min(longest, self.kv_len)


class Server(Protocol):
    """What `start(context, address)` of grpc_server.py and http_server.py gives: a server that takes requests.

        async def start(context: ServerContext, address: str) -> Server     # raises RequestError if it cannot bind

    address  host:port that it is bound to, with the port that the system chose for 0
    """

    address: str

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets calls that run end within grace_s seconds, then closes them."""

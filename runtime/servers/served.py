"""One loaded engine as servers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ..executor.async_engine import AsyncEngine
from ..tokenizer import read_config
from .token_names import TokenNames

if TYPE_CHECKING:
    from ..engine_file import EngineFile
    from ..executor.loading import LoadedEngine
    from ..program import Limits
    from ..tokenizer import Tokenizer


def _nothing() -> None:
    """What is not a server's to close."""


@dataclass(frozen=True, eq=False)
class ServedEngine:
    """A request is answered by one of these from its first byte to its last (ServerContext.use).

    limits           those that the engine is served with, at most those that it was built for
    kv_len           tokens that a single sequence has room for in the KV cache; None: as many as the limits say
    stop_token_ids   the tokens that the model ends its answers with; the executor knows them
    facts            the settings it runs with, by the names of their options, to be shown
    close            frees the engine
    """

    engine: AsyncEngine
    file: EngineFile
    tokenizer: Tokenizer | None
    limits: Limits
    vocab_size: int
    stop_token_ids: frozenset[int]
    kv_len: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = _nothing

    @classmethod
    def of(cls, loaded: LoadedEngine) -> Self:
        """On the loop that will serve it."""
        return cls(AsyncEngine(loaded.executor), loaded.file, loaded.tokenizer, loaded.limits, loaded.vocab_size,
                   loaded.stop_token_ids, loaded.kv.longest(loaded.limits.max_seq_len), loaded.facts(), loaded.close)

    @property
    def hash(self) -> str:
        return self.file.hash

    @property
    def default_len(self) -> int:
        """How long a sequence may become whose request does not say it: what could run."""
        longest = self.limits.max_seq_len
        return longest if self.kv_len is None else min(longest, self.kv_len)

    @cached_property
    def token_names(self) -> TokenNames:
        return TokenNames(self.tokenizer)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """What the model recommends for sampling."""
        config: Mapping[str, Any] = read_config(self.file).get("generation", {})
        return config

"""Which engines may be loaded: their code is native code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..engine_file import EngineFile
from ..errors import RequestError
from .attestation import PROVENANCE_TYPE, is_about, public_key, read, verify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_HASH = re.compile(r"[0-9a-f]{64}")


class EngineRefused(RequestError):
    """The engine is not one that may be loaded here."""


@dataclass(frozen=True)
class LoadPolicy:
    """hashes, keys: none: any engine. Otherwise its hash must be one of these, and its provenance signed by one of
    those keys."""

    hashes: tuple[str, ...] = ()
    keys: tuple[Ed25519PublicKey, ...] = ()

    @classmethod
    def of(cls, hashes: list[str], key_paths: list[str]) -> Self:
        """Raises RequestError for what is no hash, BadKey."""
        for hash in hashes:
            if not _HASH.fullmatch(hash):
                raise RequestError(f"--require-hash {hash}: expected all 64 hexadecimal digits of an engine's hash")
        return cls(tuple(hashes), tuple(public_key(path) for path in key_paths))

    def check(self, engine: EngineFile, attestations: Path) -> None:
        """attestations: the file of statements about the engine. Raises EngineRefused.

        Nothing of the engine has run at this point; what is loaded afterwards is read from the same open file.
        """
        if self.hashes and engine.hash not in self.hashes:
            raise EngineRefused(f"{engine.path} has the hash {engine.hash}; required is {' or '.join(self.hashes)}")
        if self.keys and not signed(engine.hash, read(attestations), self.keys):
            raise EngineRefused(
                f"{engine.path}: {why_unsigned(engine.hash, read(attestations))}\n"
                f"  looked for in {attestations}; sign it with `ingot engines sign`, or pull its signatures")


ANY_ENGINE = LoadPolicy()


def signed(engine_hash: str, envelopes: list[bytes], keys: tuple[Ed25519PublicKey, ...]) -> bool:
    """Whether one of the keys has signed a provenance of this engine."""
    statements = (verify(envelope, keys) for envelope in envelopes)
    return any(statement is not None and statement.get("predicateType") == PROVENANCE_TYPE
               and is_about(statement, engine_hash) for statement in statements)


def why_unsigned(engine_hash: str, envelopes: list[bytes]) -> str:
    if not envelopes:
        return f"engine {engine_hash} is not signed"
    return f"none of the {len(envelopes)} signed statements is a provenance of engine {engine_hash} by a required key"

"""The thin runtime: reads engines, runs them on a device, serves them. It needs no torch and no compiler.

    from ingot.runtime import Engine, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, Generation, Piece
    from .sampling import SamplingParams

__all__ = ["Engine", "Generation", "Piece", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Loads the engine with its arrays only for those who use it: reading an engine file needs neither."""
    if name in ("Engine", "Generation", "Piece"):
        from . import engine

        return getattr(engine, name)
    if name == "SamplingParams":
        from .sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

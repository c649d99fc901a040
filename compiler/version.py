"""Versions of everything that takes part in a build, for the manifest."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .cache.keys import library_versions
from .cpu import toolchain


def ingot_version() -> str:
    try:
        return version("ingot-llm")
    except PackageNotFoundError:
        return "unknown"


def toolchain_versions(compiler: str, kind: str) -> dict[str, str]:
    """Package or compiler -> version, for targets of a kind. The same versions and inputs give the same engine."""
    libraries = library_versions("gguf", "numpy", "tokenizers", "torch", "transformers")
    if kind == "cuda":
        return libraries | library_versions("triton")
    return libraries | {"c_compiler": toolchain.version("cc" if compiler == "cc" else "zig")}

"""Versions of everything that takes part in a build, for the manifest."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .cpu import toolchain


def ingot_version() -> str:
    try:
        return version("ingot-llm")
    except PackageNotFoundError:
        return "unknown"


def toolchain_versions(compiler: str) -> dict[str, str]:
    """Package or compiler -> version. The same versions and inputs give the same engine."""
    packages = ("numpy", "torch", "transformers")
    return {name: version(name).partition("+")[0] for name in packages} | {
        "c_compiler": toolchain.version("cc" if compiler == "cc" else "zig")}

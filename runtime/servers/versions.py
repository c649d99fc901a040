"""The version that servers tell."""

from importlib.metadata import PackageNotFoundError, version


def runtime_version() -> str:
    try:
        return version("ingot-llm")
    except PackageNotFoundError:
        return "unknown"

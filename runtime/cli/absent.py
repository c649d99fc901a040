"""Packages that are not installed: what was asked for needs them, and how they are had."""

from __future__ import annotations

TRITON = "3.9.0"
TRITON_INSTALL = f"pip install --no-deps triton=={TRITON}"


def compiler_absent(module: str | None) -> str:
    """How a message ends that begins with what needs the module. Triton, which only GPUs need, comes by itself."""
    top = (module or "").partition(".")[0]
    what, install = (("the compiler of GPU kernels", TRITON_INSTALL) if top == "triton" else
                     ("the compiler", "pip install 'ingot-llm[build]'"))
    return f"{what}, which is not installed here: no module named {module!r}.\n  Install it: {install}"

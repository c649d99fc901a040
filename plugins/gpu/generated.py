"""Modules of kernels whose text the compiler made: they lie in no file, and their name says what text they are."""
from __future__ import annotations

import hashlib
import importlib
import linecache
import sys
from types import ModuleType

_PACKAGE = "generated"


def module_name(text: str) -> str:
    """"generated." and the first 16 digits of the text's SHA-256."""
    return f"{_PACKAGE}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def module_of(name: str, text: str = "") -> ModuleType:
    """The module of that name: imported, or made of its text if it is a generated one.

    Raises ValueError for a text that is not the one that the name tells.
    """
    if not text:
        return importlib.import_module(name)
    if name != module_name(text):
        raise ValueError(f"the source of {name} is another text, that of {module_name(text)}")
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    # Triton asks `inspect` for the lines of a function.
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Compiles and loads the C form of packing (plugins/linear/pack_native.c), once a process.

What is compiled is kept in the cache folder like Python's own bytecode: builds that use no build cache take it too, as
it is made of Ingot's sources alone. Where there is no C compiler, numpy packs, with the same result.
"""
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from ingot.plugins.linear import native
from ingot.runtime.errors import IngotError

from ..cache.build_cache import BuildCache
from ..cache.keys import key, source_digest
from ..cpu.isa import CpuIsa, host_isas

_SOURCES = ("plugins/linear/pack_native.c", "compiler/cpu/toolchain.py", "compiler/cpu/isa.py")
_once = threading.Lock()
_tried = False


def load_native() -> bool:
    """Whether packing runs natively from now on. Compiling takes about a second, the first time on a machine."""
    global _tried
    with _once:
        if not _tried:
            _tried = True
            isas = host_isas()
            if isas and importlib.util.find_spec("ziglang") is not None:
                # Whatever fails here, numpy is there.
                with contextlib.suppress(IngotError, OSError):
                    native.use(_loaded(_compiled(isas[-1], BuildCache())))
    return native.is_used()


def compile_native(isa: CpuIsa, folder: Path) -> Path:
    """The shared object for an instruction set. Raises CompileError, NoCompiler."""
    from ..cpu.toolchain import compile_shared

    out = folder / "pack.so"
    flags = (*isa.extra_flags, *native.FLAGS)
    compile_shared({"pack_native.c": native.SOURCE.read_text()}, replace(isa, extra_flags=flags), [], out)
    return out


def _compiled(isa: CpuIsa, cache: BuildCache) -> bytes:
    name = key(isa=isa.name, flags=native.FLAGS, sources=source_digest(*_SOURCES))
    if (data := cache.get("code", name)) is None:
        with tempfile.TemporaryDirectory(prefix="ingot-pack-") as folder:
            data = compile_native(isa, Path(folder)).read_bytes()
        cache.put("code", name, data)
    return data


def _loaded(code: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(prefix="ingot-pack-", suffix=".so") as file:
        file.write(code)
        file.flush()
        return ctypes.CDLL(file.name)

"""The C compiler: the pinned one from a wheel (zig), or the host's `cc` when asked.

The same sources give the same bytes wherever they lie and whatever the machine is: files are compiled under fixed
relative names in a temporary folder, without debug information, build identifiers or time stamps.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Literal

from ingot.runtime.errors import RequestError, WorkFailed

from ..cache.build_cache import BuildCache
from ..cache.keys import key
from .isa import CpuIsa

Compiler = Literal["zig", "cc"]

# Not -ffast-math: NaN and infinities must work. Contraction to fused multiply-add is allowed; what has to be exact is
# integer. -fno-sanitize is for zig, which otherwise compiles checks for undefined behaviour in.
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
                 "-fno-trapping-math", "-fno-sanitize=undefined", "-fno-stack-protector", "-Wall", "-Wextra",
                 "-Wno-unused-function", "-Wno-unused-parameter", "-Werror=implicit-function-declaration")
LINK_FLAGS = ("-shared", "-s", "-Wl,--build-id=none", "-Wl,-z,defs", "-lm", "-lpthread")
_INTRINSICS = {"x86_64": "<immintrin.h>", "aarch64": "<arm_neon.h>"}
"""The compiler's own header for each machine: most of the text of a file of kernels."""
_LINES_SHOWN = 12
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


class CompileError(WorkFailed):
    """The C compiler refused a source; the message holds the first lines it printed."""


class NoCompiler(RequestError):
    """The compiler asked for is not there or cannot make code for the target."""


def compile_shared(sources: Mapping[str, str], isa: CpuIsa, include_dirs: Sequence[Path], out: Path,
                   compiler: Compiler = "zig", jobs: int = 1, cache: BuildCache | None = None) -> None:
    """Compile C texts (file name -> text) for `isa` and link them, in the given order, to the shared object `out`.

    Only symbols marked __attribute__((visibility("default"))) are exported. `jobs` files are compiled at a time; those
    that the cache holds are not compiled again. `out` appears whole or not at all. Raises CompileError or NoCompiler.
    """
    keys = [] if cache is None else [_object_key(text, isa, include_dirs, compiler) for text in sources.values()]
    code = None if cache is None else cache.get("code", key(objects=keys, link=LINK_FLAGS))
    if code is None:
        with tempfile.TemporaryDirectory(prefix="ingot-cc-") as folder:
            objects = _objects(sources, keys, isa, include_dirs, Path(folder), compiler, jobs, cache)
            linked = Path(folder, "linked.so")
            _run([*command(isa, compiler), *objects, *LINK_FLAGS, "-o", linked.name], linked.name, isa, folder)
            code = linked.read_bytes()
        if cache is not None:
            cache.put("code", key(objects=keys, link=LINK_FLAGS), code)
    # The system's temporary folder may be another file system: write next to `out`, then rename.
    sibling = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        sibling.write_bytes(code)
        os.replace(sibling, out)
    finally:
        sibling.unlink(missing_ok=True)


def assembly(source: str, isa: CpuIsa, include_dirs: Sequence[Path], compiler: Compiler = "zig") -> str:
    """The assembly text that the compiler makes of one C text; works for every target on every host."""
    with tempfile.TemporaryDirectory(prefix="ingot-cc-") as folder:
        name, = _compile({"source.c": source}, isa, include_dirs, Path(folder), compiler, 1, ("-S",), ".s")
        return Path(folder, name).read_text()


def disassemble(path: Path) -> str:
    """Disassembly of a shared object by llvm-objdump, or by objdump where only that is installed.

    Raises NoCompiler if there is neither.
    """
    for tool in ("llvm-objdump", "objdump"):
        if shutil.which(tool):
            done = subprocess.run([tool, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout
    raise NoCompiler(f"no disassembler for {path.name}: llvm-objdump (or an objdump for its machine) is not installed.")


def command(isa: CpuIsa, compiler: Compiler) -> list[str]:
    """The compiler's command line up to the files: program and target."""
    if compiler == "zig":
        if importlib.util.find_spec("ziglang") is None:
            raise _no_zig()
        return [sys.executable, "-m", "ziglang", "cc", "-target", isa.zig_target, f"-mcpu={isa.zig_cpu}"]
    program = _host_compiler()
    machine = os.uname().machine
    if machine != isa.machine:
        raise NoCompiler(f"`cc` makes code for {machine}, the target {isa.name} needs {isa.machine}.\n"
                         "  Use the default compiler, which cross-compiles.")
    # gcc takes architecture and features apart.
    arch, *features = isa.march.split("+") if machine == "x86_64" else [isa.march]
    return [program, f"-march={arch}", *(f"-m{feature}" for feature in features)]


def version(compiler: Compiler = "zig") -> str:
    """One line that names the compiler and its version, for the manifest. Raises NoCompiler if it is not there."""
    if compiler == "zig":
        if importlib.util.find_spec("ziglang") is None:
            raise _no_zig()
        return f"zig {package_version('ziglang')}"  # the wheel holds the compiler itself
    program = _host_compiler()
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"


def _no_zig() -> NoCompiler:
    return NoCompiler("the package ziglang, which holds the C compiler, is not installed.\n"
                      "  pip install ingot-llm[build], or use the host's compiler: --compiler cc")


def _host_compiler() -> str:
    program = shutil.which(os.environ.get("CC", "cc"))
    if program is None:
        raise NoCompiler("no C compiler `cc` on this machine; the default compiler comes with ingot-llm[build].")
    return program


def _object_key(text: str, isa: CpuIsa, include_dirs: Sequence[Path], compiler: Compiler) -> str:
    """Names everything that an object is made of; headers by their content, wherever they lie."""
    return key(text=text, headers=_headers(text, include_dirs), flags=[*COMPILE_FLAGS, *isa.extra_flags],
               compiler=version(compiler), target=[isa.zig_target, isa.zig_cpu, isa.march])


def _headers(text: str, include_dirs: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of every header of `_included`: name -> digest."""
    return {name: hashlib.sha256(content.encode()).hexdigest()
            for name, content in _included(text, include_dirs).items()}


def _included(text: str, include_dirs: Sequence[Path]) -> dict[str, str]:
    """Every header that a text includes by quotes, and those that these include: name -> text."""
    found: dict[str, str] = {}
    waiting = [(name, list(include_dirs)) for name in _INCLUDE.findall(text)]
    while waiting:
        name, folders = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name in found or path is None:  # the compiler's own, or missing: then compiling tells
            continue
        found[name] = path.read_text()
        waiting += [(inner, [path.parent, *include_dirs]) for inner in _INCLUDE.findall(found[name])]
    return found


def _objects(sources: Mapping[str, str], keys: Sequence[str], isa: CpuIsa, include_dirs: Sequence[Path], folder: Path,
             compiler: Compiler, jobs: int, cache: BuildCache | None) -> list[str]:
    """The names of the objects inside folder, in the order of `sources`."""
    if cache is None:
        return _compile(sources, isa, include_dirs, folder, compiler, jobs, ("-c",), ".o")
    missing = {}
    for (name, text), object_key in zip(sources.items(), keys, strict=True):
        if (data := cache.get("object", object_key)) is not None:
            (folder / f"{name}.o").write_bytes(data)
        else:
            missing[name] = text
    _compile(missing, isa, include_dirs, folder, compiler, jobs, ("-c",), ".o")
    for name, object_key in zip(sources, keys, strict=True):
        if name in missing:
            cache.put("object", object_key, (folder / f"{name}.o").read_bytes())
    return [f"{name}.o" for name in sources]


def _compile(sources: Mapping[str, str], isa: CpuIsa, include_dirs: Sequence[Path], folder: Path, compiler: Compiler,
             jobs: int, mode: tuple[str, ...], suffix: str) -> list[str]:
    """Compile each text to `<its name><suffix>` inside folder; returns those names in the order of `sources`."""
    prefix = [*command(isa, compiler), *COMPILE_FLAGS, *isa.extra_flags]
    includes = [f"-I{path.resolve()}" for path in include_dirs]
    precompiled = _precompiled(sources, isa, include_dirs, folder, compiler, prefix)

    def one(name: str, text: str) -> str:
        assert "/" not in name and name.endswith(".c"), name
        (folder / name).write_text(text)
        made = name + suffix
        _run([*prefix, *includes, *precompiled.get(name, ()), *mode, name, "-o", made], name, isa, str(folder))
        return made

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return list(pool.map(one, sources.keys(), sources.values()))


def _precompiled(sources: Mapping[str, str], isa: CpuIsa, include_dirs: Sequence[Path], folder: Path,
                 compiler: Compiler, prefix: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Name of each file that reads the header of intrinsics -> the options by which zig takes it as read once for all.
    What becomes of the files is the same to the byte."""
    header = _INTRINSICS[isa.machine]
    readers = [name for name, text in sources.items()
               if any(header in each for each in (text, *_included(text, include_dirs).values()))]
    if compiler != "zig" or len(readers) < 2:
        return {}
    source, made = "intrinsics.h", "intrinsics.pch"
    (folder / source).write_text(f"#include {header}\n")
    _run([*prefix, "-x", "c-header", source, "-o", made], source, isa, str(folder))
    return dict.fromkeys(readers, ("-include-pch", made))


def _run(words: Sequence[str], name: str, isa: CpuIsa, folder: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env={**os.environ, **_zig_cache(folder)})
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()][:_LINES_SHOWN]
        raise CompileError(f"the C compiler failed on {name} for {isa.name} (exit status {done.returncode}):\n  "
                           + "\n  ".join(lines))


def _zig_cache(folder: str) -> dict[str, str]:
    """The variable by which zig keeps what it makes of the C library in `folder`, where its own place for that cannot
    be written to, as in a container without a home; else nothing. It fails there, or tries for ever."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or "/", ".cache")
    place = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or os.path.join(home, "zig")
    try:
        os.makedirs(place, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError:
        return {"ZIG_GLOBAL_CACHE_DIR": os.path.join(folder, "zig-cache")}
    return {}

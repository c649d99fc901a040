"""The native code of a CPU engine: checked against this CPU, loaded without a trace on disk."""

import _ctypes
import ctypes
import os
import platform
import tempfile
from typing import Any

from .. import amx
from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import WorkFailed
from ..host import cpu_features, cpu_name
from ..program import EngineMismatch, outdated
from ..step import StepInputs

CODE = "code/model.so"
ABI_VERSION = 3

STEP_ARRAYS = tuple(name for name in StepInputs.ARRAYS if name != "block_tables")
"""Those that every kernel finds in ingot_step; block tables are arguments."""


class Step(ctypes.Structure):
    """ingot_step."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_seqs", "num_logits", "max_blocks")),
        *((name, ctypes.c_void_p) for name in STEP_ARRAYS),
        ("sampling", ctypes.c_void_p),
    ]


class Launch(ctypes.Structure):
    """ingot_launch."""

    _fields_ = [("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p)]


def check_cpu(engine: EngineFile, machine: str | None = None, features: frozenset[str] | None = None) -> None:
    """Raises EngineMismatch unless this CPU (or the one described) has what the engine's code needs."""
    target = engine.manifest["target"]
    needs_machine, needs = target.get("machine"), target.get("features")
    if not isinstance(needs_machine, str) or not isinstance(needs, list):
        raise EngineFormatError(f"{engine.path}: manifest.json: target: machine or features are missing or malformed")
    machine = platform.machine() if machine is None else machine
    features = cpu_features() if features is None else features
    missing = sorted(set(needs) - features)
    if machine == needs_machine and not missing:
        return
    if machine != needs_machine:
        article = "an" if needs_machine[:1] in "aeiou" else "a"
        reason = f"it needs {article} {needs_machine} machine, this one is {machine}"
    else:
        reason = f"this CPU ({cpu_name()}) lacks {', '.join(missing)}"
    raise EngineMismatch(
        f"{engine.path} was built for {target['name']}; {reason}.\n"
        f"  Build one for this machine: ingot build {engine.manifest['model']['name']} --target cpu "
        f"--precision {engine.manifest['precision']}"
    )


class NativeCode:
    """A loaded library of kernels; `close` unloads it."""

    def __init__(self, engine: EngineFile) -> None:
        """Raises EngineFormatError if it is no library of the ABI that this runtime speaks, WorkFailed."""
        check_cpu(engine)
        if amx.FEATURE in engine.manifest["target"]["features"]:
            amx.request_tiles(str(engine.path))
        self._engine = engine
        self._path = engine.path
        self._addresses: dict[str, int] = {}
        self._fd, self._library = _load(engine)
        try:
            self._bind(engine)
        except BaseException:
            self.close()
            raise

    def _bind(self, engine: EngineFile) -> None:
        version = self._function("ingot_abi_version", ctypes.c_int)()
        if version != ABI_VERSION:
            raise outdated(engine, f"its code speaks ABI {version}, this runtime {ABI_VERSION}")
        self.pool_create = self._function("ingot_pool_create", ctypes.c_void_p, ctypes.c_int)
        self.pool_destroy = self._function("ingot_pool_destroy", None, ctypes.c_void_p)
        # Calls through ctypes release Python's global lock: others run while `wait` waits.
        self.start = self._function(
            "ingot_start", None, ctypes.c_void_p, ctypes.POINTER(Step), ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        )
        self.wait = self._function("ingot_wait", None, ctypes.c_void_p)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise EngineFormatError(f"{self._path}: {CODE} has no symbol {name}") from None
        function.restype, function.argtypes = result, arguments
        return function

    def profile(self, *arguments: Any) -> None:
        """ingot_profile. Raises EngineMismatch if the library is of before profiles."""
        self.need("ingot_profile")
        self._function("ingot_profile", None, ctypes.c_void_p, ctypes.POINTER(Step), ctypes.c_void_p, ctypes.c_int,
                       ctypes.c_int, ctypes.c_void_p)(*arguments)

    def need(self, name: str) -> None:
        """Raises EngineMismatch unless the library has this function, which engines did not always have."""
        if not hasattr(self._library, name):
            raise outdated(self._engine, f"its code has no {name}")

    def kernel(self, name: str) -> int:
        """The address of a kernel. Raises EngineFormatError if the library has none of that name."""
        if name not in self._addresses:
            try:
                self._addresses[name] = ctypes.addressof(ctypes.c_char.in_dll(self._library, name))
            except ValueError:
                raise EngineFormatError(f"{self._path}: {CODE} has no kernel {name}") from None
        return self._addresses[name]

    def close(self) -> None:
        """Unloads the library: nothing of it may run, and no address of it be used, from now on."""
        if self._fd >= 0:
            _ctypes.dlclose(self._library._handle)
            os.close(self._fd)
            self._fd = -1


def _load(engine: EngineFile) -> tuple[int, ctypes.CDLL]:
    """The library, loaded from a file in memory, and the descriptor of that file.

    The descriptor stays open as long as the library is loaded: the loader takes two libraries of equal path for one,
    and the path holds the descriptor's number.
    """
    try:
        fd = os.memfd_create("ingot-model.so")
    except OSError:  # a kernel or sandbox without it
        fd = _temporary_file()
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(engine.read(CODE))
        return fd, ctypes.CDLL(f"/proc/self/fd/{fd}", mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        os.close(fd)
        raise WorkFailed(f"{engine.path}: cannot load {CODE}: {error}") from None
    except BaseException:
        os.close(fd)
        raise


def _temporary_file() -> int:
    fd, path = tempfile.mkstemp(prefix="ingot-", suffix=".so")
    os.unlink(path)
    return fd

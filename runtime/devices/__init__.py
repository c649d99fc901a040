"""The devices that run engines, one module each; `load_program` picks the one that an engine was built for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..errors import RequestError
from ..host import available_memory_bytes
from ..kv_memory import DEFAULT_FRACTION
from ..kv_memory import kv_cache_tokens as tokens_in_free_memory
from ..program import EngineMismatch, Program

DEVICES = ("cpu", "cuda", "emulator")
"""An engine for CPUs runs on cpu, one for GPUs on cuda or, on the CPU, in the emulator."""


def target_kind(manifest: dict[str, Any]) -> str:
    """"cpu" or "cuda"."""
    target = manifest["target"]
    kind = target.get("kind", str(target["name"]).partition(":")[0])
    if not isinstance(kind, str):
        raise EngineFormatError(f"manifest.json: target.kind: expected a string, got {kind!r}")
    return kind


def device_of(engine: EngineFile, device: str | None = None) -> tuple[str, tuple[int, ...]]:
    """(one of DEVICES, numbers of the GPUs) that run an engine: what is asked for ("cuda:1" is the second GPU,
    "cuda:2,3" are two for an engine that is divided among as many), else what it was built for. Other devices have no
    numbers.

    Raises RequestError if that does not run it, EngineMismatch if no device of this runtime does.
    """
    kind, target = target_kind(engine.manifest), engine.manifest["target"]["name"]
    if kind not in ("cpu", "cuda"):
        raise EngineMismatch(f"{engine.path} was built for {target}; this version of the runtime runs engines for "
                             "CPUs and for CUDA GPUs")
    able = ("cpu",) if kind == "cpu" else ("cuda", "emulator")
    name, colon, number = (device or able[0]).partition(":")
    numbers = number.split(",")
    if name not in DEVICES or (colon and (name != "cuda" or not all(one.isdecimal() for one in numbers))):
        raise RequestError(f"--device: unknown device {device!r}; expected {', '.join(DEVICES)}, cuda:NUMBER or "
                           "cuda:NUMBER,NUMBER")
    if name not in able:
        raise RequestError(f"--device {name} does not run {engine.path}, which was built for {target}; it runs on: "
                           f"{', '.join(able)}")
    if name != "cuda":
        return name, ()
    from .gpu_collective import ranks_on

    return name, ranks_on(engine, tuple(map(int, numbers)) if colon else ())


def free_bytes(engine: EngineFile, device: str | None = None) -> int:
    """Memory that an engine could take now on the device that would run it, of each GPU. Raises as device_of does, and
    NoGpu."""
    name, numbers = device_of(engine, device)
    if name != "cuda":
        return available_memory_bytes()
    from .cuda_driver import find_gpu, load_driver
    from .cuda_memory import free_of

    with _emulator_told(engine):
        driver = load_driver()
        gpus = [find_gpu(driver, number) for number in numbers]
    return min(free_of(driver, gpu) for gpu in gpus)


@contextmanager
def _emulator_told(engine: EngineFile) -> Iterator[None]:
    """Who has no GPU may still run the engine."""
    from .cuda_driver import NoGpu

    try:
        yield
    except NoGpu as error:
        target = engine.manifest["target"]["name"]
        hint = "\n  Without a GPU it runs on the CPU, very slowly: --device emulator"
        told = str(error) if "--device emulator" in str(error) else f"{error}{hint}"
        raise NoGpu(f"{engine.path} was built for {target}; {told}") from None


def default_fraction(engine: EngineFile, device: str | None = None) -> float:
    """Of the free memory, what the KV cache takes unless somebody says something else."""
    if device_of(engine, device)[0] != "cuda":
        return DEFAULT_FRACTION
    from .cuda import DEFAULT_FRACTION as OF_GPUS

    return OF_GPUS


def load_program(engine: EngineFile, kv_cache_tokens: int | None = None, num_workers: int | None = None,
                 host_kv_tokens: int = 0, *, device: str | None = None, kv_cache_fraction: float | None = None,
                 most_kv_tokens: int | None = None) -> Program:
    """Loads the engine's code and weights, with a KV cache of at least `kv_cache_tokens` tokens.

    kv_cache_tokens: None: kv_cache_fraction of the memory that is free beside all else, by default default_fraction,
    but no more than most_kv_tokens.
    num_workers: threads of a CPU engine, by default one a core that this process may use.
    host_kv_tokens: room for blocks that are kept in the host's memory. device: as device_of takes it.
    Raises EngineMismatch if the engine is for another machine, EngineFormatError if its plan is wrong, NoGpu,
    RequestError, WorkFailed.
    """
    name, numbers = device_of(engine, device)
    fraction = default_fraction(engine, device) if kv_cache_fraction is None else kv_cache_fraction
    if name == "cuda":
        from .cuda import CudaProgram

        with _emulator_told(engine):
            return CudaProgram(engine, kv_cache_tokens, host_kv_tokens, kv_cache_fraction=fraction,
                               most_kv_tokens=most_kv_tokens, ordinals=numbers)
    if (tokens := kv_cache_tokens) is None:
        tokens = tokens_in_free_memory(engine.manifest, fraction)
        tokens = tokens if most_kv_tokens is None else min(tokens, most_kv_tokens)
    if name == "emulator":
        from .emulator import EmulatorProgram

        return EmulatorProgram(engine, tokens, host_kv_tokens)
    from .cpu import CpuProgram

    return CpuProgram(engine, tokens, num_workers, host_kv_tokens)

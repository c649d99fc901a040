"""ingot doctor: what this machine can build and run, and what is in the way."""

import argparse
import ctypes
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .. import amx
from ..errors import IngotError, WorkFailed
from ..folders import cache_folder
from ..host import available_cores, available_memory_bytes, cpu_features, cpu_name
from .absent import TRITON, TRITON_INSTALL
from .output import print_json, size, table

RUNTIME_PACKAGES = ("numpy", "tokenizers", "jinja2")
COMPILER_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "pyyaml", "ziglang")
# What kernels make use of, of the many flags that a CPU has.
TELLING_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
                    "asimddp", "sve")
LEAST_DISK_BYTES = 2_000_000_000


class Check(NamedTuple):
    """status: "ok", "warn" (something is missing that one may do without) or "fail"."""

    name: str
    status: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    checks = [check() for check in CHECKS]
    failed = [check.name for check in checks if check.status == "fail"]
    if arguments.json:
        print_json([check._asdict() for check in checks])
    else:
        print(table([(check.status, check.name, check.detail) for check in checks]))
        print(f"\nin the way: {', '.join(failed)}" if failed else "\nnothing is in the way")
    return 1 if failed else 0


def _python() -> Check:
    right = sys.version_info >= (3, 11) and sys.platform == "linux"
    return Check("python", "ok" if right else "fail", f"{platform.python_version()} on {sys.platform} "
                 f"{platform.machine()}; needs 3.11 or newer on Linux")


def _cpu() -> Check:
    found = [name for name in TELLING_FEATURES if name in cpu_features()]
    enough = {"avx2", "fma"} <= set(found) or "asimddp" in found
    if amx.FEATURE in found:
        try:
            amx.request_tiles("cpu:x86-64-amx")
        except WorkFailed as error:
            return Check("cpu", "warn", f"{cpu_name()}: {' '.join(found)}; {' '.join(str(error).split())}")
    return Check("cpu", "ok" if enough else "fail", f"{cpu_name()}: {' '.join(found) or 'none of the features'}"
                 + ("" if enough else "; CPU engines need AVX2 with FMA, or Arm with dot products"))


def _cores() -> Check:
    return Check("cores", "ok", f"{available_cores()} physical for this process; {os.cpu_count()} logical in all")


def _memory() -> Check:
    available = available_memory_bytes()
    return Check("memory", "ok" if available >= 1 << 30 else "warn", f"{size(available)} available")


def _runtime_packages() -> Check:
    found, missing = _versions(RUNTIME_PACKAGES)
    if missing:
        return Check("runtime", "fail", f"missing: {', '.join(missing)}; pip install ingot-llm")
    return Check("runtime", "ok", ", ".join(found))


def _compiler_packages() -> Check:
    found, missing = _versions(COMPILER_PACKAGES)
    if missing:
        return Check("compiler", "warn", f"cannot build engines: missing {', '.join(missing)}; "
                     "pip install 'ingot-llm[build]'")
    return Check("compiler", "ok", ", ".join(found))


def _c_compiler() -> Check:
    try:
        from ingot.compiler.cpu.isa import host_isa
        from ingot.compiler.cpu.toolchain import compile_shared
    except ImportError as error:
        return Check("c compiler", "warn", f"not tried, the compiler is not installed: {error}")
    source = '__attribute__((visibility("default"))) int ingot_doctor(int x) { return x + 1; }\n'
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="ingot-doctor-") as folder:
            path = Path(folder, "doctor.so")
            isa = host_isa()
            compile_shared({"doctor.c": source}, isa, [], path)
            if ctypes.CDLL(str(path)).ingot_doctor(41) != 42:
                return Check("c compiler", "fail", f"code compiled for {isa.name} computes wrongly")
    except (IngotError, OSError) as error:
        return Check("c compiler", "fail", str(error))
    return Check("c compiler", "ok", f"compiles for {isa.name}, and this machine runs it "
                 f"({time.perf_counter() - begin:.1f} s)")


def _gpu_compiler() -> Check:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return Check("gpu compiler", "warn", f"cannot build engines for GPUs: missing triton; {TRITON_INSTALL}")
    if found != TRITON:
        return Check("gpu compiler", "warn", f"kernels are for triton {TRITON}, this is {found}; {TRITON_INSTALL}")
    return Check("gpu compiler", "ok", f"triton {found}; needs neither a GPU nor a driver")


def _gpu() -> Check:
    from ..devices.cuda_driver import list_gpus, load_driver, teams

    try:
        driver = load_driver()
        version_number = int(driver.call("cuDriverGetVersion"))
        gpus = list_gpus(driver)
        together = teams(driver, gpus)
    except IngotError as error:
        return Check("gpu", "warn", " ".join(str(error).split()))
    driver_text = f"driver for CUDA {version_number // 1000}.{version_number % 1000 // 10}"
    reach = [f"cuda:{','.join(str(gpu.ordinal) for gpu in team)} reach each other's memory" for team in together]
    if len(gpus) > 1 and not together:
        reach = ["none reaches another's memory: engines that are divided among GPUs (--tensor-parallel) do not run"]
    return Check("gpu", "ok", "; ".join([*(
        f"cuda:{gpu.ordinal} {gpu.name}, {gpu.arch}, {size(gpu.memory_bytes)}" for gpu in gpus), *reach, driver_text]))


def _cache() -> Check:
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Check("cache", "warn", f"{folder} cannot be written; set INGOT_CACHE to a folder that can")
    free = shutil.disk_usage(existing).free
    return Check("cache", "ok" if free >= LEAST_DISK_BYTES else "warn", f"{folder}; {size(free)} free on its disk")


def _disk() -> Check:
    free = shutil.disk_usage(".").free
    return Check("disk", "ok" if free >= LEAST_DISK_BYTES else "warn", f"{size(free)} free for engines here")


def _versions(packages: tuple[str, ...]) -> tuple[list[str], list[str]]:
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    return found, missing


CHECKS: tuple[Callable[[], Check], ...] = (
    _python, _cpu, _cores, _memory, _runtime_packages, _compiler_packages, _c_compiler, _gpu_compiler, _gpu, _cache,
    _disk,
)

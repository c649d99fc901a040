"""What this machine gives to a CPU engine: CPU features, cores, memory. Linux only, as CPU engines are.

Every function takes `root`, the folder that holds proc/ and sys/, so that tests can describe other machines.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path


def cpu_features(root: Path = Path("/")) -> frozenset[str]:
    """The CPU's feature flags by the names of /proc/cpuinfo; empty where that cannot be read."""
    return frozenset(_cpuinfo(root, ("flags", "Features")).split())


def cpu_name(root: Path = Path("/")) -> str:
    return _cpuinfo(root, ("model name", "CPU part")) or "unknown CPU"


def _cpuinfo(root: Path, keys: tuple[str, ...]) -> str:
    """The value of the first line in /proc/cpuinfo with one of these keys."""
    try:
        with open(root / "proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in keys:
                    return value.strip()
    except OSError:
        pass
    return ""


def available_cores(root: Path = Path("/"), cpus: set[int] | None = None) -> int:
    """Physical cores that this process may use: of its affinity mask, within its control group's CPU quota.

    Two hyperthreads of a core share its arithmetic units, so that a second worker there gains nothing.
    """
    if cpus is None:
        # Engines can be built where this call is missing: all processors count there.
        has_affinity = hasattr(os, "sched_getaffinity")
        cpus = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        cores.add(_read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(cpu))
    count = len(cores)
    for folder in _cgroups(root, "cpu"):
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota == "max":  # version 1, or no limit
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            count = min(count, -(-int(quota) // int(period)))
    return max(count, 1)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be taken without swapping, within the control group's limit; 0 if unknown."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            available = min(available, max(int(limit) - int(used), 0))
    return available


def return_free_memory() -> None:
    """Give the pages that freed memory occupies back to the system; the C library keeps them for later otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others return memory by themselves, or not at all
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups that bound this process, from its own up to the mount point; of version 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        yield folder
        # Inside a container the path may be the host's, of which only the mount point itself is visible.
        while folder != mount:
            folder = folder.parent
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""What a machine offers, read from described machines."""

from pathlib import Path

import pytest

from ingot.runtime.host import available_cores, available_memory_bytes, cpu_features, cpu_name


def describe(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cores(siblings: list[str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": f"{group}\n" for i, group in enumerate(siblings)}


def test_features_of_x86_and_arm(tmp_path: Path) -> None:
    x86 = describe(tmp_path / "x86", {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Abacus 9\nflags\t: fpu avx2 fma\n"
                                                      "\nprocessor\t: 1\nflags\t\t: other\n"})
    assert cpu_features(x86) == {"fpu", "avx2", "fma"}
    assert cpu_name(x86) == "Abacus 9"
    arm = describe(tmp_path / "arm", {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimddp\n"})
    assert cpu_features(arm) == {"fp", "asimd", "asimddp"}
    assert cpu_features(tmp_path / "nothing") == frozenset()


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    root = describe(tmp_path, cores(["0,2", "1,3", "0,2", "1,3"]))
    assert available_cores(root, {0, 1, 2, 3}) == 2
    assert available_cores(root, {0, 2}) == 1
    assert available_cores(root, {0, 1}) == 2


def test_without_topology_each_cpu_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path, {4, 5, 6}) == 3


@pytest.mark.parametrize(("files", "expected"), [
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    ({"proc/self/cgroup": "3:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 4),
    ({"proc/self/cgroup": "3:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 8),
    ({"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n",
      "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 8),
])  # fmt: skip
def test_the_control_groups_quota_bounds_cores(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    root = describe(tmp_path, {**cores([str(i) for i in range(8)]), **files})
    assert available_cores(root, set(range(8))) == expected


def test_memory(tmp_path: Path) -> None:
    root = describe(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n"})
    assert available_memory_bytes(root) == 2_048_000
    describe(root, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000000\n",
                    "sys/fs/cgroup/a/memory.current": "400000\n"})
    assert available_memory_bytes(root) == 600_000
    describe(root, {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert available_memory_bytes(root) == 2_048_000
    assert available_memory_bytes(tmp_path / "nothing") == 0


def test_this_machine() -> None:
    assert available_cores() >= 1
    assert available_memory_bytes() > 0
    assert cpu_features()

"""Instruction sets that a CPU engine can be built for, and what this host has."""
from __future__ import annotations

import platform
from dataclasses import dataclass

from ingot.runtime.errors import RequestError
from ingot.runtime.host import cpu_features


@dataclass(frozen=True)
class CpuIsa:
    """One instruction set.

    machine: as platform.machine() names it. required: flags that /proc/cpuinfo must list for the code to run.
    zig_cpu, march: the same set in the words of zig (-mcpu) and of gcc or clang (-march).
    """

    name: str
    machine: str
    required: frozenset[str]
    zig_cpu: str
    march: str
    extra_flags: tuple[str, ...] = ()

    @property
    def multiplies_pairs(self) -> bool:
        """Whether it multiplies pairs of bfloat16, so that what is bfloat16 is not widened."""
        return "avx512_bf16" in self.required

    @property
    def zig_target(self) -> str:
        """glibc 2.28 is what distributions since 2018 have (Debian 10, RHEL 8, Ubuntu 20.04)."""
        return f"{self.machine}-linux-gnu.2.28"


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}

# Compilers prefer 256-bit vectors on x86-64-v4 for the sake of early Xeons that lower their clock; these kernels are
# dense enough that the wider registers win there too.
_WIDE = ("-mprefer-vector-width=512",)

ISAS: dict[str, CpuIsa] = {
    isa.name: isa
    for isa in (
        CpuIsa("x86-64-v3", "x86_64", _V3, "x86_64_v3", "x86-64-v3"),
        CpuIsa("x86-64-v4", "x86_64", _V4, "x86_64_v4", "x86-64-v4", _WIDE),
        CpuIsa("x86-64-v4-vnni", "x86_64", _VNNI, "x86_64_v4+avx512vnni", "x86-64-v4+avx512vnni", _WIDE),
        CpuIsa("x86-64-v4-bf16", "x86_64", _BF16, "x86_64_v4+avx512vnni+avx512bf16",
               "x86-64-v4+avx512vnni+avx512bf16", _WIDE),
        CpuIsa("x86-64-amx", "x86_64", _BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
               "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_int8+amx_bf16",
               "x86-64-v4+avx512vnni+avx512bf16+amx-tile+amx-int8+amx-bf16", _WIDE),
        CpuIsa("aarch64-dotprod", "aarch64", frozenset({"asimd", "asimddp"}), "generic+v8_2a+dotprod",
               "armv8.2-a+dotprod"),
    )
}


def runnable_isas(machine: str, flags: frozenset[str]) -> list[CpuIsa]:
    """The instruction sets that such a machine can run, the most capable last."""
    return [isa for isa in ISAS.values() if isa.machine == machine and isa.required <= flags]


def host_isas() -> list[CpuIsa]:
    """The instruction sets that this machine can run, the most capable last; empty if it can run none."""
    return runnable_isas(platform.machine(), cpu_features())


def host_isa() -> CpuIsa:
    """The most capable instruction set of this machine; RequestError if it can run none."""
    found = host_isas()
    if not found:
        raise RequestError(f"this machine ({platform.machine()}) can run none of Ingot's CPU targets.\n"
                           f"  Needed is one of: {', '.join(ISAS)} (AVX2 with FMA, or Arm with dot products).")
    return found[-1]

"""Which instruction sets a machine can run."""
from __future__ import annotations

from ingot.compiler.cpu.isa import ISAS, runnable_isas


def names(machine: str, flags: frozenset[str]) -> list[str]:
    return [isa.name for isa in runnable_isas(machine, flags)]


def test_the_most_capable_comes_last() -> None:
    v3, vnni, bf16, amx = (ISAS[name].required for name in (
        "x86-64-v3", "x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-amx"))
    assert names("x86_64", v3) == ["x86-64-v3"]
    assert names("x86_64", vnni) == ["x86-64-v3", "x86-64-v4", "x86-64-v4-vnni"]
    assert names("x86_64", bf16) == ["x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16"]
    assert names("x86_64", amx)[-2:] == ["x86-64-v4-bf16", "x86-64-amx"]
    assert names("x86_64", amx - {"amx_bf16"})[-1] == "x86-64-v4-bf16"
    assert names("x86_64", bf16 - {"avx512_vnni"}) == ["x86-64-v3", "x86-64-v4"]
    assert names("x86_64", v3 - {"f16c"}) == []


def test_machines_do_not_mix() -> None:
    assert names("aarch64", frozenset({"asimd", "asimddp"})) == ["aarch64-dotprod"]
    assert names("aarch64", frozenset({"asimd"})) == []
    assert names("riscv64", ISAS["x86-64-v4-vnni"].required) == []

"""GPU targets as data: an architecture's limits, a device's figures, and the reading of both from YAML."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ingot.plugins.gpu.device import Device
from ingot.runtime.errors import RequestError

_OPERAND_TYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "int8": "int8", "int4": "bf16",
                  "nvfp4": "nvfp4"}
"""The type that a precision multiplies in; w4a8 takes fp8 where there is fp8."""


class BadTarget(RequestError):
    """A file of targets that cannot be read, or an entry of it with a missing, unknown or impossible figure."""


@dataclass(frozen=True)
class Architecture:
    """name        "sm_90a", as cubins name it
    capability     90: what the compiler takes
    precisions     precision -> the matrix instruction that its linear layers must show in the disassembly
    kv_precisions  element types of the KV cache
    ops_per_clock  operand type -> dense operations of a multiprocessor in a clock
    shared_per_sm, shared_per_block  bytes; registers_per_sm of 32 bits; threads_per_sm, blocks_per_sm resident
    """

    name: str
    capability: int
    precisions: dict[str, str]
    kv_precisions: tuple[str, ...]
    ops_per_clock: dict[str, int]
    shared_per_sm: int
    shared_per_block: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int


@dataclass(frozen=True)
class Gpu:
    """One device. tflops: operand type -> dense peak with 32-bit accumulation, in 10^12 operations a second.
    link_gb_s: between it and the other GPUs of a host, in both directions together, in 10^9 bytes a second.
    sources: figure -> the document that gives it."""

    arch: Architecture
    num_sms: int
    memory_gib: float
    bandwidth_gb_s: float
    l2_mib: float
    tflops: dict[str, float]
    sources: dict[str, str]
    link_gb_s: float

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """That come in from other GPUs."""
        return self.link_gb_s / 2 * 1e9

    @property
    def device(self) -> Device:
        """What the kernels' tactics need."""
        return Device(self.arch.name, self.arch.capability, self.num_sms, self.arch.shared_per_block)

    @property
    def clock_hz(self) -> float:
        """That the fp32 rate implies."""
        return self.implied_clock_hz("fp32")

    def implied_clock_hz(self, operand_type: str) -> float:
        """At which all multiprocessors together reach the rate of an operand type."""
        return self.tflops[operand_type] * 1e12 / (self.num_sms * self.arch.ops_per_clock[operand_type])

    def operand_type(self, precision: str) -> str:
        """The type whose Tensor Core rate a precision's linear layers run at."""
        if precision == "w4a8":
            return "fp8" if "fp8" in self.arch.precisions else "int8"
        return _OPERAND_TYPES[precision]

    def flops_per_s(self, precision: str) -> float:
        return self.tflops[self.operand_type(precision)] * 1e12

    @property
    def instructions_per_s(self) -> float:
        """Of all threads, at the rate of FP32's multiply-adds."""
        return self.flops_per_s("fp32") / 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"arch": self.arch.name, "limits": {
            name: getattr(self.arch, name) for name in _LIMITS}}


_FIGURES = ("num_sms", "memory_gib", "bandwidth_gb_s", "l2_mib", "link_gb_s", "tflops")
_KEYS = ("arch", "note", *_FIGURES, "sources")
_LIMITS = tuple(f.name for f in fields(Architecture)[5:])
_LEAST_LINK_GB_S, _LEAST_LINK = 64, "derived: PCI Express 4.0 of 16 lanes, where the file gives no figure"
_CLOCKS_HZ = (0.5e9, 4e9)
_CLOCK_RATIOS = (0.4, 1.2)
"""Clock that a matrix rate implies / that of fp32: from half (GeForce) to equal; with sparsity it is 1.7 to 2."""


@cache
def architectures() -> dict[str, Architecture]:
    entries = yaml.safe_load((Path(__file__).parent / "architectures.yaml").read_text())
    return {name: Architecture(name=name, capability=entry["capability"], precisions=entry["precisions"],
                               kv_precisions=tuple(entry["kv_precisions"]), ops_per_clock=entry["ops_per_clock"],
                               **entry["limits"])
            for name, entry in entries.items()}


def parse_gpu(name: str, entry: Any, where: str) -> tuple[Gpu, str]:
    """One entry of a file of GPU targets -> (Gpu, note). Raises BadTarget that names file, entry and figure."""
    def refuse(what: str) -> BadTarget:
        return BadTarget(f"{where}: target {name!r}: {what}\n"
                         "  An example of every figure: compiler/targets/nvidia.yaml")

    if not isinstance(entry, Mapping):
        raise refuse(f"expected a mapping of figures, got {entry!r}")
    if unknown := [str(key) for key in entry if key not in _KEYS]:
        raise refuse(f"unknown key {unknown[0]!r}; the keys are: {', '.join(_KEYS)}")
    entry = _with_link(entry)
    if missing := [key for key in _KEYS if key not in entry]:
        raise refuse(f"{missing[0]!r} is missing")
    known = architectures()
    if entry["arch"] not in known:
        raise refuse(f"unknown architecture {entry['arch']!r}; known: {', '.join(known)}")
    arch = known[entry["arch"]]
    for figure in _FIGURES[:-1]:
        if not _is_positive(entry[figure]):
            raise refuse(f"{figure} must be a positive number, got {entry[figure]!r}")
    if entry["num_sms"] != int(entry["num_sms"]):
        raise refuse(f"num_sms must be a whole number, got {entry['num_sms']!r}")
    rates = entry["tflops"]
    if not isinstance(rates, Mapping) or not all(map(_is_positive, rates.values())):
        raise refuse(f"tflops must map operand types to positive numbers, got {rates!r}")
    if unknown := [str(kind) for kind in rates if kind not in _OPERAND_TYPES.values()]:
        raise refuse(f"tflops of unknown operand type {unknown[0]!r}; known: "
                     f"{', '.join(dict.fromkeys(_OPERAND_TYPES.values()))}")
    gpu = Gpu(arch, int(entry["num_sms"]), entry["memory_gib"], entry["bandwidth_gb_s"], entry["l2_mib"], dict(rates),
              _sources(entry["sources"], refuse), entry["link_gb_s"])
    for precision in arch.precisions:
        if (kind := gpu.operand_type(precision)) not in rates:
            raise refuse(f"{arch.name} computes in {precision}, but tflops has no rate of {kind}")
    if not _CLOCKS_HZ[0] <= gpu.clock_hz <= _CLOCKS_HZ[1]:
        raise refuse(f"{gpu.num_sms} multiprocessors of {arch.name} need a clock of {gpu.clock_hz / 1e9:.3g} GHz for "
                     f"the rate of fp32, {rates['fp32']:g} in units of 10^12 operations a second")
    for kind in rates:
        if kind in arch.ops_per_clock:
            _check_rate(gpu, kind, refuse)
    return gpu, str(entry["note"])


def _with_link(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the slowest link that a GPU of these architectures has, where the entry tells of none."""
    if "link_gb_s" in entry:
        return entry
    found = {**entry, "link_gb_s": _LEAST_LINK_GB_S}
    if isinstance(entry.get("sources"), Mapping):
        found["sources"] = {**entry["sources"], _LEAST_LINK: ["link_gb_s"]}
    return found


def _check_rate(gpu: Gpu, kind: str, refuse: Any) -> None:
    """Raises where no clock of the device gives a rate: one with sparsity, or of another device."""
    low, high = _CLOCK_RATIOS
    if low <= gpu.implied_clock_hz(kind) / gpu.clock_hz <= high:
        return
    most = high * gpu.clock_hz * gpu.num_sms * gpu.arch.ops_per_clock[kind] / 1e12
    least = low * gpu.clock_hz * gpu.num_sms * gpu.arch.ops_per_clock[kind] / 1e12
    raise refuse(f"tflops of {kind}: {gpu.num_sms} multiprocessors of {gpu.arch.name} at {gpu.clock_hz / 1e9:.2f} GHz, "
                 f"which the rate of fp32 implies, reach {least:.4g} to {most:.4g}, got {gpu.tflops[kind]:g}. "
                 "Rates are dense: data sheets often print them with sparsity, which is twice as much")


def _sources(documents: Any, refuse: Any) -> dict[str, str]:
    """{document: [figures]} -> {figure: document}, each figure once."""
    if not isinstance(documents, Mapping) or not all(isinstance(named, list) for named in documents.values()):
        raise refuse(f"sources must map documents to lists of figures, got {documents!r}")
    found: dict[str, str] = {}
    for document, named in documents.items():
        for figure in named:
            if figure not in _FIGURES:
                raise refuse(f"source {document!r} gives {figure!r}; the figures are: {', '.join(_FIGURES)}")
            if figure in found:
                raise refuse(f"{figure} has two sources: {found[figure]!r} and {document!r}")
            found[figure] = str(document)
    if missing := [figure for figure in _FIGURES if figure not in found]:
        raise refuse(f"{missing[0]} has no source")
    return {figure: found[figure] for figure in _FIGURES}


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")

"""Target: a machine as the compiler sees it."""
from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ingot.runtime.errors import RequestError

from ..cpu.isa import host_isa, host_isas
from .gpu import BadTarget, Gpu, parse_gpu

HOST = "cpu"
"""The target that stands for the machine that builds."""


class UnknownTarget(RequestError):
    """No target of that name."""


class UnsupportedPrecision(RequestError):
    """The target cannot compute in the precision asked for."""


@dataclass(frozen=True)
class Target:
    """name        "cpu:x86-64-v4-vnni", "h200"
    kind        "cpu" or "cuda"
    isa         cpu: key of compiler/cpu/isa.py; cuda: architecture, "sm_90a"
    precisions  what engines may be built in: precision -> the instruction that does the arithmetic
    kv_precisions  element types of the KV cache
    note        one line for `ingot targets`
    gpu         figures of a cuda target
    """

    name: str
    kind: str
    isa: str
    precisions: dict[str, str]
    kv_precisions: tuple[str, ...]
    note: str
    gpu: Gpu | None = None

    def require_precision(self, precision: str) -> None:
        if precision not in self.precisions:
            raise UnsupportedPrecision(
                f"{self.name} has no precision {precision!r}; it has: {', '.join(self.precisions)}.\n"
                f"  Choose one with --precision, or another target: ingot targets")

    def to_json(self) -> dict[str, Any]:
        figures = {} if self.gpu is None else {"gpu": self.gpu.to_json()}
        return {"name": self.name, "kind": self.kind, "isa": self.isa, "precisions": self.precisions,
                "kv_precisions": list(self.kv_precisions), "note": self.note} | figures


@cache
def _load() -> dict[str, Target]:
    """The targets that come with Ingot."""
    folder = Path(__file__).parent
    entries = yaml.safe_load((folder / "cpu.yaml").read_text())
    cpus = {name: Target(name=name, kv_precisions=tuple(entry.pop("kv_precisions")), **entry)
            for name, entry in entries.items()}
    return cpus | read_targets(folder / "nvidia.yaml")


def read_targets(path: Path) -> dict[str, Target]:
    """The GPU targets of a YAML file, or of all *.yaml files of a folder. Raises BadTarget."""
    if path.is_dir():
        files = sorted(path.glob("*.yaml"))
        if not files:
            raise BadTarget(f"{path}: no *.yaml file in this folder")
        targets: dict[str, Target] = {}
        for file in files:
            for name, target in read_targets(file).items():
                if name in targets:
                    raise BadTarget(f"{file}: target {name!r} also stands in another file of {path}")
                targets[name] = target
        return targets
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadTarget(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadTarget(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict) or not entries:
        raise BadTarget(f"{path}: expected targets by name, as in compiler/targets/nvidia.yaml, got {entries!r:.60}")
    return {str(name): _gpu_target(str(name), entry, str(path)) for name, entry in entries.items()}


def _gpu_target(name: str, entry: Any, where: str) -> Target:
    gpu, note = parse_gpu(name, entry, where)
    return Target(name, "cuda", gpu.arch.name, gpu.arch.precisions, gpu.arch.kv_precisions, note, gpu)


def list_targets() -> list[Target]:
    """All known targets; the host's own comes first, under its full name."""
    runnable = host_isas()
    host = f"cpu:{runnable[-1].name}" if runnable else ""
    return sorted(_load().values(), key=lambda target: (target.name != host, target.kind))


def find_target(name: str) -> Target:
    """The target of that name; "cpu" is the best CPU target that this machine can run.

    A user's own: FILE.yaml where the file holds one target, FILE.yaml:NAME or FOLDER:NAME where there are several.
    Raises UnknownTarget with the nearest names, BadTarget for what is wrong in a file.
    """
    if own := _own_targets(name):
        return own
    targets = _load()
    if name == HOST:
        name = f"cpu:{host_isa().name}"
    if name in targets:
        return targets[name]
    raise UnknownTarget(f"unknown target {name!r}.{_hint(name, [HOST, *targets])}\n"
                        f"  Known: {', '.join([HOST, *targets])}. See: ingot targets")


def _own_targets(spec: str) -> Target | None:
    """The target of a user's file or folder; None if spec names neither."""
    place, _, name = spec.rpartition(":")
    path = Path(place if place and _is_place(place) else spec)
    if not _is_place(str(path)):
        return None
    targets = read_targets(path)
    if str(path) == spec:
        if len(targets) > 1:
            raise UnknownTarget(f"{path} holds several targets: {', '.join(targets)}.\n"
                                f"  Name one: --target {path}:{next(iter(targets))}")
        return next(iter(targets.values()))
    if name not in targets:
        raise UnknownTarget(f"{path} holds no target {name!r}.{_hint(name, list(targets))}\n"
                            f"  It holds: {', '.join(targets)}")
    return targets[name]


def _is_place(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or ("/" in text and Path(text).is_dir())


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(near)}?" if near else ""

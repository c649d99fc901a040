"""Tuning records: which tactic was the fastest for a problem, as a file that is an input of builds.

A record holds for one target and one state of the kernels' sources; a build refuses it for any other, naming both.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.plugins.kernel import source_digest
from ingot.runtime.errors import RequestError

from .problems import KERNELS, P, Problem, key_of, name_of, problem_of, tactic_of, with_tactic

VERSION = 1
_FIELDS = {"version": int, "target": str, "machine": str, "workers": int, "sources": dict, "records": list}


class BadRecords(RequestError):
    """A file that holds no tuning records, or none that this Ingot can read."""


class StaleRecords(RequestError):
    """Records of another target, or of kernels that have changed since."""


@dataclass(frozen=True)
class Record:
    """kernel     a key of problems.KERNELS
    problem    problems.key_of
    tactic     the fields that differ from the model's choice; none: that was the fastest, or as good
    median_us  of a launch, over the rounds of the measurement; model_us: of the model's choice in the same rounds
    """

    kernel: str
    problem: dict[str, Any]
    tactic: dict[str, int]
    median_us: float
    model_us: float

    @property
    def key(self) -> str:
        return _key(self.kernel, self.problem)


@dataclass(frozen=True)
class Records:
    """target   full name; machine, workers: the processor and the threads that were measured, for people
    sources  kernel -> digest of its source
    """

    target: str
    machine: str
    workers: int
    sources: dict[str, str]
    records: tuple[Record, ...]
    _by_key: dict[str, Record] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {record.key: record for record in self.records})

    @classmethod
    def read(cls, path: Path) -> Records:
        """Raises BadRecords."""
        try:
            value = json.loads(path.read_text())
        except OSError as error:
            raise BadRecords(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadRecords(f"{path}: no JSON: {error}.\n  Measure with: ingot tune MODEL -o {path}") from None
        return cls.of(value, str(path))

    @classmethod
    def of(cls, value: Any, where: str) -> Records:
        """From `to_json`. Raises BadRecords."""
        if not isinstance(value, dict) or set(value) != set(_FIELDS):
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise BadRecords(f"{where}: expected tuning records, an object of {', '.join(_FIELDS)}; got {found}")
        for name, kind in _FIELDS.items():
            if not isinstance(value[name], kind):
                raise BadRecords(f"{where}: {name}: expected {kind.__name__}, got {value[name]!r:.60}")
        if value["version"] != VERSION:
            raise BadRecords(f"{where}: version {value['version']}; this Ingot reads {VERSION}.\n"
                             "  Measure again: ingot tune MODEL")
        records = tuple(_record(entry, f"{where}: records[{i}]") for i, entry in enumerate(value["records"]))
        return cls(value["target"], value["machine"], value["workers"], value["sources"], records)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "target": self.target, "machine": self.machine, "workers": self.workers,
                "sources": self.sources, "records": [dict(vars(record)) for record in self.records]}

    def require(self, target: str, where: str) -> None:
        """Raises StaleRecords unless they are of this target and of the kernels as they are."""
        again = f"Measure again on such a machine: ingot tune MODEL --target {target} -o FILE"
        if self.target != target:
            raise StaleRecords(f"{where} was measured for {self.target}; this build is for {target}.\n  {again}")
        for kernel, digest in self.sources.items():
            now = source_digest(KERNELS[kernel]) if kernel in KERNELS else "no such kernel"
            if digest != now:
                raise StaleRecords(f"{where} was measured with the {kernel} kernels of source {digest[:12]}; those of "
                                   f"this Ingot are {now[:12]}.\n  {again}")

    def tuned(self, problem: P) -> P | None:
        """The problem with the tactic that was measured for it; None if none was."""
        record = self._by_key.get(_key(name_of(problem), key_of(problem)))
        return None if record is None else with_tactic(problem, tactic_of(record.kernel, record.tactic))

    def only(self, problems: Iterable[Problem]) -> Records:
        """Without records that none of these asks for."""
        keys = {_key(name_of(problem), key_of(problem)) for problem in problems}
        kept = tuple(record for record in self.records if record.key in keys)
        names = {record.kernel for record in kept}
        return replace(self, records=kept, sources={n: digest for n, digest in self.sources.items() if n in names})

    def merged(self, newer: Records, where: str) -> Records:
        """These and newer ones, which win. Raises StaleRecords if they are not of one target and source."""
        self.require(newer.target, where)
        return replace(newer, sources=self.sources | newer.sources,
                       records=tuple({record.key: record for record in (*self.records, *newer.records)}.values()))


def current_sources(kernels: Iterable[str]) -> dict[str, str]:
    """Kernel -> digest of its source."""
    return {kernel: source_digest(KERNELS[kernel]) for kernel in sorted(set(kernels))}


def _key(kernel: str, problem: Mapping[str, Any]) -> str:
    return json.dumps([kernel, dict(problem)], sort_keys=True)


def _record(entry: Any, where: str) -> Record:
    try:
        record = Record(str(entry["kernel"]), dict(entry["problem"]), dict(entry["tactic"]),
                        float(entry["median_us"]), float(entry["model_us"]))
        problem = problem_of(record.kernel, record.problem)
        assert key_of(problem) == record.problem
        tactic_of(record.kernel, record.tactic)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise BadRecords(f"{where}: malformed record {entry!r:.200}: {type(error).__name__} {error}") from None
    return record

"""Reads Prometheus' text format, as much as it takes to compare a server's metrics before and after."""

import math
import re
from dataclasses import dataclass
from typing import Self

_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Samples:
    """(name, labels) -> value."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Lines that are no samples are skipped."""
        values = {}
        for line in text.splitlines():
            match = None if line.startswith("#") else _LINE.fullmatch(line.strip())
            if match is None:
                continue
            name, labels, value = match.groups()
            pairs = frozenset((key, re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text))
                              for key, text in _LABEL.findall(labels or ""))
            try:
                values[name, pairs] = float(value)
            except ValueError:
                continue
        return cls(values)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples of that name with these labels; None if there is none."""
        found = list(self.by_label(name, None, **labels).values())
        return found[0] if found else None

    def by_label(self, name: str, label: str | None, **labels: str) -> dict[str, float]:
        """As total, for each value of `label` ("" where it is missing)."""
        sums: dict[str, float] = {}
        for (sample, pairs), value in self.values.items():
            if sample == name and labels.items() <= pairs:
                key = "" if label is None else dict(pairs).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the first sample of that name; empty if there is none."""
        return next((dict(pairs) for (sample, pairs) in self.values if sample == name), {})

    def since(self, earlier: Self) -> "Samples":
        """What counters and histograms have counted since."""
        return Samples({key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()})

    def quantiles(self, name: str, fractions: list[float]) -> list[float] | None:
        """Of a histogram, linear within its buckets; None if it is missing or empty.

        A quantile beyond the last bound is that bound, at least so much.
        """
        counts = {math.inf if bound == "+Inf" else float(bound): number
                  for bound, number in self.by_label(f"{name}_bucket", "le").items() if bound}
        if not counts or not counts.get(math.inf):
            return None
        bounds = sorted(counts)
        result = []
        for fraction in fractions:
            rank, below, begin = fraction * counts[math.inf], 0.0, 0.0
            for bound in bounds:
                if counts[bound] >= rank:
                    share = (rank - below) / (counts[bound] - below) if counts[bound] > below else 0.0
                    result.append(begin if bound == math.inf else begin + share * (bound - begin))
                    break
                below, begin = counts[bound], bound
        return result

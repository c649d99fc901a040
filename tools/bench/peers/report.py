"""What the rounds gave, as a table: medians with minimum and maximum, and ratios taken within each round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .job import Result

TASKS = {"generation": "generation, tok/s", "context": "context, tok/s", "requests": "16 requests, tok/s"}
FIRST = "ingot"


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def rates(results: Sequence[Result], task: str) -> list[float]:
    return [rate for result in results if (rate := getattr(result, task)) is not None]


def table(results: Mapping[str, Sequence[Result]], failures: Mapping[str, str]) -> list[str]:
    lines = ["| engine | " + " | ".join(TASKS.values()) + " | load, s | resident, MB |", "|---|---|---|---|---|---|"]
    for name, rounds in results.items():
        cells = [spread(found) if (found := rates(rounds, task)) else "–" for task in TASKS]
        loads = [result.load_s for result in rounds if result.load_s]
        memory = [result.peak_rss_bytes / 1e6 for result in rounds if result.peak_rss_bytes]
        cells += [spread(loads, 2) if loads else "–", f"{max(memory):.0f}" if memory else "–"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines + [f"| {name} | failed: {reason.splitlines()[0]} | | | | |" for name, reason in failures.items()]


def ratios(results: Mapping[str, Sequence[Result]], peers: Mapping[str, str]) -> list[str]:
    """Each Ingot engine against the best peer of each task; a ratio compares results of one round."""
    lines = ["| engine | task | best peer | ratio: median (min–max) |", "|---|---|---|---|"]
    for name in (name for name in results if peers[name] == FIRST):
        for task, title in TASKS.items():
            others = {other: found for other in results
                      if peers[other] != FIRST and (found := rates(results[other], task))}
            mine = rates(results[name], task)
            if not others or not mine:
                continue
            best = max(others, key=lambda other: statistics.median(others[other]))
            pairs = [a / b for a, b in zip(mine, others[best], strict=False)]
            lines.append(f"| {name} | {title.split(',')[0]} | {best} | {spread(pairs, 2)} × |")
    return lines


def roofline(results: Mapping[str, Sequence[Result]], bytes_per_token: Mapping[str, int],
             read_rate: float) -> list[str]:
    """The share of the machine's read bandwidth that generation at batch 1 reaches, by the bytes of its own weights."""
    lines = [f"Reading memory, all threads: {read_rate / 1e9:.1f} GB/s.", "",
             "| engine | bytes a token, MB | ceiling, tok/s | reached |", "|---|---|---|---|"]
    for name, size in bytes_per_token.items():
        ceiling = read_rate / size
        reached = statistics.median(rates(results[name], "generation")) / ceiling
        lines.append(f"| {name} | {size / 1e6:.1f} | {ceiling:.0f} | {reached:.0%} |")
    return lines


def as_json(results: Mapping[str, Sequence[Result]], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {**facts, "results": {name: [vars(result) for result in rounds] for name, rounds in results.items()}}

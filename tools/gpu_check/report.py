"""Results as a short table and as Markdown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from ingot.runtime.cli.output import table

SECTIONS = ("kernels", "ceilings", "rates", "engines", "team", "throughput")
_MATRIX_TYPE = {"fp8": "fp8", "w4a8": "fp8", "int8": "int8", "int4": "bf16", "bf16": "bf16"}

Table = tuple[str, Sequence[str], Sequence[tuple[str, ...]]]


def failures(results: dict[str, Any]) -> list[str]:
    """What did not do, one line each."""
    found = [f"{row['name']}: {row['detail']}" for row in results.get("kernels", {}).get("outcomes", [])
             if row["status"] == "failed"]
    found += [f"{row['name']}, {row['precision']}, {row['candidate']}: {row['problem']}"
              for row in results.get("rates", []) if row["problem"]]
    found += [f"engine {row['model']}, {row['precision']}: {row['problem']}"
              for row in results.get("engines", []) if row["problem"]]
    found += [f"engine of {row['ranks']} ranks: {row['problem']}" for row in results.get("team", []) if row["problem"]]
    found += [f"{row['who']}, {row['phase']}, batch {row['batch']}: {row['problem']}"
              for row in results.get("throughput", []) if row["problem"] and row["who"].startswith("ingot")]
    return found


def tables(results: dict[str, Any]) -> list[Table]:
    """(title, header, rows) of each section that has results."""
    makers = {"kernels": _kernels, "ceilings": _ceilings, "rates": _rates, "engines": _engines,
              "team": _team,
              "throughput": _throughput}
    return [makers[section](results) for section in SECTIONS if section in results]


def as_text(results: dict[str, Any]) -> str:
    parts = [f"{title}\n{table(rows, header, indent='  ')}" for title, header, rows in tables(results)]
    told = failures(results)
    return "\n\n".join([*parts, "failed:\n" + "\n".join(f"  {line}" for line in told) if told else "nothing failed"])


def as_markdown(results: dict[str, Any]) -> str:
    facts = results.get("facts", {})
    lines = ["# gpu_check", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    for title, header, rows in tables(results):
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}",
                  *(f"| {' | '.join(row)} |" for row in rows), ""]
    told = failures(results)
    lines += ["## Failures", "", *([f"- {line}" for line in told] or ["None."]), ""]
    return "\n".join(lines)


def _kernels(results: dict[str, Any]) -> Table:
    rows = [(row["group"], str(row["passed"]), str(row["failed"]), str(row["skipped"]), f"{row['seconds']:.1f} s")
            for row in results["kernels"]["summary"]]
    return "Kernels against their references", ("tests", "passed", "failed", "skipped", "time"), rows


def _ceilings(results: dict[str, Any]) -> Table:
    found = results["ceilings"]
    rows = [("copy", f"{found['copy_bytes_s'] / 1e9:.0f} GB/s")]
    rows += [(f"{name} products", value if isinstance(value, str) else f"{value / 1e12:.0f} T/s")
             for name, value in found["flops_s"].items()]
    return "Ceilings, by PyTorch", ("what", "rate"), rows


def _rates(results: dict[str, Any]) -> Table:
    ceilings = results.get("ceilings", {})
    copy, flops = ceilings.get("copy_bytes_s"), ceilings.get("flops_s", {})
    rows = []
    for row in results["rates"]:
        byte_rate, flop_rate = row["num_bytes"] / row["seconds"], row["flops"] / row["seconds"]
        most = flops.get(_MATRIX_TYPE.get(row["precision"], ""))
        rows.append((row["name"], row["precision"], row["candidate"], _number(1e6 * row["seconds"], ".1f"),
                     _number(1e6 * row["expected_s"], ".1f"), _number(byte_rate / 1e9, ".0f"), _share(byte_rate, copy),
                     _number(flop_rate / 1e12, ".1f"), _share(flop_rate, most), _number(row["error"], ".1e")))
    return "Rates (the first of each problem is what a build takes)", (
        "problem", "precision", "candidate", "µs", "model µs", "GB/s", "of copy", "TFLOP/s", "of products",
        "error"), rows


def _engines(results: dict[str, Any]) -> Table:
    rows = [(row["model"], row["precision"], _number(row["emulator_error"], ".1e"), _number(row["model_error"], ".1e"),
             _number(100 * row["top1"], ".0f") + " %", f"{row['differing']} of {row['num_tokens']}",
             row["problem"] or "passed") for row in results["engines"]]
    return "Engines", ("model", "precision", "off the emulator", "off transformers", "same top token",
                       "greedy tokens differing", "result"), rows


def _team(results: dict[str, Any]) -> Table:
    def result(row: dict[str, Any]) -> str:
        return row["problem"] or (f"skipped: {row['skipped']}" if row["skipped"] else "passed")

    rows = [(str(row["ranks"]), row["device"], _number(row["emulator_error"], ".1e"),
             _number(row["exchange_us"], ".1f"), str(row["num_exchanges"] or ""), result(row))
            for row in results["team"]]
    return "Engines divided among GPUs", ("ranks", "GPUs", "off the emulator", "µs of a step's exchanges", "exchanges",
                                          "result"), rows


def _throughput(results: dict[str, Any]) -> Table:
    rows = [(row["who"], row["phase"], str(row["batch"]), _number(1e3 * row["seconds"], ".3f"),
             _number(1e3 * row["device_s"], ".3f"), _number(row["tokens_per_step"] / row["seconds"], ".0f"),
             row["problem"]) for row in results["throughput"]]
    return "Throughput", ("who", "phase", "batch", "ms a step", "ms on the GPU", "tokens/s", "note"), rows


def _number(value: float, form: str) -> str:
    return "" if isnan(value) else format(value, form)


def _share(value: float, most: Any) -> str:
    return "" if isnan(value) or not isinstance(most, (int, float)) else f"{value / most:.0%}"


def only_known(sections: Iterable[str]) -> list[str]:
    return [section for section in sections if section not in SECTIONS]

"""The command; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.compiler.cpu.isa import host_isa
from ingot.compiler.tune.machine import Machine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.folders import cache_folder

from . import report, workload
from .contestants import Contestant, contestants
from .job import Result
from .prepare import ENVIRONMENTS, LLAMA_CPP, Kitchen


def _machine() -> dict[str, Any]:
    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "isa": host_isa().name, "system": platform.platform(),
            "python": platform.python_version()}


def _read_rate(threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine([], host_isa().name, threads, folder)
        try:
            return machine.read_bytes()
        finally:
            machine.close()


def _bytes_per_token(engine: Path) -> int:
    """Weights that a step of one token reads whole: all but tables of embeddings, of which it reads a row."""
    with EngineFile.open(engine) as file:
        plan = file.plan
    read = {arg[1] for launch in plan["buckets"][0]["launches"] if "embedding" not in launch["kernel"]
            for arg in launch["args"] if arg[0] == "weight"}
    return sum(plan["weights"][name]["size"] for name in read)


def _chosen(names: str | None) -> list[Contestant]:
    everyone = contestants()
    if names is None:
        return everyone
    wanted = names.split(",")
    peers = {contestant.peer for contestant in everyone}
    if unknown := ", ".join(sorted(set(wanted) - peers)):
        raise RequestError(f"--peers: {unknown} unknown; expected some of {', '.join(sorted(peers))}")
    return [contestant for contestant in everyone if contestant.peer in (*wanted, report.FIRST)]


def measure(arguments: argparse.Namespace) -> int:
    say = workload.progress
    cache = (arguments.cache or cache_folder() / "peers").absolute()
    model = workload.model(arguments.model, cache, say)
    kitchen = Kitchen(cache, model, arguments.threads, say)
    job = workload.job(model.checkpoint, arguments.threads)
    failures: dict[str, str] = {}
    ready: dict[Contestant, Path] = {}
    for contestant in _chosen(arguments.peers):
        try:
            ready[contestant] = contestant.prepare(kitchen)
        except IngotError as error:
            failures[contestant.name] = f"not prepared: {error}"
            say(f"{contestant.name}: {failures[contestant.name]}")
    results: dict[str, list[Result]] = {contestant.name: [] for contestant in ready}
    reads = []
    for number in range(arguments.rounds):
        reads.append(_read_rate(arguments.threads))
        for contestant, prepared in ready.items():
            if contestant.name in failures:
                continue
            try:
                result = contestant.run(kitchen, prepared, job)
            except IngotError as error:
                failures[contestant.name] = str(error)
                say(f"{contestant.name}: {error}")
                continue
            results[contestant.name].append(result)
            say(f"round {number + 1}: {contestant.name}: " + ", ".join(
                f"{task} {getattr(result, task):.0f}" for task in report.TASKS if getattr(result, task) is not None))
    results = {name: rounds for name, rounds in results.items() if rounds and name not in failures}
    _give(arguments, model.checkpoint, results, failures, ready, max(reads))
    return 1 if report.FIRST not in {c.peer for c in ready if c.name in results} else 0


def _give(arguments: argparse.Namespace, checkpoint: Path, results: dict[str, list[Result]], failures: dict[str, str],
          ready: dict[Contestant, Path], read_rate: float) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for rounds in results.values():
        for result in rounds:
            result.text = tokenizer.decode(result.answer)
    peers = {contestant.name: contestant.peer for contestant in ready}
    sizes = {contestant.name: _bytes_per_token(path) for contestant, path in ready.items()
             if contestant.peer == report.FIRST and contestant.name in results}
    facts = {"model": arguments.model, "threads": arguments.threads, "rounds": arguments.rounds, "machine": _machine(),
             "date": datetime.now(UTC).date().isoformat(), "llama.cpp": LLAMA_CPP, "environments": ENVIRONMENTS,
             "read_bytes_per_s": read_rate, "failures": failures}
    machine = facts["machine"]
    command = f"python -m tools.bench.peers {arguments.model} --rounds {arguments.rounds} --threads {arguments.threads}"
    command += f" --peers {arguments.peers}" if arguments.peers else ""
    lines = [f"## {arguments.model}", "", f"`{command}`, {facts['date']}, {machine['cpu']}, {machine['isa']}, "
             f"{arguments.threads} threads; medians of {arguments.rounds} rounds (minimum–maximum).", "",
             *report.table(results, failures), "", *report.ratios(results, peers), "",
             *report.roofline(results, sizes, read_rate), "", "First words of each answer to the same prompt:", "",
             *(f"- {name}: {rounds[0].text[:100]!r}" for name, rounds in results.items() if rounds[0].text)]
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(results, facts), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description=__doc__)
    parser.add_argument("model", help="smollm2, gemma3 or llama-1b")
    parser.add_argument("--peers", help="some of them, with commas between; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    try:
        return measure(parser.parse_args())
    except IngotError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1


if __name__ == "__main__":
    sys.exit(main())

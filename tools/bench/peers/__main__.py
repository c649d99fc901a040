"""The command; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
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


def prepare(chosen: Sequence[Contestant], kitchen: Kitchen) -> tuple[dict[Contestant, Path], dict[str, str]]:
    """What each one loads, and of those that cannot be prepared why: one that fails keeps no other from it."""
    ready: dict[Contestant, Path] = {}
    failures: dict[str, str] = {}
    for contestant in chosen:
        try:
            ready[contestant] = contestant.prepare(kitchen)
        except (IngotError, OSError) as error:
            failures[contestant.name] = f"not prepared: {error}"
            kitchen.say(f"{contestant.name}: {failures[contestant.name]}")
    return ready, failures


def measure(arguments: argparse.Namespace) -> int:
    say = workload.progress
    cache = (arguments.cache or cache_folder() / "peers").absolute()
    model = workload.model(arguments.model, cache, say)
    kitchen = Kitchen(cache, model, arguments.threads, say)
    job = workload.job(model.checkpoint, arguments.threads)
    ready, failures = prepare(_chosen(arguments.peers), kitchen)
    if arguments.prepare:
        for contestant, path in ready.items():
            say(f"{contestant.name}: ready, {path}")
        return 1 if failures else 0
    results, reads = _earlier(arguments)
    for number in range(len(reads), arguments.rounds):
        rate = _read_rate(arguments.threads)
        of_round: dict[str, Result] = {}
        for contestant, prepared in ready.items():
            if contestant.name in failures:
                continue
            try:
                result = contestant.run(kitchen, prepared, job)
            except (IngotError, OSError) as error:
                failures[contestant.name] = str(error)
                say(f"{contestant.name}: {error}")
                continue
            of_round[contestant.name] = result
            say(f"round {number + 1}: {contestant.name}: " + ", ".join(
                f"{task} {getattr(result, task):.0f}" for task in report.TASKS if getattr(result, task) is not None))
        reads.append(rate)
        for name, result in of_round.items():
            results.setdefault(name, []).append(result)
        if arguments.json:
            _keep(arguments, results, reads)
    results = {name: rounds for name, rounds in results.items() if rounds and name not in failures}
    _give(arguments, model.checkpoint, results, failures, ready, reads)
    return 1 if report.FIRST not in {c.peer for c in ready if c.name in results} else 0


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"model": arguments.model, "threads": arguments.threads, "peers": arguments.peers}


def _keep(arguments: argparse.Namespace, results: dict[str, list[Result]], reads: list[float]) -> None:
    data = report.as_json(results, {**_settings(arguments), "reads": reads})
    partial = arguments.json.with_name(arguments.json.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(arguments.json)


def _earlier(arguments: argparse.Namespace) -> tuple[dict[str, list[Result]], list[float]]:
    """The whole rounds that an interrupted run has left, and what memory gave in each."""
    if not arguments.resume:
        return {}, []
    if arguments.json is None:
        raise RequestError("--resume goes on where the file of --json ends; name it")
    if not arguments.json.exists():
        return {}, []
    data = json.loads(arguments.json.read_text())
    found = {name: data.get(name) for name in _settings(arguments)}
    if found != _settings(arguments):
        raise RequestError(f"--resume: {arguments.json} holds rounds of {found}, asked for are "
                           f"{_settings(arguments)}.\n  Measure them anew, without --resume, or into another file")
    return {name: [Result(**row) for row in rows] for name, rows in data["results"].items()}, data["reads"]


def _give(arguments: argparse.Namespace, checkpoint: Path, results: dict[str, list[Result]], failures: dict[str, str],
          ready: dict[Contestant, Path], reads: list[float]) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for rounds in results.values():
        for result in rounds:
            result.text = tokenizer.decode(result.answer)
    peers = {contestant.name: contestant.peer for contestant in ready}
    sizes = {contestant.name: _bytes_per_token(path) for contestant, path in ready.items()
             if contestant.peer == report.FIRST and contestant.name in results}
    read_rate = max(reads)
    facts = {**_settings(arguments), "rounds": len(reads), "reads": reads, "machine": _machine(),
             "date": datetime.now(UTC).date().isoformat(), "llama.cpp": LLAMA_CPP, "environments": ENVIRONMENTS,
             "failures": failures}
    machine = facts["machine"]
    command = f"python -m tools.bench.peers {arguments.model} --rounds {arguments.rounds} --threads {arguments.threads}"
    command += f" --peers {arguments.peers}" if arguments.peers else ""
    lines = [f"## {arguments.model}", "", f"`{command}`, {facts['date']}, {machine['cpu']}, {machine['isa']}, "
             f"{arguments.threads} threads; medians of {len(reads)} rounds (minimum–maximum).", "",
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
    parser.add_argument("--prepare", action="store_true", help="install, build and convert all that is missing, and "
                        "measure nothing; a later run starts to measure at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the rounds that the file of --json holds")
    parser.add_argument("--markdown", type=Path)
    try:
        return measure(parser.parse_args())
    except IngotError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long builds take: the first, the same again, another precision, another target, a refit; and a server's start.

    python -m tools.bench.builds smollm2|gemma3|FOLDER [--gpu h200:fp8] [--json]

Each build is a process of its own, `ingot build`, with a build cache that is empty at first (and, for the first build,
an empty cache of the C compiler too); so the times are those of the command as a user waits for it, imports of Python
included. A refit is measured beside the time that it takes to read the checkpoint and to write and sync the engine,
nothing else, from and to the same disk: with the files in memory, and with the checkpoint's pages dropped before.

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.cli.output import size, table
from ingot.runtime.host import available_cores, cpu_name

from ..demo_models import MODELS, provide
from .replicas import serve

_CHUNK_BYTES = 1 << 20
_FRACTION_BITS = {"BF16": (np.uint16, 7), "F16": (np.uint16, 10), "F32": (np.uint32, 23)}


@dataclass
class Times:
    """label -> (seconds, what the build reports of its stages and of what it reused)."""

    rows: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, label: str, seconds: float, detail: str = "") -> None:
        self.rows[label] = round(seconds, 3), detail
        print(f"{label}: {seconds:.2f} s  {detail}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """folder: for caches and engines, all removed at the end."""

    checkpoint: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "INGOT_CACHE": str(self.folder / "cache"),
                "ZIG_GLOBAL_CACHE_DIR": str(self.folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(self.folder / "zig-local")}

    def build(self, name: str, target: str, precision: str, *options: str) -> tuple[float, str]:
        """(seconds, stages and what was reused)"""
        return self._run("build", str(self.checkpoint), "--target", target, "--precision", precision,
                         "-o", str(self.engine(name)), "--force", "--json", *options)

    def refit(self, name: str, weights: Path, *options: str) -> tuple[float, str]:
        return self._run("refit", str(self.engine(name)), "--weights", str(weights), "-o",
                         str(self.engine(f"{name}-refitted")), "--force", "--json", *options)

    def engine(self, name: str) -> Path:
        return self.folder / f"{name}.engine"

    def _run(self, *words: str) -> tuple[float, str]:
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "ingot.runtime.cli", *words], capture_output=True, text=True,
                              env=self.environment)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"ingot {' '.join(words)}: {done.stderr}")
        return seconds, _told(json.loads(done.stdout))


def _told(facts: dict[str, Any]) -> str:
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in facts["seconds"].items() if seconds >= 0.05)
    reused = ", ".join(f"{kind} {found}/{asked}" for kind, (found, asked) in facts.get("reused", {}).items())
    return f"{stages}; reused {reused}" if reused else stages


def other_weights(checkpoint: Path, folder: Path) -> Path:
    """A copy whose every tensor of floats is another one: as of a fine-tuned model of the same architecture. The last
    bit that a bfloat16 has is flipped, which changes a number by less than a hundredth."""
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("*.safetensors"):
        with open(path, "r+b") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            for name, entry in header.items():
                if name == "__metadata__" or entry["dtype"] not in _FRACTION_BITS:
                    continue
                kind, fraction_bits = _FRACTION_BITS[entry["dtype"]]
                begin, end = entry["data_offsets"]
                bits = np.fromfile(path, kind, (end - begin) // np.dtype(kind).itemsize,
                                   offset=8 + header_bytes + begin)
                file.seek(8 + header_bytes + begin)
                file.write((bits ^ kind(1 << fraction_bits - 7)).tobytes())
    return folder


def move_bytes(sources: list[Path], target: Path, size_bytes: int) -> float:
    """Seconds to read the files and to write and sync so many bytes."""
    begin = time.perf_counter()
    for source in sources:
        with open(source, "rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass
    block = os.urandom(_CHUNK_BYTES)
    with open(target, "wb", buffering=0) as out:
        for written in range(0, size_bytes, _CHUNK_BYTES):
            out.write(block[: min(_CHUNK_BYTES, size_bytes - written)])
        os.fsync(out.fileno())
    seconds = time.perf_counter() - begin
    target.unlink()
    return seconds


def drop_pages(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_answer_s(engine: Path) -> float:
    """From the start of `ingot serve` until it takes requests."""
    begin = time.perf_counter()
    with serve(engine, "--kv-cache-tokens", "8192"):
        return time.perf_counter() - begin


def measure(bench: Bench, gpu: tuple[str, str] | None) -> Times:
    times = Times()
    times.add("w4a8, first build", *bench.build("w4a8", "cpu", "w4a8"))
    times.add("from there to a server that takes requests", first_answer_s(bench.engine("w4a8")))
    times.add("w4a8, the same again", *bench.build("w4a8", "cpu", "w4a8"))
    times.add("int8, another precision", *bench.build("int8", "cpu", "int8"))
    times.add("w4a8 for x86-64-v3, another target", *bench.build("v3", "cpu:x86-64-v3", "w4a8"))
    times.add("w4a8, max_batch_size 8", *bench.build("b8", "cpu", "w4a8", "--max-batch-size", "8"))
    if gpu is not None:
        target, precision = gpu
        times.add(f"{precision} for {target}", *bench.build("gpu", target, precision))
        times.add(f"{precision} for {target}, the same again", *bench.build("gpu", target, precision))
        other = "b200" if target != "b200" else "h200"
        times.add(f"{precision} for {other}, another GPU", *bench.build("gpu2", other, precision))
    changed = other_weights(bench.checkpoint, bench.folder / "changed" / bench.checkpoint.name)
    files = sorted(changed.glob("*.safetensors"))
    for name in ("w4a8", "int8", *(["gpu"] if gpu is not None else [])):
        for state, prepare in _STATES.items():
            prepare(files)
            seconds, detail = bench.refit(name, changed, "--no-cache")
            engine = bench.engine(f"{name}-refitted")
            prepare(files)
            moved = move_bytes(files, bench.folder / "moved", engine.stat().st_size)
            times.add(f"refit of {name}, {state}", seconds, detail)
            times.add(f"  reading the checkpoint, writing {size(engine.stat().st_size)}, {state}", moved,
                      f"the refit takes {seconds / moved:.1f} times as long")
    return times


_STATES: dict[str, Callable[[list[Path]], None]] = {
    "checkpoint in memory": lambda files: None, "checkpoint on the disk": drop_pages}


def main() -> int:
    parser = argparse.ArgumentParser("builds", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--gpu", metavar="TARGET:PRECISION", help="also an engine for this GPU, such as h200:fp8")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = provide(MODELS[arguments.model]).checkpoint if arguments.model in MODELS else Path(arguments.model)
    gpu = None
    if arguments.gpu is not None:
        target, _, precision = arguments.gpu.partition(":")
        gpu = target, precision
    with tempfile.TemporaryDirectory(prefix="ingot-builds-") as folder:
        times = measure(Bench(checkpoint.resolve(), Path(folder)), gpu)
    machine = f"{cpu_name()}, {available_cores()} cores, {os.cpu_count()} threads, Python {platform.python_version()}"
    if arguments.json:
        print(json.dumps({"machine": machine, "times": {name: seconds for name, (seconds, _) in times.rows.items()},
                          "details": {name: detail for name, (_, detail) in times.rows.items()}}))
    else:
        print(machine)
        print(table([(label, f"{seconds:.2f} s", detail) for label, (seconds, detail) in times.rows.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

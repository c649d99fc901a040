"""The same engine from different circumstances: folder, user, home, time zone, locale, hash seed, cores, file times.

    python -m tools.bench.reproduce smollm2|gemma3|FOLDER [--target cpu --precision w4a8] [--json]

Three builds in processes of their own, each from a copy of the checkpoint in another folder: one on all cores, one with
everything else and a single core, both with an empty build cache, and one more with the first one's cache. Where the
system lets it, the second also runs as another user (in a user namespace). Prints the hashes; exit status 1 unless they
are equal, and then what `ingot diff` says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ingot.runtime.cli.output import table
from ingot.runtime.diff import diff
from ingot.runtime.engine_file import EngineFile

from ..demo_models import MODELS, provide

OTHER_UID = "4321"


@dataclass(frozen=True, eq=False)
class Circumstances:
    """folder: of the checkpoint's copy and the engine; cache: of the build cache; prefix: words before Python."""

    name: str
    folder: Path
    cache: Path
    cores: frozenset[int]
    environment: dict[str, str]
    prefix: tuple[str, ...] = ()

    def build(self, checkpoint: Path, target: str, precision: str) -> tuple[str, Path]:
        """(hash, engine)"""
        own = self.folder / checkpoint.name
        if not own.exists():
            shutil.copytree(checkpoint, own)
            for number, path in enumerate(sorted(own.iterdir())):
                os.utime(path, (number, len(self.name) * 1_000_000))
        engine = self.folder / f"{self.name.replace(' ', '-')}.engine"
        environment = {**os.environ, **self.environment, "INGOT_CACHE": str(self.cache),
                       "ZIG_GLOBAL_CACHE_DIR": str(self.folder / "zig")}
        done = subprocess.run(
            [*self.prefix, sys.executable, "-m", "ingot.runtime.cli", "build", str(own), "--target", target,
             "--precision", precision, "-o", str(engine), "--json"], capture_output=True, text=True, cwd=self.folder,
            env=environment, preexec_fn=lambda: os.sched_setaffinity(0, self.cores))
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stderr}")
        return str(json.loads(done.stdout)["hash"]), engine


def other_user() -> tuple[str, ...]:
    """What makes a process run as somebody else; nothing where the system does not let us."""
    words = ("unshare", "--user", f"--map-user={OTHER_UID}", f"--map-group={OTHER_UID}")
    try:
        done = subprocess.run([*words, "id", "-u"], capture_output=True, text=True)
    except FileNotFoundError:
        return ()
    return words if done.stdout.strip() == OTHER_UID else ()


def other_locale() -> str:
    """One that the system has, if possible one that writes numbers and sorts in another way."""
    known = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout.split()
    wanted = ("tr_TR.utf8", "de_DE.utf8", "fr_FR.utf8", "C")
    return next((name for name in wanted if name in known), "C")


def circumstances(folder: Path) -> list[Circumstances]:
    cores = frozenset(os.sched_getaffinity(0))
    one, two = folder / "one", folder / "a much longer path, with blanks" / "two"
    for each in (one, two):
        each.mkdir(parents=True)
    return [
        Circumstances("empty cache", one, folder / "cache", cores, {"PYTHONHASHSEED": "1", "TZ": "UTC"}),
        Circumstances("other everything", two, folder / "other cache", frozenset([min(cores)]),
                      {"PYTHONHASHSEED": "2", "TZ": "Asia/Kathmandu", "LC_ALL": other_locale(), "USER": "somebody",
                       "LOGNAME": "somebody", "HOME": str(two), "OMP_NUM_THREADS": "3"}, other_user()),
        Circumstances("warm cache", two, folder / "cache", cores, {"PYTHONHASHSEED": "3", "TZ": "America/St_Johns"}),
    ]


def main() -> int:
    parser = argparse.ArgumentParser("reproduce", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = provide(MODELS[arguments.model]).checkpoint if arguments.model in MODELS else Path(arguments.model)
    with tempfile.TemporaryDirectory(prefix="ingot-reproduce-") as folder:
        built = {each: each.build(checkpoint, arguments.target, arguments.precision)
                 for each in circumstances(Path(folder))}
        equal = len({engine_hash for engine_hash, _ in built.values()}) == 1
        reasons = [] if equal else _reasons([path for _, path in built.values()])
    rows = [(each.name, engine_hash, f"uid {OTHER_UID if each.prefix else os.getuid()}, {len(each.cores)} cores, "
             + ", ".join(f"{name}={value}" for name, value in each.environment.items() if name != "HOME"))
            for each, (engine_hash, _) in built.items()]
    if arguments.json:
        print(json.dumps({"equal": equal, "hashes": {name: engine_hash for name, engine_hash, _ in rows},
                          "reasons": reasons}))
    else:
        print(table(rows))
        print("\n".join(["equal" if equal else "NOT EQUAL", *reasons]))
    return 0 if equal else 1


def _reasons(paths: list[Path]) -> list[str]:
    told = []
    for path in paths[1:]:
        with EngineFile.open(paths[0]) as first, EngineFile.open(path) as other:
            found = diff(first, other)
            told += [*found.reasons, *(f"{each.topic}: {each.detail}" for each in found.differences[:8])]
    return told


if __name__ == "__main__":
    sys.exit(main())

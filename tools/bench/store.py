"""What engines of one model take in a store: 4 CPU targets in 2 precisions each.

    python -m tools.bench.store smollm2|gemma3|FOLDER [--no-calibration] [--json]

Exit status 1 if the store takes more than 1.1 times the bytes of the distinct weights of the engines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.runtime.cli.output import size, table
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.manifest import is_weight
from ingot.runtime.store.store import Store

from ..demo_models import MODELS, provide

TARGETS = ("cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4-vnni", "cpu:aarch64-dotprod")
PRECISIONS = ("w4a8", "int8")
MAX_RATIO = 1.1


def fill(store: Store, checkpoint: Path, folder: Path, targets: tuple[str, ...] = TARGETS,
         precisions: tuple[str, ...] = PRECISIONS, calibrate: bool = True) -> dict[str, int]:
    """Builds the engines and adds each; name -> bytes of its file."""
    sizes = {}
    for target, precision in product(targets, precisions):
        path = folder / f"{target.replace(':', '-')}.{precision}.engine"
        build(BuildRequest(str(checkpoint), target, precision, path, calibrate=calibrate), cache=BuildCache())
        sizes[path.stem] = path.stat().st_size
        with EngineFile.open(path) as file:
            store.add(file)
        path.unlink()
        print(f"{path.stem}: {size(sizes[path.stem])}", file=sys.stderr, flush=True)
    return sizes


def shares(store: Store) -> tuple[int, int]:
    """(bytes of all files of the store, bytes of the distinct weights)"""
    weights = {entry["sha256"]: entry["size"] for hash in store.engines()
               for name, entry in store.manifest(hash)["members"].items() if is_weight(name)}
    taken = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    return taken, sum(weights.values())


def main() -> int:
    parser = argparse.ArgumentParser("store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--no-calibration", dest="calibrate", action="store_false")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = provide(MODELS[arguments.model]).checkpoint if arguments.model in MODELS else Path(arguments.model)
    with tempfile.TemporaryDirectory(prefix="ingot-store-") as folder:
        store = Store(Path(folder, "store"))
        sizes = fill(store, checkpoint, Path(folder), calibrate=arguments.calibrate)
        taken, weights = shares(store)
        good = store.verify().good
    files, ratio = sum(sizes.values()), taken / weights
    if arguments.json:
        print(json.dumps({"engines": sizes, "files_bytes": files, "store_bytes": taken, "weight_bytes": weights,
                          "ratio": round(ratio, 4)}))
    else:
        print(table([("engines", str(len(sizes))), ("as files", size(files)), ("in the store", size(taken)),
                     ("distinct weights", size(weights)), ("store / weights", f"{ratio:.3f}")]))
    return 0 if good and ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())

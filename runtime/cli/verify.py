"""ingot verify ENGINE: every byte of it is what the manifest says; --rebuild: and what its recipe makes."""

import argparse
import importlib
from typing import Any

from ..engine_file import EngineFile
from ..errors import RequestError
from ..manifest import is_weight
from .absent import compiler_absent
from .engine_options import add_engine_argument, open_engine
from .output import Progress, print_json, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser)
    parser.add_argument("--rebuild", action="store_true",
                        help="build it again by its recorded recipe, without the cache, and compare the hashes")
    parser.add_argument("--checkpoint", metavar="CHECKPOINT", help="with --rebuild: what it was built from")


def run(arguments: argparse.Namespace) -> int:
    if arguments.rebuild != (arguments.checkpoint is not None):
        raise RequestError("--rebuild and --checkpoint belong together: name what the engine was built from")
    progress = Progress(not arguments.json)
    with open_engine(arguments) as engine:
        try:
            checks = engine.verify(lambda done, total: progress.show(f"verified {size(done)} of {size(total)}"))
            rebuilt = _rebuild(engine, arguments.checkpoint, progress) if arguments.rebuild else None
        finally:
            progress.clear()
    total = sum(check.size_bytes for check in checks)
    if arguments.json:
        members = [{"name": check.name, "size_bytes": check.size_bytes, "sha256": check.sha256} for check in checks]
        print_json({"engine": engine.path, "hash": engine.hash, "size_bytes": total, "members": members,
                    "num_weights_elsewhere": sum(map(is_weight, engine.stripped)), "rebuilt": rebuilt})
    else:
        print(f"{engine.path}: all {len(checks)} members, {size(total)}, are what the manifest says")
        if engine.stripped and engine.members:
            elsewhere = size(sum(engine.stripped.values()))
            print(f"{len(engine.stripped)} weights, {elsewhere}, are named and not in the file")
        if rebuilt is not None:
            print(f"built again from {arguments.checkpoint} in {sum(rebuilt.values()):.0f} s: the same hash")
        print(f"hash {engine.hash}")
    return 0


def _rebuild(engine: EngineFile, checkpoint: str, progress: Progress) -> dict[str, float]:
    """Stage -> seconds. The compiler is loaded only when it is asked for."""
    try:
        rebuild: Any = importlib.import_module("ingot.compiler.rebuild")
        result = rebuild.rebuild(engine, checkpoint, lambda stage, detail: progress.show(f"{stage:<9} {detail}"))
    except ModuleNotFoundError as error:
        raise RequestError(f"--rebuild needs {compiler_absent(error.name)}") from None
    seconds: dict[str, float] = result.seconds
    return seconds

"""ingot verify ENGINE: every byte of it is what the manifest says."""

import argparse

from ..engine_file import EngineFile
from .output import Progress, print_json, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", help="engine file")


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(not arguments.json)
    with EngineFile.open(arguments.engine) as engine:
        try:
            checks = engine.verify(lambda done, total: progress.show(f"verified {size(done)} of {size(total)}"))
        finally:
            progress.clear()
    total = sum(check.size_bytes for check in checks)
    if arguments.json:
        members = [{"name": check.name, "size_bytes": check.size_bytes, "sha256": check.sha256} for check in checks]
        print_json({"engine": engine.path, "hash": engine.hash, "size_bytes": total, "members": members})
    else:
        print(f"{engine.path}: all {len(checks)} members, {size(total)}, are what the manifest says")
        print(f"hash {engine.hash}")
    return 0

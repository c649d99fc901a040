"""ingot diff A B: what differs between two engines, and why their hashes do."""

import argparse
from dataclasses import asdict

from ..diff import EngineDiff, diff
from ..engine_file import EngineFile
from .engine_options import add_engine_argument, open_engine
from .output import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser, "a", metavar="A")
    parser.add_argument("b", metavar="B", help="likewise")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 whether or not they differ: to compare is the work, and it succeeded."""
    with open_engine(arguments, "a") as a, open_engine(arguments, "b") as b:
        found = diff(a, b)
        if arguments.json:
            print_json({"a": {"path": a.path, "hash": a.hash}, "b": {"path": b.path, "hash": b.hash}, **asdict(found)})
        else:
            print(_text(found, a, b))
    return 0


def _text(found: EngineDiff, a: EngineFile, b: EngineFile) -> str:
    if found.equal:
        bare = [engine.path for engine in (a, b) if engine.stripped and engine.members]
        return f"the same engine: hash {a.hash}" + (f"\n{', '.join(bare)} without its weights" if bare else "")
    return "\n".join([
        table([("A", a.hash, a.path), ("B", b.hash, b.path)]), "",
        "what differs, A / B:", table([(d.topic, d.detail) for d in found.differences], indent="  "), "",
        "why the hashes differ:", *(f"  {reason}" for reason in found.reasons)])

"""Generates the Python modules of runtime/servers/proto/*.proto, which are committed.

    python -m tools.generate_protos            writes them anew
    python -m tools.generate_protos --check    exit status 1 if they are not what the .proto files give

Needs grpcio-tools, of the version that constraints.txt pins: another one may write other text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "runtime" / "servers" / "proto"
PACKAGE = "ingot/runtime/servers/proto"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate() -> dict[str, str]:
    """File name -> text of every generated module."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        # The compiler derives imports, and the name that a file has in the descriptor pool, from its path.
        (root / PACKAGE).mkdir(parents=True)
        sources = sorted(FOLDER.glob("*.proto"))
        for source in sources:
            (root / PACKAGE / source.name).write_bytes(source.read_bytes())
        arguments = ["protoc", f"-I{root}", f"-I{files('grpc_tools') / '_proto'}", f"--python_out={root}",
                     f"--pyi_out={root}", f"--grpc_python_out={root}"]
        if status := protoc.main([*arguments, *(f"{PACKAGE}/{source.name}" for source in sources)]):
            raise SystemExit(status)
        return {source.stem + suffix: (root / PACKAGE / (source.stem + suffix)).read_text()
                for source in sources for suffix in SUFFIXES}


def stale(generated: dict[str, str]) -> list[str]:
    """Names of the committed modules that differ, are missing, or have no .proto any more."""
    present = {path.name: path.read_text() for suffix in SUFFIXES for path in FOLDER.glob(f"*{suffix}")}
    return sorted(name for name in present.keys() | generated.keys() if present.get(name) != generated.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    generated = generate()
    names = stale(generated)
    if arguments.check:
        print("\n".join(f"{name} is not what its .proto file gives" for name in names) or "up to date")
        return 1 if names else 0
    for name in names:
        if name in generated:
            (FOLDER / name).write_text(generated[name])
        else:
            (FOLDER / name).unlink()
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

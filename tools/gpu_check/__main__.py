"""Checks an NVIDIA GPU and Ingot's kernels on it: correctness, rates, whole engines, and PyTorch beside them.

    python -m tools.gpu_check --report report.md           everything, where a GPU, PyTorch and triton 3.9.0 are
    python -m tools.gpu_check --only kernels,rates         some sections; what others have found before stays
    python -m tools.gpu_check --dry                        what would be checked; needs no GPU
    python -m tools.gpu_check pack --target h200 -o FILE   anywhere: what a machine needs that has no triton 3.9.0
    python -m tools.gpu_check --pack FILE                  there; nothing is compiled or fetched

Exit status: 0 all passed, 1 something failed, 2 there is no GPU, or the request was wrong.
"""
from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _provide_ingot() -> None:
    """Where Ingot is not installed, its folders are imported from this checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        importlib.import_module("ingot.runtime.errors")
    except ModuleNotFoundError:
        package = types.ModuleType("ingot")
        package.__path__ = [str(ROOT)]
        sys.modules["ingot"] = package


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    from .report import SECTIONS

    parser = argparse.ArgumentParser("gpu_check", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("verb", nargs="?", choices=("run", "pack"), default="run")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=SECTIONS, metavar="SECTIONS",
                        help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--device", default="cuda:0", help="cuda:NUMBER")
    parser.add_argument("--target", help="the target that the GPU is; by default it is found by the GPU's name")
    parser.add_argument("--pack", type=Path, help="code and engines that were made elsewhere")
    parser.add_argument("--model", help="a checkpoint that `engines` tries too; a pack must have been made with it")
    parser.add_argument("-o", "--output", type=Path, help="of pack")
    parser.add_argument("--results", type=Path, default=Path("gpu_check.json"), metavar="FILE",
                        help="what was found, section by section; results of other sections in it are kept")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown")
    parser.add_argument("--folder", type=Path, help="for large files: the model of `throughput` (7 GB)")
    parser.add_argument("--dry", action="store_true", help="list what would be checked")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    _provide_ingot()
    from ingot.runtime.errors import IngotError

    from .pack import make_pack
    from .report import as_markdown, as_text, failures, only_known
    from .sections import dry, run

    arguments = parse(argv)
    try:
        if unknown := only_known(arguments.only):
            print(f"gpu_check: --only: unknown section {unknown[0]!r}", file=sys.stderr)
            return 2
        if arguments.verb == "pack":
            if not arguments.target or not arguments.output:
                print("gpu_check: pack needs --target and -o", file=sys.stderr)
                return 2
            from .code import find_target

            make_pack(arguments.output, find_target(arguments.target), arguments.only, _say, arguments.model)
            return 0
        if arguments.dry:
            print("\n".join(dry(arguments.only, arguments.target or "h200")))
            return 0
        results = run(arguments, _say)
    except IngotError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return error.exit_status
    print(as_text(results))
    if arguments.report:
        arguments.report.write_text(as_markdown(results))
    return 1 if failures(results) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

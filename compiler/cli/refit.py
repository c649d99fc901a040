"""ingot refit ENGINE --weights CHECKPOINT -o FILE: new weights, no compilation."""

import argparse
import sys
from pathlib import Path

from ingot.runtime.cli.output import print_json, size, table

from ..checkpoint.read_ahead import read_ahead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file, with or without its weights")
    parser.add_argument("--weights", required=True, metavar="CHECKPOINT",
                        help="checkpoint of the same architecture: folder, hub name, or GGUF file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="engine file to write")
    parser.add_argument("--name", help="what the engine calls its model (default: the checkpoint's folder or hub name)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="the text that the engine was calibrated "
                        "with, where that was not the one that ships with the compiler")
    parser.add_argument("--no-calibration", dest="calibrate", action="store_false",
                        help="round to nearest: the model is not run over a text, which takes minutes")
    parser.add_argument("--strip-weights", action="store_true", help="name the new weights, but leave them out")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="put the engine into this engine store too; with "
                        "--strip-weights: its weights there alone")
    parser.add_argument("--self-test", action="store_true", help="run the engine and record what it answers")
    parser.add_argument("--no-cache", dest="cache", action="store_false",
                        help="pack everything anew and keep nothing for later")
    parser.add_argument("--force", action="store_true", help="replace the engine file if there is one")


def run(arguments: argparse.Namespace) -> int:
    read_ahead(arguments.weights)
    # Behind that, as these take a quarter of a second.
    from ..cache.build_cache import BuildCache
    from ..refit import RefitRequest, refit
    from .report import Report

    request = RefitRequest(arguments.engine, arguments.weights, arguments.output, arguments.name, arguments.force,
                           arguments.strip_weights, arguments.calibration, arguments.calibrate, arguments.store,
                           arguments.self_test)
    with Report(not arguments.json) as report:
        result = refit(request, report, BuildCache() if arguments.cache else None)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        print_json({"path": str(result.path), "hash": result.hash, "seconds": result.seconds,
                    "warnings": list(result.warnings)})
    else:
        print(table([
            ("engine", result.path), ("hash", result.hash), ("model", result.manifest["model"]["name"]),
            ("weights", size(result.manifest["memory"]["weights_bytes"])),
            ("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.seconds.items())),
        ]))
    return 0

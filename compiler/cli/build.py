"""ingot build MODEL --target T --precision P: one checkpoint becomes one engine."""

import argparse
import sys
from pathlib import Path

from ingot.runtime.cli.output import print_json, size, table

from ..build import BuildRequest, BuildResult, build
from ..cache.build_cache import BuildCache
from .report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint folder, hub name, or GGUF file")
    parser.add_argument("--target", required=True, help="what to build for; cpu is this machine (see: ingot targets)")
    parser.add_argument("--precision", required=True, help="such as w4a8 (ingot targets lists them)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="engine file (default: named for what it is)")
    parser.add_argument("--max-batch-size", type=int, metavar="N", help="sequences in a step")
    parser.add_argument("--max-num-tokens", type=int, metavar="N", help="tokens in a step")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="tokens of a sequence, prompt and answer together")
    parser.add_argument("--kv-precision", metavar="P", help="of the KV cache (default: the precision's own)")
    parser.add_argument("--compiler", choices=("zig", "cc"), default="zig",
                        help="C compiler: the pinned zig (default), or this machine's cc")
    parser.add_argument("--no-calibration", dest="calibrate", action="store_false",
                        help="round weights of 4 bits to nearest, without running the model on a text")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the graph after each pass there")
    parser.add_argument("--name", help="what the engine calls its model (default: the checkpoint's folder or hub name)")
    parser.add_argument("--strip-weights", action="store_true",
                        help="leave the weights out of the file: they are found in the store by their hashes, or made "
                        "again by ingot refit")
    parser.add_argument("--no-cache", dest="cache", action="store_false",
                        help="make everything anew and keep nothing for later builds")
    parser.add_argument("--dry-run", action="store_true", help="plan only: no code, no weights, no file")
    parser.add_argument("--force", action="store_true", help="replace the engine file if there is one")


def run(arguments: argparse.Namespace) -> int:
    request = BuildRequest(
        model=arguments.model, target=arguments.target, precision=arguments.precision, output=arguments.output,
        max_batch_size=arguments.max_batch_size, max_num_tokens=arguments.max_num_tokens,
        max_seq_len=arguments.max_seq_len, kv_precision=arguments.kv_precision, dump=arguments.dump,
        dry_run=arguments.dry_run, force=arguments.force, compiler=arguments.compiler,
        calibrate=arguments.calibrate, name=arguments.name, strip_weights=arguments.strip_weights,
    )
    with Report(not arguments.json) as report:
        result = build(request, report, BuildCache() if arguments.cache else None)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        print_json({
            "path": str(result.path) if result.path else None, "hash": result.hash or None,
            "seconds": result.seconds, "reused": result.reused, "warnings": list(result.warnings),
            "manifest": result.manifest,
        })
    else:
        print(_summary(result))
    return 0


def _summary(result: BuildResult) -> str:
    manifest, memory = result.manifest, result.manifest["memory"]
    limits = manifest["limits"]
    rows = [
        ("engine", result.path or "(none: dry run)"),
        ("hash", result.hash or "(none: dry run)"),
        ("model", f"{manifest['model']['name']} ({manifest['model']['architecture']})"),
        ("target", f"{manifest['target']['name']}, {manifest['precision']}, KV cache {manifest['kv_precision']}"),
        ("limits", ", ".join(f"{name} {value}" for name, value in limits.items())),
        ("memory", f"weights {size(memory['weights_bytes'])}, arena {size(memory['arena_bytes'])}, "
                   f"{size(memory['kv_bytes_per_token'])} of KV a token"),
        ("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.seconds.items())),
    ]
    if result.reused:
        rows.append(("reused", ", ".join(f"{kind} {found}/{asked}" for kind, (found, asked) in result.reused.items())))
    return table(rows)

"""ingot build MODEL --target T --precision P: one checkpoint becomes one engine; --recipe FILE: a matrix of them."""

import argparse
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ingot.runtime.cli.output import print_json, size, table
from ingot.runtime.errors import RequestError

from ..build import BuildRequest, BuildResult, build
from ..cache.build_cache import BuildCache
from ..calibration.record import METHODS
from ..recipe.matrix import Outcome, build_all
from ..recipe.read import read_recipe
from .gpu_summary import gpu_rows, kernel_rows
from .report import Report

# Options that a recipe says itself: option -> its default.
_OF_ONE_BUILD = {"tensor_parallel": 1, "kv_precision": None, "max_batch_size": None, "max_num_tokens": None,
                 "max_seq_len": None, "name": None, "dump": None, "tuning_records": None, "compiler": "zig",
                 "calibrate": True, "calibration": None, "quantization_method": "best", "layers": None,
                 "group_size": None, "group_minimums": None, "lora_max_rank": None, "lora_max_adapters": None,
                 "lora_modules": None}

_OPTIONS = {"calibrate": "--no-calibration", "layers": "--layer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder, hub name, or GGUF file; with --recipe: in place "
                        "of the recipe's own")
    parser.add_argument("--recipe", type=Path, nargs="+", metavar="FILE", help="build all that these recipes ask for")
    parser.add_argument("--target", help="what to build for; cpu is this machine (see: ingot targets); with --recipe: "
                        "only those of its targets that match, such as 'cpu*'")
    _add_precision_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="engine file (default: named for what it is); with --recipe: the folder for all")
    _add_room_arguments(parser)
    parser.add_argument("--kv-precision", metavar="P", help="of the KV cache (default: the precision's own)")
    parser.add_argument("--compiler", choices=("zig", "cc"), default="zig",
                        help="C compiler: the pinned zig (default), or this machine's cc")
    _add_calibration_arguments(parser)
    parser.add_argument("--tuning-records", type=Path, metavar="FILE",
                        help="what ingot tune has measured on such a machine: which kernels are the fastest")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the graph after each pass there")
    parser.add_argument("--name", help="what the engine calls its model (default: the checkpoint's folder or hub name)")
    parser.add_argument("--strip-weights", action="store_true",
                        help="leave the weights out of the file: they are found elsewhere by their hashes, or made "
                        "again by ingot refit")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="put the engine into this engine store too; with "
                        "--strip-weights: its weights there alone")
    parser.add_argument("--self-test", action="store_true",
                        help="run the engine and record in it what it answers: servers ask again before it takes over")
    _add_quality_arguments(parser)
    parser.add_argument("--no-cache", dest="cache", action="store_false",
                        help="make everything anew and keep nothing for later builds")
    parser.add_argument("--jobs", type=int, metavar="N", help="with --recipe: builds at a time (default: as many as "
                        "cores and memory allow)")
    parser.add_argument("--dry-run", action="store_true", help="plan only: no code, no weights, no file; a recipe that "
                        "holds a configuration needs no checkpoint for it")
    parser.add_argument("--force", action="store_true", help="replace the engine file if there is one")


def _add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", help="such as w4a8 (ingot targets lists them); with --recipe: only those")
    parser.add_argument("--layer", dest="layers", action="append", type=layer, metavar="PATTERN=PRECISION",
                        help="another precision for layers of these names, such as 'model.layers.0.*=int8'; the most "
                        "exact pattern decides")
    parser.add_argument("--group-size", type=int, metavar="N", help="input channels that share a scale in four-bit "
                        "integers on GPUs: 32, 64 or 128 (default: 128, or what the checkpoint is quantized in)")
    parser.add_argument("--group-minimums", action=argparse.BooleanOptionalAction,
                        help="whether each of these groups has a minimum too (default: it has)")


def _add_room_arguments(parser: argparse.ArgumentParser) -> None:
    """What a step and a sequence may hold, and adapters."""
    parser.add_argument("--max-batch-size", type=int, metavar="N", help="sequences in a step (default: 16 on CPUs; "
                        "128 on GPUs of 64 GiB or more, else 32)")
    parser.add_argument("--max-num-tokens", type=int, metavar="N", help="tokens in a step (default: 512 on CPUs; 8192 "
                        "on GPUs of 64 GiB or more, else 2048)")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="tokens of a sequence, prompt and answer together "
                        "(default: what the model was made for)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N",
                        help="GPUs that the engine is divided among (default: 1)")
    parser.add_argument("--lora-max-rank", type=int, metavar="R",
                        help="make room for LoRA adapters of up to this rank, which servers load while they run")
    parser.add_argument("--lora-max-adapters", type=int, metavar="N", help="how many of them at once (default: 4)")
    parser.add_argument("--lora-modules", nargs="+", metavar="NAME",
                        help="linear layers that they may change, such as q_proj v_proj (default: all but the head, "
                        "routers and experts)")


def _add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-calibration", dest="calibrate", action="store_false",
                        help="round weights of 4 bits to nearest, without running the model on a text")
    parser.add_argument("--calibration", type=Path, metavar="FILE",
                        help='text that the model is run on, or JSONL with a "text" in each line (default: one that '
                        "ships with the compiler)")
    parser.add_argument("--quantization-method", choices=sorted(METHODS), default="best",
                        help="how weights of 4 bits are rounded (default: what errs least, layer by layer)")


def _add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure-quality", action="store_true",
                        help="run the engine over a held-out text; record perplexity, agreement and the worst layers")
    parser.add_argument("--max-perplexity-increase", type=share, metavar="SHARE",
                        help="measure, and fail without an engine if its perplexity is further above the checkpoint's "
                        "in float32, such as 1%%")
    parser.add_argument("--min-top1-agreement", type=share, metavar="SHARE",
                        help="measure, and fail without an engine if fewer of its best next tokens are the "
                        "checkpoint's, such as 0.97")
    parser.add_argument("--max-kl-divergence", type=float, metavar="NATS",
                        help="measure, and fail without an engine if its predictions diverge further from the "
                        "checkpoint's, such as 0.005: steadier than perplexity over a short text")


def share(text: str) -> float:
    """"1%" or "0.01"."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, such as 1% or 0.01") from None


def layer(text: str) -> tuple[str, str]:
    """"lm_head=bf16"."""
    pattern, _, precision = text.partition("=")
    if not pattern or not precision:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=PRECISION, such as lm_head=bf16")
    return pattern, precision


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that a recipe leaves open, or that go before it, for all of its builds."""
    names = ("dry_run", "force", "strip_weights", "store", "self_test", "measure_quality", "max_perplexity_increase",
             "min_top1_agreement", "max_kl_divergence")
    return {name: getattr(arguments, name) for name in names}


def run(arguments: argparse.Namespace) -> int:
    cache = BuildCache() if arguments.cache else None
    if arguments.recipe is not None:
        return _run_recipes(arguments, cache)
    for name in ("model", "target", "precision"):
        if getattr(arguments, name) is None:
            raise RequestError(f"{'MODEL' if name == 'model' else f'--{name}'} is missing: "
                               "ingot build MODEL --target T --precision P, or ingot build --recipe FILE")
    if arguments.jobs is not None:
        raise RequestError("--jobs goes with --recipe: a single build uses all cores")
    request = BuildRequest(
        model=arguments.model, target=arguments.target, precision=arguments.precision, output=arguments.output,
        **_options(arguments), **{name: getattr(arguments, name) for name in _OF_ONE_BUILD} | {
            "layers": dict(arguments.layers) if arguments.layers else None})
    with Report(not arguments.json) as report:
        result = build(request, report, cache)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        print_json(_facts(result))
    else:
        print(_summary(result))
    return 0


def _run_recipes(arguments: argparse.Namespace, cache: BuildCache | None) -> int:
    """Exit status 0 if all were built; else that of the gravest failure."""
    for name, default in _OF_ONE_BUILD.items():
        if getattr(arguments, name) != default:
            option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise RequestError(f"{option} stands in the recipe; change it there, or leave --recipe out")
    folder = arguments.output or Path()
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder; with --recipe, -o names the folder of all engines")
    if arguments.model is not None and len(arguments.recipe) > 1:
        raise RequestError("MODEL takes the place of one recipe's model; there are several recipes")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise RequestError(f"--jobs is {arguments.jobs}; expected at least 1")
    options = _options(arguments)
    for name in ("measure_quality", "self_test"):
        options[name] = options[name] or None  # not asked for: as the recipe says
    asked = [request for path in arguments.recipe
             for request in read_recipe(path).requests(folder, arguments.model, **options)]
    requests = [request for request in asked if fnmatchcase(request.target, arguments.target or "*")
                and fnmatchcase(request.precision, arguments.precision or "*")]
    if not requests:
        there = dict.fromkeys(f"{request.target} {request.precision}" for request in asked)
        raise RequestError(f"no build of the recipe matches; it has: {', '.join(there)}")

    def told(outcome: Outcome) -> None:
        if not arguments.json:
            asked = outcome.request
            print(f"{asked.name} {asked.target} {asked.precision}: {outcome.seconds:.1f} s, {_end(outcome)}",
                  file=sys.stderr, flush=True)

    outcomes = build_all(requests, cache, arguments.jobs, told)
    if arguments.json:
        print_json([{"model": o.request.name, "target": o.request.target, "precision": o.request.precision,
                     "error": o.error or None, **(_facts(o.result) if o.result else {})} for o in outcomes])
    else:
        print(table([_row(outcome) for outcome in outcomes],
                    ("model", "target", "precision", "weights", "arena", "KV a token", "time", "reused", "result")))
        for error, failed in _by_error(outcomes).items():
            print(f"\n{', '.join(failed)}: {error}")
    return min((outcome.status for outcome in outcomes if outcome.error), default=0)


def _by_error(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """What failed by each error: a checkpoint that cannot be had fails all builds, and is told once."""
    failed: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error:
            asked = outcome.request
            failed.setdefault(outcome.error, []).append(f"{asked.name} {asked.target} {asked.precision}")
    return failed


def _row(outcome: Outcome) -> tuple[str, ...]:
    asked, result = outcome.request, outcome.result
    head = (str(asked.name), asked.target, asked.precision)
    if result is None:
        return (*head, "", "", "", f"{outcome.seconds:.1f} s", "", outcome.error.partition(":")[0])
    memory = result.manifest["memory"]
    found, total = (sum(uses[i] for uses in result.reused.values()) for i in (0, 1))
    return (*head, size(memory["weights_bytes"]), size(memory["arena_bytes"]), size(memory["kv_bytes_per_token"]),
            f"{outcome.seconds:.1f} s", f"{found}/{total}", result.hash[:12] or "dry run")


def _end(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"failed: {outcome.error.partition(':')[0]}"
    return str(outcome.result.path or "planned")


def _facts(result: BuildResult) -> dict[str, object]:
    return {"path": str(result.path) if result.path else None, "hash": result.hash or None, "seconds": result.seconds,
            "reused": result.reused, "warnings": list(result.warnings), "manifest": result.manifest}


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
        *gpu_rows(manifest, dry_run=result.path is None),
        ("time", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.seconds.items())),
    ]
    if stored := manifest["model"].get("quantization"):
        rows.append((stored["method"], ", ".join(
            f"{row['count']} x {row['format']} {'kept' if row['kept'] else 'converted'} ({row['scheme']})"
            for row in stored["weights"])))
    rows += result.quality.describe() if result.quality else []
    if result.reused:
        rows.append(("reused", ", ".join(f"{kind} {found}/{asked}" for kind, (found, asked) in result.reused.items())))
    shown = table(rows)
    if result.path is None and manifest["target"]["kind"] == "cuda":
        shown += f"\n\n{kernel_rows(manifest)}"
    return shown

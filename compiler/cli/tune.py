"""ingot tune ENGINE|MODEL: the fastest kernels on this machine, as a file for builds; --serving: the best limits."""
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ingot.runtime.cli.engine_options import add_store_argument
from ingot.runtime.cli.output import print_json, table
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.host import available_cores
from ingot.runtime.store.locate import open_engine

from ..build import BuildRequest, build
from ..cache.build_cache import BuildCache
from ..targets import find_target
from ..tune.kernels import Settings, tune
from ..tune.problems import Problem, problem_of
from ..tune.records import Record, Records
from ..tune.serving import Grid, Setting, tune_serving
from .report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="ENGINE|MODEL", help="an engine, or a checkpoint: what to tune the kernels of")
    add_store_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="records, for ingot build --tuning-records (default: named for model and target)")
    parser.add_argument("--add", action="store_true", help="keep the other records of FILE, if it holds any")
    parser.add_argument("--force", action="store_true", help="replace FILE if there is one")
    parser.add_argument("--num-workers", type=int, metavar="N", help="threads (default: physical cores)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N",
                        help="measurements of each candidate (default 7); more on a busy machine")
    model = parser.add_argument_group("of a checkpoint, as for ingot build")
    model.add_argument("--target", default="cpu", help="this machine's own (cpu, the default), or a lesser one it runs")
    model.add_argument("--precision", help="such as w4a8")
    model.add_argument("--kv-precision", metavar="P")
    model.add_argument("--max-batch-size", type=int, metavar="N")
    model.add_argument("--max-num-tokens", type=int, metavar="N")
    model.add_argument("--max-seq-len", type=int, metavar="N")
    serving = parser.add_argument_group("--serving: load on an ENGINE in this process, by each of some limits")
    serving.add_argument("--serving", action="store_true",
                         help="measure max_batch_size x max_num_tokens in place of kernels")
    serving.add_argument("--batch-sizes", type=int, nargs="+", metavar="N",
                         help="default: a few up to the engine's own")
    serving.add_argument("--num-tokens", type=int, nargs="+", metavar="N", help="tokens of a step; likewise")
    serving.add_argument("--isl", type=int, default=256, metavar="N", help="tokens of a prompt (default 256)")
    serving.add_argument("--osl", type=int, default=64, metavar="N", help="tokens of an answer (default 64)")
    serving.add_argument("--num-requests", type=int, metavar="N", help="for each setting (default: 3 a sequence)")
    serving.add_argument("--max-itl-ms", type=float, metavar="MS",
                         help="of the settings whose P99 between two tokens is below, the one with most throughput")


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        raise RequestError(f"--rounds is {arguments.rounds}; expected at least 1")
    _require_options_of_one_kind(arguments)
    return _run_serving(arguments) if arguments.serving else _run_kernels(arguments)


def _require_options_of_one_kind(arguments: argparse.Namespace) -> None:
    """Raises RequestError for options that would mean nothing, before minutes are measured."""
    if arguments.serving:
        if arguments.output is not None or arguments.add or arguments.force:
            raise RequestError("--serving writes no records: leave out -o, --add and --force")
        return
    for name in ("batch_sizes", "num_tokens", "num_requests", "max_itl_ms"):
        if getattr(arguments, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} goes with --serving; without it kernels are measured")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise RequestError(f"{arguments.output}: the folder {arguments.output.parent} does not exist")


def _run_kernels(arguments: argparse.Namespace) -> int:
    engine = _engine(arguments)
    if engine is not None:
        target, name, problems, max_tokens = _of_engine(engine)
    else:
        target, name, problems, max_tokens = _of_model(arguments)
    output = arguments.output or Path(f"{name}.{target.replace(':', '-')}.tuning.json")
    older = Records.read(output) if arguments.add and output.exists() else None
    if older is not None:
        older.require(target, str(output))
    elif output.exists() and not arguments.force:
        raise RequestError(f"{output} exists.\n"
                           "  Replace it with --force, add to it with --add, or name another with -o.")
    settings = Settings(arguments.num_workers or available_cores(), arguments.rounds, max_tokens)
    with Report(not arguments.json) as report:
        found = tune(problems, target.partition(":")[2], settings, BuildCache(),
                     lambda text: report("tune", text))
    records = found if older is None else older.merged(found, str(output))
    _write(output, records)
    if arguments.json:
        print_json(found.to_json())
    else:
        print(_summary(found, output))
    return 0


def _engine(arguments: argparse.Namespace) -> EngineFile | None:
    """The engine that is meant; None if it is a checkpoint."""
    path = Path(arguments.what)
    if path.is_dir() or path.suffix == ".gguf" or (arguments.precision and not path.is_file()):
        return None
    return open_engine(arguments.what, arguments.store)


def _of_engine(engine: EngineFile) -> tuple[str, str, list[Problem], int]:
    with engine:
        return _of_manifest(engine.manifest, str(engine.path))


def _of_manifest(manifest: dict[str, Any], where: str) -> tuple[str, str, list[Problem], int]:
    """Target, name, problems, tokens of a step. Raises RequestError for an engine that does not tell its problems."""
    target = manifest["target"]
    if target["kind"] != "cpu":
        raise RequestError(f"{where} is for {target['name']}: kernels of GPUs are chosen by a model; only those of "
                           "CPUs can be measured so far")
    told = [entry["problem"] for entry in manifest["kernels"] if "problem" in entry]
    if not told:
        raise RequestError(f"{where} does not tell the problems of its kernels: it was built by an older Ingot, or has "
                           "none to tune.\n  Name the checkpoint instead: ingot tune MODEL --precision P")
    problems = [problem_of(p["kernel"], {name: value for name, value in p.items() if name != "kernel"}) for p in told]
    return target["name"], manifest["model"]["name"], problems, manifest["limits"]["max_num_tokens"]


def _of_model(arguments: argparse.Namespace) -> tuple[str, str, list[Problem], int]:
    if arguments.precision is None:
        raise RequestError("--precision is missing: ingot tune MODEL --precision P, or ingot tune ENGINE")
    target = find_target(arguments.target)
    if target.gpu is not None:
        raise RequestError(f"{target.name}: kernels of GPUs are chosen by a model; only those of CPUs can be measured "
                           "so far")
    request = BuildRequest(arguments.what, target.name, arguments.precision, dry_run=True,
                           max_batch_size=arguments.max_batch_size, max_num_tokens=arguments.max_num_tokens,
                           max_seq_len=arguments.max_seq_len, kv_precision=arguments.kv_precision)
    with Report(not arguments.json) as report:
        manifest = build(request, report, BuildCache()).manifest
    return _of_manifest(manifest, arguments.what)


def _write(path: Path, records: Records) -> None:
    """Whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        draft.write_text(json.dumps(records.to_json(), indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WorkFailed(f"{path}: cannot be written: {error.strerror}") from None


def _summary(records: Records, output: Path) -> str:
    rows = [_row(record) for record in records.records]
    header = ("kernel", "problem", "fastest", "us", "model's, us", "ratio")
    changed = sum(bool(record.tactic) for record in records.records)
    return (table(rows, header) + f"\n\n{records.target}, {records.workers} threads on {records.machine}: {changed} of "
            f"{len(records.records)} problems are solved faster than by the model's choice\n"
            f"{output}\n  Build with it: ingot build MODEL --target {records.target} --tuning-records {output}")


def _row(record: Record) -> list[str]:
    shown = " ".join(f"{value}" if name == "scheme" else f"{name} {value}" for name, value in record.problem.items()
                     if value not in (0, ""))
    chosen = " ".join(f"{name} {value}" for name, value in record.tactic.items()) or "the model's"
    return [record.kernel, shown, chosen, f"{record.median_us:.1f}", f"{record.model_us:.1f}",
            f"{record.median_us / record.model_us:.2f}"]


def _run_serving(arguments: argparse.Namespace) -> int:
    engine = _engine(arguments)
    if engine is None:
        raise RequestError("--serving needs an engine: it is measured as it is served")
    grid = Grid(arguments.batch_sizes, arguments.num_tokens, arguments.isl, arguments.osl, arguments.num_requests,
                arguments.max_itl_ms, arguments.num_workers)
    with engine, Report(not arguments.json) as report:
        settings = tune_serving(engine, grid, lambda text: report("tune", text))
    best = grid.best(settings)
    if arguments.json:
        print_json({"settings": [vars(setting) for setting in settings], "best": None if best is None else vars(best)})
    else:
        print(_serving_table(settings, best, arguments))
    return 0 if best is not None else 1


def _serving_table(settings: list[Setting], best: Setting | None, arguments: argparse.Namespace) -> str:
    header = ("", "max_batch_size", "max_num_tokens", "output tok/s", "first token ms P50", "P99",
              "between tokens ms P50", "P99")
    rows = [["->" if setting is best else "", str(setting.max_batch_size), str(setting.max_num_tokens),
              f"{setting.output_tokens_per_s:.0f}", f"{setting.first_token_p50_ms:.1f}",
              f"{setting.first_token_p99_ms:.1f}", f"{setting.inter_token_p50_ms:.2f}",
              f"{setting.inter_token_p99_ms:.2f}"] for setting in settings]
    if best is None:
        return table(rows, header) + f"\n\nNo setting keeps {arguments.max_itl_ms} ms between two tokens (P99)."
    return table(rows, header) + (f"\n\n  ingot serve {arguments.what} --max-batch-size {best.max_batch_size} "
                          f"--max-num-tokens {best.max_num_tokens}")

"""ingot bench ENGINE | --url URL: load, and a report of the life of each request (docs/benchmarking.md)."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import sys
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, WorkFailed
from .engine_options import add_engine_argument, add_engine_arguments, engine_options, open_engine
from .output import Progress, print_json, table
from .serve import SWITCH_INTERVAL_S

if TYPE_CHECKING:
    from ..bench.bench import Plan, Result
    from ..bench.drivers.driver import Driver
    from ..bench.load import Load

_SERVER_PACKAGES = {"aiohttp", "grpc", "google", "smg_grpc_proto"}
_DEFAULT_REQUESTS, _DEFAULT_CONCURRENCY = 100, 8
# For statistics without an engine: any size gives the same lengths.
_SOME_VOCABULARY = 32_000
_MAX_DRY_SESSIONS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser, nargs="?")
    parser.add_argument("--url", help="a server instead: grpc://HOST:PORT, http://HOST:PORT, grpcs:// or https://")
    _add_server_arguments(parser)
    _add_workload_arguments(parser)
    _add_load_arguments(parser)
    _add_profile_arguments(parser)
    out = parser.add_argument_group("the report")
    out.add_argument("--output", metavar="FILE", help="the report as JSON, with every request")
    out.add_argument("--plot", metavar="FILE.png", help="a picture of it")
    out.add_argument("--dry-run", action="store_true", help="only tell what would be sent")
    add_engine_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument("--model", metavar="NAME", help="by HTTP; default: the first that it has")
    server.add_argument("--lora", action="append", default=[], metavar="NAME",
                        help="by HTTP: an adapter of the server; requests name these in turn; may be repeated")
    server.add_argument("--token-file", metavar="FILE", help="the bearer token that it wants")
    server.add_argument("--tls-ca", metavar="FILE", help="certificates to trust, PEM")
    server.add_argument("--metrics-url", metavar="URL", help="with grpc://: where its metrics are, if not over gRPC")
    server.add_argument("--vocab-size", type=int, metavar="N", help="where the server does not tell it")


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.workload import DISTRIBUTIONS, PRESETS

    work = parser.add_argument_group("the workload")
    work.add_argument("--workload", choices=list(PRESETS), default="fixed",
                      help="how lengths are distributed; shared-prefix, agent: presets of the options below")
    work.add_argument("--distribution", choices=DISTRIBUTIONS, help="of all lengths; default: the workload's")
    work.add_argument("--isl", metavar="N", help="input tokens of a session's first request; uniform: LOW:HIGH too")
    work.add_argument("--osl", metavar="N", help="output tokens of each request; likewise")
    work.add_argument("--isl-stdev", type=float, metavar="X", help="normal, lognormal: default half of the mean")
    work.add_argument("--osl-stdev", type=float, metavar="X", help="likewise")
    work.add_argument("--prefix-len", type=int, metavar="N", help="tokens that sessions of a group begin with")
    work.add_argument("--prefix-groups", type=int, metavar="N", help="how many different prefixes there are")
    work.add_argument("--turns", type=int, metavar="N", help="requests of a session, each with what was said before")
    work.add_argument("--turn-isl", metavar="N", help="tokens that each later turn adds")
    work.add_argument("--turn-isl-stdev", type=float, metavar="X", help="as --isl-stdev")
    work.add_argument("--think-time", type=float, metavar="S", help="mean pause before each later turn, in seconds")
    work.add_argument("--dataset", metavar="FILE", help="JSON lines of task_id, prompt or input_ids, output_tokens")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, pauses and arrivals (default 0)")
    work.add_argument("--token-seed", type=int, metavar="N",
                      help="of the prompts' tokens (default: new ones each time, that no cache holds)")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    shape = load.add_mutually_exclusive_group()
    shape.add_argument("--request-rate", type=float, metavar="X",
                       help="sessions that begin a second, at random moments (Poisson); inf: all at once")
    shape.add_argument("--concurrency", type=int, metavar="N",
                       help=f"sessions under way at a time (default {_DEFAULT_CONCURRENCY})")
    load.add_argument("--num-requests", type=int, metavar="N",
                      help=f"default {_DEFAULT_REQUESTS}, or the data set's, or as many as fit the duration")
    load.add_argument("--duration", type=float, metavar="S", help="no request begins later, in seconds")
    load.add_argument("--warmup", type=int, default=4, metavar="N",
                      help="requests before the measured ones (default 4)")


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    profile = parser.add_argument_group("a profile instead of a load")
    profile.add_argument("--profile", action="store_true",
                         help="where the time of a step goes, and how near it is to what this machine can do: "
                              "generation of one sequence and of 16, and a prompt")
    profile.add_argument("--context", type=int, default=512, metavar="N",
                         help="tokens of each sequence then (default 512)")
    profile.add_argument("--by", default="operator,part", metavar="KINDS",
                         help="what is summed up: some of operator, part, kernel (default: operator,part)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.engine is not None and arguments.url is not None:
        raise RequestError("give an engine or --url, not both")
    if arguments.profile:
        return _profile(arguments)
    plan = _plan(arguments)
    if arguments.dry_run:
        return _dry_run(arguments, plan)
    if arguments.engine is None and arguments.url is None:
        raise RequestError("what to measure: give an engine file, or a server by --url")
    if arguments.plot is not None:
        from ..bench.plot import check_plot

        check_plot(arguments.plot)
    for path in (arguments.output, arguments.plot):
        _check_writable(path)
    try:
        result = asyncio.run(_bench(arguments, plan))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _SERVER_PACKAGES:
            raise
        raise RequestError(f"`ingot bench --url` needs the module {error.name!r}, which is not installed here.\n"
                           "  Install it: pip install 'ingot-llm[serve]'") from None
    _write(arguments, result)
    requests = result.report["requests"]
    if not requests["finished"]:
        raise WorkFailed("no request was finished")
    return 1 if requests["failed"] else 0


def _profile(arguments: argparse.Namespace) -> int:
    from ..profile.report import KINDS, profile_engine, profiles_text

    kinds = tuple(arguments.by.split(","))
    if arguments.engine is None:
        raise RequestError("--profile looks into an engine in this process: give an engine file")
    if arguments.context < 1:
        raise RequestError(f"--context {arguments.context}: expected at least 1")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise RequestError(f"--by: unknown {', '.join(map(repr, unknown))}; expected some of {', '.join(KINDS)}")
    progress = Progress(not arguments.json)
    try:
        with open_engine(arguments) as engine:
            facts = profile_engine(engine, arguments.context, arguments.num_workers, progress.show,
                                   arguments.device)
    finally:
        progress.clear()
    if arguments.json:
        print_json(facts)
    else:
        print(profiles_text(facts, kinds))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    from ..bench.bench import Plan
    from ..bench.workload import make_workload

    load = _load(arguments)
    workload = None
    lengths = {name: getattr(arguments, name) for name in (
        "distribution", "isl", "osl", "prefix_len", "prefix_groups", "turns", "turn_isl")}
    lengths["think_s"] = arguments.think_time
    stdevs = {name: getattr(arguments, f"{name}_stdev") for name in ("isl", "osl", "turn_isl")}
    if arguments.dataset is None:
        workload = make_workload(arguments.workload, stdevs, **lengths)
    elif arguments.workload != "fixed" or any(value is not None for value in (*lengths.values(), *stdevs.values())):
        raise RequestError("--dataset says what is sent; --workload and lengths are for drawn requests")
    if min(arguments.seed, arguments.warmup, arguments.token_seed or 0) < 0:
        raise RequestError("--seed, --token-seed and --warmup: expected 0 or more")
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        raise RequestError(f"--vocab-size {arguments.vocab_size}: expected at least 1")
    tokens = {} if arguments.token_seed is None else {"token_seed": arguments.token_seed}
    return Plan(load, workload, arguments.dataset, arguments.seed, arguments.warmup, arguments.vocab_size, **tokens)


def _load(arguments: argparse.Namespace) -> Load:
    from ..bench.load import Load

    rate, concurrency = arguments.request_rate, arguments.concurrency
    num_requests, duration_s = arguments.num_requests, arguments.duration
    if rate is not None and not rate > 0:
        raise RequestError(f"--request-rate {rate}: expected more than 0, or inf")
    for option, value in (("--concurrency", concurrency), ("--num-requests", num_requests)):
        if value is not None and value < 1:
            raise RequestError(f"{option} {value}: expected at least 1")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise RequestError(f"--duration {duration_s}: expected seconds")
    if rate == math.inf and num_requests is None and arguments.dataset is None and duration_s is not None:
        raise RequestError("--request-rate inf sends all at once: give --num-requests")
    if rate is None and concurrency is None:
        concurrency = _DEFAULT_CONCURRENCY
    if num_requests is None and duration_s is None and arguments.dataset is None:
        num_requests = _DEFAULT_REQUESTS
    return Load(rate, concurrency, num_requests, duration_s)


def _dry_run(arguments: argparse.Namespace, plan: Plan) -> int:
    """Needs neither engine nor server; of an engine that is given only the limits and the tokenizer are read."""
    from ..bench.drivers.driver import Facts
    from ..bench.workload import Session, statistics

    facts, count_tokens = Facts("the dry run", "", vocab_size=_SOME_VOCABULARY), None
    if arguments.engine is not None:
        from ..program import Limits
        from ..tokenizer import Tokenizer

        with open_engine(arguments) as file:
            facts.max_seq_len = min(Limits.of(file.manifest).max_seq_len, arguments.max_seq_len or 1 << 31)
            if (tokenizer := Tokenizer.of(file)) is not None:
                encode = tokenizer.encode
                count_tokens = lambda text: len(encode(text))  # noqa: E731 (a branch's worth of function)
    sessions, left = [], plan.load.num_requests or _DEFAULT_REQUESTS
    if plan.dataset is not None and plan.load.num_requests is None:
        left = _MAX_DRY_SESSIONS
    for session in islice(plan.sessions(facts), _MAX_DRY_SESSIONS):
        sessions.append(Session(session.name, session.turns[:left]))
        left -= len(session.turns)
        if left <= 0:
            break
    figures = statistics(sessions, count_tokens)
    if arguments.json:
        print_json({**plan.describe(), **figures})
    else:
        rows = [(name.replace("_", " "), _shown(value)) for name, value in {**plan.describe(), **figures}.items()]
        print(table(rows))
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    return "unknown" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


async def _bench(arguments: argparse.Namespace, plan: Plan) -> Result:
    from ..bench.bench import bench
    from . import _version

    progress = Progress(not arguments.json)
    async with _driver(arguments) as driver:
        try:
            return await bench(driver, plan, _version(), progress.show)
        finally:
            progress.clear()
            await driver.close()


@asynccontextmanager
async def _driver(arguments: argparse.Namespace) -> AsyncGenerator[Driver, None]:
    if arguments.lora and not (arguments.url or "").startswith(("http://", "https://")):
        raise RequestError("--lora goes with --url http://HOST:PORT: it names adapters that the server has loaded")
    if arguments.url is None:
        from ..bench.drivers.in_process import in_process

        async with in_process(arguments.engine, engine_options(arguments)) as driver:
            with _as_when_serving():
                yield driver
        return
    url = urllib.parse.urlsplit(arguments.url)
    token = _token(arguments.token_file)
    if url.scheme in ("http", "https") and url.netloc:
        from ..bench.drivers.http import HttpDriver

        yield HttpDriver(arguments.url, arguments.model, token, arguments.tls_ca, arguments.lora)
    elif url.scheme in ("grpc", "grpcs") and url.netloc:
        from ..bench.drivers.grpc import GrpcDriver

        yield GrpcDriver(url.netloc, token, arguments.tls_ca, url.scheme == "grpcs", arguments.metrics_url)
    else:
        raise RequestError(f"--url {arguments.url}: expected grpc://HOST:PORT or http://HOST:PORT")


@contextmanager
def _as_when_serving() -> Iterator[None]:
    """The interpreter as `ingot serve` sets it up, for threads that must not wait for each other."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


def _token(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--token-file: cannot read {path}: {error}") from None


def _check_writable(path: str | None) -> None:
    """Before the work, not after it."""
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"cannot write {path!r}: {folder} is no folder that can be written to")


def _write(arguments: argparse.Namespace, result: Result) -> None:
    from ..bench.report import report_text

    if arguments.json:
        print_json(result.report)
    else:
        print(report_text(result.report))
    if arguments.output:
        full = {**result.report, "records": [record.to_json() for record in result.records]}
        try:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(full, file, indent=1)
        except OSError as error:
            raise WorkFailed(f"cannot write {arguments.output!r}: {error.strerror}") from None
    if arguments.plot:
        from ..bench.plot import draw

        draw(arguments.plot, result.records, result.report)

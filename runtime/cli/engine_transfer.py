"""ingot engines push, pull: engines between the store and other stores."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..errors import RequestError
from ..store.remotes import open_remote
from ..store.store import Store
from ..store.transfer import Transferred, pull, push
from .engine_names import add_why, name_engine
from .output import Progress, print_json, size


def push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="oci://REGISTRY/REPOSITORY, a folder, or a URL that fsspec knows")
    parser.add_argument("engines", metavar="ENGINE", nargs="*", help="names or hashes (default: all names)")
    parser.add_argument("--move", action="store_true", help="let names there that mean other engines move")


def push_engines(arguments: argparse.Namespace, store: Store) -> int:
    engines = arguments.engines or sorted(store.lock.now())
    return _transfer(arguments, engines, lambda remote, engine, on_bytes: push(
        store, remote, store.resolve(engine), engine if engine in store.lock.now() else None, arguments.move, on_bytes))


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="as of push")
    parser.add_argument("engines", metavar="ENGINE", nargs="*",
                        help="names, or whole hashes (default: all that engines.lock names)")
    add_why(parser)


def pull_engines(arguments: argparse.Namespace, store: Store) -> int:
    engines = arguments.engines or sorted(store.lock.now())
    if "://" not in arguments.url and not os.path.isdir(arguments.url):
        raise RequestError(f"{arguments.url}: no folder; expected one that ingot engines push has written, or "
                           "oci://HOST/REPOSITORY")

    def one(remote: Any, engine: str, on_bytes: Callable[[int], None]) -> Transferred:
        known = store.lock.now().get(engine)
        done = pull(store, remote, known.hash if known is not None else engine, on_bytes,
                    lambda hash: name_engine(store, engine, hash, "add", arguments.why) if engine != hash else None)
        return done

    return _transfer(arguments, engines, one)


def _transfer(arguments: argparse.Namespace, engines: list[str],
              work: Callable[[Any, str, Callable[[int], None]], Transferred]) -> int:
    if not engines:
        raise RequestError("no engine is named, neither here nor in engines.lock")
    progress, done, results = Progress(not arguments.json), 0, []

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress.show(f"{size(done)}")

    with open_remote(arguments.url) as remote:
        for engine in engines:
            try:
                results.append((engine, work(remote, engine, on_bytes)))
            finally:
                progress.clear()
            if not arguments.json:
                result = results[-1][1]
                broken = f"; the connection broke {result.num_retries} times" if result.num_retries else ""
                print(f"{engine}: {result.hash}\n{result.num_sent} of {result.num_blobs} blobs travelled, "
                      f"{size(result.sent_bytes)}{broken}")
    if arguments.json:
        print_json([{"engine": engine, **asdict(result)} for engine, result in results])
    return 0

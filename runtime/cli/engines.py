"""ingot engines: the engine store, its names, and other stores."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import RequestError, WorkFailed
from ..store import attestation, provenance
from ..store.export import export
from ..store.locate import Located, locate
from ..store.lock_file import Move, again, before, move_of, removal
from ..store.policy import LoadPolicy, signed, why_unsigned
from ..store.store import Store
from . import COMMON_FLAGS
from .engine_names import add_why, name_engine
from .engine_options import add_store_argument
from .engine_server import (
    add_load_arguments,
    add_server_arguments,
    describe,
    load_on_servers,
    status,
    status_arguments,
    swap,
    swap_arguments,
)
from .engine_transfer import pull_arguments, pull_engines, push_arguments, push_engines
from .output import Progress, print_json, size, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (summary, add, run) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verb.set_defaults(run_verb=run)
        for flag, meaning in COMMON_FLAGS.items():  # before or behind the verb
            verb.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meaning)
        add_store_argument(verb)
        add(verb)


def run(arguments: argparse.Namespace) -> int:
    run_verb: Callable[[argparse.Namespace, Store], int] = arguments.run_verb
    store = Store(arguments.store)
    try:
        return run_verb(arguments, store)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a folder that may not be written
        place = error.filename if error.filename is not None else store.folder
        raise WorkFailed(f"{place}: {error.strerror or error}") from error


# Names

def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="engines that have no name too")


def _list(arguments: argparse.Namespace, store: Store) -> int:
    named = store.lock.now()
    rows = [{"name": name, **_shown(move), "in_store": store.has(move.hash)} for name, move in sorted(named.items())]
    if arguments.all:
        hashes = {move.hash for move in named.values()}
        nothing = {"time": "", "by": "", "action": ""}
        rows += [{"name": "", **_shown(move_of(store.manifest(hash), hash, "add", "")), **nothing, "in_store": True}
                 for hash in store.engines() if hash not in hashes]
    if arguments.json:
        print_json({"store": str(store.folder), "engines": rows})
        return 0
    print(table([(row["name"] or "-", row["hash"][:12], row["model"], row["target"], row["precision"], row["quality"],
                  row["time"], "" if row["in_store"] else "not in the store") for row in rows],
                ("name", "hash", "model", "target", "precision", "quality", "time", "")) if rows
          else f"{store.folder}: no engine has a name; ingot engines add FILE NAME")
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="FILE", help="engine file")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a new name for it; without one, gc removes it again")
    parser.add_argument("--move", action="store_true", help="the name may mean another engine: it moves, as by pin")
    add_why(parser)


def _add(arguments: argparse.Namespace, store: Store) -> int:
    located = locate(Path(arguments.engine), arguments.store)
    progress = Progress(not arguments.json)
    done = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress.show(f"added {size(done)}")

    with located.open() as engine:
        try:
            added = store.add(engine, on_bytes)
        finally:
            progress.clear()
        store.add_attestations(engine.hash, attestation.read(located.attestations))
        if arguments.name is not None:
            now = store.lock.now().get(arguments.name)
            moves = arguments.move and now is not None and now.hash != added.hash
            name_engine(store, arguments.name, added.hash, "pin" if moves else "add", arguments.why)
    if arguments.json:
        print_json({**asdict(added), "name": arguments.name})
    else:
        print(f"{arguments.name or 'added'}: {added.hash}\n{added.num_new_blobs} of {added.num_blobs} blobs, "
              f"{size(added.new_bytes)} of {size(added.size_bytes)}, are new")
    return 0


def _pin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("hash", metavar="HASH", help="of an engine in the store, or its first digits")
    add_why(parser)
    add_load_arguments(parser)
    add_server_arguments(parser)


def _pin(arguments: argparse.Namespace, store: Store) -> int:
    return _moved(arguments, store, store.full_hash(arguments.hash), "pin")


def _rollback_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="how many engines back (default 1)")
    add_why(parser)
    add_load_arguments(parser)
    add_server_arguments(parser)


def _rollback(arguments: argparse.Namespace, store: Store) -> int:
    """The history tells all of the engine that a move tells: a checkout of the lock file is enough."""
    name, history = arguments.name, store.lock.history(arguments.name)
    target, old = before(history, arguments.n), store.lock.now().get(name)
    servers = load_on_servers(arguments, target.hash) if arguments.server else []
    store.lock.move(name, again(target, "rollback" if old is not None else "add", arguments.why))
    return _tell_move(arguments, store, target.hash, old, servers)


def _moved(arguments: argparse.Namespace, store: Store, hash: str, action: str) -> int:
    name, old = arguments.name, store.lock.now().get(arguments.name)
    # The servers first: what none of them takes is not what the name shall mean.
    servers = load_on_servers(arguments, hash) if arguments.server else []
    name_engine(store, name, hash, action if old is not None else "add", arguments.why)
    return _tell_move(arguments, store, hash, old, servers)


def _tell_move(arguments: argparse.Namespace, store: Store, hash: str, old: Move | None,
               servers: list[dict[str, Any]]) -> int:
    if arguments.json:
        print_json({"name": arguments.name, "hash": hash, "before": old.hash if old is not None else None,
                    "in_store": store.has(hash), **({"servers": servers} if servers else {})})
        return 0
    lines = [*map(describe, servers), f"{arguments.name}: {hash}", *([f"before: {old.hash}"] if old else [])]
    if not store.has(hash):
        lines.append(f"It is not in {store.folder}; get it: ingot engines pull URL {hash}")
    print("\n".join(lines))
    return 0


def _log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="default: all names")


def _log(arguments: argparse.Namespace, store: Store) -> int:
    names = store.lock.read() if arguments.name is None else {arguments.name: store.lock.history(arguments.name)}
    moves = sorted(((move.time, number, name, move) for name, history in names.items()
                    for number, move in enumerate(history)), reverse=True, key=lambda item: item[:3])
    if arguments.json:
        print_json([{"name": name, **_shown(move)} for _, _, name, move in moves])
    elif moves:
        print(table([(_time(move), name, move.action, move.hash[:12] or "-", move.target, move.precision, move.by,
                      move.why) for _, _, name, move in moves],
                    ("time", "name", "action", "hash", "target", "precision", "by", "why")))
    return 0


def _rm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="its history stays, and with it its engines")
    add_why(parser)


def _rm(arguments: argparse.Namespace, store: Store) -> int:
    last = store.lock.history(arguments.name)[-1]
    store.lock.move(arguments.name, removal(last, arguments.why))
    if arguments.json:
        print_json({"name": arguments.name, "hash": None, "before": last.hash})
    else:
        print(f"{arguments.name}: means nothing any more\nbefore: {last.hash}")
    return 0


# The folder

def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="a name in the store, or the start of a hash")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="engine file to write")
    parser.add_argument("--force", action="store_true", help="replace it if it exists")


def _export(arguments: argparse.Namespace, store: Store) -> int:
    located, path = locate(arguments.engine, arguments.store), Path(arguments.output)
    with located.open() as engine:
        export(engine, path, arguments.force)
        statements = attestation.read(located.attestations)
        attestation.add(Located(store, None, path).attestations, statements)
        if arguments.json:
            print_json({"hash": engine.hash, "path": str(path), "size_bytes": path.stat().st_size})
        else:
            print(f"{path}: {engine.hash}, {size(path.stat().st_size)}")
    return 0


def _gc_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delete", action="store_true", help="remove it; without, only tell what would be removed")
    parser.add_argument("--keep-history", type=int, metavar="N",
                        help="of what names have meant before, keep the last N moves only (default: all)")


def _gc(arguments: argparse.Namespace, store: Store) -> int:
    if arguments.keep_history is not None and arguments.keep_history < 0:
        raise RequestError(f"--keep-history is {arguments.keep_history}; expected a number of moves, 0 or more")
    collect = store.collect_garbage if arguments.delete else store.garbage
    garbage = collect(arguments.keep_history)
    if arguments.json:
        print_json({"deleted": arguments.delete, "engines": garbage.engines, "blobs": garbage.blobs,
                    "partial": [path.name for path in garbage.partial], "size_bytes": garbage.size_bytes})
    else:
        for hash in garbage.engines:
            print(f"engine {hash}")
        print(f"{'removed' if arguments.delete else 'would remove'} {len(garbage.engines)} engines, "
              f"{len(garbage.blobs)} blobs, {len(garbage.partial)} partial files: {size(garbage.size_bytes)}")
        if garbage.size_bytes and not arguments.delete:
            print("  do it: --delete")
    return 0


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engines", metavar="ENGINE", nargs="*", help="default: everything in the store")
    parser.add_argument("--key", action="append", default=[], metavar="FILE",
                        help="public key, PEM: each engine must be signed by it, or by one of several")


def _verify(arguments: argparse.Namespace, store: Store) -> int:
    found = [locate(reference, arguments.store) for reference in arguments.engines]
    files = [located for located in found if located.hash is None]
    hashes = [located.hash for located in found if located.hash is not None]
    progress, done = Progress(not arguments.json), 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress.show(f"verified {size(done)}")

    try:
        check = store.verify(hashes or None if not files else hashes, on_bytes)
    finally:
        progress.clear()
    problems = [f"blob {sha256} is damaged: {store.blobs.path(sha256)}{_users(store, users)}"
                for sha256, users in check.damaged.items()]
    problems += [f"blob {sha256} is missing{_users(store, users)}" for sha256, users in check.missing.items()]
    problems += [f"engine {hash}: {problem}" for hash, problem in check.broken.items()]
    for located in files:
        with located.open() as engine:
            engine.verify()
            check.num_engines += 1
    keys = LoadPolicy.of([], arguments.key).keys
    if keys:
        signable = found or [Located(store, hash, None) for hash in store.engines()]
        problems += [problem for located in signable for problem in _unsigned(located, keys)]
    if arguments.json:
        print_json({"store": str(store.folder), **asdict(check), "problems": problems})
    elif not problems:
        print(f"{check.num_engines} engines, {check.num_blobs} blobs, {size(check.size_bytes)}: all as their hashes say"
              + (", and signed" if keys else ""))
    if problems and not arguments.json:
        raise WorkFailed("\n  ".join([f"{store.folder}: {len(problems)} problems", *problems, *_cure(check.damaged)]))
    return 1 if problems else 0


def _users(store: Store, hashes: list[str]) -> str:
    names = {move.hash: name for name, move in store.lock.now().items()}
    return "".join(f"\n    in engine {hash}" + (f", {names[hash]}" if hash in names else "") for hash in hashes)


def _cure(damaged: dict[str, list[str]]) -> list[str]:
    return ["Delete the damaged files, then pull or add their engines again."] if damaged else []


def _unsigned(located: Located, keys: Any) -> list[str]:
    with located.open() as engine:
        envelopes = attestation.read(located.attestations)
        if signed(engine.hash, envelopes, keys):
            return []
        return [why_unsigned(engine.hash, envelopes)]


def _sign_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="a file, a name in the store, or the start of a hash")
    parser.add_argument("--key", required=True, metavar="FILE", help="private Ed25519 key, PEM")


def _sign(arguments: argparse.Namespace, store: Store) -> int:
    key = attestation.private_key(arguments.key)
    located = locate(arguments.engine, arguments.store)
    with located.open() as engine:
        hash = engine.hash
        envelopes = [attestation.sign(statement, key) for statement in provenance.statements(engine.manifest, hash)]
    if located.hash is not None:
        num_new = store.add_attestations(hash, envelopes)
    else:
        num_new = attestation.add(located.attestations, envelopes)
    if arguments.json:
        print_json({"hash": hash, "key_id": attestation.key_id(key.public_key()), "num_new": num_new,
                    "path": str(located.attestations)})
    else:
        print(f"{hash}: provenance and SBOM signed" + ("" if num_new else ", as they were already")
              + f"\n{located.attestations}")
    return 0


def _time(move: Move) -> str:
    return f"{move.time:%Y-%m-%d %H:%M:%S}"


def _shown(move: Move) -> dict[str, Any]:
    return {**asdict(move), "time": f"{move.time:%Y-%m-%dT%H:%M:%SZ}"}


Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace, Store], int]]
VERBS: dict[str, Verb] = {
    "list": ("what each name means now", _list_arguments, _list),
    "add": ("put an engine file into the store, under a new name", _add_arguments, _add),
    "pin": ("move a name to another engine of the store, and with --server running servers too", _pin_arguments, _pin),
    "rollback": ("move a name back to the engine that it meant before, and with --server running servers too",
                 _rollback_arguments, _rollback),
    "swap": ("have running servers load another engine of their store", swap_arguments,
             lambda arguments, store: swap(arguments)),
    "status": ("the engines that running servers have", status_arguments, lambda arguments, store: status(arguments)),
    "log": ("how names have moved, the latest first", _log_arguments, _log),
    "rm": ("take a name away", _rm_arguments, _rm),
    "export": ("write an engine of the store as an engine file", _export_arguments, _export),
    "gc": ("remove what no name means or has meant", _gc_arguments, _gc),
    "verify": ("read every byte of the store; check signatures", _verify_arguments, _verify),
    "sign": ("sign an engine's provenance and the SBOM of its toolchain", _sign_arguments, _sign),
    "push": ("send engines to a registry or a folder: only what it lacks", push_arguments, push_engines),
    "pull": ("get engines from there: only what is missing here, verified", pull_arguments, pull_engines),
}

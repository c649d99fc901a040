"""ingot serve ENGINE: gRPC and HTTP servers over one engine, until a signal ends them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .engine_options import add_engine_argument, add_engine_arguments, engine_options
from .output import size

if TYPE_CHECKING:
    from ..executor.loading import EngineOptions
    from ..executor.overlap import KvBudget
    from ..servers.context import Server, ServerContext, ServerSettings
    from ..store.lock_file import LockFile

# Ports as Triton's clients and probes expect them.
DEFAULT_HTTP, DEFAULT_GRPC = "127.0.0.1:8000", "127.0.0.1:8001"
# The executor's thread must not wait for the servers' to give up the interpreter; Python's own 5 ms is a whole step.
SWITCH_INTERVAL_S = 0.0005
# What clients get to read the last of their answers once the engine has no more work.
CLOSING_GRACE_S = 2.0
KILLED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..servers.thoughts import NAMES as REASONING_PARSERS
    from ..servers.tool_calls import NAMES as TOOL_CALL_PARSERS

    add_engine_argument(parser)
    parser.add_argument("--grpc", metavar="ADDR", help=f"host:port, port 0: any (default {DEFAULT_GRPC})")
    parser.add_argument("--http", metavar="ADDR", help=f"host:port (default {DEFAULT_HTTP}); of the two servers, those "
                                                       "that are named are started, or both if none is")
    parser.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: the engine's name)")
    parser.add_argument("--grpc-services", metavar="NAMES", help="of trtllm,vllm,kserve,control (default: all)")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM certificate chain; with --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM private key")
    parser.add_argument("--tls-client-ca", metavar="FILE", help="PEM: clients must show a certificate signed by it")
    parser.add_argument("--token-file", metavar="FILE", help="a bearer token that clients must send")
    parser.add_argument("--max-message-bytes", type=int, default=32 << 20, metavar="N",
                        help="of one request (default 32 MiB)")
    parser.add_argument("--tool-call-parser", metavar="NAME",
                        help=f"how the model writes calls of tools, in chats over HTTP: {', '.join(TOOL_CALL_PARSERS)} "
                             "(default: told by its chat template)")
    parser.add_argument("--reasoning-parser", metavar="NAME",
                        help="how it writes what it thinks aloud, to be told apart in chats over HTTP: "
                             f"{', '.join(REASONING_PARSERS)} (default: it is part of the answer)")
    adapters = parser.add_argument_group("LoRA adapters, for engines built with --lora-max-rank")
    adapters.add_argument("--lora", action="append", default=[], metavar="NAME=PATH",
                          help="an adapter that PEFT saved, to be named as the model of a request; may be repeated; "
                               "NAME=PATH@sha256:HASH: only if this is its content")
    adapters.add_argument("--lora-folder", metavar="FOLDER",
                          help="clients may load adapters from below this folder, and unload them (default: none may)")
    swaps = parser.add_argument_group("when another engine takes over (ingot engines swap, rollback, pin --server)")
    swaps.add_argument("--lock", metavar="FILE", help="the lock file that says what the name ENGINE means (default: "
                                                      "engines.lock of the store)")
    swaps.add_argument("--follow", action="store_true",
                       help="serve what the name means in the lock file, as that changes")
    swaps.add_argument("--pull", metavar="URL", help="with --follow: where engines come from that the store lacks")
    swaps.add_argument("--swap-min-kv", type=float, default=0.5, metavar="F",
                       help="an engine must have room for this part of the KV cache that the first one had, beside the "
                            "one that runs; else it is refused (default 0.5)")
    parser.add_argument("--self-test", action="store_true",
                        help="try the engine out before it takes requests; those that take over later always are")
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                        help="how long requests may still run after SIGTERM (default 30)")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = server_settings(arguments)
    _need_packages(settings)
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(_serve(settings, arguments))


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    """Raises RequestError for files that cannot be read and settings that contradict each other."""
    from ..servers.context import GRPC_SERVICES, ServerSettings
    from ..servers.thoughts import NAMES as REASONING_PARSERS
    from ..servers.tool_calls import NAMES as TOOL_CALL_PARSERS

    grpc, http = arguments.grpc, arguments.http
    if grpc is None and http is None:
        grpc, http = DEFAULT_GRPC, DEFAULT_HTTP
    services = tuple(arguments.grpc_services.split(",")) if arguments.grpc_services else GRPC_SERVICES
    if unknown := [name for name in services if name not in GRPC_SERVICES]:
        raise RequestError(f"--grpc-services: unknown {', '.join(unknown)}; there are {', '.join(GRPC_SERVICES)}")
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise RequestError("--tls-cert and --tls-key go together; only one is given")
    if arguments.tls_client_ca is not None and arguments.tls_cert is None:
        raise RequestError("--tls-client-ca needs --tls-cert and --tls-key: without TLS no client shows a certificate")
    if arguments.max_message_bytes < 1024:
        raise RequestError(f"--max-message-bytes is {arguments.max_message_bytes}; expected at least 1024")
    if not 0 < arguments.swap_min_kv <= 1:
        raise RequestError(f"--swap-min-kv is {arguments.swap_min_kv}; expected above 0 and at most 1")
    if not arguments.drain_timeout >= 0:
        raise RequestError(f"--drain-timeout is {arguments.drain_timeout}; expected seconds, 0 or more")
    for option, name, names in (("--tool-call-parser", arguments.tool_call_parser, TOOL_CALL_PARSERS),
                                ("--reasoning-parser", arguments.reasoning_parser, REASONING_PARSERS)):
        if name is not None and name not in names:
            raise RequestError(f"{option}: unknown {name!r}; there are {', '.join(names)}")
    if arguments.lora_folder is not None and not os.path.isdir(arguments.lora_folder):
        raise RequestError(f"--lora-folder {arguments.lora_folder}: no folder")
    token = None
    if arguments.token_file is not None:
        token = _read(arguments.token_file, "--token-file").decode("ascii", "replace").strip()
        if not token or not token.isprintable() or not token.isascii():
            raise RequestError(f"--token-file {arguments.token_file}: expected one line of printable ASCII characters")
    return ServerSettings(
        grpc_address=grpc, http_address=http, grpc_services=services,
        tls_certificate=_read_optional(arguments.tls_cert, "--tls-cert"),
        tls_key=_read_optional(arguments.tls_key, "--tls-key"),
        tls_client_ca=_read_optional(arguments.tls_client_ca, "--tls-client-ca"), auth_token=token,
        max_message_bytes=arguments.max_message_bytes, drain_timeout_s=arguments.drain_timeout,
        tool_call_parser=arguments.tool_call_parser, reasoning_parser=arguments.reasoning_parser,
        lora_folder=arguments.lora_folder)


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{option}: cannot read {path}: {error.strerror}") from None


def _read_optional(path: str | None, option: str) -> bytes | None:
    return None if path is None else _read(path, option)


def _need_packages(settings: ServerSettings) -> None:
    """Imports the servers before the engine is loaded. Raises RequestError if what they need is not installed."""
    try:
        import uvloop  # noqa: F401

        if settings.grpc_address is not None:
            from ..servers import grpc_server  # noqa: F401
        if settings.http_address is not None:
            from ..servers import http_server  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ingot."):
            raise
        raise RequestError(f"`ingot serve` needs packages that are not installed here: no module named {error.name!r}."
                           "\n  Install them: pip install 'ingot-llm[serve]'") from None


def _need_addresses(settings: ServerSettings) -> None:
    """Raises RequestError for an address that cannot be had, before a large engine is loaded in vain."""
    from ..servers.address import require_free

    for protocol, address in (("gRPC", settings.grpc_address), ("HTTP", settings.http_address)):
        if address is not None:
            require_free(address, protocol)


async def _serve(settings: ServerSettings, arguments: argparse.Namespace) -> int:
    from ..adapters.source import parse_named
    from ..executor.loading import LoadedEngine
    from ..servers.context import ServerContext
    from ..servers.served import ServedEngine

    sources = [parse_named(text) for text in arguments.lora]
    options, lock = engine_options(arguments), _lock_file(arguments)
    reference = _locked(lock, arguments.engine) if lock is not None else arguments.engine
    # What is not in the store yet comes before the engine that is to be served is asked for.
    fetch = _fetching(arguments)
    if fetch is not None:
        await asyncio.to_thread(fetch, reference)
    _need_addresses(settings)
    engine = ServedEngine.of(LoadedEngine(reference, options, "full" if arguments.self_test else "none"))
    context = ServerContext(engine, arguments.model_name or engine.file.manifest["model"]["name"], settings)
    del engine  # the context alone decides how long it lives
    try:
        context.adapters.start_with(sources)
        return await _run(context, options, lock, fetch, arguments)
    finally:
        await context.close()


async def _run(context: ServerContext, options: EngineOptions, lock: LockFile | None,
               fetch: Callable[[str], None] | None, arguments: argparse.Namespace) -> int:
    from ..servers.follow import Follower
    from ..servers.swap import Swapper

    if context.settings.lora_folder is not None and context.adapters.room is None:
        print("ingot: --lora-folder: this engine has no room for adapters, so that none can be loaded until one takes "
              "over that has (ingot build --lora-max-rank)", file=sys.stderr, flush=True)
    context.swapper = Swapper(context, options, _kv_budget(context.current.facts, options, arguments.swap_min_kv))
    must_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, must_end)
    servers = await _start(context)
    # What was loaded stays: no collection needs to look at it again, and none falls into a step because of it.
    gc.collect()
    gc.freeze()
    addresses = {name: server.address for name, server in servers.items()}
    print(_start_line(context, addresses, arguments.json), flush=True)
    following = None
    if arguments.follow:
        assert lock is not None
        following = asyncio.create_task(Follower(context, context.swapper, lock, arguments.engine, fetch=fetch).run())
    await must_end.wait()
    if following is not None:
        following.cancel()
    await _end(context, list(servers.values()), context.settings.drain_timeout_s)
    return 0


def _lock_file(arguments: argparse.Namespace) -> LockFile | None:
    """The file that says which engine the name means, if that is asked for. Raises RequestError."""
    from ..store.lock_file import LockFile, check_name
    from ..store.store import Store

    if arguments.pull is not None and not arguments.follow:
        raise RequestError("--pull goes with --follow")
    if arguments.lock is None and not arguments.follow:
        return None
    check_name(arguments.engine)
    return LockFile(Path(arguments.lock)) if arguments.lock is not None else Store(arguments.store).lock


def _locked(lock: LockFile, name: str) -> str:
    """The hash that the name means. Raises RequestError."""
    move = lock.now().get(name)
    if move is None:
        names = ", ".join(sorted(lock.now()))
        known = f"the names are: {names}" if names else "it has no names, or does not exist"
        raise RequestError(f"{lock.path} has no engine named {name}; {known}")
    return move.hash


def _fetching(arguments: argparse.Namespace) -> Callable[[str], None] | None:
    """What gets an engine into the store that is not there."""
    if arguments.pull is None:
        return None
    from ..store.remotes import open_remote
    from ..store.store import Store
    from ..store.transfer import pull

    def fetch(engine_hash: str) -> None:
        store = Store(arguments.store)
        if not store.has(engine_hash):
            with open_remote(arguments.pull) as remote:
                pull(store, remote, engine_hash)
    return fetch


def _kv_budget(facts: Mapping[str, Any], options: EngineOptions, min_fraction: float) -> KvBudget:
    from ..executor.overlap import KvBudget

    host_is_tokens = options.host_cache_fraction is None
    return KvBudget(facts["kv_cache_bytes"], facts["host_kv_bytes"], options.kv_cache_tokens,
                    options.host_kv_tokens if host_is_tokens else None, min_fraction)


def _on_signal(must_end: asyncio.Event) -> None:
    if must_end.is_set():
        os._exit(KILLED)  # whoever asks twice does not want to wait for anything
    must_end.set()


async def _start(context: ServerContext) -> dict[str, Server]:
    servers: dict[str, Server] = {}
    try:
        if context.settings.grpc_address is not None:
            from ..servers import grpc_server

            servers["grpc"] = await grpc_server.start(context, context.settings.grpc_address)
        if context.settings.http_address is not None:
            from ..servers import http_server

            servers["http"] = await http_server.start(context, context.settings.http_address)
    except BaseException:
        for server in servers.values():
            await server.stop(0)
        raise
    return servers


async def _end(context: ServerContext, servers: list[Server], timeout_s: float) -> None:
    """While requests still run, the servers stay, and say that the engine is draining."""
    print(f"ingot: draining: {context.num_requests} requests run or wait, {timeout_s:g} s for them", file=sys.stderr,
          flush=True)
    done = await context.drain(timeout_s)
    await asyncio.gather(*(server.stop(CLOSING_GRACE_S) for server in servers))
    print("ingot: drained" if done else "ingot: drained; some requests were cancelled", file=sys.stderr, flush=True)


def _start_line(context: ServerContext, addresses: dict[str, str], as_json: bool) -> str:
    engine, facts = context.current, context.current.facts
    manifest = engine.file.manifest
    if as_json:
        adapters = {} if context.adapters.room is None else {
            "adapters": {each.name: each.adapter.sha256 for each in context.adapters.all()}}
        return json.dumps({"ready": True, "engine": engine.hash, "model": context.model_name, "pid": os.getpid(),
                           **addresses, **facts, **adapters})
    reuse = "prefixes are reused" if facts["prefix_reuse"] else "no prefix reuse"
    host = f", {facts['host_kv_tokens']:,} tokens in host memory" if facts["host_kv_tokens"] else ""
    lines = [
        ("engine", f"{context.model_name}, {manifest['precision']}, {manifest['target']['name']}, {engine.hash[:12]}"),
        ("scheduler", f"{facts['scheduler_policy']}, {facts['context_chunking']}; a step: {facts['max_batch_size']} "
                      f"sequences, {facts['max_num_tokens']:,} tokens; {facts['max_queue_size']} requests may wait"),
        ("KV cache", f"{facts['kv_cache_tokens']:,} tokens, {size(facts['kv_cache_bytes'])}{host}; guarantees "
                     f"{facts['guaranteed_requests']} requests of {facts['max_seq_len']:,} tokens at once; {reuse}"),
        *_adapter_lines(context),
        *((name, address) for name, address in addresses.items()),
    ]
    return "\n".join([*(f"{name:<10} {text}" for name, text in lines), "ready"])


def _adapter_lines(context: ServerContext) -> list[tuple[str, str]]:
    room, loaded = context.adapters.room, context.adapters.all()
    if room is None:
        return []
    names = ", ".join(f"{each.name} ({each.adapter.sha256[:12]}, rank {each.adapter.rank})" for each in loaded)
    loads = f"; others from {context.settings.lora_folder}" if context.settings.lora_folder is not None else ""
    return [("adapters", f"{names or 'none'}; {room.max_adapters} at once, of rank {room.max_rank} at most, "
                         f"{size(room.num_bytes)}{loads}")]

"""ingot serve ENGINE: gRPC and HTTP servers over one engine, until a signal ends them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .engine_options import add_engine_argument, add_engine_arguments, engine_options
from .output import size

if TYPE_CHECKING:
    from ..executor.async_engine import AsyncEngine
    from ..executor.loading import LoadedEngine
    from ..servers.context import Server, ServerContext, ServerSettings

# Ports as Triton's clients and probes expect them.
DEFAULT_HTTP, DEFAULT_GRPC = "127.0.0.1:8000", "127.0.0.1:8001"
# The executor's thread must not wait for the servers' to give up the interpreter; Python's own 5 ms is a whole step.
SWITCH_INTERVAL_S = 0.0005
# What clients get to read the last of their answers once the engine has no more work.
CLOSING_GRACE_S = 2.0
KILLED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                        help="how long requests may still run after SIGTERM (default 30)")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = server_settings(arguments)
    _need_packages(settings)
    import uvloop

    from ..executor.loading import LoadedEngine

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with LoadedEngine(arguments.engine, engine_options(arguments)) as engine:
        return uvloop.run(_serve(engine, settings, arguments))


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    """Raises RequestError for files that cannot be read and settings that contradict each other."""
    from ..servers.context import GRPC_SERVICES, ServerSettings

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
    if not arguments.drain_timeout >= 0:
        raise RequestError(f"--drain-timeout is {arguments.drain_timeout}; expected seconds, 0 or more")
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
        max_message_bytes=arguments.max_message_bytes, drain_timeout_s=arguments.drain_timeout)


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


async def _serve(loaded: LoadedEngine, settings: ServerSettings, arguments: argparse.Namespace) -> int:
    from ..executor.async_engine import AsyncEngine
    from ..servers.context import ServerContext

    facts = loaded.facts()
    model_name = arguments.model_name or loaded.file.manifest["model"]["name"]
    context = ServerContext(
        AsyncEngine(loaded.executor), loaded.file, loaded.tokenizer, loaded.limits, loaded.vocab_size,
        loaded.stop_token_ids, model_name, _with_scheduling(settings, facts),
        loaded.kv.longest(loaded.limits.max_seq_len))
    must_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, must_end)
    servers = await _start(context)
    # What was loaded stays: no collection needs to look at it again, and none falls into a step because of it.
    gc.collect()
    gc.freeze()
    addresses = {name: server.address for name, server in servers.items()}
    print(_start_line(loaded, model_name, addresses, facts, arguments.json), flush=True)
    await must_end.wait()
    await _end(context.engine, list(servers.values()), settings.drain_timeout_s)
    return 0


def _with_scheduling(settings: ServerSettings, facts: dict[str, Any]) -> ServerSettings:
    from dataclasses import replace

    return replace(settings, scheduling=tuple(facts.items()))


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


async def _end(engine: AsyncEngine, servers: list[Server], timeout_s: float) -> None:
    """While requests still run, the servers stay, and say that the engine is draining."""
    running = len(engine.request_ids)
    print(f"ingot: draining: {running} requests run or wait, {timeout_s:g} s for them", file=sys.stderr, flush=True)
    done = await engine.drain(timeout_s)
    await asyncio.gather(*(server.stop(CLOSING_GRACE_S) for server in servers))
    print("ingot: drained" if done else "ingot: drained; some requests were cancelled", file=sys.stderr, flush=True)


def _start_line(loaded: LoadedEngine, model_name: str, addresses: dict[str, str], facts: dict[str, Any],
                as_json: bool) -> str:
    manifest = loaded.file.manifest
    if as_json:
        return json.dumps({"ready": True, "engine": loaded.file.hash, "model": model_name, "pid": os.getpid(),
                           **addresses, **facts})
    reuse = "prefixes are reused" if facts["prefix_reuse"] else "no prefix reuse"
    host = f", {facts['host_kv_tokens']:,} tokens in host memory" if facts["host_kv_tokens"] else ""
    lines = [
        ("engine", f"{model_name}, {manifest['precision']}, {manifest['target']['name']}, {loaded.file.hash[:12]}"),
        ("scheduler", f"{facts['scheduler_policy']}, {facts['context_chunking']}; a step: {facts['max_batch_size']} "
                      f"sequences, {facts['max_num_tokens']:,} tokens; {facts['max_queue_size']} requests may wait"),
        ("KV cache", f"{facts['kv_cache_tokens']:,} tokens, {size(facts['kv_cache_bytes'])}{host}; guarantees "
                     f"{facts['guaranteed_requests']} requests of {facts['max_seq_len']:,} tokens at once; {reuse}"),
        *((name, address) for name, address in addresses.items()),
    ]
    return "\n".join([*(f"{name:<10} {text}" for name, text in lines), "ready"])

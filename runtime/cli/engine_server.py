"""The commands of `ingot engines` that speak to running servers: another engine takes over there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import IngotError, RequestError, WorkFailed
from .output import print_json, table

if TYPE_CHECKING:
    import grpc

    from ..servers.proto import control_pb2 as pb

_SERVICE = "/ingot.v1.Control"


class ServerRefused(WorkFailed):
    """A server keeps the engine that it has, and says why."""


def add_server_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    group = parser.add_argument_group("running servers")
    group.add_argument("--server", action="append", required=required, default=None, metavar="ADDR",
                       help="host:port of the gRPC of a server whose engine shall change; may be repeated: one after "
                            "the other")
    group.add_argument("--token-file", metavar="FILE", help="the bearer token that the server wants")
    group.add_argument("--tls-ca", metavar="FILE", help="speak TLS; PEM certificates to trust")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM certificate to show; with --tls-key")
    group.add_argument("--tls-key", metavar="FILE", help="PEM private key")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                       help="how long a server may take (default 600); it goes on by itself after that")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N",
                        help="room of the KV cache (default: what the server's first engine had, or what of it fits)")
    parser.add_argument("--host-kv-tokens", type=int, metavar="N", help="room of the tier in host memory, likewise")
    parser.add_argument("--allow-other-tokenizer", action="store_true",
                        help="clients that send token ids know the new engine's")


def load_on_servers(arguments: argparse.Namespace, engine: str, if_serving: str = "") -> list[dict[str, Any]]:
    """Has each server load an engine of its store; what came of it. Raises RequestError, ServerRefused.

    The first that refuses ends it: those behind it keep what they have, and the error says which have changed.
    """
    return _on_each(arguments, lambda call: _loaded(call("LoadEngine", _load_request(arguments, engine, if_serving))))


def _load_request(arguments: argparse.Namespace, engine: str, if_serving: str) -> pb.LoadEngineRequest:
    from ..servers.proto import control_pb2 as pb

    options = pb.LoadOptions(if_serving=if_serving,
                             allow_other_tokenizer=getattr(arguments, "allow_other_tokenizer", False))
    for name in ("kv_cache_tokens", "host_kv_tokens"):
        value = getattr(arguments, name, None)
        if value is not None:
            if value < (1 if name == "kv_cache_tokens" else 0):
                raise RequestError(f"--{name.replace('_', '-')} is {value}; expected a number of tokens")
            setattr(options, name, value)
    return pb.LoadEngineRequest(engine=engine, options=options)


def _loaded(response: pb.LoadEngineResponse) -> dict[str, Any]:
    kind = response.DESCRIPTOR.enum_types_by_name["Trial"]
    return {"before": response.hash_before, "hash": response.hash,
            "trial": kind.values_by_number[response.trial].name.removeprefix("TRIAL_").lower(),
            "wait_s": round(response.wait_s, 4), "load_s": round(response.load_s, 4),
            "trial_s": round(response.trial_s, 4), "kv_cache_tokens": response.kv_cache_tokens,
            "wanted_kv_tokens": response.wanted_kv_tokens, "num_finishing": response.num_finishing}


def describe(done: dict[str, Any]) -> str:
    """Of one server, a line for people."""
    if done["before"] == done["hash"]:
        return f"{done['server']}: serves {done['hash'][:12]} already"
    tried = {"recorded": "it gave the answers of its build", "smoke": "it has no record of its build, and gave sound "
             "answers", "returned": "it was still loaded"}.get(done["trial"], "")
    less = ""
    if done["kv_cache_tokens"] < done["wanted_kv_tokens"]:
        less = f"\n  KV cache: {done['kv_cache_tokens']:,} tokens of {done['wanted_kv_tokens']:,}: no more fitted"
    return (f"{done['server']}: {done['hash'][:12]} has taken over from {done['before'][:12]} in "
            f"{done['load_s']:.2f} s; {tried}; {done['num_finishing']} requests finish on the old one{less}")


# The verbs

def swap_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE",
                        help="a name, or the start of a hash, in the servers' own store; names do not move")
    add_load_arguments(parser)
    add_server_arguments(parser, required=True)


def swap(arguments: argparse.Namespace) -> int:
    results = load_on_servers(arguments, arguments.engine)
    if arguments.json:
        print_json(results)
    else:
        print("\n".join(map(describe, results)))
    return 0


def status_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, required=True)


def status(arguments: argparse.Namespace) -> int:
    from ..servers.proto import control_pb2 as pb

    results = _on_each(arguments, lambda call: _status(call("GetSwapStatus", pb.GetSwapStatusRequest())))
    if arguments.json:
        print_json(results)
        return 0
    for server in results:
        state = "" if server["phase"] == "idle" else f", {server['phase']} {server['loading'][:12]}"
        counts = ", ".join(f"{count} {result}" for result, count in server["results"].items())
        print(f"{server['server']}{state}" + (f"; swaps: {counts}" if counts else ""))
        rows = [(engine["hash"][:12], "new requests" if number == 0 else "finishes", engine["target"],
                 engine["precision"], engine["num_requests"], engine["kv_cache_tokens"])
                for number, engine in enumerate(server["engines"])]
        print(table(rows, ("engine", "gets", "target", "precision", "requests", "KV tokens"), indent="  "))
        if server["last_error"]:
            print(f"  last refused: {server['last_error']}")
    return 0


def _status(response: pb.SwapStatus) -> dict[str, Any]:
    phases = response.DESCRIPTOR.enum_types_by_name["Phase"].values_by_number
    return {"phase": phases[response.phase].name.removeprefix("PHASE_").lower(), "loading": response.loading,
            "engines": [{"hash": engine.hash, "target": engine.target, "precision": engine.precision,
                         "num_requests": engine.num_requests, "kv_cache_tokens": engine.kv_cache_tokens}
                        for engine in response.engines],
            "history": list(response.history), "results": {name: count for name, count in response.results.items()
                                                           if count}, "last_error": response.last_error}


# The connection

Caller = Callable[[str, Any], Any]


def _on_each(arguments: argparse.Namespace, work: Callable[[Caller], dict[str, Any]]) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    for address in arguments.server:
        try:
            with _connected(arguments, address) as call:
                done.append({"server": address, **work(call)})
        except IngotError as error:
            changed = ", ".join(each["server"] for each in done if each.get("before") != each.get("hash"))
            raise type(error)(f"{address}: {error}" + (f"\n  These servers have changed: {changed}" if changed else "")
                              ) from None
    return done


@contextmanager
def _connected(arguments: argparse.Namespace, address: str) -> Iterator[Caller]:
    """(method, request) -> response. Raises RequestError, ServerRefused."""
    try:
        import grpc

        from ..servers.proto import control_pb2 as pb
    except ModuleNotFoundError as error:
        raise RequestError(f"speaking to a server needs packages that are not installed here: no module named "
                           f"{error.name!r}.\n  Install them: pip install 'ingot-llm[serve]'") from None
    kinds: dict[str, Any] = {"LoadEngine": pb.LoadEngineResponse, "GetSwapStatus": pb.SwapStatus}
    metadata = () if arguments.token_file is None else (
        ("authorization", f"Bearer {_read(arguments.token_file, '--token-file').decode().strip()}"),)
    with _channel(grpc, arguments, address) as channel:
        def call(method: str, request: Any) -> Any:
            ask = channel.unary_unary(f"{_SERVICE}/{method}", lambda message: message.SerializeToString(),
                                      kinds[method].FromString)
            try:
                return ask(request, timeout=arguments.timeout, metadata=metadata)
            except grpc.RpcError as error:
                raise _as_error(grpc, error) from None
        yield call


def _channel(grpc: Any, arguments: argparse.Namespace, address: str) -> grpc.Channel:
    if not address.rpartition(":")[2].isdecimal():  # gRPC would take the port of HTTPS
        raise RequestError("expected host:port, as in --server 127.0.0.1:8001")
    if arguments.tls_ca is None:
        if arguments.tls_cert is not None or arguments.tls_key is not None:
            raise RequestError("--tls-cert and --tls-key need --tls-ca")
        return grpc.insecure_channel(address)
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise RequestError("--tls-cert and --tls-key go together; only one is given")
    key = None if arguments.tls_key is None else _read(arguments.tls_key, "--tls-key")
    certificate = None if arguments.tls_cert is None else _read(arguments.tls_cert, "--tls-cert")
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(_read(arguments.tls_ca, "--tls-ca"), key,
                                                                     certificate))


def _as_error(grpc: Any, error: Any) -> IngotError:
    code, text = error.code(), error.details() or "no reason given"
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED):
        return RequestError(text)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkFailed("no answer within --timeout; the server may still be loading the engine.\n"
                          "  See: ingot engines status --server ADDR")
    return ServerRefused(text)


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{option}: cannot read {path}: {error.strerror}") from None



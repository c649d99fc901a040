"""Where a server listens, as HOST:PORT, and what to say when it cannot."""

from __future__ import annotations

import errno
import socket

from ..errors import RequestError


def host_and_port(address: str, protocol: str) -> tuple[str, int]:
    """"[::1]:8000" -> ("::1", 8000); an empty host means all interfaces. Raises RequestError naming the protocol."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise RequestError(f"cannot serve {protocol} at {address}: expected host:port, as in 127.0.0.1:8000 or "
                           "[::1]:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def require_free(address: str, protocol: str) -> None:
    """Raises RequestError if nothing can listen at `address` now.

    For gRPC, whose library tells the reason on standard error alone. It still may fail to bind afterwards.
    """
    host, port = host_and_port(address, protocol)
    try:
        for family, kind, number, _, place in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                                                 flags=socket.AI_PASSIVE):
            with socket.socket(family, kind, number) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(place)
            return  # one is enough: a name may stand for an address of IPv6 too, which this machine may not have
    except OSError as error:
        raise cannot_serve(protocol, address, error) from None


def cannot_serve(protocol: str, address: str, error: OSError) -> RequestError:
    """What to do about a failed bind, by its reason."""
    if isinstance(error, socket.gaierror):
        reason, step = "the host is not found", "Name one of this machine's addresses; 0.0.0.0 is all of them."
    elif error.errno == errno.EADDRINUSE:
        reason, step = "the port is in use", "Choose another; port 0 takes any that is free."
    elif error.errno == errno.EADDRNOTAVAIL:
        reason, step = "this machine has no such address", "Name one that it has; 0.0.0.0 is all of them."
    elif error.errno == errno.EACCES:
        reason, step = "this user may not listen there", "Choose a port above 1023."
    else:
        reason, step = error.strerror or str(error), "Port 0 takes any that is free."
    return RequestError(f"cannot serve {protocol} at {address}: {reason}.\n  {step}")

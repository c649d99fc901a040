"""Processes for measurements and tests: `ingot serve`, and the SMG gateway in front of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 60.0
END_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running `ingot serve`. start: what it printed when it was ready."""

    process: subprocess.Popen[str]
    start: dict[str, Any]

    @property
    def grpc(self) -> str:
        """host:port"""
        return str(self.start["grpc"])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(END_S)


@contextmanager
def serve(engine: Path, *options: str) -> Iterator[Server]:
    """A server at ports of the system's choice, gRPC only unless `options` name --http too. Killed at the end."""
    command = [sys.executable, "-m", "ingot.runtime.cli", "serve", str(engine), "--json", "--grpc", "127.0.0.1:0",
               *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait(END_S)
                errors.seek(0)
                raise RuntimeError(f"`ingot serve` ended at its start: {errors.read()}")
            yield Server(process, json.loads(line))
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def gateway(workers: Sequence[str], policy: str, *options: str) -> Iterator[str]:
    """The base URL of an SMG gateway, ready, in front of gRPC workers at host:port. Ended at the end."""
    smg = Path(sys.executable).with_name("smg")
    port, metrics_port = _free_port(), _free_port()
    command = [str(smg), "launch", "--worker-urls", *(f"grpc://{worker}" for worker in workers), "--policy", policy,
               "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
               "--prometheus-port", str(metrics_port), "--log-level", "warn", *options]
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: it may start processes, which must end with it.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if not _is_ready(base, len(workers), process):
                output.seek(0)
                raise RuntimeError(f"the gateway does not get ready:\n{output.read()[-4000:]}")
            yield base
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(base: str, num_workers: int, process: subprocess.Popen[Any]) -> bool:
    """Once all workers are healthy and their tokenizer has been loaded; False if that takes too long."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/readiness", timeout=5) as response:
                if json.load(response).get("healthy_workers") == num_workers:
                    return True
        except (OSError, ValueError):  # not there yet, or 503
            pass
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

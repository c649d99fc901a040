"""`ingot serve` as a process: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import main
from tests.runtime.mock_engine import BLOCK_SIZE, EOS, LIMITS, reference_greedy
from tests.runtime.test_thin import python

WAIT_S = 300
SIZES = ["--kv-cache-tokens", "96", "--num-workers", "1"]


class Serve:
    """A running server. start: what it printed when it was ready."""

    def __init__(self, engine: Path, *options: str) -> None:
        command = [sys.executable, "-m", "ingot.runtime.cli", "serve", str(engine), "--json", *SIZES, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert line, self.end()
        self.start: dict[str, Any] = json.loads(line)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://{self.start['http']}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=WAIT_S)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return status, "".join(self.lines.queue)


@contextmanager
def serve(engine: Path, *options: str) -> Iterator[Serve]:
    server = Serve(engine, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_it_serves_and_ends(mock_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with serve(mock_path, "--http", "127.0.0.1:0", "--model-name", "mine", "--log-requests", str(log)) as server:
        start = server.start
        assert start["ready"] and start["model"] == "mine" and "grpc" not in start
        assert int(start["http"].rpartition(":")[2]) > 0
        assert start["scheduler_policy"] == "GUARANTEED_NO_EVICT" and start["prefix_reuse"]
        assert (start["kv_cache_tokens"], start["max_seq_len"]) == (96, LIMITS["max_seq_len"])
        assert start["guaranteed_requests"] == 96 // BLOCK_SIZE // (LIMITS["max_seq_len"] // BLOCK_SIZE) == 2
        prompt = [5, 6, 7]
        expected = reference_greedy(prompt, 10)
        with server.post("/v1/completions", {"model": "mine", "prompt": prompt, "max_tokens": 10}) as answer:
            usage = json.load(answer)["usage"]
        assert usage["completion_tokens"] == len(expected) == 10 and EOS not in expected
        server.signal(signal.SIGTERM)
        status, told = server.end()
    assert status == 0
    assert "draining: 0 requests run or wait" in told and "drained" in told
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["output_tokens"] == 10


LONG = {"prompt": [5, 6, 7], "max_tokens": 44, "n": 100, "ignore_eos": True}
"""A thousand steps of the mock engine."""


def post_many(server: Serve, count: int) -> tuple[list[threading.Thread], list[Any]]:
    """Long requests at once; their answers, or the errors, come into the list."""
    answers: list[Any] = []

    def post() -> None:
        try:
            with server.post("/v1/completions", {"model": "mock", **LONG}) as answer:
                answers.append(json.load(answer))
        except OSError as error:
            answers.append(error)

    threads = [threading.Thread(target=post) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def count(server: Serve, *metrics: str) -> float:
    """The sum of metrics without labels."""
    with urllib.request.urlopen(f"http://{server.start['http']}/metrics", timeout=WAIT_S) as page:
        values = dict(line.split() for line in page.read().decode().splitlines() if line[0] != "#" and "{" not in line)
    return sum(float(values[name]) for name in metrics)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def until_running(server: Serve) -> None:
    until(lambda: count(server, "ingot_requests_running") > 0)


def until_all_have_come(server: Serve, number: int) -> None:
    until(lambda: count(server, "ingot_requests_running", "ingot_requests_waiting") >= number)


def test_what_runs_is_finished_and_what_comes_is_refused(mock_path: Path) -> None:
    with serve(mock_path, "--http", "127.0.0.1:0", "--drain-timeout", "300") as server:
        threads, answers = post_many(server, 6)
        until_all_have_come(server, 6)
        server.signal(signal.SIGTERM)
        assert "draining" in server.lines.get(timeout=WAIT_S)
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post("/v1/completions", {"model": "mock", "prompt": [1], "max_tokens": 1})
        assert caught.value.code == 503
        for thread in threads:
            thread.join(WAIT_S)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [4400] * 6
        status, told = server.end()
    assert status == 0 and "drained\n" in told


def test_it_does_not_wait_for_ever(mock_path: Path) -> None:
    with serve(mock_path, "--http", "127.0.0.1:0", "--drain-timeout", "0.1") as server:
        threads, answers = post_many(server, 6)
        until_running(server)
        server.signal(signal.SIGTERM)
        status, told = server.end()
        for thread in threads:
            thread.join(WAIT_S)
    assert status == 0 and "some requests were cancelled" in told
    assert len(answers) == 6


def test_a_second_signal_ends_it_at_once(mock_path: Path) -> None:
    with serve(mock_path, "--http", "127.0.0.1:0") as server:
        threads, answers = post_many(server, 6)
        until_running(server)
        server.signal(signal.SIGTERM)
        assert "draining" in server.lines.get(timeout=WAIT_S)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 130
        for thread in threads:
            thread.join(WAIT_S)
    assert all(isinstance(answer, OSError) for answer in answers)


def test_both_servers_by_default_names(mock_path: Path) -> None:
    with serve(mock_path, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0") as server:
        assert int(server.start["grpc"].rpartition(":")[2]) > 0
        server.signal(signal.SIGINT)
        assert server.end()[0] == 0


def test_for_people(mock_path: Path) -> None:
    command = [sys.executable, "-m", "ingot.runtime.cli", "serve", str(mock_path), "--http", "127.0.0.1:0", *SIZES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "ready\n":
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        text = "".join(lines)
        assert "GUARANTEED_NO_EVICT, FIRST_COME_FIRST_SERVED" in text and "4 sequences, 16 tokens" in text
        assert "96 tokens" in text and "guarantees 2 requests of 48 tokens at once; prefixes are reused" in text
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(("options", "message"), [
    (["--max-batch-size", "9"], "max_batch_size 9 is above 4, what the engine was built for"),
    (["--max-seq-len", "99"], "max_seq_len 99 is above 48"),
    (["--max-seq-len", "1"], "max_seq_len must be at least 2"),
    (["--max-queue-size", "0"], "--max-queue-size is 0"),
    (["--kv-cache-fraction", "1.5"], "--kv-cache-fraction is 1.5; expected above 0 and at most 1"),
    (["--host-cache-fraction", "-1"], "--host-cache-fraction is -1.0"),
    (["--kv-cache-tokens", "0"], "--kv-cache-tokens is 0"),
    (["--host-kv-tokens", "-1"], "--host-kv-tokens is -1"),
    (["--tls-cert", "x.pem"], "--tls-cert and --tls-key go together"),
    (["--tls-client-ca", "x.pem"], "--tls-client-ca needs --tls-cert"),
    (["--token-file", "/nowhere"], "--token-file: cannot read /nowhere: No such file"),
    (["--grpc-services", "vllm,other"], "unknown other; there are trtllm, vllm, kserve, control"),
    (["--tool-call-parser", "other"], "unknown 'other'; there are hermes, llama3_json, mistral, qwen3_coder, pythonic"),
    (["--reasoning-parser", "other"], "--reasoning-parser: unknown 'other'; there are think"),
    (["--max-message-bytes", "5"], "--max-message-bytes is 5"),
    (["--drain-timeout", "nan"], "--drain-timeout is nan"),
    (["--log-requests", "/nowhere/log"], "cannot write the request log /nowhere/log"),
    (["--http", "nonsense"], "cannot serve HTTP at nonsense: expected host:port"),
    (["--grpc", "8001"], "cannot serve gRPC at 8001: expected host:port"),
    (["--http", "192.0.2.1:0"], "cannot serve HTTP at 192.0.2.1:0: this machine has no such address"),
    (["--grpc", "192.0.2.1:0"], "cannot serve gRPC at 192.0.2.1:0: this machine has no such address"),
])  # fmt: skip
def test_what_is_refused(mock_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    addresses = [] if "--http" in options else ["--http", "127.0.0.1:0"]
    assert main(["serve", str(mock_path), *addresses, *options]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_token(mock_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("\n")
    assert main(["serve", str(mock_path), "--token-file", str(tmp_path / "token")]) == 2
    assert "expected one line of printable ASCII characters" in capsys.readouterr().err


def test_packages_that_are_missing(mock_path: Path) -> None:
    """The thin runtime alone: serving is told to need more, and what."""
    for absent, option in (("grpc", "--grpc"), ("aiohttp", "--http")):
        code = ("absent = Absent.find_spec\n"
                f"Absent.find_spec = lambda s, name, path=None, target=None: absent(s, 'torch' if name == {absent!r} "
                "else name)\n"
                "from ingot.runtime.cli import main; sys.exit(main(sys.argv[1:]))")
        done = python(code, "serve", str(mock_path), option, "127.0.0.1:0")
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "pip install 'ingot-llm[serve]'" in done.stderr

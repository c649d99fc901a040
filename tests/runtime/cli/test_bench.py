"""ingot bench: options, files, messages, exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import main
from tests.runtime.servers.scripted_engine import ScriptedRunner, http, outputs


def ingot(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["bench", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "give an engine file, or a server by --url"),
    (["x.engine", "--url", "http://x"], "not both"),
    (["--url", "ftp://x"], "expected grpc://HOST:PORT"),
    (["--url", "http://"], "expected grpc://HOST:PORT"),
    (["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    (["x", "--request-rate", "0"], "--request-rate"),
    (["x", "--request-rate", "nan"], "--request-rate"),
    (["x", "--request-rate", "1", "--concurrency", "1"], "not allowed with"),
    (["x", "--request-rate", "inf", "--duration", "1"], "--num-requests"),
    (["x", "--concurrency", "0"], "--concurrency"),
    (["x", "--num-requests", "0"], "--num-requests"),
    (["x", "--duration", "-1"], "--duration"),
    (["x", "--isl", "many"], "--isl"),
    (["x", "--workload", "poetry"], "invalid choice"),
    (["x", "--dataset", "a", "--isl", "5"], "--dataset"),
    (["x", "--plot", "a.jpg"], ".png"),
    (["x", "--output", "/missing/a.json"], "/missing"),
    (["x", "--seed", "-1"], "--seed"),
    (["x", "--vocab-size", "0"], "--vocab-size"),
    (["missing.engine"], "missing.engine"),
    (["--url", "http://x", "--token-file", "/missing"], "--token-file"),
])
def test_wrong_requests(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, _, err = ingot(capsys, *arguments)
    assert status in (1, 2) and message in err
    assert status == 2 or "127.0.0.1:1" in err  # a server that is not there is no fault of the request


def test_dry_run(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    status, out, _ = ingot(capsys, "--dry-run", "--workload", "agent", "--num-requests", 50)
    assert status == 0 and "reusable" in out and "turns 6" in out
    status, out, _ = ingot(capsys, "--dry-run", "--json", "--workload", "uniform", "--isl", "10:20", "--osl", 5)
    facts = json.loads(out)
    assert facts["requests"] == 100 and facts["output_tokens"]["total"] == 500
    assert 10 <= facts["input_tokens"]["min"] <= facts["input_tokens"]["max"] <= 20
    # An engine's longest sequence, 48 here, bounds the lengths.
    status, out, _ = ingot(capsys, mock_path, "--dry-run", "--json", "--isl", 100, "--osl", 8)
    assert json.loads(out)["input_tokens"]["max"] == 40


def test_dry_run_of_a_data_set(capsys: pytest.CaptureFixture[str], mock_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"task_id": 0, "prompt": "Hello", "output_tokens": 5}\n' * 300)
    status, out, _ = ingot(capsys, mock_path, "--dry-run", "--json", "--dataset", path)
    assert status == 0 and json.loads(out)["input_tokens"]["total"] == 1500  # a token a byte
    status, out, _ = ingot(capsys, "--dry-run", "--json", "--dataset", path, "--num-requests", 7)
    assert json.loads(out)["requests"] == 7 and json.loads(out)["input_tokens"] is None


def test_an_engine_in_process(capsys: pytest.CaptureFixture[str], mock_path: Path, tmp_path: Path) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "report.png"
    status, out, err = ingot(
        capsys, mock_path, "--isl", 10, "--osl", 8, "--num-requests", 12, "--request-rate", "inf", "--kv-cache-tokens",
        400, "--num-workers", 1, "--output", output, "--plot", plot)
    assert status == 0, err
    for expected in ("12 finished, 0 refused, 0 failed", "in process", "mock", "time to first token",
                     "inter-token latency", "queue wait", "GUARANTEED_NO_EVICT", "all at once"):
        assert expected in out, out
    report: dict[str, Any] = json.loads(output.read_text())
    assert len(report["records"]) == 12 and len(report["run"]["engine"]) == 64
    assert all(len(record["output_times_s"]) == 8 for record in report["records"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_nothing_of_the_servers_is_needed_in_process(mock_path: Path) -> None:
    """Without the packages of the extras serve and bench."""
    script = """
import sys
for name in ("aiohttp", "grpc", "google.protobuf", "smg_grpc_proto", "prometheus_client", "matplotlib"):
    sys.modules[name] = None
from ingot.runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""
    options = ["--isl", "5", "--osl", "3", "--num-requests", "4", "--kv-cache-tokens", "400", "--num-workers", "1"]
    command = [sys.executable, "-c", script, "bench"]
    done = subprocess.run([*command, str(mock_path), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "4 finished" in done.stdout, done.stderr
    for url in ("http://x", "grpc://x"):
        done = subprocess.run([*command, "--url", url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "ingot-llm[serve]" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([*command, str(mock_path), "--plot", "x.png"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "ingot-llm[bench]" in done.stderr


def test_json_and_refusals(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    """What the engine has no room for is a result, not a failure."""
    status, out, _ = ingot(
        capsys, mock_path, "--json", "--isl", 10, "--osl", 20, "--num-requests", 40, "--request-rate", "inf",
        "--kv-cache-tokens", 400, "--num-workers", 1, "--max-queue-size", 4)
    requests = json.loads(out)["requests"]
    assert status == 0 and requests["finished"] + requests["refused"] == 40
    assert requests["finished"] >= 4 and requests["refused"] > 0 and "QueueFull" in str(requests["errors"])


def test_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runner = ScriptedRunner()
    with http(tmp_path, runner) as address:
        status, out, _ = ingot(capsys, "--url", f"http://{address}", "--isl", 5, "--osl", 3, "--num-requests", 6)
        assert status == 0 and "6 finished" in out and f"http://{address}" in out


def test_failures_are_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.script = lambda request: outputs(request, "abc", "error" if len(runner.requests) > 6 else "length")
    with http(tmp_path, runner) as address:
        status, out, _ = ingot(capsys, "--url", f"http://{address}", "--isl", 5, "--osl", 3, "--num-requests", 6)
    assert status == 1 and "2 finished, 0 refused, 4 failed" in out and "4 × the request failed" in out

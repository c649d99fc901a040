"""--lora of the command line: what it loads, prints and refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.cli import main
from tests.runtime.adapters.samples import room, seeded_adapter, write_adapter
from tests.runtime.cli.test_serve import SIZES, serve
from tests.runtime.mock_engine import write_engine
from tests.runtime.test_thin import python


@pytest.fixture(scope="module")
def roomy_path(mock_code: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with room for adapters, whose kernels leave them alone."""
    return write_engine(tmp_path_factory.mktemp("lora") / "roomy.engine", mock_code, lora=room().to_json())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return seeded_adapter(tmp_path / "adapter", 1)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ingot: AdapterError: ")
    return captured.err


def test_generate_and_chat(roomy_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str],
                           monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    from ingot.runtime.devices.cpu import CpuProgram

    monkeypatch.setattr(CpuProgram, "write_adapter", lambda self, slot, image: written.append((slot, image.copy())))
    assert main(["generate", str(roomy_path), "Hi", "--max-tokens", "2", "--lora", str(adapter)]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    pinned = f"{adapter}@sha256:{Adapter.read(adapter).sha256}"
    assert main(["chat", str(roomy_path), "--max-tokens", "2", "--lora", pinned]) == 0
    assert [slot for slot, _ in written] == [0, 0]
    assert all((image == Adapter.read(adapter).image(room())).all() for _, image in written)
    capsys.readouterr()


def test_the_runtime_reads_adapters_alone(roomy_path: Path, adapter: Path) -> None:
    """Without the packages that wrote them."""
    code = "from ingot.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python(code, "generate", str(roomy_path), "Hi", "--max-tokens", "2", "--lora", str(adapter))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_generate_refuses(roomy_path: Path, mock_path: Path, adapter: Path, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    for engine, lora, words in (
        (mock_path, adapter, "--lora-max-rank"), (roomy_path, tmp_path / "none", "no folder"),
        (roomy_path, dora, "DoRA"), (roomy_path, f"{adapter}@sha256:12", "64 hexadecimal digits"),
        (roomy_path, f"{adapter}@sha256:{'0' * 64}", "expected 0000"),
    ):
        assert words in refused(capsys, "generate", str(engine), "Hi", "--raw", "--lora", str(lora))
    assert main(["generate", str(roomy_path), "Hi", "--raw", "--lora", f"mine={adapter}"]) == 2
    assert f"for there is one: --lora {adapter}\n" in capsys.readouterr().err


def test_serve(roomy_path: Path, adapter: Path, tmp_path: Path) -> None:
    sha256 = Adapter.read(adapter).sha256
    with serve(roomy_path, "--http", "127.0.0.1:0", "--lora", f"mine={adapter}@sha256:{sha256}", "--lora-folder",
               str(tmp_path)) as server:
        assert server.start["adapters"] == {"mine": sha256}
        assert (server.start["lora_max_rank"], server.start["lora_slots"]) == (4, 2)
        with server.post("/v1/completions", {"model": "mine", "prompt": [5, 6], "max_tokens": 2}) as response:
            assert json.load(response)["model"] == "mine"
        with server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "adapter"}) as response:
            assert json.load(response)["sha256"] == sha256
        server.signal(15)
        assert server.end()[0] == 0


def test_serve_tells_that_no_adapter_can_be_loaded(mock_path: Path, tmp_path: Path) -> None:
    """--lora-folder is no error with an engine that has no room: another, which has, may take over."""
    with serve(mock_path, "--http", "127.0.0.1:0", "--lora-folder", str(tmp_path)) as server:
        server.signal(15)
        code, told = server.end()
    assert code == 0 and "no room for adapters" in told


def test_what_serve_refuses(roomy_path: Path, mock_path: Path, adapter: Path, tmp_path: Path,
                            capsys: pytest.CaptureFixture[str]) -> None:
    for engine, options, words in (
        (roomy_path, ["--lora", str(adapter)], "expected NAME=PATH"),
        (roomy_path, ["--lora", f"mine={tmp_path / 'none'}"], "no folder"),
        (mock_path, ["--lora", f"mine={adapter}"], "no room for LoRA adapters"),
    ):
        assert words in refused(capsys, "serve", str(engine), *SIZES, *options)
    assert main(["serve", str(roomy_path), "--lora-folder", str(tmp_path / "none")]) == 2
    assert "--lora-folder" in capsys.readouterr().err
    assert main(["serve", str(roomy_path), *SIZES, "--lora", f"mock={adapter}"]) == 2
    assert "AdapterExists: 'mock' is the name of the model itself" in capsys.readouterr().err

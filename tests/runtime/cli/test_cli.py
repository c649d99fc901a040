"""The command line on the mock engine: output, exit statuses, errors without tracebacks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import VERBS, main
from ingot.runtime.cli.inspect import layer_of
from ingot.runtime.cli.output import size, table
from tests.runtime.mock_engine import manifest, reference_greedy, write_engine


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    return json.loads(out)


def test_generate_prints_the_answer(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    status, out, err = run(capsys, "generate", mock_path, "Hi", "--max-tokens", 8, "--stats")
    facts = run_json(capsys, "generate", mock_path, "Hi", "--max-tokens", 8, "--json")
    assert status == 0
    assert out == facts["text"] + "\n"
    assert "tokens/s" in err
    # The engine has a chat template, so that the prompt is a message: u:Hi|<s>a:
    assert facts["num_prompt_tokens"] == 8
    assert facts["num_tokens"] == len(facts["token_ids"]) == 8
    assert facts["memory"]["kv_used_bytes"] == 16 * 160


def test_generate_raw_and_sampled(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    raw = run_json(capsys, "--json", "generate", mock_path, "--raw", "A", "--max-tokens", 5)
    assert raw["token_ids"] == reference_greedy([32], 5)  # 32: the byte-level vocabulary starts at "!"
    options = ("--temperature", 2, "--top-k", 30, "--top-p", 0.9, "--max-tokens", 12)
    unseeded = run_json(capsys, "generate", mock_path, "A", "--json", *options)
    again = run_json(capsys, "generate", mock_path, "A", "--json", *options, "--seed", unseeded["seed"])
    assert again["token_ids"] == unseeded["token_ids"]


def test_generate_reads_standard_input(mock_path: Path) -> None:
    command = [sys.executable, "-m", "ingot.runtime.cli", "generate", str(mock_path), "-"]
    done = subprocess.run([*command, "--raw", "--max-tokens", "3", "--json"], input="A", capture_output=True, text=True,
                          check=True)
    assert json.loads(done.stdout)["token_ids"] == reference_greedy([32], 3)


def test_verify(capsys: pytest.CaptureFixture[str], mock_path: Path, tmp_path: Path) -> None:
    facts = run_json(capsys, "verify", mock_path, "--json")
    assert {member["name"] for member in facts["members"]} >= {"manifest.json", "plan.json", "code/model.so"}
    status, out, _ = run(capsys, "verify", mock_path)
    assert (status, facts["hash"] in out) == (0, True)
    damaged = tmp_path / "damaged.engine"
    data = bytearray(mock_path.read_bytes())
    data[data.index(b"tokenizer/config.json") + 5000 & ~4095] ^= 1
    damaged.write_bytes(data)
    status, out, err = run(capsys, "verify", damaged)
    assert (status, out) == (2, "")
    assert str(damaged) in err
    assert "Traceback" not in err


def test_inspect(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    facts = run_json(capsys, "inspect", mock_path, "--json")
    assert facts["buckets"] == [1, 4, 16]
    assert facts["why_not_here"] is None
    assert facts["sections"]["weights/"] == {"members": 2, "size_bytes": 2 * 258 * 16 * 4}
    assert "runs on this machine" in run(capsys, "inspect", mock_path)[1]


def test_inspect_tells_the_kv_of_long_and_of_short_sequences(
    capsys: pytest.CaptureFixture[str], mock_code: bytes, tmp_path: Path,
) -> None:
    memory = {"kv_block_size": 4, "kv_block_bytes": 1000, "kv_bytes_per_token": 750,
              "kv_bytes_per_token_beyond_windows": 250,
              "kv_tables": [{"window": window, "layers": 1} for window in (None, 10, 10)]}
    path = write_engine(tmp_path / "x.engine", mock_code, memory=memory)
    facts = run_json(capsys, "inspect", path, "--json")
    assert facts["kv_bytes_of_longest_sequence"] == 1000 * (12 + 4 + 4)  # 48 tokens; 10 may touch 4 blocks
    assert facts["longest_sequences_that_fit_here"] * 20000 <= facts["kv_tokens_that_fit_here"] * 750
    text = " ".join(run(capsys, "inspect", path)[1].split())
    assert ("blocks of 4 tokens, 1.000 kB, in 3 tables (1 × all tokens, 2 × window of 10 tokens); a token takes 750 B, "
            "beyond the windows 250 B; the longest sequence 20.00 kB") in text


def test_inspect_of_an_engine_for_another_machine(
    capsys: pytest.CaptureFixture[str], mock_code: bytes, tmp_path: Path,
) -> None:
    target = {**manifest()["target"], "features": ["warp_drive"]}
    path = write_engine(tmp_path / "x.engine", mock_code, target=target)
    assert "does not run on this machine" in run(capsys, "inspect", path)[1]
    assert "lacks warp_drive" in run_json(capsys, "inspect", path, "--json")["why_not_here"]


def test_inspect_of_an_engine_of_another_version(
    capsys: pytest.CaptureFixture[str], mock_code: bytes, tmp_path: Path,
) -> None:
    path = write_engine(tmp_path / "x.engine", mock_code, edit_plan=lambda plan: plan.update(version=1))
    for view in ([], ["--memory"]):
        status, out, errors = run(capsys, "inspect", path, *view)
        assert (status, out) == (2, "")
        assert "plan has version 1, this runtime reads 5.\n  Build it again: ingot build mock" in errors


def test_inspect_views(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    layers = run_json(capsys, "inspect", mock_path, "--layers", "--json")
    assert [layer["layer"] for layer in layers] == ["embed", "layers.0", "head", "sampling"]
    assert layers[1]["launches"] == {"1": 2, "16": 2}
    assert layers[2]["weights"] == [{"label": "head", "size": 16512}]
    memory = run_json(capsys, "inspect", mock_path, "--memory", "--json")
    assert memory["kv"] == [{"table": 0, "window": None, "layers": 1, "heads": 2, "key_dim": 8, "value_dim": 8,
                             "dtype": "f32"}]
    assert [entry["arena_bytes"] for entry in memory["buckets"]] == [128 + 1032, 512 + 4128, 2048 + 4128]
    for view, expected in (("--layers", "layers.0"), ("--kernels", "mock_embed"), ("--memory", "16.51 kB")):
        status, out, _ = run(capsys, "inspect", mock_path, view)
        assert (status, expected in out) == (0, True)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    checks = run_json(capsys, "doctor", "--json")
    assert {check["name"]: check["status"] for check in checks}["c compiler"] == "ok"
    status, out, _ = run(capsys, "doctor")
    assert (status, "nothing is in the way" in out) == (0, True)


def test_doctor_without_what_the_runtime_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ingot.runtime.cli.doctor.RUNTIME_PACKAGES", ("numpy", "no-such-package"))
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "missing: no-such-package" in out


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"cpu:x86-64-v3", "cpu:aarch64-dotprod"} <= {t["name"] for t in run_json(capsys, "targets", "--json")}
    assert "w4a8" in run(capsys, "targets")[1]


@pytest.mark.parametrize(("argv", "message"), [
    (["frobnicate"], "unknown command 'frobnicate'; the commands are: build, generate, "),
    (["bild"], "unknown command 'bild', did you mean build?"),
    (["generate", "/no/such.engine", "x"], "No such file"),
    (["build", "/no/model", "--max-perplexity-increase", "some"], "'some' is no share, such as 1% or 0.01"),
    (["verify", "{mock}", "surplus"], "unrecognized arguments: surplus"),
    (["verify"], "required: engine"),
    (["generate", "{mock}", "x", "--temperature", "-1"], "temperature is -1.0; expected 0 to"),
    (["generate", "{mock}", "x", "--top", "1"], "unrecognized arguments: --top"),
    (["generate", "{mock}", "x", "--raw", "--system", "y"], "--system needs a chat"),
    (["generate", "{mock}", "caf\udce9", "--raw"], "the prompt is no UTF-8 text at character 3"),
    (["generate", "{mock}", "x" * 50], "sequences of 48 at most"),
    (["generate", "{mock}", "x", "--kv-cache-tokens", "4"], "raise kv_cache_tokens"),
    (["build", "/no/model", "--target", "cpu:z80", "--precision", "fp32"], "unknown target 'cpu:z80'"),
    (["build", "/no/model", "--target", "cpu", "--precision", "fp3"], "unknown precision 'fp3'"),
    (["build", "/no/model", "--target", "cpu"], "--precision is missing"),
])  # fmt: skip
def test_wrong_requests(capsys: pytest.CaptureFixture[str], mock_path: Path, argv: list[str], message: str) -> None:
    status, out, err = run(capsys, *(argument.format(mock=mock_path) for argument in argv))
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(verb in out for verb in VERBS)
    assert run(capsys)[0] == 2
    assert run(capsys, "generate", "--help")[0] == 0
    assert run(capsys, "--version")[1].startswith("ingot ")


def test_debug_shows_where(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run(capsys, "--debug", "verify", "/no/such")[2]
    monkeypatch.setenv("INGOT_DEBUG", "1")
    assert "Traceback" in run(capsys, "verify", "/no/such")[2]


def test_faults_of_ingot_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, mock_path: Path) -> None:
    def fail(arguments: object) -> int:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("ingot.runtime.cli.verify.run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["verify", str(mock_path)])


def test_a_missing_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("ingot.compiler")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "yaml", None)
    status, _, err = run(capsys, "targets")
    assert status == 2
    assert "`ingot targets` needs the compiler" in err
    assert "'yaml'" in err
    assert "pip install 'ingot-llm[build]'" in err


def test_a_missing_compiler_of_gpu_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                           mock_path: Path) -> None:
    """ingot-llm[build] is installed then, and has no Triton."""
    def absent(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'triton'", name="triton.language")

    monkeypatch.setattr(importlib.import_module("ingot.compiler.cli.build"), "run", absent)
    status, _, err = run(capsys, "build", "x")
    assert status == 2 and "`ingot build` needs the compiler of GPU kernels" in err
    assert "pip install --no-deps triton==" in err and "ingot-llm[build]" not in err


def test_interruption(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mock_path: Path) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ingot.runtime.cli.verify.run", interrupt)
    status, _, err = run(capsys, "verify", mock_path)
    assert (status, err) == (130, "\ningot: interrupted\n")


def test_a_reader_that_has_enough(mock_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ingot.runtime.cli", "inspect", str(mock_path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(("origin", "layer"), [
    ("model.layers.13.self_attn.q_proj (a.py:7)", "model.layers.13"), ("model.layers.2", "model.layers.2"),
    ("transformer.h.0.mlp", "transformer.h.0"), ("model.embed_tokens (a.py:1)", "model.embed_tokens"), ("", "(none)"),
])  # fmt: skip
def test_layer_of(origin: str, layer: str) -> None:
    assert layer_of(origin) == layer


@pytest.mark.parametrize(("number", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.000 kB"), (1234567, "1.235 MB"), (95_004_032, "95.00 MB"),
    (2_500_000_000_000, "2.500 TB"), (5e18, "5.000e+06 TB"),
])  # fmt: skip
def test_size(number: float, text: str) -> None:
    assert size(number) == text


def test_table() -> None:
    assert table([("a", 5), ("long", 123)], ("name", "n")) == "name    n\na       5\nlong  123"
    assert table([]) == ""


@pytest.mark.parametrize(("error", "told"), [
    (PermissionError(13, "Permission denied", "x.json"), "ingot: x.json: Permission denied\n  --debug shows"),
    (OSError(28, "No space left on device"), "ingot: No space left on device\n  --debug shows"),
    (ConnectionResetError(104, "Connection reset by peer"), None),
    (OSError("of Ingot's own making"), None),
])
def test_what_the_machine_refuses_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError, told: str | None,
) -> None:
    def refuse(arguments: object) -> int:
        raise error

    monkeypatch.setattr("ingot.runtime.cli.verify.run", refuse)
    if told is None:
        with pytest.raises(type(error)):
            main(["verify", "x"])
    else:
        assert run(capsys, "verify", "x")[0] == 1
        assert told in run(capsys, "verify", "x")[2]
        with pytest.raises(type(error)):
            main(["verify", "x", "--debug"])

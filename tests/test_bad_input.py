"""Wrong input and failing work, through the command line: one clear message, the exit status, nothing left behind.

In one process, so that an error that is not told to users would fail the test with its traceback. The kinds of damage
to an engine file are in tests/runtime/test_engine_file.py."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.compiler.cpu.generate import CpuProgram
from ingot.compiler.engine_writer import EngineWriter
from ingot.compiler.precision import PRECISIONS
from ingot.runtime.cli import main
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import MANIFEST, PLAN, REFIT, section
from tools.large_build import Llama, write_checkpoint

WRONG, FAILED = 2, 1
SECTIONS = (MANIFEST, PLAN, REFIT, "code/", "weights/", "tokenizer/", "debug/")


class Bench:
    """Runs commands. folder: where they write; nothing else may be in it after what is refused."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def refuse(self, status: int, argv: list[object], *told: str) -> None:
        """The command exits with the status, prints nothing but one message that holds all that is `told`."""
        before = contents(self.folder)
        self.capsys.readouterr()
        got = main([str(argument) for argument in argv])
        out, err = self.capsys.readouterr()
        assert (got, out) == (status, ""), err
        assert err.count("ingot: ") == 1 and "Traceback" not in err
        message = err.partition("ingot: ")[2]
        for part in told:
            assert part in message, message
        assert contents(self.folder) == before

    def build(self, status: int, model: object, *told: str, options: tuple[object, ...] = ()) -> None:
        chosen = {"--target": "cpu", "--precision": "fp32", **dict(zip(options[::2], options[1::2], strict=True))}
        rest = [word for pair in chosen.items() for word in pair]
        self.refuse(status, ["build", model, "-o", self.folder / "x.engine", *rest], *told)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Temporary files of the system's kind count too."""
    (tmp_path / "out" / "tmp").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "out" / "tmp"))
    return Bench(tmp_path / "out", capsys)


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails after the compiler has run need not wait for it."""
    monkeypatch.setattr(CpuProgram, "compile", lambda program, compiler, cache: b"no code")


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Of the tiny checkpoint, to be spoiled."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def test_a_missing_shard(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    write_checkpoint(Llama(64, 96, 2, 4, 2, 256), folder, shard_bytes=40_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    bench.build(WRONG, folder, f"{shard} is missing", "expects", "model.layers.0.", "Download the whole checkpoint")


def test_a_truncated_file(bench: Bench, copy: Path) -> None:
    path = copy / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    bench.build(WRONG, copy, f"{path}: truncated: expected {size} bytes, got {size - 100}. Download it again")


@pytest.mark.usefixtures("no_code")
def test_weights_that_are_not_numbers(bench: Bench, copy: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(copy / "model.safetensors")
    tensors[name][3, 5] = np.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    for precision in ("fp32", "w4a8"):
        bench.build(WRONG, copy, f"tensor {name} holds nan at [3, 5]", str(copy), "download or save it again",
                    options=("--precision", precision))


def test_an_unknown_architecture(bench: Bench, copy: Path) -> None:
    config = copy / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "lllama"}))
    bench.build(WRONG, copy, f"{config}: unknown architecture 'lllama'; transformers ", "llama", "spelled alike")


def test_an_encoder_decoder_model(bench: Bench, copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 256, "d_model": 64,
        "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "is_encoder_decoder": True}))
    bench.build(WRONG, copy, "t5 is an encoder-decoder model; an engine holds a decoder alone")


@pytest.mark.parametrize(("options", "told"), [
    (("--target", "cpu:x86-64-v33"), ("unknown target 'cpu:x86-64-v33'", "Did you mean cpu:x86-64-v3")),
    (("--target", "h100"), ("unknown target 'h100'", "Known: cpu, ", "ingot targets")),
    (("--precision", "nvfp4"), ("'nvfp4'", "fp32, bf16, int8, w4a8", "ingot targets")),
    (("--precision", "w4a9"), ("unknown precision 'w4a9'", "fp32, bf16, int8, w4a8", "ingot targets")),
    (("--kv-precision", "fp8"), ("has no KV cache in 'fp8'", "it has: fp32, bf16")),
    (("--max-seq-len", "129"), ("max_seq_len 129 is beyond the 128 positions of tiny-llama",)),
    (("--calibration", "nowhere.txt"), ("cannot read the calibration text nowhere.txt: there is no such file",)),
    (("--jobs", "2"), ("goes with --recipe",)),
    (("--max-batch-size", "0"), ("max_batch_size must be at least 1, got 0",)),
], ids=lambda value: value[1] if value[0].startswith("--") else "")
def test_wrong_requests(bench: Bench, tiny_checkpoint: Path, options: tuple[str, ...], told: tuple[str, ...]) -> None:
    bench.build(WRONG, tiny_checkpoint, *told, options=options)


def test_a_precision_that_the_target_lacks(bench: Bench, tiny_checkpoint: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "fp8", replace(PRECISIONS["bf16"], name="fp8"))
    bench.build(WRONG, tiny_checkpoint, "has no precision 'fp8'; it has: fp32, bf16, int8, w4a8", "ingot targets",
                options=("--precision", "fp8"))


def test_no_checkpoint_there(bench: Bench, tmp_path: Path) -> None:
    bench.build(WRONG, tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    bench.build(WRONG, empty, f"{empty} holds neither model.safetensors nor", "but nothing")


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    """In a process of its own: the hub's package reads its address when it is imported."""
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "ingot.runtime.cli", "build", "nobody/no-model", "--target", "cpu", "--precision",
               "fp32", "-o", str(out / "x.engine")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={
        **os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"})
    assert (done.returncode, done.stdout) == (FAILED, ""), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("ingot: ") == 1
    assert "nobody/no-model" in done.stderr and "Give the path of a checkpoint" in done.stderr
    assert list(out.iterdir()) == []


def test_the_output_exists(bench: Bench, tiny_checkpoint: Path) -> None:
    (bench.folder / "x.engine").write_text("kept")
    bench.build(WRONG, tiny_checkpoint, f"{bench.folder / 'x.engine'} exists", "--force")


@pytest.mark.usefixtures("no_code")
def test_a_disk_that_fills_while_writing(bench: Bench, tiny_checkpoint: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        bench.build(FAILED, tiny_checkpoint, "DiskFull", str(bench.folder / "x.engine"), "the engine needs at least",
                    "are available", "Free some space or choose a path on another disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("no_code")
def test_a_disk_that_is_too_small(bench: Bench, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before anything is written, or, where it was not known how much there is to write, meanwhile."""
    disk = bench.folder / "disk"
    disk.mkdir()
    with small_disk(disk, 200_000):
        argv = ["build", tiny_checkpoint, "-o", disk / "x.engine", "--target", "cpu", "--precision", "fp32"]
        bench.refuse(FAILED, argv, "DiskFull", "No space left on device", "Free some space")
        init = EngineWriter.__init__
        monkeypatch.setattr(EngineWriter, "__init__", lambda writer, path, force, *_: init(writer, path, force))
        bench.refuse(FAILED, argv, "DiskFull", "No space left on device", "Free some space")


_BUILD_THAT_STOPS = """
import sys, time
from ingot.compiler.engine_writer import EngineWriter
from ingot.runtime.cli import main
add, added = EngineWriter.add_weight, []
def slow(*arguments):
    added.append(0)
    if len(added) == 4:
        print("writing", flush=True)
        time.sleep(600)
    return add(*arguments)
EngineWriter.add_weight = slow
main(sys.argv[1:])
"""


def test_a_build_that_is_killed(bench: Bench, tiny_checkpoint: Path) -> None:
    """It cannot clean up; the next build of the same engine does."""
    options = ["build", str(tiny_checkpoint), "-o", str(bench.folder / "x.engine"), "--target", "cpu", "--precision",
               "fp32", "--max-batch-size", "1", "--max-num-tokens", "1", "--no-cache"]
    process = subprocess.Popen([sys.executable, "-c", _BUILD_THAT_STOPS, *options], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    left = [path.name for path in bench.folder.iterdir() if path.is_file()]
    assert len(left) == 1 and left[0].startswith(".x.engine.") and left[0].endswith(".partial")
    assert (bench.folder / left[0]).stat().st_size > 0
    assert main(options) == 0
    assert contents(bench.folder).keys() == {"tmp", "x.engine"}
    assert main(["verify", str(bench.folder / "x.engine")]) == 0


@pytest.fixture
def damaged(bench: Bench, speaking_engine: Callable[..., Path]) -> Callable[[bytes], Path]:
    """Writes an engine that something is wrong with."""
    def write(data: bytes) -> Path:
        path = bench.folder / "damaged.engine"
        path.write_bytes(data)
        return path
    return write


def test_an_engine_cut_off_at_each_section(bench: Bench, speaking_engine: Callable[..., Path],
                                           damaged: Callable[[bytes], Path]) -> None:
    whole = speaking_engine()
    with EngineFile.open(whole) as file:
        members = list(file.members.values())
    borders = {min(m.header_offset for m in members if section(m.name) == name) for name in SECTIONS}
    borders |= {max(m.end_offset for m in members), whole.stat().st_size - 1}
    assert len(borders) == len(SECTIONS) + 2
    data = whole.read_bytes()
    for border in sorted(borders):
        path = damaged(data[:border])
        for argv in (["verify", path], ["generate", path, "Hi"]):
            bench.refuse(WRONG, argv, "EngineTruncated", str(path))


def test_a_byte_of_each_section(bench: Bench, speaking_engine: Callable[..., Path],
                                damaged: Callable[[bytes], Path]) -> None:
    """Of the plan, the code and the tokenizer when it is loaded; of the weights, which would take long, by verify."""
    whole = speaking_engine()
    with EngineFile.open(whole) as file:
        members = list(file.members.values())
    for name in SECTIONS:
        member = max((m for m in members if section(m.name) == name), key=lambda m: m.size)
        data = bytearray(whole.read_bytes())
        data[member.data_offset + member.size // 2] ^= 4
        path = damaged(bytes(data))
        bench.refuse(WRONG, ["verify", path], "EngineHashMismatch", str(path), member.name, "expected")
        if name not in ("weights/", "debug/", REFIT):
            bench.refuse(WRONG, ["generate", path, "Hi"], "EngineHashMismatch", str(path), member.name, "expected")


def test_an_engine_for_another_instruction_set(bench: Bench, speaking_checkpoint: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProgram, "compile", lambda program, compiler, cache: b"no code")  # nothing will run it
    target = "cpu:aarch64-dotprod" if os.uname().machine == "x86_64" else "cpu:x86-64-v3"
    path = bench.folder / "x.engine"
    assert main(["build", str(speaking_checkpoint), "-o", str(path), "--target", target, "--precision", "fp32"]) == 0
    bench.refuse(WRONG, ["generate", path, "Hi"], "EngineMismatch", str(path), "aarch64", "x86_64")
    assert main(["verify", str(path)]) == 0


def test_a_newer_format(bench: Bench, speaking_engine: Callable[..., Path], damaged: Callable[[bytes], Path]) -> None:
    data = speaking_engine().read_bytes()
    assert data.endswith(b"ingot engine format 0001")
    path = damaged(data[:-1] + b"2")
    for argv in (["verify", path], ["generate", path, "Hi"]):
        bench.refuse(WRONG, argv, "EngineVersionError", str(path), "engine format 2", "formats up to 1", "Upgrade")


@pytest.mark.parametrize(("prompt", "options", "told"), [
    ("x" * 129, (), ("the prompt has 129 tokens", "sequences of 128 at most", "--max-seq-len")),
    ("x" * 128, (), ("the prompt has 128 tokens", "no room for an answer", "--max-seq-len")),
    ("", (), ("the prompt has no tokens", "expected at least one")),
    ("Hi", ("--max-tokens", 0), ("max_tokens is 0; expected an integer, at least 1",)),
    ("Hi", ("--temperature", "nan"), ("temperature is nan; expected 0 to 1000",)),
    ("Hi", ("--temperature", -1), ("temperature is -1.0; expected 0 to 1000",)),
    ("Hi", ("--top-p", 0), ("top_p is 0.0; expected above 0",)),
    ("Hi", ("--seed", -1), ("seed is -1; expected",)),
    ("Hi", ("--num-workers", 0), ("num_workers is 0; expected 1 to",)),
    ("Hi", ("--kv-cache-tokens", 0), ("kv_cache_tokens is 0, host_kv_tokens 0; expected",)),
    ("Hi", ("--chat",), ("has no chat template",)),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) and len(value) == 2 else "")
def test_wrong_questions(bench: Bench, speaking_engine: Callable[..., Path], prompt: str, options: tuple[object, ...],
                         told: tuple[str, ...]) -> None:
    bench.refuse(WRONG, ["generate", speaking_engine(), prompt, *options], *told)


def test_a_question_that_is_too_long_for_the_cache(bench: Bench, speaking_engine: Callable[..., Path]) -> None:
    bench.refuse(WRONG, ["generate", speaking_engine(), "x" * 40, "--kv-cache-tokens", 32], "NeverFits",
                 "40 tokens", "kv_cache_tokens")

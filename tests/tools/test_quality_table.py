"""tools/quality_table.py on the tiny model: what it measures, and that nothing is measured twice."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ingot.compiler.auto.cost import Cost
from ingot.compiler.auto.find import Choice, Finder
from ingot.compiler.auto.search import Found
from ingot.runtime.errors import WorkFailed
from tools import quality_table
from tools.quality_table import llama_rows


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["quality_table", *map(str, words)])
    return quality_table.main()


def test_forms_of_gpus(speaking_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quality_table, "WINDOW", 32)
    text, output = tmp_path / "text.txt", tmp_path / "table.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    words = (speaking_checkpoint, "--text", text, "--tokens", 96, "-o", output, "--rows", "bf16, GPU",
             "int4 to nearest, GPU")
    assert run(monkeypatch, *words) == 0
    entry, = json.loads(output.read_text()).values()
    reference, bf16, int4 = entry["transformers, fp32"], entry["bf16, GPU"], entry["int4 to nearest, GPU"]
    assert reference["increase"] == 0 and reference["top1_agreement"] == 1
    assert bf16["perplexity"] == pytest.approx(reference["perplexity"] * (1 + bf16["increase"]))
    assert abs(bf16["increase"]) < 0.02 and bf16["kl_divergence"] < int4["kl_divergence"]
    assert int4["num_bytes"] < bf16["num_bytes"]
    printed = capsys.readouterr().out
    monkeypatch.setattr(quality_table.Model, "row", lambda self, row: pytest.fail("measured again"))
    assert run(monkeypatch, *words) == 0
    assert capsys.readouterr().out == printed and "96 tokens" in printed


def test_auto_on_a_gpu_and_a_row_that_fails(speaking_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """What is found is measured as its graph; a failure is told, and the next row measured all the same."""
    choice = Choice("int4", {"model.layers.0.*": "bf16"}, Found((), 0.0, 0.0, Cost(0, 0.0), ()), (), (32, True))
    monkeypatch.setattr(quality_table, "WINDOW", 32)
    monkeypatch.setattr(Finder, "find", lambda self, increase, margin: choice if increase == 0.01 else fail())

    def fail() -> NoReturn:
        raise WorkFailed("no choice of precisions keeps it")
    text, output = tmp_path / "text.txt", tmp_path / "table.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    assert run(monkeypatch, speaking_checkpoint, "--text", text, "--tokens", 64, "-o", output, "--rows",
               "int4 to nearest, GPU", "auto at*GPU") == 1
    entry, = json.loads(output.read_text()).values()
    plain, auto = entry["int4 to nearest, GPU"], entry["auto at 1 %, GPU"]
    assert auto["num_bytes"] > plain["num_bytes"] and auto["kl_divergence"] < plain["kl_divergence"]
    assert "auto at 0.5 %, GPU" not in entry
    assert "auto at 0.5 %, GPU: no choice of precisions keeps it" in capsys.readouterr().err


def test_llama(tmp_path: Path) -> None:
    binary, text = tmp_path / "llama-perplexity", tmp_path / "text.txt"
    binary.write_text('#!/bin/sh\ncase "$2" in *a.gguf) echo "Final estimate: PPL = 20.0000 +/- 1";;\n'
                      '*b.gguf) echo "Final estimate: PPL = 21.0000 +/- 1" >&2;; *) exit 3;; esac\n')
    binary.chmod(0o755)
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    assert llama_rows(binary, files, text, 512) == [("a.gguf", "20.0000", "+0.00%"), ("b.gguf", "21.0000", "+5.00%")]
    with pytest.raises(quality_table.RequestError, match=r"gives no perplexity for .*c\.gguf \(exit status 3"):
        llama_rows(binary, [tmp_path / "c.gguf"], text, 512)

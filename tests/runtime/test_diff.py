"""What ingot diff says of two engines."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.engine_writer import EngineWriter
from ingot.runtime.cli import main
from ingot.runtime.diff import EngineDiff, diff
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.manifest import canonical_json

Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def one(name: str, weights: dict[str, bytes] | None = None, strip: bool = False, tokenizer: bytes = b"{}",
            code: bytes = b"code", labels: str = "int8 [1]", **changes: Any) -> Path:
        weights = weights or {"layers.0.up": b"one", "layers.1.up": b"two"}
        manifest = {
            "ingot_version": "0.1.0", "precision": "int8", "kernels": [{"name": "linear_a", "launches": {"1": 2}}],
            "model": {"name": "tiny", "architecture": "Tiny", "config_sha256": "0" * 64, "checkpoint_sha256": "1" * 64},
            "target": {"name": "cpu:x86-64-v3", "isa": "x86-64-v3"}, "memory": {"weights_bytes": 6},
            "limits": {"max_batch_size": 1, "max_num_tokens": 8, "max_seq_len": 16}, "toolchain": {"torch": "2.13.0"},
            "recipe": {"precision": "int8", "max_batch_size": 1}, **changes}
        path = tmp_path / name
        with EngineWriter(path, strip_weights=strip) as writer:
            blobs = {key: writer.add_weight(data).split("/")[1].removesuffix(".bin") for key, data in weights.items()}
            writer.add("plan.json", canonical_json({"weights": {
                f"w{number}": {"blob": blob, "label": f"{key} {labels}", "size": 3}
                for number, (key, blob) in enumerate(blobs.items())}}))
            writer.add("code/model.so", code)
            writer.add("tokenizer/config.json", tokenizer)
            writer.finish(manifest)
        return path
    return one


def between(a: Path, b: Path) -> EngineDiff:
    with EngineFile.open(a) as left, EngineFile.open(b) as right:
        return diff(left, right)


def lines(found: EngineDiff, topic: str) -> list[str]:
    return [d.detail for d in found.differences if d.topic == topic]


def test_the_same_engine(write: Writer) -> None:
    assert between(write("a"), write("b")) == EngineDiff(True)
    assert between(write("c"), write("d", strip=True)) == EngineDiff(True)


def test_other_weights(write: Writer) -> None:
    found = between(write("a"), write("b", {"layers.0.up": b"one", "layers.1.up": b"new", "layers.2.up": b"x"},
                                      model={"name": "tiny", "architecture": "Tiny", "config_sha256": "0" * 64,
                                             "checkpoint_sha256": "2" * 64}))
    assert lines(found, "weights") == ["1 of 2 differ: layers.1.up int8 [1]", "1 only in the second: layers.2.up"]
    assert lines(found, "model") == ["model.checkpoint_sha256: 111111111111… / 222222222222…"]
    assert found.reasons == ["the checkpoints hold different tensors"]


def test_another_recipe(write: Writer) -> None:
    found = between(write("a"), write("b", {"layers.0.up": b"1", "layers.1.up": b"2"}, labels="w4a8 [1]",
                                      precision="w4a8", recipe={"precision": "w4a8", "max_batch_size": 1},
                                      kernels=[{"name": "linear_b", "launches": {}}, {"name": "norm", "launches": {}}]))
    assert lines(found, "precision") == ["precision: int8 / w4a8"]
    assert lines(found, "weights") == [
        "2 of 2 differ: layers.0.up int8 [1] / w4a8 [1]; layers.1.up int8 [1] / w4a8 [1]"]
    assert lines(found, "kernels") == ["1 only in the first (1 linear): linear_a",
                                       "2 only in the second (1 linear, 1 norm): linear_b, norm"]
    assert found.reasons == ["the recipes differ: precision int8 / w4a8"]


def test_kernels_in_other_numbers(write: Writer) -> None:
    found = between(write("a"), write("b", kernels=[{"name": "linear_a", "launches": {"1": 3}}]))
    assert lines(found, "kernels") == ["1 run in other places or numbers: linear_a"]


def test_other_tools_and_tokenizers(write: Writer) -> None:
    found = between(write("a"), write("b", toolchain={"torch": "2.14.0"}, tokenizer=b"{ }", quality={"perplexity": 3}))
    assert lines(found, "toolchain") == ["toolchain.torch: 2.13.0 / 2.14.0"]
    assert lines(found, "quality") == ["quality: nothing / {'perplexity': 3}"]
    assert lines(found, "members") == ["tokenizer/config.json: 2 / 3 bytes"]
    assert found.reasons == ["the tools differ: torch 2.13.0 / 2.14.0", "the tokenizer's files differ"]


def test_what_no_input_explains(write: Writer) -> None:
    found = between(write("a"), write("b", code=b"other code"))
    assert lines(found, "members") == ["code/model.so: 4 / 10 bytes"]
    assert len(found.reasons) == 1 and found.reasons[0].startswith("all inputs that are recorded are equal")


def test_calibrated_on_another_kind_of_machine(write: Writer) -> None:
    found = between(write("a", num_calibrated_weights=1),
                    write("b", {"layers.0.up": b"one", "layers.1.up": b"2"}, num_calibrated_weights=1))
    assert [reason[:34] for reason in found.reasons] == ["weights were calibrated on machines"[:34]]


def test_the_command(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(write("a")), str(write("b", {"layers.0.up": b"1", "layers.1.up": b"2"}))
    assert main(["diff", a, a]) == 0 and "the same engine" in capsys.readouterr().out
    assert main(["diff", a, b]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 differ" in out and "why the hashes differ" in out
    assert main(["diff", a, b, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is False and told["differences"][0]["topic"] == "weights" and told["a"]["path"] == a

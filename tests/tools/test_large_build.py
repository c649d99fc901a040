"""tools/large_build.py: what it writes is a checkpoint, what it measures is memory; and a build that stays small."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ingot.compiler.checkpoint.open import open_checkpoint
from tools.large_build import Llama, build_command, measured, write_checkpoint

TINY = Llama(64, 96, 2, 4, 2, 256)


def test_the_checkpoint_is_as_safetensors_reads_it(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path, shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and sorted(index) == sorted(name for name, _ in TINY.tensors())
    checkpoint = open_checkpoint(tmp_path)
    for name, shape in TINY.tensors():
        with safe_open(tmp_path / index[name], "pt") as file:
            assert np.array_equal(file.get_tensor(name).float().numpy(), checkpoint.get(name))
        size, (least, most) = np.abs(checkpoint.get(name)), (0.5, 2) if len(shape) == 1 else (2**-7, 2**-5)
        assert checkpoint.shape(name) == shape
        assert least <= size.min() and size.max() < most, name


def test_the_default_has_three_billion_parameters() -> None:
    assert 3_000_000_000 < Llama().parameters < 3_500_000_000


def test_memory_of_a_process_and_its_children_is_counted() -> None:
    hold = "import time; held = bytearray(b'x') * 100_000_000; time.sleep(1)"
    parent = ("import subprocess, sys; held = bytearray(b'x') * 50_000_000; "
              f"subprocess.run([sys.executable, '-c', {hold!r}])")
    usage = measured([sys.executable, "-c", parent])
    assert usage.status == 0 and usage.seconds >= 1
    assert 150_000_000 <= usage.peak_anonymous_bytes < 250_000_000
    assert measured([sys.executable, "-c", "raise SystemExit(3)"]).status == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "w4a8"])
def test_memory_of_a_build_does_not_grow_with_the_model(tmp_path: Path, precision: str) -> None:
    """The weights take 426 MB in float32, the largest matrix of them 66 MB: that much, and what is worked on, a build
    may take beyond planning alone."""
    llama = Llama(1024, 2816, 8, 16, 4, 16_000)
    assert 4 * llama.parameters > 420_000_000
    write_checkpoint(llama, tmp_path / "model")
    command = build_command(tmp_path / "model", tmp_path / "x.engine", "--target", "cpu", "--precision", precision,
                            "--max-num-tokens", "16")
    planned, built = measured([*command, "--dry-run"]), measured(command)
    print(f"{precision}: planning {planned.peak_anonymous_bytes:,}, building {built.peak_anonymous_bytes:,} bytes")
    assert planned.status == built.status == 0
    assert built.peak_anonymous_bytes <= planned.peak_anonymous_bytes + 150_000_000

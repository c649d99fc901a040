"""The parts of the build benchmarks that could lie: other weights are other, bytes are moved, shares are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ingot.runtime.store.store import Store
from tests.runtime.store.samples import SHARED, add, engine
from tools.bench import builds, reproduce
from tools.bench.store import shares


def test_other_weights_are_of_the_same_layout(tmp_path: Path) -> None:
    import ml_dtypes

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    rng = np.random.default_rng(0)
    tensors = {"a": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16), "c": np.arange(4, dtype=np.int64),
               "b": rng.standard_normal(9).astype(np.float16), "d": rng.standard_normal((3, 3)).astype(np.float32)}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    (checkpoint / "config.json").write_text("{}")
    changed = builds.other_weights(checkpoint, tmp_path / "changed")
    after = load_file(changed / "model.safetensors")
    assert after.keys() == tensors.keys() and (changed / "config.json").read_text() == "{}"
    for name in ("a", "b", "d"):
        before, now = (each[name].astype(np.float32) for each in (tensors, after))
        assert now.shape == before.shape and np.all(now != before) and np.allclose(now, before, rtol=0.01)
    assert np.array_equal(after["c"], tensors["c"])
    assert np.array_equal(load_file(checkpoint / "model.safetensors")["a"], tensors["a"])


def test_bytes_are_read_and_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(3_000_000))
    builds.drop_pages([source])
    assert builds.move_bytes([source], tmp_path / "target", 2_500_000) > 0
    assert not (tmp_path / "target").exists()


def test_a_stores_share_of_weights(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    add(store, engine(tmp_path / "a.engine", b"a" * 50_000), "a")
    add(store, engine(tmp_path / "b.engine", b"b" * 50_000), "b")
    taken, weights = shares(store)
    assert weights == 100_000 + len(SHARED) and weights < taken < 1.1 * weights


def test_circumstances_differ(tmp_path: Path) -> None:
    first, other, warm = reproduce.circumstances(tmp_path)
    assert len({first.folder, other.folder}) == 2 and first.cache == warm.cache != other.cache
    assert len(other.cores) == 1 and {"TZ", "LC_ALL", "USER", "HOME", "PYTHONHASHSEED"} <= other.environment.keys()
    assert len({each.environment["PYTHONHASHSEED"] for each in (first, other, warm)}) == 3

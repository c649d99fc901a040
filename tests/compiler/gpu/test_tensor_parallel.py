"""Engines divided among GPUs give the tokens of the whole one."""
from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.devices.gpu_collective import meet
from ingot.runtime.devices.gpu_kernels import read_kernels
from ingot.runtime.devices.gpu_plan import BoundLaunch
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import RequestError
from ingot.runtime.sampling import SamplingParams


def exchange(kind: str, element: str, parts: list[np.ndarray], destinations: list[np.ndarray]) -> None:
    """One launch of all ranks; parts [rows + 1, width], of which the last row belongs to no step."""
    rows, width = parts[0].shape[0] - 1, parts[0].shape[1]
    sizes = np.array([rows, 0, 0, 0], np.int32)
    entry = {"collective": kind, "parameters": [["source", f"*{element}"], ["destination", f"*{element}"],
                                                ["sizes", "*i32"], ["rows", "i32"], ["width", "i32"]]}
    kernel = read_kernels({"kernels": {kind: entry}})[kind]
    meet([BoundLaunch(kernel, (1, 1, 1), (part.ctypes.data, out.ctypes.data, sizes.ctypes.data, 0, width), "", "", {})
          for part, out in zip(parts, destinations, strict=True)])


@pytest.mark.parametrize(("element", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_sums_and_joins(element: str, dtype: Any) -> None:
    parts = [np.random.default_rng(rank).standard_normal((4, 6)).astype(dtype) for rank in range(4)]
    whole = np.sum([part.astype(np.float32) for part in parts], axis=0)
    last = [part[-1].copy() for part in parts]
    joined = [np.zeros((3, 24), dtype) for _ in range(4)]
    exchange("all_gather", element, parts, joined)
    assert all(np.array_equal(out, np.concatenate([part[:3] for part in parts], axis=1)) for out in joined)
    exchange("all_reduce", element, parts, parts)
    for part, row in zip(parts, last, strict=True):
        np.testing.assert_array_equal(part[:3], whole[:3].astype(dtype))
        np.testing.assert_array_equal(part[3], row)  # rows beyond the step's are left alone


def test_sums_of_bf16_are_rounded_once() -> None:
    """1 + 2^-8 + 2^-8: each sum of two would be rounded to 1."""
    parts = [np.array([[bits], [0]], np.uint16) for bits in (0x3F80, 0x3B80, 0x3B80)]
    exchange("all_reduce", "bf16", parts, parts)
    assert {int(part[0, 0]) for part in parts} == {0x3F81}


@pytest.mark.parametrize("change", [
    {"collective": "broadcast"}, {"parameters": []},
    {"parameters": [["source", "*i8"], ["destination", "*i8"], ["sizes", "*i32"], ["rows", "i32"], ["width", "i32"]]}])
def test_exchanges_that_are_none(change: dict[str, Any]) -> None:
    entry = {"collective": "all_reduce", "parameters": [], **change}
    with pytest.raises(EngineFormatError, match=r"collective|parameters"):
        read_kernels({"kernels": {"x": entry}})


@pytest.mark.parametrize(("target", "ranks", "message"), [
    ("cpu", 2, "only engines for GPUs"), ("h200", 3, "expected 1, 2")])
def test_builds_that_cannot_be_divided(target: str, ranks: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(BuildRequest("nowhere", target, "bf16", tensor_parallel=ranks))


PROMPTS = [[5, 17, 99, 3, 250, 7], [400, 2, 2, 81], [12]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_tokens_are_those_of_one_gpu(kind: str, tmp_path: Path) -> None:
    """Sums over ranks are rounded elsewhere than those within one: logits differ by roundings, tokens do not."""
    from tools.small_models import save_random, small_config

    save_random(small_config(kind, hidden_size=128, head_dim=32), tmp_path / kind)
    tokens, sizes = {}, {}
    for ranks in (1, 2, 4):
        request = BuildRequest(str(tmp_path / kind), "h200", "bf16", tmp_path / f"{ranks}.engine", max_batch_size=4,
                               max_num_tokens=8, max_seq_len=64)
        result = build(replace(request, tensor_parallel=ranks))
        assert result.manifest.get("tensor_parallel", 1) == ranks
        sizes[ranks] = result.manifest["memory"]["weights_bytes"]
        with EngineFile.open(tmp_path / f"{ranks}.engine") as file:
            divided = [weight for weight in file.plan["weights"].values() if "blobs" in weight]
            assert all(len(weight["blobs"]) == ranks for weight in divided)
            assert bool(divided) == (ranks > 1)
        engine = Engine.load(tmp_path / f"{ranks}.engine", device="emulator")
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        tokens[ranks] = [list(answer.token_ids) for answer in answers]
        engine.close()
    assert tokens[2] == tokens[1] and tokens[4] == tokens[1]
    assert sizes[4] < sizes[2] < sizes[1]


def test_addresses_are_read_as_given() -> None:
    """The arrays that an exchange writes are the ones at the addresses, not copies."""
    data = (ctypes.c_float * 4)(1, 2, 3, 4)
    array = np.frombuffer(memoryview(data).cast("B"), np.float32).reshape(2, 2)
    exchange("all_reduce", "fp32", [array, array], [array, array])
    assert list(data) == [2, 4, 3, 4]

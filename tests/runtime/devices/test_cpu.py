"""The cpu device on the mock engine: results, isolation of steps, refusals, no allocation."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime.devices import load_program
from ingot.runtime.devices.cpu import CpuProgram
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.program import EngineMismatch, step_logits
from tests.runtime.allocations import allocations
from tests.runtime.mock_engine import DIM, manifest, reference_logits, reference_means, write_engine

TOKENS = [7, 200, 13, 13, 91, 0, 255, 30, 31, 32, 33]


def load(path: Path, kv_cache_tokens: int = 64, num_workers: int = 2) -> CpuProgram:
    program = load_program(EngineFile.open(path), kv_cache_tokens, num_workers)
    assert isinstance(program, CpuProgram)
    return program


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_context_in_chunks_and_two_sequences(mock_path: Path, num_workers: int) -> None:
    program = load(mock_path, num_workers=num_workers)
    assert (program.num_blocks, program.block_size, program.vocab_size) == (16, 4, 258)
    inputs = program.inputs[0]
    other = TOKENS[::-1]
    # Blocks out of order; chunks of 3, 5, 3 tokens beside one token of the other sequence at a time.
    blocks, other_blocks = [9, 2, 14], [0, 15, 1]
    begin = 0
    for step, count in enumerate((3, 5, 3)):
        inputs.clear()
        inputs.add(TOKENS[begin : begin + count], begin, [blocks], 2)
        inputs.add(other[step : step + 1], step, [other_blocks], 1)
        logits = step_logits(program, inputs)
        assert logits.shape == (3, 258)
        begin += count
        np.testing.assert_allclose(logits[:2], reference_logits(TOKENS)[begin - 2 : begin], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logits[2], reference_logits(other)[step], rtol=1e-4, atol=1e-5)
    program.close()


def test_one_set_of_inputs_is_filled_while_the_other_runs(mock_path: Path) -> None:
    program, other = load(mock_path), TOKENS[::-1]
    for position in range(len(TOKENS)):
        first, second = program.inputs
        for inputs, tokens, blocks in ((first, TOKENS, [9, 2, 14]), (second, other, [0, 15, 1])):
            if inputs is second:
                program.launch(first)
            inputs.clear()
            inputs.add(tokens[position : position + 1], position, [blocks], 1)
        for inputs, tokens in ((first, TOKENS), (second, other)):
            if inputs is second:
                program.launch(second)
            program.wait()
            expected = reference_logits(tokens)[position]
            np.testing.assert_allclose(program.logits()[0], expected, rtol=1e-4, atol=1e-5)
    program.close()


def test_one_step_at_a_time(mock_path: Path) -> None:
    program = load(mock_path)
    program.inputs[0].add(TOKENS, 0, [[0, 1, 2]], 1)
    for call in (program.wait, program.logits):
        with pytest.raises(AssertionError, match="no step"):
            call()
    program.launch(program.inputs[0])
    with pytest.raises(AssertionError, match="in flight"):
        program.launch(program.inputs[0])
    with pytest.raises(AssertionError, match="in flight"):
        program.logits()
    program.close()  # waits for the step
    with pytest.raises(AssertionError, match="closed"):
        program.launch(program.inputs[0])


def test_copies_of_blocks(mock_path: Path) -> None:
    """From device to host, back, and on the device; in order, after the step that is in flight."""
    engine = EngineFile.open(mock_path)
    program = load_program(engine, 64, 2, host_kv_tokens=8)
    assert isinstance(program, CpuProgram)
    assert (program.num_blocks, program.num_host_blocks, program.block_bytes) == (16, 2, 640)
    inputs = program.inputs[0]
    inputs.add(TOKENS[:8], 0, [[0, 1]], 1)
    program.launch(inputs)
    program.copy_blocks([(0, 16), (1, 17), (16, 5)])
    program.copy_blocks([(17, 6)])
    program.wait()
    for tokens, blocks in ((TOKENS[::-1][:8], [0, 1]), ([], [])):
        inputs.clear()
        if tokens:  # what lay in the blocks is gone
            inputs.add(tokens, 0, [blocks], 0)
        inputs.add(TOKENS[8:], 8, [[5, 6, 7]], 3)
        logits = step_logits(program, inputs)
        np.testing.assert_allclose(logits, reference_logits(TOKENS)[8:], rtol=1e-4, atol=1e-5)
    program.copy_blocks([(6, 3), (16, 2)])
    values = program.trace(inputs, {"y"})
    np.testing.assert_allclose(values["y"], reference_means(TOKENS)[8:], rtol=1e-4, atol=1e-5)
    inputs.clear()
    inputs.add(TOKENS[8:], 8, [[2, 3, 8]], 1)
    np.testing.assert_allclose(step_logits(program, inputs)[0], reference_logits(TOKENS)[-1], rtol=1e-4, atol=1e-5)
    for pair in ((0, 18), (18, 0), (-1, 0), (0, -1)):
        with pytest.raises(AssertionError):
            program.copy_blocks([(0, 0), pair])
    program.close()


def test_the_smallest_bucket_that_fits_runs(mock_code: bytes, tmp_path: Path) -> None:
    def mark(plan: dict[str, Any]) -> None:
        # Only the bucket of 4 tokens computes logits; those of others stay as they are, zero.
        for index in (0, 2):
            del plan["buckets"][index]["launches"][3:]

    program = load(write_engine(tmp_path / "x.engine", mock_code, edit_plan=mark))
    computed = []
    for count in range(1, 7):
        inputs = program.inputs[count % 2]
        inputs.clear()
        inputs.add(TOKENS[:count], 0, [[0, 1]], 1)
        computed.append(bool(step_logits(program, inputs).any()))
    assert computed == [False, True, True, True, False, False]
    program.close()


def test_trace_gives_values_and_leaves_the_same_logits(mock_path: Path) -> None:
    program = load(mock_path)
    program.inputs[1].add(TOKENS, 0, [[3, 4, 5]], 2)
    logits = step_logits(program, program.inputs[1]).copy()
    values = program.trace(program.inputs[1], {"x", "y", "logits", "no such value"})
    assert list(values) == ["x", "y", "logits"]
    assert values["x"].shape == (1, len(TOKENS), DIM)
    np.testing.assert_allclose(values["y"], reference_means(TOKENS), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(values["logits"], logits)
    program.close()


def test_two_engines_side_by_side(mock_path: Path, mock_code: bytes, tmp_path: Path) -> None:
    """The loader takes libraries of one path for one library; each engine must have code of its own."""
    def swap(plan: dict[str, Any]) -> None:
        plan["buckets"][0]["launches"][3]["args"][1] = ["weight", "table"]

    first, second = load(mock_path), load(write_engine(tmp_path / "x.engine", mock_code, edit_plan=swap))
    for program in (first, second):
        program.inputs[0].add(TOKENS[:1], 0, [[0]], 1)
    expected = step_logits(first, first.inputs[0]).copy()
    second.close()
    np.testing.assert_array_equal(step_logits(first, first.inputs[0]), expected)
    first.close()
    first.close()  # as often as one likes


def test_close_ends_the_threads(mock_path: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    program = load(mock_path, num_workers=4)
    assert len(os.listdir("/proc/self/task")) == before + 4
    program.close()
    assert len(os.listdir("/proc/self/task")) == before


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set plan[path[0]][path[1]]… to the last of `path`."""
    def edit(plan: dict[str, Any]) -> None:
        *keys, last, value = path
        target: Any = plan
        for key in keys:
            target = target[key]
        target[last] = value
    return edit


_ARG = ("buckets", 1, "launches", 0, "args", 1)


@pytest.mark.parametrize(("edit", "message"), [
    (_set("kv", []), "plan: kv: expected dict"),
    (_set("kv", "windows", [None, 0]), r"windows: \[None, 0\]; expected a number of tokens or null"),
    (_set("kv", "windows", []), "windows"),
    (_set("kv", "block_size", 0), "block_size: expected at least 1, got 0"),
    (_set("kv", "slots", {}), "slots: expected list"),
    (_set("kv", "slots", 0, "dtype", "f8"), "f8"),
    (_set("kv", "slots", 0, "heads", 0), "heads: expected at least 1, got 0"),
    (_set("kv", "slots", 0, "table", 1), r"slots\[0\]: table 1; there are 1"),
    (_set("kv", "slots", 0, "value_offset", 448), "256 bytes at value_offset 448 do not fit a block of 640"),
    (_set("kv", "slots", 0, "value_offset", 321), "aligned to 64"),
    (_set("kv", "slots", 0, "value_offset", -64), "value_offset -64"),
    (_set("kv", "slots", 0, "value_offset", 192), "two overlap at byte 192 of a block of table 0"),
    (_set("weights", "table", "size", 1), "expected 1"),
    (_set("weights", "table", "blob", "a" * 64), "no member"),
    (_set("buckets", []), "buckets"),
    (_set("buckets", 2, "tokens", 15), "up to 16"),
    (_set("buckets", 1, "launches", 0, "kernel", "nothing"), "no kernel nothing"),
    (_set("buckets", 1, "outputs", {}), "logits: expected dict"),
    (_set("buckets", 1, "outputs", "logits", "width", 200), r"different widths: \[200, 258\]"),
    (_set("buckets", 1, "outputs", "logits", "offset", 1 << 20), "do not fit the arena"),
    (_set("buckets", 1, "outputs", "logits", "dtype", "f16"), "'f16'"),
    (_set(*_ARG, ["arena", 1 << 20]), "outside"),
    (_set(*_ARG, ["arena", -64]), "outside"),
    (_set(*_ARG, ["arena", 0.5]), "offset 0.5 is outside"),
    (_set(*_ARG, ["weight", "other"]), "'other'"),
    (_set(*_ARG, ["weight", "table", 1 << 20]), "outside"),
    (_set(*_ARG, ["kv", 1, "k"]), "points to nothing"),
    (_set(*_ARG, ["kv", 0, "q"]), "points to nothing"),
    (_set(*_ARG, ["input", "num_tokens"]), "inputs are"),
    (_set(*_ARG, ["input", "block_tables", 4 * 4 * 12]), "outside its 192 bytes"),
    (_set(*_ARG, ["elsewhere"]), "expected arena"),
    (_set(*_ARG, ["lora", 0]), "the engine has no room for adapters"),
    (_set("buckets", 1, "launches", 0, "adapters", "yes"), r"launches\[0\]: adapters: expected bool, got 'yes'"),
    (_set(*_ARG, []), "points to nothing"),
])  # fmt: skip
def test_a_wrong_plan_is_refused(mock_code: bytes, tmp_path: Path, edit: Any, message: str) -> None:
    path = write_engine(tmp_path / "wrong.engine", mock_code, edit_plan=edit)
    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises((EngineFormatError, EngineMismatch), match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(os.listdir("/proc/self/task")) == threads


def test_an_engine_of_another_version_is_refused(mock_code: bytes, tmp_path: Path) -> None:
    path = write_engine(tmp_path / "old.engine", mock_code, edit_plan=_set("version", 1))
    with pytest.raises(EngineMismatch, match=r"built by Ingot 0\.1\.0 for another version of the runtime: its plan has "
                       r"version 1, this runtime reads 5\.\n  Build it again: ingot build mock --target cpu"):
        load(path)
    stale = bytes(mock_code).replace(b"ingot_start", b"ingot_begin")
    with pytest.raises(EngineFormatError, match="no symbol ingot_start"):
        load(write_engine(tmp_path / "stale.engine", stale))


def test_engine_for_another_cpu(mock_code: bytes, tmp_path: Path) -> None:
    target = {**manifest()["target"], "name": "cpu:x86-64-v9", "features": ["fma", "warp_drive"]}
    path = write_engine(tmp_path / "v9.engine", mock_code, target=target)
    with pytest.raises(EngineMismatch, match=r"lacks (fma, )?warp_drive.*\n.*ingot build mock --target cpu") as caught:
        load(path)
    assert caught.value.exit_status == 2
    for machine, told in (("mips", "needs a mips machine"), ("aarch64", "needs an aarch64 machine")):
        if machine != platform.machine():
            target = {**target, "machine": machine, "features": []}
            with pytest.raises(EngineMismatch, match=told):
                load(write_engine(tmp_path / f"{machine}.engine", mock_code, target=target))
    del target["machine"]
    with pytest.raises(EngineFormatError, match="machine"):
        load(write_engine(tmp_path / "none.engine", mock_code, target=target))


def test_engine_for_another_device(mock_code: bytes, tmp_path: Path) -> None:
    target = {**manifest()["target"], "name": "h200"}
    with pytest.raises(EngineMismatch, match="built for h200"):
        load(write_engine(tmp_path / "x.engine", mock_code, target=target))


def test_code_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match=r"cannot load code/model\.so"):
        load(write_engine(tmp_path / "x.engine", b"\x7fELF" + bytes(60)))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"num_workers": 0}, "num_workers is 0"),
    ({"num_workers": 5000}, "num_workers is 5000"),
    ({"kv_cache_tokens": 0}, "kv_cache_tokens is 0"),
    ({"kv_cache_tokens": 1 << 50}, "no memory for a KV cache"),
    ({"host_kv_tokens": -1}, "host_kv_tokens -1"),
    ({"host_kv_tokens": 1 << 50}, "no memory for .* of KV on the host"),
])  # fmt: skip
def test_wrong_arguments(mock_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(IngotError, match=message) as caught:
        load_program(EngineFile.open(mock_path), **{"kv_cache_tokens": 64, **arguments})
    assert isinstance(caught.value, RequestError) or "memory" in message


def test_no_allocation_in_any_step_after_the_first(mock_path: Path, tmp_path: Path) -> None:
    assert allocations(mock_path, [1] * 24, tmp_path)[1:] == [0] * 23

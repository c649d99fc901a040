"""The emulator device on the mock GPU engine: results, two sets of inputs, tiers, traces, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.runtime import devices
from ingot.runtime.devices import emulator, load_program
from ingot.runtime.devices.emulator import EmulatorProgram
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.program import EngineMismatch, step_logits
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import Score
from ingot.runtime.sampling_state import SequenceSampling
from ingot.runtime.step import StepInputs
from tests.runtime import mock_gpu_engine as mock

TOKENS = [7, 100, 13, 13, 91, 0, 155, 30, 31, 32]


@pytest.fixture
def program(gpu_engine: Path) -> Iterator[EmulatorProgram]:
    loaded = load_program(EngineFile.open(gpu_engine), 256, host_kv_tokens=64, device="emulator")
    assert isinstance(loaded, EmulatorProgram)
    yield loaded
    loaded.close()


def fill(program: EmulatorProgram, number: int, tokens: list[int], **sampling: Any) -> StepInputs:
    """Inputs that ask for the logits of every token; sampled by these parameters, if any are given."""
    inputs = program.inputs[number]
    inputs.clear()
    inputs.add(tokens, 0, [[0]], len(tokens))
    if sampling:
        inputs.sampling.fill([SequenceSampling(SamplingParams(**sampling), [3, 5]) for _ in tokens])
    return inputs


def close_to(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=0.3)


def greedy(tokens: list[int]) -> list[int]:
    return [int(token) for token in mock.reference_logits(tokens).argmax(axis=1)]


@pytest.mark.parametrize("count", [1, 4, 5, 10])
def test_logits_of_both_buckets(program: EmulatorProgram, count: int) -> None:
    """Few tokens: sums split among blocks, through the workspace. Many: copies by descriptors."""
    for number in (0, 1, 0):
        logits = step_logits(program, fill(program, number, TOKENS[:count]))
        assert logits.shape == (count, mock.VOCAB_SIZE)
        close_to(logits, mock.reference_logits(TOKENS[:count]))


def test_the_next_step_is_filled_while_the_device_is_at_work(program: EmulatorProgram) -> None:
    first = fill(program, 0, TOKENS[:4], temperature=0.0)
    program.launch(first)
    first.token_ids.fill(0)  # as if the copy to the device were long done
    second = fill(program, 1, TOKENS[4:], temperature=0.0)
    assert not first.sampling.outputs.tokens.any(), "nothing is written before somebody waits"
    assert program.wait().tokens[:4].tolist() == greedy(TOKENS[:4])
    program.launch(second)
    assert program.wait().tokens[:6].tolist() == greedy(TOKENS[4:])
    assert first.sampling.outputs.tokens[:4].tolist() == greedy(TOKENS[:4]), "the outputs of each are its own"


def test_sampling_of_every_kind(program: EmulatorProgram) -> None:
    """Through the long lists, which are copied only where a row uses them."""
    logits = mock.reference_logits(TOKENS[:2])
    program.launch(fill(program, 0, TOKENS[:2], temperature=0.0, logprobs=2))
    outputs = program.wait()
    assert outputs.tokens[:2].tolist() == greedy(TOKENS[:2]) == outputs.top_ids[:2, 0].tolist()
    assert outputs.ranks[:2].tolist() == [1, 1] and (outputs.logprobs[:2] < 0).all()
    program.launch(fill(program, 1, TOKENS[:2], temperature=0.0, logit_bias={11: 1000.0}))
    assert program.wait().tokens[:2].tolist() == [11, 11]
    banned = fill(program, 0, TOKENS[:2])
    banned.sampling.fill([SequenceSampling(SamplingParams(temperature=0.0, repetition_penalty=1000.0), [token])
                          for token in greedy(TOKENS[:2])])
    program.launch(banned)
    assert program.wait().tokens[:2].tolist() == np.argsort(-logits, axis=1)[:, 1].tolist()
    scored = fill(program, 1, TOKENS[:2])
    scored.sampling.fill([Score(9), None])
    program.launch(scored)
    expected = logits[0, 9] - np.log(np.exp(logits[0] - logits[0].max()).sum()) - logits[0].max()
    assert program.wait().logprobs[0] == pytest.approx(expected, abs=0.3)


def test_one_step_at_a_time(program: EmulatorProgram) -> None:
    inputs = fill(program, 0, TOKENS)
    for call in (program.wait, program.logits):
        with pytest.raises(AssertionError, match="no step"):
            call()
    program.launch(inputs)
    for again in (lambda: program.launch(inputs), program.logits, lambda: program.trace(inputs, ())):
        with pytest.raises(AssertionError, match="in flight"):
            again()
    program.wait()
    program.close()
    with pytest.raises(AssertionError, match="closed"):
        program.launch(inputs)


def test_values_on_the_way(program: EmulatorProgram) -> None:
    found = program.trace(fill(program, 0, TOKENS[:5], temperature=0.0), {"x", "h"})
    x = from_bf16(mock.TABLE[TOKENS[:5]])
    assert list(found) == ["x", "h"] and np.array_equal(found["x"], x)
    h = from_bf16(to_bf16(x + x @ from_bf16(mock.MATRIX).T))
    np.testing.assert_allclose(found["h"], h, rtol=1e-2, atol=2e-2)
    assert program.inputs[0].sampling.outputs.tokens[:5].tolist() == greedy(TOKENS[:5])
    assert list(program.trace(fill(program, 1, TOKENS[:2]), {"h"})) == ["h"]


def test_blocks_move_between_tiers_in_order(program: EmulatorProgram) -> None:
    """Between steps; a step moves them, since it is what they must precede."""
    assert (program.num_blocks, program.num_host_blocks) == (16, 4)
    for rank in program._ranks:
        for number in range(20):
            rank.blocks._block(number)[:] = number
    program.copy_blocks([(3, 16), (5, 3), (16, 5)])  # swapped through the host tier
    program.copy_blocks([(5, 19)])
    with pytest.raises(AssertionError):
        program.copy_blocks([(0, 20)])
    step_logits(program, fill(program, 0, TOKENS))
    found = [int(program._ranks[0].blocks._block(number)[0]) for number in (3, 5, 16, 19)]
    assert found == [5, 3, 3, 3]


def test_what_is_not_written_shows(program: EmulatorProgram) -> None:
    """The arena holds NaN before each step: rows beyond the step's keep it."""
    step_logits(program, fill(program, 0, TOKENS))
    logits = step_logits(program, fill(program, 0, TOKENS[:1]))
    bucket = program._ranks[0].buckets[0]
    assert bucket.logits_rows == 4 and np.isfinite(logits).all()
    begin = bucket.logits - program._ranks[0].arena.ctypes.data
    rows = program._ranks[0].arena[begin : begin + 16 * mock.VOCAB_SIZE].view(np.float32).reshape(4, -1)
    assert np.isnan(rows[1:]).all()


def test_through_the_engine(gpu_engine: Path) -> None:
    """Scheduler, KV cache and step loop run on it as on any device; the model has no tokenizer."""
    expected = [TOKENS[0]]
    for _ in range(6):
        expected += greedy(expected[-1:])
    with Engine.load(gpu_engine, device="emulator", kv_cache_tokens=128) as engine:
        answers = engine.generate([TOKENS[:1], TOKENS[:1]], SamplingParams(max_tokens=6, ignore_eos=True))
        assert [answer.token_ids for answer in answers] == [expected[1:]] * 2
        close_to(engine.logits(TOKENS), mock.reference_logits(TOKENS))


def test_two_programs_of_one_engine(gpu_engine: Path) -> None:
    with EngineFile.open(gpu_engine) as one, EngineFile.open(gpu_engine) as other:
        first, second = (EmulatorProgram(engine, 64) for engine in (one, other))
        first.launch(fill(first, 0, TOKENS[:3], temperature=0.0))
        second.launch(fill(second, 0, TOKENS[3:6], temperature=0.0))
        assert first.wait().tokens[:3].tolist() == greedy(TOKENS[:3])
        first.close()
        assert second.wait().tokens[:3].tolist() == greedy(TOKENS[3:6])


def engine_with(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> EngineFile:
    return EngineFile.open(mock.write_engine(tmp_path / "edited.engine", edit_plan=edit))


def test_kernels_that_have_changed_since(tmp_path: Path) -> None:
    def edit(plan: dict[str, Any]) -> None:
        for entry in plan["kernels"].values():
            if entry["module"].endswith("linear.gpu"):
                entry["source_sha256"] = "0" * 64
    with pytest.raises(EngineMismatch, match=r"compiled from ingot\.plugins\.linear\.gpu; the installed source of it, "
                                             r"or what it imports, has changed.*\n  Build it again: ingot build mock"):
        EmulatorProgram(engine_with(tmp_path, edit), 64)


def test_kernels_of_a_module_that_is_not_there(tmp_path: Path) -> None:
    def edit(plan: dict[str, Any]) -> None:
        for entry in plan["kernels"].values():
            entry["module"] = "ingot.plugins.no_such.gpu"
    with pytest.raises(EngineMismatch, match=r"compiled from ingot\.plugins\.no_such\.gpu"):
        EmulatorProgram(engine_with(tmp_path, edit), 64)


def test_a_kernel_that_fails_is_named(tmp_path: Path) -> None:
    """A constant that makes no sense for the kernel."""
    def edit(plan: dict[str, Any]) -> None:
        entry = next(entry for entry in plan["kernels"].values() if entry["function"] == "embedding")
        entry["constants"]["BLOCK"] = 100  # no power of two
    program = EmulatorProgram(engine_with(tmp_path, edit), 64)
    with pytest.raises(WorkFailed, match=r"launch 0 of steps of up to 4 tokens, embedding of mock, failed: .*"
                                         r"in block \(0, 0, 0\) of embedding"):
        step_logits(program, fill(program, 0, TOKENS[:2]))
    with pytest.raises(AssertionError, match="no step is in flight"):
        program.wait()


def test_counters_that_a_launch_leaves(tmp_path: Path) -> None:
    """Another launch writes where arrivals are counted."""
    def edit(plan: dict[str, Any]) -> None:
        entry = next(entry for entry in plan["buckets"][0]["launches"] if entry["op"] == "embedding")
        entry["args"][2] = ["workspace", 0]
    program = EmulatorProgram(engine_with(tmp_path, edit), 64)
    with pytest.raises(WorkFailed, match=r"a launch left byte \d+ of the workspace not zero; of its first 256 bytes"):
        step_logits(program, fill(program, 0, TOKENS[:1]))


def test_a_wrong_plan_names_the_file(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, lambda plan: plan["buckets"][0]["launches"][0].update(grid=[0, 1, 1]))
    with pytest.raises(EngineFormatError, match=r"^\S+edited\.engine: plan\.buckets\[0\]\.launches\[0\] \(embedding"):
        EmulatorProgram(engine, 64)


@pytest.mark.parametrize(("tokens", "host_tokens"), [(0, 0), (64, -1)])
def test_sizes_that_make_no_sense(gpu_engine: Path, tokens: int, host_tokens: int) -> None:
    with EngineFile.open(gpu_engine) as engine, pytest.raises(RequestError, match="expected at least 1 and 0"):
        load_program(engine, tokens, host_kv_tokens=host_tokens, device="emulator")


def test_triton_is_needed(gpu_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise emulator.PackageNotFoundError(name)

    with EngineFile.open(gpu_engine) as engine:
        monkeypatch.setattr(emulator, "version", absent)
        with pytest.raises(RequestError, match=r"triton is not installed here\.\n  Install it: pip install --no-deps "
                                               r"triton==3\.9\.0"):
            load_program(engine, 64, device="emulator")
        monkeypatch.setattr(emulator, "version", lambda name: "3.8.1")
        with pytest.raises(RequestError, match=r"needs triton 3\.9\.0, .*; here is 3\.8\.1"):
            load_program(engine, 64, device="emulator")


@pytest.mark.parametrize("imported", ["before", "not before"])
def test_a_process_that_compiles(gpu_engine: Path, imported: str) -> None:
    """Triton must not have been imported to compile; if nobody has imported it, the emulator does, to interpret."""
    script = ("import os, sys; os.environ.pop('TRITON_INTERPRET', None)\n"
              + ("import triton\n" if imported == "before" else "") +
              "from ingot.runtime.cli import main\n"
              "sys.exit(main(['generate', sys.argv[1], 'x', '--raw', '--device', 'emulator']))")
    done = subprocess.run([sys.executable, "-c", script, str(gpu_engine)], capture_output=True, text=True)
    if imported == "before":
        assert done.returncode == 2 and "Set TRITON_INTERPRET=1 in the environment" in done.stderr, done.stderr
    else:
        assert done.returncode == 2 and "has no tokenizer" in done.stderr, done.stderr  # loaded, then asked for text


def test_devices_by_name(gpu_engine: Path, mock_path: Path) -> None:
    with EngineFile.open(gpu_engine) as gpu, EngineFile.open(mock_path) as cpu:
        assert devices.device_of(gpu) == ("cuda", (0,)) and devices.device_of(cpu) == ("cpu", ())
        assert devices.device_of(gpu, "cuda:3") == ("cuda", (3,))
        assert devices.device_of(gpu, "emulator") == ("emulator", ())
        for engine, device, told in (
                (cpu, "emulator", "--device emulator does not run .*, which was built for cpu:.*; it runs on: cpu"),
                (cpu, "cuda", "--device cuda does not run"), (gpu, "cpu", "it runs on: cuda, emulator"),
                (gpu, "tpu", "unknown device 'tpu'; expected cpu, cuda, emulator, cuda:NUMBER or cuda:NUMBER,NUMBER"),
                (gpu, "cuda:x", "unknown device 'cuda:x'"), (gpu, "emulator:0", "unknown device 'emulator:0'"),
                (gpu, "cuda:", "unknown device 'cuda:'"), (gpu, "cuda:0,", "unknown device 'cuda:0,'"),
                (gpu, "cuda:0,1", "cuda:0,1 names 2 GPUs; .* runs on one GPU.\n  For example: --device cuda:0$")):
            with pytest.raises(RequestError, match=told):
                devices.device_of(engine, device)
        assert devices.free_bytes(gpu, "emulator") == pytest.approx(devices.free_bytes(cpu), rel=0.2)
        assert devices.default_fraction(gpu, "emulator") == 0.5 and devices.default_fraction(gpu) == 0.9


def test_a_gpu_engine_without_a_driver_tells_of_the_emulator(gpu_engine: Path) -> None:

    script = ("import sys; from ingot.runtime.cli import main\n"
              "sys.modules['cuda'] = None; sys.exit(main(['generate', sys.argv[1], 'x']))")
    done = subprocess.run([sys.executable, "-c", script, str(gpu_engine)], capture_output=True, text=True)
    assert done.returncode == 2 and "--device emulator" in done.stderr and "Traceback" not in done.stderr


def test_an_engine_for_something_else(gpu_engine: Path, tmp_path: Path) -> None:
    path = mock.write_engine(tmp_path / "x.engine", target={"name": "tpu-v5e", "kind": "tpu", "isa": "v5e"})
    with EngineFile.open(path) as engine, pytest.raises(EngineMismatch, match="built for tpu-v5e; this version of the"):
        load_program(engine, 64)

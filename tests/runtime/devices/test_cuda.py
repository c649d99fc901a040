"""The cuda device on a fake driver: results, the order of copies and launches, tiers of KV blocks, traces, profiles."""
from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.plugins.gpu.floats import from_bf16
from ingot.runtime.devices.cuda import CudaProgram, runs_on
from ingot.runtime.devices.cuda_driver import Driver
from ingot.runtime.devices.cuda_rank import runs
from ingot.runtime.devices.emulator import EmulatorProgram
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.program import step_logits
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import Score
from ingot.runtime.sampling_state import SequenceSampling
from tests.runtime import mock_gpu_engine as mock

from .conftest import Load

if TYPE_CHECKING:
    from .fake_cuda import FakeCuda

TOKENS = [7, 100, 13, 13, 91, 0, 155, 30, 31, 32]


def fill(program: CudaProgram | EmulatorProgram, number: int, tokens: list[int], **sampling: Any) -> Any:
    """Inputs that ask for the logits of every token; sampled by these parameters, if any are given."""
    inputs = program.inputs[number]
    inputs.clear()
    inputs.add(tokens, 0, [list(range(-(-len(tokens) // program.block_size)))], len(tokens))
    if sampling:
        inputs.sampling.fill([SequenceSampling(SamplingParams(**sampling), [3, 5]) for _ in tokens])
    return inputs


def close_to(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("count", [1, 4, 5, 10])
def test_logits_of_both_buckets(load: Load, count: int) -> None:
    """Few tokens: sums split among blocks, through the workspace. Many: copies by descriptors."""
    program, fake = load()
    tokens = TOKENS[:count]
    for number in (0, 1, 0):
        close_to(step_logits(program, fill(program, number, tokens)), mock.reference_logits(tokens))
    assert any("tma" in name for name in fake.launched) == (count > 4)
    assert fake.calls["cuGraphLaunch"] == 3 and "cuLaunchKernelEx" not in fake.calls


def test_kernels_that_wait_begin_while_the_one_before_ends(load: Load, tmp_path: Path) -> None:
    def half(plan: dict[str, Any]) -> None:
        for number, kernel in enumerate(plan["kernels"].values()):
            kernel["programmatic_launch"] = number % 2 == 0

    def launches(edit: Callable[[dict[str, Any]], None] | None) -> tuple[int, int, int]:
        program, fake = load(path=mock.write_engine(tmp_path / f"{edit}.engine", edit_plan=edit))
        buckets = [bucket.launches for bucket in program._ranks[0].buckets]
        found = fake.overlapping, sum(launch.kernel.programmatic_launch for bucket in buckets for launch in bucket[1:])
        program.profile(fill(program, 0, TOKENS))
        assert fake.overlapping == found[0], "launches whose time is taken run alone"
        return *found, sum(len(bucket) - 1 for bucket in buckets)

    overlapping, waiting, all_but_first = launches(None)
    assert overlapping == waiting == all_but_first > 0, "compiled for sm_90a"
    overlapping, waiting, _ = launches(half)
    assert 0 < overlapping == waiting < all_but_first


def test_a_step_is_one_copy_one_graph_and_one_copy_back(load: Load) -> None:
    program, fake = load()
    best = mock.reference_logits(TOKENS[:3]).argmax(axis=1).tolist()

    def step(number: int) -> None:
        program.launch(fill(program, number % 2, TOKENS[:3], temperature=0.0, logprobs=2))
        outputs = program.wait()
        assert outputs.tokens[:3].tolist() == best and outputs.ranks[:3].tolist() == [1, 1, 1]
        assert outputs.top_ids[:3, 0].tolist() == best and (outputs.logprobs[:3] < 0).all()

    step(0)
    before = dict(fake.calls)
    for number in range(4):
        step(number)
    made = {name: count - before.get(name, 0) for name, count in fake.calls.items() if count > before.get(name, 0)}
    assert {name: made[name] for name in ("cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord")
            } == {"cuMemcpyHtoDAsync": 4, "cuGraphLaunch": 4, "cuMemcpyDtoHAsync": 4, "cuEventRecord": 4}
    assert set(made) <= {"cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord", "cuCtxSetCurrent",
                         "cuEventQuery", "cuEventSynchronize"}, "a step allocates nothing and waits for nothing else"


def test_long_lists_are_copied_where_a_row_uses_them(load: Load) -> None:
    program, fake = load()
    plain = fake.calls.get("cuMemcpyHtoDAsync", 0)
    logits = mock.reference_logits(TOKENS[:2])
    program.launch(fill(program, 0, TOKENS[:2], temperature=0.0, logit_bias={11: 1000.0}))
    assert program.wait().tokens[:2].tolist() == [11, 11]
    best = logits.argmax(axis=1).tolist()
    banned = fill(program, 1, TOKENS[:2], temperature=0.0, frequency_penalty=2.0)
    banned.sampling.fill([SequenceSampling(SamplingParams(temperature=0.0, repetition_penalty=1000.0), [token])
                          for token in best])
    program.launch(banned)
    second = np.argsort(-logits, axis=1)[:, 1].tolist()
    assert program.wait().tokens[:2].tolist() == second
    scored = program.inputs[0]
    scored.sampling.fill([Score(9), None])
    program.launch(scored)
    expected = logits[0, 9] - np.log(np.exp(logits[0] - logits[0].max()).sum()) - logits[0].max()
    assert program.wait().logprobs[0] == pytest.approx(expected, abs=0.3)
    assert fake.calls["cuMemcpyHtoDAsync"] - plain <= 5


def test_the_next_step_is_filled_while_the_device_is_at_work(load: Load) -> None:
    """The driver does nothing before somebody waits: what is filled meanwhile must not reach the step before."""
    program, fake = load()
    first = fill(program, 0, TOKENS[:4], temperature=0.0)
    program.launch(first)
    assert fake.queue and not fake.launched[:1], "launch returned before the device began"
    second = fill(program, 1, TOKENS[4:], temperature=0.0)
    assert not first.sampling.outputs.tokens.any()
    assert program.wait().tokens[:4].tolist() == mock.reference_logits(TOKENS[:4]).argmax(axis=1).tolist()
    program.launch(second)
    fill(program, 0, TOKENS[:1], temperature=0.0)
    assert program.wait().tokens[:6].tolist() == mock.reference_logits(TOKENS[4:]).argmax(axis=1).tolist()


def test_long_steps_are_slept_through(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """By how long the bucket took before, if that was seen; steps that nobody had to wait for shorten it."""
    program, _ = load()
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def synchronize(*args: Any) -> Any:
        now[0] += 0.010 if args[0] == "cuEventSynchronize" else 0
        return call(*args)

    call = program._ranks[0].context.driver.call
    monkeypatch.setattr("ingot.runtime.devices.cuda.sleep", sleep)
    monkeypatch.setattr("ingot.runtime.devices.cuda.perf_counter", lambda: now[0])
    monkeypatch.setattr(program._ranks[0].context.driver, "call", synchronize)
    program.launch(fill(program, 0, TOKENS[:1]))
    program.wait()
    assert slept == [] and program._expected_s == [pytest.approx(0.010), 0.0]
    program.launch(fill(program, 1, TOKENS[:1]))
    program.wait()
    assert slept == [pytest.approx(0.009 - 2e-4)]
    program.launch(fill(program, 0, TOKENS[:1]))
    program._ranks[0].context.synchronize()  # it has ended long before it is waited for
    now[0] += 0.004
    program.wait()
    assert len(slept) == 1 and program._expected_s[0] < 0.0188


def test_one_step_at_a_time(load: Load) -> None:
    program, _ = load()
    inputs = fill(program, 0, TOKENS)
    for call in (program.wait, program.logits):
        with pytest.raises(AssertionError, match="no step"):
            call()
    program.launch(inputs)
    for launch in (lambda: program.launch(inputs), program.logits, lambda: program.profile(inputs)):
        with pytest.raises(AssertionError, match="in flight"):
            launch()
    program.close()  # waits for the step
    program.close()
    with pytest.raises(AssertionError, match="closed"):
        program.launch(inputs)


def test_another_thread_runs_the_steps(load: Load) -> None:
    """The executor's: the context must be made current there."""
    program, _ = load()
    found: list[np.ndarray] = []

    def run() -> None:
        program.copy_blocks([(0, 1)])
        found.append(step_logits(program, fill(program, 0, TOKENS[:2])).copy())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    close_to(found[0], mock.reference_logits(TOKENS[:2]))


def test_traced_values(load: Load) -> None:
    program, fake = load()
    for tokens in (TOKENS[:3], TOKENS):
        values = program.trace(fill(program, 0, tokens), {"x", "h"})
        assert set(values) == {"x", "h"} and fake.calls["cuLaunchKernelEx"] % 4 == 0
        np.testing.assert_array_equal(values["x"], from_bf16(mock.TABLE[tokens]))
        close_to(values["h"] @ from_bf16(mock.HEAD).T, mock.reference_logits(tokens))


def test_profile(load: Load) -> None:
    program, fake = load()
    for _ in range(2):
        durations = program.profile(fill(program, 0, TOKENS))
        assert durations.dtype == np.int64 and durations.shape == (4,) and (durations > 0).all()
    close_to(step_logits(program, program.inputs[0]), mock.reference_logits(TOKENS))
    assert fake.calls["cuGraphInstantiate"] == len(mock.BUCKETS) + 1, "one timed graph, used twice"


def test_blocks_of_both_tiers(load: Load) -> None:
    program, fake = load(kv_cache_tokens=64, host_kv_tokens=48)
    assert (program.num_blocks, program.num_host_blocks) == (4, 3)
    blocks = [np.full(program.block_bytes, number + 1, np.uint8) for number in range(7)]
    for number, data in enumerate(blocks):
        write_block(program, fake, number, data)
    pairs = [(0, 4), (1, 5), (2, 3), (6, 0), (4, 6), (3, 1)]
    program.copy_blocks(pairs)
    program.launch(fill(program, 0, TOKENS))
    program.copy_blocks([(0, 2)])
    program.wait()
    for source, destination in [*pairs, (0, 2)]:
        blocks[destination] = blocks[source]
    program.copy_blocks([])
    program._ranks[0].context.synchronize()
    for number, data in enumerate(blocks):
        assert np.array_equal(read_block(program, fake, number), data), number


def test_neighbours_are_copied_together(load: Load) -> None:
    program, fake = load(kv_cache_tokens=256, host_kv_tokens=64)
    program.copy_blocks([(0, 8), (1, 9), (2, 10), (3, 16), (4, 17)])
    assert fake.calls["cuMemcpyDtoDAsync"] == 1
    assert len(fake.queue) == 2


def address(program: CudaProgram, fake: FakeCuda, number: int) -> int:
    return program._ranks[0].block_address(number)


def write_block(program: CudaProgram, fake: FakeCuda, number: int, data: np.ndarray) -> None:
    view(program, number)[:] = data


def read_block(program: CudaProgram, fake: FakeCuda, number: int) -> np.ndarray:
    return view(program, number)


def view(program: CudaProgram, number: int) -> np.ndarray:
    """A block as it is on the fake device, whose memory is that of this process."""
    import ctypes

    return np.ctypeslib.as_array(
        (ctypes.c_uint8 * program.block_bytes).from_address(program._ranks[0].block_address(number)))


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda pair: pair[0] != pair[1]), max_size=20))
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    """Of 8 blocks on the device and 4 on the host: a run as one copy gives what its pairs give one by one."""
    wanted, got = list(range(12)), list(range(12))
    for source, destination in pairs:
        wanted[destination] = wanted[source]
    for source, destination, count in runs(pairs, 8):
        for begin in (source, destination):
            assert begin + count <= 8 or begin >= 8, "leaves its tier"
        got[destination : destination + count] = got[source : source + count]
    assert got == wanted


def test_the_kv_cache_takes_what_is_free(load: Load) -> None:
    small, fake = load(None, fraction=0.5, memory_bytes=64 << 20)
    large, _ = load(None, fraction=1.0, memory_bytes=64 << 20)
    assert 1.9 < large.num_blocks / small.num_blocks < 2.1
    used = sum(region.size for region in fake.device_memory.values())
    assert used >= small.kv_bytes + small.weights_bytes + small.arena_bytes + small.workspace_bytes
    assert small.kv_bytes == small.num_blocks * mock.BLOCK_BYTES > 24 << 20
    assert not view(small, small.num_blocks - 1).any(), "the cache begins cleared"


def test_an_engine_looks_at_the_gpu_once(gpu_engine: Path, fake_driver: Callable[..., FakeCuda],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """One context, and of the free memory no more than the largest batch of the longest sequences can use."""
    with EngineFile.open(gpu_engine) as file:
        fake, limits = fake_driver(file, memory_bytes=64 << 20), file.manifest["limits"]
    monkeypatch.setattr("ingot.runtime.devices.cuda.load_driver", lambda: Driver(fake))
    with Engine.load(gpu_engine) as engine:
        assert fake.calls["cuDevicePrimaryCtxRetain"] == 1
        tokens = limits["max_batch_size"] * limits["max_seq_len"]
        assert engine.program.num_blocks == -(-tokens // engine.program.block_size) * len(engine.program.kv_windows)
    fake.assert_nothing_held()


def test_blocks_in_clusters(load: Load, tmp_path: Path) -> None:
    """Attributes of nodes and of launches; the grid is counted in blocks, not clusters."""
    def cluster(plan: dict[str, Any]) -> None:
        for symbol, kernel in plan["kernels"].items():
            kernel["cluster"] = 16 if symbol.startswith("embedding") else 2

    program, _ = load(path=mock.write_engine(tmp_path / "cluster.engine", edit_plan=cluster))
    close_to(step_logits(program, fill(program, 0, TOKENS)), mock.reference_logits(TOKENS))
    assert program.trace(program.inputs[0], {"x"})["x"].shape == (10, mock.DIM)


@pytest.mark.parametrize(("isa", "capability", "runs"), [
    ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_80", (8, 0), True), ("sm_80", (8, 9), True),
    ("sm_86", (8, 0), False), ("sm_80", (9, 0), False), ("sm_100a", (10, 0), True), ("sm_100a", (10, 3), False),
    ("sm_120a", (12, 0), True), ("avx2", (8, 0), False), ("sm_", (0, 0), False)])
def test_where_code_runs(isa: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(isa, capability) is runs

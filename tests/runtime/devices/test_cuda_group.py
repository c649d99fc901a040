"""An engine that is divided among GPUs, on a fake driver with several: the kernels themselves exchange values there."""
from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices import device_of, emulator
from ingot.runtime.devices.cuda import CudaProgram
from ingot.runtime.devices.cuda_driver import CudaError, Driver, NoGpu, list_gpus, teams
from ingot.runtime.devices.cuda_group import NoPeerAccess
from ingot.runtime.devices.emulator import EmulatorProgram
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError, RequestError, WorkFailed
from ingot.runtime.program import EngineMismatch, step_logits
from tests.runtime import mock_gpu_engine as mock

from .conftest import Load
from .fake_cuda import FakeCuda
from .test_cuda import TOKENS, close_to, fill, view
from .test_cuda_errors import refused

if TYPE_CHECKING:
    Fake = Callable[..., FakeCuda]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock.write_engine(tmp_path_factory.mktemp("mock_pair") / "pair.engine", ranks=2)


@pytest.fixture
def load_pair(load: Load, pair: Path) -> Load:
    def loaded(*args: Any, **options: Any) -> tuple[CudaProgram, FakeCuda]:
        return load(*args, path=pair, **{"num_gpus": 2, **options})
    return loaded


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_and_four_ranks_give_the_numbers_of_one(load: Load, gpu_engine: Path, tmp_path: Path, ranks: int) -> None:
    """On the fake driver and in the emulator, in steps of both buckets."""
    path = mock.write_engine(tmp_path / "divided.engine", ranks=ranks)
    program, fake = load(path=path, num_gpus=ranks)
    whole, _ = load()
    with EngineFile.open(path) as file:
        emulated = EmulatorProgram(file, 256)
        for number, count in enumerate((3, 10, 1)):
            found = step_logits(program, fill(program, number % 2, TOKENS[:count])).copy()
            close_to(found, mock.reference_logits(TOKENS[:count]))
            np.testing.assert_array_equal(found, step_logits(whole, fill(whole, number % 2, TOKENS[:count])))
            np.testing.assert_array_equal(found, step_logits(emulated, fill(emulated, number % 2, TOKENS[:count])))
        emulated.close()
    assert fake.calls["cuGraphLaunch"] == 3 * ranks
    assert program.gpus == tuple(list_gpus(Driver(fake))) and program.gpu.ordinal == 0


def test_a_step_takes_nothing(load_pair: Load) -> None:
    program, fake = load_pair()
    best = mock.reference_logits(TOKENS[:3]).argmax(axis=1).tolist()

    def step(number: int) -> None:
        program.launch(fill(program, number % 2, TOKENS[:3], temperature=0.0))
        assert program.wait().tokens[:3].tolist() == best

    step(0)
    before = dict(fake.calls)
    for number in range(3):
        step(number)
    made = {name: count - before.get(name, 0) for name, count in fake.calls.items() if count > before.get(name, 0)}
    assert {name: made[name] for name in ("cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord")
            } == {"cuMemcpyHtoDAsync": 6, "cuGraphLaunch": 6, "cuMemcpyDtoHAsync": 3, "cuEventRecord": 6}
    assert set(made) <= {"cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord", "cuCtxSetCurrent",
                         "cuEventQuery"}


def test_other_gpus_than_the_first(fake_driver: Fake, pair: Path) -> None:
    with EngineFile.open(pair) as engine:
        fake = fake_driver(engine, num_gpus=4, apart=((0, 1), (1, 0)))
        program = CudaProgram(engine, 256, driver=Driver(fake), ordinals=(3, 1))
        assert [gpu.ordinal for gpu in program.gpus] == [3, 1] and set(fake.peers) == {(3, 1), (1, 3)}
        close_to(step_logits(program, fill(program, 0, TOKENS[:2])), mock.reference_logits(TOKENS[:2]))
        program.close()
        fake.assert_nothing_held()


def test_peers_that_others_have_enabled_stay(fake_driver: Fake, pair: Path) -> None:
    with EngineFile.open(pair) as engine:
        fake = fake_driver(engine, num_gpus=2)
        context = Driver(fake).call("cuDevicePrimaryCtxRetain", Driver(fake).call("cuDeviceGet", 0))
        Driver(fake).call("cuCtxSetCurrent", context)
        fake.peers.add((0, 1))
        CudaProgram(engine, 256, driver=Driver(fake)).close()
        assert fake.peers == {(0, 1)}


def test_an_engine_beside_another_keeps_its_peers(fake_driver: Fake, pair: Path) -> None:
    """As in a swap: the first one is closed while the second one runs."""
    with EngineFile.open(pair) as one, EngineFile.open(pair) as other:
        fake = fake_driver(one, num_gpus=2)
        first, second = (CudaProgram(engine, 256, driver=Driver(fake)) for engine in (one, other))
        first.close()
        close_to(step_logits(second, fill(second, 0, TOKENS[:2])), mock.reference_logits(TOKENS[:2]))
        second.close()
        fake.assert_nothing_held()


def test_steps_of_two_engines_do_not_overlap(load_pair: Load) -> None:
    """Their blocks would wait for each other's room. A step that is not waited for, or fails, lets others on: one
    thread may launch both, as with two streams of answers."""
    first, fake = load_pair()
    second, other = load_pair()

    def busy(which: FakeCuda) -> bool:
        return any(stream.busy for stream in which.streams)

    first.launch(fill(first, 0, TOKENS))
    assert busy(fake)
    second.launch(fill(second, 0, TOKENS[:2]))
    assert busy(other) and not busy(fake)
    first.wait()
    first.launch(fill(first, 1, TOKENS))
    assert not busy(other)
    first.close()
    second.wait()
    other.fail("cuGraphLaunch", 2, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(CudaError):
        second.launch(fill(second, 1, TOKENS[:2]))
    third, _ = load_pair()
    close_to(step_logits(third, fill(third, 0, TOKENS[:2])), mock.reference_logits(TOKENS[:2]))


def test_two_threads_launch_steps_in_turn(load_pair: Load) -> None:
    programs = [load_pair()[0] for _ in range(2)]
    found: dict[int, np.ndarray] = {}

    def steps(which: int) -> None:
        for number in range(3):
            found[which] = step_logits(programs[which], fill(programs[which], number % 2, TOKENS[:2])).copy()

    threads = [threading.Thread(target=steps, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for which in range(2):
        close_to(found[which], mock.reference_logits(TOKENS[:2]))


def test_engines_on_other_gpus_do_not_wait(fake_driver: Fake, pair: Path) -> None:
    with EngineFile.open(pair) as one, EngineFile.open(pair) as two:
        fake = fake_driver(one, num_gpus=4)
        first, second = (CudaProgram(engine, 256, driver=Driver(fake), ordinals=ordinals)
                         for engine, ordinals in ((one, (0, 1)), (two, (2, 3))))
        first.launch(fill(first, 0, TOKENS[:2]))
        with second._group.launching():
            assert {stream.device for stream in fake.streams if stream.busy} == {0, 1}
        for program in (first, second):
            program.close()
        fake.assert_nothing_held()


def test_a_step_that_nobody_waits_for_fails(load_pair: Load) -> None:
    """The next engine's step begins all the same; the error is told to whoever asks."""
    first, fake = load_pair()
    second, _ = load_pair()
    fake.faulty = next(kernel.symbol for kernel in fake.kernels.values() if kernel.symbol.startswith("embedding")), 1
    first.launch(fill(first, 0, TOKENS[:3]))
    close_to(step_logits(second, fill(second, 0, TOKENS[:2])), mock.reference_logits(TOKENS[:2]))
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        first.wait()
    first.close()
    fake.forget()


def test_traces_and_profiles(load_pair: Load) -> None:
    program, _ = load_pair()
    values = program.trace(fill(program, 0, TOKENS[:3]), {"h"})
    close_to(values["h"] @ mock.from_bf16(mock.HEAD).T, mock.reference_logits(TOKENS[:3]))
    for _ in range(2):
        assert program.profile(fill(program, 1, TOKENS)).shape == (6,)


def test_blocks_are_copied_on_all_ranks(load_pair: Load) -> None:
    program, fake = load_pair(kv_cache_tokens=64, host_kv_tokens=32)
    first, second = program._ranks
    for rank in (first, second):
        for number in range(6):
            of_rank(program, rank, number)[:] = 10 * rank.rank + number
    program.copy_blocks([(0, 4), (4, 2), (4, 5)])
    for rank in (first, second):
        rank.context.enter()
        rank.context.synchronize()
        assert [int(of_rank(program, rank, number)[0]) - 10 * rank.rank for number in range(6)] == [0, 1, 0, 3, 0, 0]
    assert fake.calls["cuMemcpyDtoHAsync"] == 2


def of_rank(program: CudaProgram, rank: Any, number: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array(
        (ctypes.c_uint8 * program.block_bytes).from_address(rank.block_address(number)))


def test_the_cache_is_as_large_as_the_least_gpu_allows(load_pair: Load) -> None:
    small, _ = load_pair(None, memory_bytes=64 << 20)
    mixed, _ = load_pair(None, memory_bytes=(96 << 20, 64 << 20))
    assert mixed.num_blocks == small.num_blocks
    assert view(mixed, mixed.num_blocks - 1).size == mixed.block_bytes


def test_gpus_that_do_not_reach_each_other(fake_driver: Fake, pair: Path) -> None:
    told = refused(fake_driver, pair, NoPeerAccess, "read each other's memory", num_gpus=3, ordinals=(0, 2),
                   apart=((2, 0), (0, 1)))
    assert "cuda:2 (Fake GPU) does not reach the memory of cuda:0 (Fake GPU)\n" in told and "cuda:1 (" not in told
    assert "ingot doctor" in told
    fake = FakeCuda({}, num_gpus=5, apart=((0, 1), (2, 4), (4, 0)))
    fake.cuInit(0)
    driver = Driver(fake)
    found = teams(driver, list_gpus(driver))
    assert [[gpu.ordinal for gpu in team] for team in found] == [[0, 2, 3], [1, 4]]


def test_too_few_gpus_and_wrong_numbers_of_them(fake_driver: Fake, pair: Path, gpu_engine: Path) -> None:
    told = refused(fake_driver, pair, NoGpu, "is divided among 2 GPUs, and there is no GPU cuda:1")
    assert "cuda:0  Fake GPU" in told
    for path, device, match in (
            (pair, "cuda:1", "cuda:1 names 1 GPU; .* runs on 2 different ones.*\n.*--device cuda:0,1"),
            (pair, "cuda:1,1", "names 2 GPUs; .* 2 different ones"), (gpu_engine, "cuda:0,1", "runs on one GPU")):
        with EngineFile.open(path) as engine, pytest.raises(RequestError, match=match):
            device_of(engine, device)
    with EngineFile.open(pair) as engine:
        assert device_of(engine) == ("cuda", (0, 1)) and device_of(engine, "cuda:3,2") == ("cuda", (3, 2))
    told = refused(fake_driver, pair, EngineMismatch, "blocks wait for those of other GPUs", num_gpus=2,
                   multiprocessors=0)
    assert "has 0 multiprocessors" in told


def test_every_call_may_fail_on_either_gpu(fake_driver: Fake, pair: Path) -> None:
    """At its first and at its last call."""
    with EngineFile.open(pair) as engine:
        fake = fake_driver(engine, num_gpus=2)
        CudaProgram(engine, 256, 64, driver=Driver(fake)).close()
        fake.assert_nothing_held()
        counts = dict(fake.calls)
    quiet = {"cuInit", "cuGetErrorName", "cuGetErrorString", "cuFuncGetParamInfo"}
    for name, count in counts.items():
        released = any(part in name for part in ("Free", "Destroy", "Release", "Unload", "Disable"))
        closing = name in ("cuStreamSynchronize", "cuCtxSetCurrent")
        for number in () if name in quiet or released else {1} if closing else {1, count}:
            with EngineFile.open(pair) as engine:
                fake = fake_driver(engine, num_gpus=2)
                fake.fail(name, number, "CUDA_ERROR_UNKNOWN")
                with pytest.raises(IngotError, match=f"{name}[\\s\\S]*CUDA_ERROR_UNKNOWN"):
                    CudaProgram(engine, 256, 64, driver=Driver(fake)).close()
                fake.assert_nothing_held()


def test_memory_of_the_second_gpu(fake_driver: Fake, pair: Path) -> None:
    refused(fake_driver, pair, WorkFailed, "not enough memory on cuda:1", num_gpus=2, memory_bytes=(1 << 30, 4 << 20))
    refused(fake_driver, pair, WorkFailed, "not enough memory on cuda:1", num_gpus=2,
            change=lambda fake: fake.fail("cuMemAlloc", 6))


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("op", ["embedding", "linear"])
def test_a_gpu_that_fails_lets_the_other_go_on(load_pair: Load, device: int, op: str) -> None:
    """It waits for a signal that does not come: the host tells it to."""
    program, fake = load_pair()
    symbol = next(kernel.symbol for kernel in fake.kernels.values() if kernel.symbol.startswith(op))
    fake.faulty = symbol, device
    program.launch(fill(program, 0, TOKENS[:3]))
    with pytest.raises(CudaError, match="cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        program.wait()
    program.close()
    fake.forget()


def test_a_launch_that_fails_on_the_second_gpu(load_pair: Load) -> None:
    """The first one's kernels are at work by then."""
    program, fake = load_pair()
    fake.fail("cuGraphLaunch", 2, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(CudaError, match="cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED"):
        program.launch(fill(program, 0, TOKENS[:2]))
    program.close()


def test_no_step_follows_one_that_was_broken_off(load_pair: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels no longer wait for each other: as after Ctrl-C, in a session that goes on with the engine."""
    program, fake = load_pair()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ingot.runtime.devices.cuda_group.sleep", interrupted)
        program.launch(fill(program, 0, TOKENS[:3]))
        with pytest.raises(KeyboardInterrupt):
            program.wait()
    for step in (lambda: program.launch(fill(program, 1, TOKENS[:3])), lambda: program.trace(program.inputs[1], {"h"}),
                 lambda: program.profile(program.inputs[1])):
        with pytest.raises(WorkFailed, match="was broken off"):
            step()
    program.close()
    fake.assert_nothing_held()
    other, _ = load_pair()
    close_to(step_logits(other, fill(other, 0, TOKENS[:2])), mock.reference_logits(TOKENS[:2]))


def test_the_emulator_tells_of_ranks_that_do_not_come(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "_EXCHANGE_S", 0.2)
    with EngineFile.open(pair) as file:
        program = EmulatorProgram(file, 256)
        together = program._interpret.run_together
        monkeypatch.setattr(program._interpret, "run_together", lambda launches, *rest: together(launches[:1], *rest))
        program.launch(fill(program, 0, TOKENS[:2]))
        with pytest.raises(WorkFailed, match=r"all_reduce of mock, failed: TimeoutError: .* 1 GPUs still wait"):
            program.wait()
        program.close()

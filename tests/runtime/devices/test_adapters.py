"""Slots for LoRA adapters on every device: filled between steps, skipped by steps without adapter, checked in plans."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingot.runtime.devices import load_program
from ingot.runtime.devices.cpu_plan import _address
from ingot.runtime.devices.gpu_plan import GpuPlan
from ingot.runtime.devices.null import NullProgram
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.lora import LoraModule, LoraRoom
from ingot.runtime.program import Limits, Program, step_logits
from ingot.runtime.step import StepInputs
from tests.runtime import mock_gpu_engine as mock

from .conftest import Load

TOKENS = [7, 100, 13]
MATRIX = mock.MATRIX.reshape(-1).view(np.uint8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mock of a GPU engine whose matrix lies in a slot."""
    return mock.write_engine(tmp_path_factory.mktemp("room") / "room.engine", edit_plan=mock.with_room,
                             lora=mock.ROOM.to_json())


def fill(program: Program, adapter: int, number: int = 0, count: int = len(TOKENS)) -> StepInputs:
    inputs = program.inputs[number]
    inputs.clear()
    inputs.add([*TOKENS, *TOKENS][:count], 0, [[0]], count, adapter=adapter)
    return inputs


def check(program: Program, without: Callable[[np.ndarray], np.bool]) -> None:
    assert program.lora == mock.ROOM
    assert without(step_logits(program, fill(program, -1))), "the launch is left out"
    program.write_adapter(0, MATRIX)
    for count in (3, 6):  # both buckets: through pointers, and through descriptors
        wanted = mock.reference_logits([*TOKENS, *TOKENS][:count])
        np.testing.assert_allclose(step_logits(program, fill(program, 0, count=count)), wanted, rtol=2e-2, atol=0.3)
    filled = step_logits(program, fill(program, 0)).copy()
    # What is written while a step is on its way is for the next one; the image is the caller's again at once.
    image = np.zeros_like(MATRIX)
    program.launch(fill(program, 0))
    program.write_adapter(0, image)
    image[:] = 0xFF
    program.wait()
    np.testing.assert_array_equal(program.logits(), filled)
    changed = step_logits(program, fill(program, 0, 1))
    assert np.isfinite(changed).all() and not np.array_equal(changed, filled)
    program.write_adapter(1, MATRIX)  # the launch reads slot 0
    np.testing.assert_array_equal(step_logits(program, fill(program, 0)), changed)
    for slot, size in ((2, MATRIX.size), (-1, MATRIX.size), (0, MATRIX.size - 1)):
        with pytest.raises(AssertionError):
            program.write_adapter(slot, np.zeros(size, np.uint8))


def test_emulator(engine: Path) -> None:
    with EngineFile.open(engine) as file:
        program = load_program(file, 256, device="emulator")
        check(program, lambda logits: np.isnan(logits).all())  # the arena is poisoned before each step
        assert program.lora_bytes == 2 * MATRIX.size  # type: ignore[attr-defined]
        program.close()


def test_cuda(engine: Path, load: Load) -> None:
    program, fake = load(path=engine)
    check(program, lambda logits: (logits == 0).all())  # the arena is cleared at load
    assert program.lora_bytes == 2 * MATRIX.size
    assert fake.calls["cuGraphInstantiate"] == 2 * len(mock.BUCKETS), "with and without the launch"


def test_an_engine_without_room(load: Load) -> None:
    program, _ = load()
    assert program.lora is None and program.lora_bytes == 0
    with pytest.raises(AssertionError, match="no room"):
        program.write_adapter(0, MATRIX)


@pytest.mark.parametrize(("offset", "message"), [
    (32768, "offset 32768 is outside its 32768 bytes"), (-16, "offset -16 is outside"), (8, "not aligned to 16"),
    ("0", "offset '0' is outside")])
def test_places_in_a_slot(engine: Path, offset: Any, message: str) -> None:
    with EngineFile.open(engine) as file:
        plan = file.plan
        limits = Limits.of(file.manifest)
        GpuPlan.read(plan, limits, mock.ROOM)
        next(arg for arg in plan["buckets"][0]["launches"][1]["args"] if arg[0] == "lora")[1] = offset
        with pytest.raises(EngineFormatError, match=message):
            GpuPlan.read(plan, limits, mock.ROOM)


def test_places_in_a_slot_in_host_memory() -> None:
    places: Any = SimpleNamespace(lora=(4096, 128))
    assert [_address(["lora", *offset], places, 0) for offset in ([], [0], [127])] == [4096, 4096, 4096 + 127]
    for offset in (128, -1, "0", True):
        with pytest.raises(ValueError, match="is outside its 128 bytes"):
            _address(["lora", offset], places, 0)
    places.lora = 4096, 0
    with pytest.raises(ValueError, match="no room for adapters"):
        _address(["lora", 0], places, 0)


def test_a_slot_holds_bfloat16(engine: Path) -> None:
    with EngineFile.open(engine) as file:
        file.plan["buckets"][0]["launches"][0]["args"][0] = ["lora", 0]
        with pytest.raises(EngineFormatError, match=r"argument ids, .*the kernel takes \*i32, this is \*bf16"):
            GpuPlan.read(file.plan, Limits.of(file.manifest), mock.ROOM)


def test_null_device() -> None:
    """Adapters change what follows; one's context is no other's."""
    room = LoraRoom(1, 2, 64, (LoraModule("m", 8, 8, 0, 32),))
    program = NullProgram(Limits(4, 8, 64), 1000, 8, simulate_kv=True, lora=room)
    for slot in range(2):
        program.write_adapter(slot, np.full(64, slot + 1, np.uint8))

    def following(adapter: int, position: int = 0) -> int:
        inputs = program.inputs[0]
        inputs.clear()
        inputs.add([5], position, [[0]], 1, adapter=adapter)
        program.launch(inputs)
        return int(program.wait().tokens[0])

    assert len({following(adapter) for adapter in (-1, 0, 1)}) == 3
    following(1)
    following(1, position=1)
    following(1)
    with pytest.raises(AssertionError, match="another adapter"):
        following(0, position=1)

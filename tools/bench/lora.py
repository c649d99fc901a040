"""What room for LoRA adapters costs, and what adapters do: two engines of one model, in turns within one process.

    ingot build MODEL --target cpu --precision w4a8 -o plain.engine
    ingot build MODEL --target cpu --precision w4a8 --lora-max-rank 16 -o room.engine
    python -m tools.bench.lora plain.engine room.engine [--sequences 1 8] [--new 1 64] [--workers 1] [--rounds 40]

One line a kind of step: the time of a step of the engine without room, and, as ratios to it, of the engine with room
where no sequence has an adapter, where the first one has, and where all have. `--new`: tokens of each sequence. A time
is that of the processor, of all threads: the least mean of a round of a twentieth of a second.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.program import Program
from ingot.runtime.step import StepInputs

_CONTEXT, _ROUND_SECONDS = 128, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engines", nargs=2, metavar=("PLAIN", "ROOM"))
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--new", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with EngineFile.open(options.engines[0]) as one, EngineFile.open(options.engines[1]) as other:
        plain, room = (load_program(file, 8 * (_CONTEXT + 64) * max(options.sequences), options.workers)
                       for file in (one, other))
        assert room.lora is not None, "the second engine has no room"
        rng = np.random.default_rng(0)
        for slot in range(room.lora.max_adapters):
            # Bits of bfloat16 between 2^-8 and 2^-7, of both signs.
            values = (rng.integers(0, 2, room.lora.bytes_per_adapter // 2) << 15 | 0x3B80 | rng.integers(
                0, 128, room.lora.bytes_per_adapter // 2)).astype(np.uint16)
            room.write_adapter(slot, values.view(np.uint8))
        for new in options.new:
            for count in options.sequences:
                slots = [number % room.lora.max_adapters for number in range(count)]
                ways = [(plain, [-1] * count), (room, [-1] * count), (room, [0] + [-1] * (count - 1)), (room, slots)]
                times = measured(ways, new, options.rounds)
                shown = "  ".join(f"{name} {seconds / times[0]:5.2f}" for name, seconds in zip(
                    ("no adapter", "one", "all"), times[1:], strict=True))
                print(f"{count} x {new} tokens  {times[0] * 1e3:8.2f} ms  {shown}", flush=True)


def measured(ways: Sequence[tuple[Program, list[int]]], new: int, rounds: int) -> list[float]:
    """The least seconds of a step in each way: what else the machine does only adds to them."""
    for program, slots in ways:
        fill(program, slots, new)
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for times, (program, slots) in zip(found, ways, strict=True):
            inputs = fill(program, slots, new)
            steps, begin, used = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - begin < _ROUND_SECONDS or steps < 2:
                program.launch(inputs)
                program.wait()
                steps += 1
            times.append((time.process_time() - used) / steps)
    return list(map(min, found))


def fill(program: Program, slots: list[int], new: int) -> StepInputs:
    inputs = program.inputs[0]
    inputs.clear()
    blocks = -(-(_CONTEXT + new) // program.block_size)
    for number, slot in enumerate(slots):
        tables = [[(number * len(program.kv_windows) + table) * blocks + block for block in range(blocks)]
                  for table in range(len(program.kv_windows))]
        inputs.add([5 + number] * new, _CONTEXT, tables, 1, adapter=slot)
    return inputs


if __name__ == "__main__":
    main()

"""Runs the cuda device over the stub driver and checks what came through cuda-bindings: python -m … ENGINE

In a process of its own, whose library path holds the stub.
"""
from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from ingot.runtime.devices.cuda import CudaProgram
from ingot.runtime.devices.gpu_kernels import TensorMapType
from ingot.runtime.devices.gpu_plan import BoundLaunch, BoundTensorMap
from ingot.runtime.engine_file import EngineFile


def parameters(launch: BoundLaunch) -> str:
    """As the stub writes them, told by the rules of docs/gpu.md alone."""
    parts: list[bytes] = []
    for (_, kind), value in zip(launch.kernel.parameters, launch.arguments, strict=True):
        if isinstance(value, BoundTensorMap):
            parts += [struct.pack("<Q", value.address) + b"\xdd" * 120, struct.pack("<i", value.shape[0]),
                      struct.pack("<i", value.shape[1]), struct.pack("<q", value.stride), struct.pack("<q", 1)]
        else:
            assert isinstance(kind, str) and kind.startswith("*"), "the mock engine has pointers and maps"
            parts.append(struct.pack("<Q", int(value)))
    return "".join(f" {part.hex()}" for part in [*parts, bytes(8), bytes(8)])


def shape(launch: BoundLaunch) -> str:
    kernel, (x, y, z) = launch.kernel, launch.grid
    return f"{x * kernel.cluster} {y} {z}, {kernel.threads} 1 1, {kernel.shared_bytes}"


def expected_maps(launch: BoundLaunch) -> list[str]:
    found = []
    for value in launch.arguments:
        if isinstance(value, BoundTensorMap):
            kind, (rows, columns) = value.type, value.shape
            assert isinstance(kind, TensorMapType) and kind.dtype == "bf16"
            found.append(f"map 0 9 2: {columns} {rows}, {2 * value.stride}, {kind.box[1]} {kind.box[0]}, 1 1, 0 "
                         f"{kind.swizzle} 2 0")  # 9: CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    return found


def main() -> None:
    log = Path(os.environ["STUB_LOG"])
    with EngineFile.open(sys.argv[1]) as engine:
        program = CudaProgram(engine, 256, 64)
        handles = {symbol: int(function) for symbol, function in program._ranks[0].kernels._functions.items()}
        wanted = []
        for bucket in program._ranks[0].buckets:
            for number, launch in enumerate(bucket.launches):
                wanted += expected_maps(launch)
                overlaps = number > 0 and launch.kernel.programmatic_launch
                wanted.append(f"node {handles[launch.kernel.symbol]} after {1 if number and not overlaps else -1}: "
                              f"{shape(launch)}, 0:{parameters(launch)}")
                if launch.kernel.cluster > 1:
                    wanted += [f"node attribute 4 {launch.kernel.cluster} 1 1", "node attribute 5 1 0 0"]
                if overlaps:
                    wanted.append("edge 1: 1 0 1, 1")
        got = log.read_text().splitlines()
        assert [line for line in got if line.startswith(("node", "map", "edge"))] == wanted
        large = {f"attribute {handles[kernel.symbol]} 8 {kernel.shared_bytes}" for bucket in program._ranks[0].buckets
                 for kernel in (launch.kernel for launch in bucket.launches) if kernel.shared_bytes > 48 << 10}
        assert {line for line in got if line.startswith("attribute") and line.split()[2] == "8"} == large
        assert "event 2" in got, "CU_EVENT_DISABLE_TIMING"

        inputs = program.inputs[1]
        inputs.add([5, 6, 7, 8, 9], 0, [[0]], 5)
        program.launch(inputs)
        program.wait()
        assert program.logits().shape == (5, program.vocab_size)
        program.copy_blocks([(0, 1), (1, 16), (16, 2)])
        before = len(log.read_text().splitlines())
        program.trace(inputs, {"x"})
        bucket = program._ranks[0].buckets[1]
        wanted = []
        for launch in bucket.launches:
            wanted += expected_maps(launch)
            attributes = f" [4 {launch.kernel.cluster} 1 1] [5 1 0 0]" if launch.kernel.cluster > 1 else ""
            wanted.append(f"launch {handles[launch.kernel.symbol]}: {shape(launch)}, 0:{attributes}"
                          f"{parameters(launch)}")
        assert log.read_text().splitlines()[before:] == wanted
        assert log.read_text().splitlines().count("graph") == 1
        assert program.profile(inputs).tolist() == [250_000] * 4, "events in their order, 0.25 ms apart"
        assert "event 0" in log.read_text().splitlines(), "events that tell the time"
        program.close()
        assert log.read_text().splitlines()[-1] == "release"
    print("as told")


if __name__ == "__main__":
    main()

"""Runs the plan of a GPU program in Triton's interpreter: its memory is arrays of the test."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ingot.compiler.gpu.generate import GpuProgram
from ingot.compiler.gpu.interpret import Binding, Call, Interpreter
from ingot.compiler.plan.plan import Arg, Bucket, Launch
from ingot.compiler.weights.evaluate import TensorSource
from ingot.plugins.gpu.kernel import GpuLaunch, TensorMap
from ingot.runtime.program import Limits
from ingot.runtime.step import StepInputs


@dataclass
class ProgramRunner:
    """One sequence after another, each in blocks of its own that lie scattered over the pool."""

    program: GpuProgram
    source: TensorSource
    limits: Limits
    interpreter: Interpreter
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.program
        blobs = {weight.name: weight.make(self.source) for weight in p.weights}
        self.arrays = {f"weight.{name}": blob for name, blob in blobs.items()}
        num_blocks = len(p.kv.windows) * -(-self.limits.max_seq_len // p.kv.block_size)
        self.arrays["pool"] = np.full(num_blocks * p.kv.block_bytes, 0xFF, np.uint8)
        self.arrays["workspace"] = np.full(p.workspace.bytes + 16, 0xFF, np.uint8)
        self.arrays["workspace"][:p.workspace.zeroed_bytes] = 0
        self.arrays["arena"] = np.full(max(bucket.arena_bytes for bucket in p.buckets), 0xFF, np.uint8)
        order = np.random.default_rng(0).permutation(num_blocks).tolist()
        tables = len(p.kv.windows)
        self.tables = [order[table::tables] for table in range(tables)]
        self.length = 0

    def step(self, tokens: Sequence[int], num_logits: int, bucket: int | None = None) -> np.ndarray:
        """Logits f32 [num_logits, vocab] behind the last of these tokens, which follow those of the steps before."""
        p = self.program
        inputs = StepInputs(self.limits, p.vocab_size, p.kv.block_size, len(p.kv.windows))
        blocks = -(-(self.length + len(tokens)) // p.kv.block_size)
        inputs.add(list(tokens), self.length, [table[:blocks] for table in self.tables], num_logits)
        inputs.pieces()
        self.length += len(tokens)
        chosen = next(b for b in p.buckets if b.tokens >= (bucket or len(tokens)))
        self.arrays["step"] = inputs.memory
        places = {name: place.offset for name, place in inputs.layout.places.items()}
        calls = [self._call(chosen, launch, places) for launch in chosen.launches]
        self.arrays = self.interpreter.run(calls, self.arrays)
        assert not self.arrays["workspace"][:p.workspace.zeroed_bytes].any(), "arrivals are left behind"
        offset = chosen.outputs["logits"].offset
        size = 4 * num_logits * p.vocab_size
        return self.arrays["arena"][offset:offset + size].view(np.float32).reshape(num_logits, -1).copy()

    def _call(self, bucket: Bucket, launch: Launch, places: dict[str, int]) -> Call:
        kernel = self.program.kernels[launch.kernel]
        parameters, bound = [], dict[str, Binding]()
        for (name, kind), arg in zip(kernel.parameters, launch.args, strict=True):
            if isinstance(kind, TensorMap):
                assert arg.rectangle is not None
                kind = replace(kind, shape=arg.rectangle[:2], stride=arg.rectangle[2])
            parameters.append((name, kind))
            bound[name] = self._binding(bucket, arg, places)
        assert launch.grid is not None
        return GpuLaunch(replace(kernel, parameters=tuple(parameters)), launch.grid), bound

    def _binding(self, bucket: Bucket, arg: Arg, places: dict[str, int]) -> Binding:
        match arg.kind:
            case "value":
                return "arena", bucket.offsets[arg.name] + arg.offset
            case "weight":
                return f"weight.{arg.name}", arg.offset
            case "workspace":
                return "workspace", arg.offset
            case "input":
                return "step", places[arg.name] + arg.offset
        assert arg.kind == "kv", arg
        slot = next(slot for slot in self.program.kv.slots if slot.slot == int(arg.name))
        offset = {"k": slot.key_offset, "v": slot.value_offset, "k_scale": slot.key_scale_offset,
                  "v_scale": slot.value_scale_offset}[arg.part]
        assert offset is not None
        return "pool", offset

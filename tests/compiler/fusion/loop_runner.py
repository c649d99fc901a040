"""What the tests of fusion share: small graphs, run unfused, fused, and as compiled C."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.compiler.fusion.c_emit import emit
from ingot.compiler.fusion.fuse import fuse_loops
from ingot.compiler.importer.builder import GraphBuilder
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import bind_symbols, run, run_node
from ingot.compiler.ir.types import Dim, DType, TensorType, concrete
from ingot.compiler.ir.verify import verify
from ingot.plugins.kernel import CpuKernel
from tests.plugins.native import Library, Step, aligned, placed


class Source:
    """Checkpoint tensors by name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self.arrays[name][begin:end]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape


class Builder(GraphBuilder):
    """`b.op("add", x, 1.0)` adds a node as it is and gives the name of its one output."""

    def x(self, name: str, *shape: Dim, dtype: DType = DType.F32) -> str:
        return self.input(name, TensorType(shape, dtype))

    def op(self, op: str, *inputs: Any, **attrs: Any) -> str:
        (name,) = self.add(op, inputs, **attrs)
        return name

    def slice(self, x: str, dim: int, start: int, stop: int, step: int = 1) -> str:
        return self.op("slice", x, dim=dim, start=start, stop=stop, step=step)


Build = Callable[[Builder], str | Sequence[str]]


@dataclass
class Program:
    """One small graph: as it was built, and fused. loops: how many loops it should become, None: not looked at."""

    name: str
    build: Build
    loops: int | None = None
    graph: Graph = field(init=False)
    fused: Graph = field(init=False)

    def __post_init__(self) -> None:
        builder = Builder()
        outputs = self.build(builder)
        self.graph = verify(builder.graph([outputs] if isinstance(outputs, str) else outputs))
        self.fused = verify(fuse_loops(self.graph))

    def kernels(self) -> list[CpuKernel]:
        return [_kernel(self.fused, node) for node in self.fused.nodes if node.op == "loop"]


def _kernel(graph: Graph, node: Node) -> CpuKernel:
    return emit(node, [graph.types[value] for value in node.values])


def compiled(programs: Iterable[Program], isa: str, folder: Path) -> Library:
    """The kernels of all programs in one library."""
    return Library([kernel for program in programs for kernel in program.kernels()], isa, folder)


def random_inputs(graph: Graph, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Of integers: from -9 to 9, but inputs whose name ends in "below<n>" are indices in [0, n)."""
    rng, inputs = np.random.default_rng(seed), {}
    for name in graph.inputs:
        shape = concrete(graph.types[name].shape, {"T": tokens})
        match graph.types[name].dtype:
            case DType.F32:
                inputs[name] = rng.standard_normal(shape).astype(np.float32)
            case DType.BOOL:
                inputs[name] = rng.random(shape) < 0.5
            case _:
                _, below, limit = name.partition("below")
                low, high = (0, int(limit)) if below else (-9, 10)
                inputs[name] = rng.integers(low, high, shape).astype(np.int32)
    return inputs


def run_native(program: Program, library: Library, inputs: Mapping[str, np.ndarray], workers: int = 1,
               ) -> dict[str, np.ndarray]:
    """The outputs, loops computed in C. Memory that a loop should write is filled with NaN or 0 before."""
    graph = program.fused
    bindings = {"T": 1, **bind_symbols(graph, inputs)}
    step = Step.of_tokens(bindings["T"])
    values = {name: placed(array) for name, array in inputs.items()}
    for node in graph.nodes:
        if node.op == "loop":
            type_ = graph.types[node.output]
            out = aligned(concrete(type_.shape, bindings), type_.dtype.numpy.type)
            library.run(_kernel(graph, node), step, *(values[value] for value in node.values), out, workers=workers)
            values[node.output] = out
        else:
            results = run_node(node, [values[i] if isinstance(i, str) else i for i in node.inputs], bindings)
            values.update({name: placed(array) for name, array in zip(node.outputs, results, strict=True)})
    return {name: values[name] for name in graph.outputs}


def expect_same(program: Program, library: Library | None, tokens: int, workers: Sequence[int] = (1,), seed: int = 0,
                tolerance: float = 2e-6) -> None:
    """unfused interpretation = fused interpretation = compiled C, for any number of workers to the bit."""
    inputs = random_inputs(program.graph, tokens, seed)
    want = run(program.graph, inputs, Source({}))
    compare(run(program.fused, inputs, Source({})), want, tolerance, f"{program.name}: fused, T = {tokens}")
    if library is None:
        return
    first: dict[str, np.ndarray] | None = None
    for count in workers:
        got = run_native(program, library, inputs, count)
        compare(got, want, tolerance, f"{program.name}: C, T = {tokens}, {count} workers")
        first = first or got
        for name in got:
            assert got[name].tobytes() == first[name].tobytes(), f"{program.name}: {count} workers give other bits"


def compare(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], tolerance: float, what: str) -> None:
    """Integers and booleans equal; floats within tolerance of the largest one; NaN and infinity where expected."""
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype and got[name].shape == expected.shape, f"{what}: {name}"
        if expected.dtype.kind != "f":
            assert np.array_equal(got[name], expected), f"{what}: {name}"
            continue
        finite = np.isfinite(expected)
        assert np.array_equal(got[name][~finite], expected[~finite], equal_nan=True), f"{what}: {name}"
        scale = max(float(np.abs(expected[finite]).max(initial=0.0)), 1e-3)
        error = float(np.abs(got[name][finite] - expected[finite]).max(initial=0.0))
        assert error <= tolerance * scale, f"{what}: {name} is off by {error / scale:.1e}"

"""What the tests of fusion share: small graphs, run unfused, fused, and as compiled C."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.compiler.fusion.c_emit import emit
from ingot.compiler.fusion.fuse import fuse_loops
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import bind_symbols, run, run_node
from ingot.compiler.ir.types import concrete
from ingot.compiler.ir.verify import verify
from ingot.compiler.weights.evaluate import evaluate
from ingot.plugins.kernel import CpuKernel
from tests.compiler.graphs import Builder, Weights, compare, random_inputs
from tests.plugins.native import Library, Step, aligned, placed

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


def run_native(program: Program, library: Library, inputs: Mapping[str, np.ndarray], workers: int = 1,
               ) -> dict[str, np.ndarray]:
    """The outputs, loops computed in C. Memory that a loop should write is filled with NaN or 0 before."""
    graph = program.fused
    bindings = {"T": 1, **bind_symbols(graph, inputs)}
    step = Step.of_tokens(bindings["T"])
    values = {name: placed(evaluate(expr, Weights())) for name, expr in graph.constants.items()}
    values.update({name: placed(array) for name, array in inputs.items()})
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
    want = run(program.graph, inputs, Weights())
    compare(run(program.fused, inputs, Weights()), want, tolerance, f"{program.name}: fused, T = {tokens}")
    if library is None:
        return
    first: dict[str, np.ndarray] | None = None
    for count in workers:
        got = run_native(program, library, inputs, count)
        compare(got, want, tolerance, f"{program.name}: C, T = {tokens}, {count} workers")
        first = first or got
        for name in got:
            assert got[name].tobytes() == first[name].tobytes(), f"{program.name}: {count} workers give other bits"

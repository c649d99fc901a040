"""Loops as Triton kernels in the interpreter, in memory that ends where it may be touched."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.compiler.fusion.triton_emit import candidates
from ingot.compiler.fusion.triton_expr import Operand
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run_node
from ingot.compiler.ir.types import DType, TensorType, concrete
from ingot.compiler.weights.evaluate import evaluate
from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.plugins.gpu.kernel import GpuLaunch
from tests.compiler.fusion.loop_runner import Program
from tests.compiler.graphs import Weights

BUCKET = {"T": 21, "L": 7}
"""The largest step of the launches; those that run are smaller."""

_ELEMENTS = {DType.I32: "i32", DType.BOOL: "bool", DType.U8: "u8", DType.I8: "i8"}
_POISON = {DType.F32: np.nan, DType.I32: 1 << 30, DType.BOOL: 77, DType.U8: 77, DType.I8: 77}


def element(type_: TensorType, float_type: str) -> str:
    return float_type if type_.dtype.is_float else _ELEMENTS[type_.dtype]


def launch(graph: Graph, node: Node, float_type: str = "fp32", bindings: Mapping[str, int] = BUCKET) -> GpuLaunch:
    operands = [Operand(graph.types[value], element(graph.types[value], float_type)) for value in node.values]
    found = candidates(node, operands, element(graph.types[node.output], float_type), bindings)
    return found.legal[0].launches[0]


def launches(program: Program, float_type: str = "fp32", bindings: Mapping[str, int] = BUCKET) -> list[GpuLaunch]:
    return [launch(program.fused, node, float_type, bindings) for node in program.fused.nodes if node.op == "loop"]


def stored(x: np.ndarray, type_: TensorType, float_type: str) -> np.ndarray:
    """Flat, in memory for the bucket's largest step, poisoned where this step has nothing."""
    flat = np.full(concrete((int(np.prod(concrete(type_.shape, BUCKET))),), {}), _POISON[type_.dtype],
                   np.uint8 if type_.dtype == DType.BOOL else type_.dtype.numpy)
    flat[:x.size] = x.reshape(-1)
    if not type_.dtype.is_float:
        return flat
    return to_bf16(flat) if float_type == "bf16" else flat.astype({"fp16": np.float16, "fp32": np.float32}[float_type])


def read(bits: np.ndarray, type_: TensorType, float_type: str, tokens: int) -> np.ndarray:
    """The value of a step, after a look at what lies behind it."""
    shape = concrete(type_.shape, {"T": tokens, "L": tokens})
    values = from_bf16(bits) if bits.dtype == np.uint16 else bits
    size = int(np.prod(shape))
    rest = values[size:]
    assert np.isnan(rest).all() if type_.dtype.is_float else (rest == _POISON[type_.dtype]).all(), "written beyond"
    return values[:size].reshape(shape).astype(type_.dtype.numpy)


def run_interpreted(program: Program, interpreter: Interpreter, inputs: Mapping[str, np.ndarray], tokens: int,
                    float_type: str = "fp32") -> dict[str, np.ndarray]:
    """The outputs, loops computed by kernels; what each reads and writes is stored in float_type."""
    graph = program.fused
    values = {name: evaluate(expr, Weights()) for name, expr in graph.constants.items()} | dict(inputs)
    for node in graph.nodes:
        if node.op == "loop":
            type_ = graph.types[node.output]
            arrays = {f"in{number}": stored(values[value], graph.types[value], float_type)
                      for number, value in enumerate(node.values)}
            one = launch(graph, node, float_type)
            wanted = {name for name, _ in one.kernel.parameters}
            arrays = {name: array for name, array in arrays.items() if name in wanted}
            arrays["out"] = stored(np.empty(0, type_.dtype.numpy), type_, float_type)
            if "sizes" in wanted:
                arrays["sizes"] = np.array([tokens, 1, tokens], np.int32)
            bits = interpreter.run([(one, {})], arrays)["out"]
            values[node.output] = read(bits, type_, float_type, tokens)
        else:
            results = run_node(node, [values[i] if isinstance(i, str) else i for i in node.inputs],
                               {"T": tokens, "L": tokens})
            values.update(zip(node.outputs, results, strict=True))
    return {name: values[name] for name in graph.outputs}

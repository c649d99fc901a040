"""The GPU back end: from the final graph to cubins, weights and a plan for every token bucket."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch, TensorMap
from ingot.plugins.gpu.sources import source_digest
from ingot.runtime.lora import LoraRoom
from ingot.runtime.program import Limits
from ingot.runtime.step import StepLayout

from ..cache.build_cache import BuildCache
from ..ir.graph import Graph
from ..passes.add_lora import lora_room
from ..plan.buckets import memory_report, token_buckets
from ..plan.kv_cache import KvCache, plan_kv_cache
from ..plan.memory import Arena
from ..plan.plan import NULL, Arg, Bucket, Launch, Output, Plan, Weight, Workspace, Write
from ..targets import Gpu
from ..weights.packed import PackedWeight, WeightTable
from .choose import Choice, Chooser
from .emit_linear import MATRICES
from .emitters import EMITTERS, emit_sample
from .lower import GpuLowering, Request
from .native import require_native
from .report import kernel_report
from .storage import stored_types
from .triton_compile import CompiledKernel

KV_FRACTION = 0.9
"""Of the memory that is left, for the KV cache: what the runtime takes by default."""

_ENDS_A_LAYER = (*MATRICES, "combine")
"""One of these computes the last of what only this layer can."""

_ALIGNMENT = 256
_LAYER = re.compile(r"\blayers?\.(\d+)\b|\bh\.(\d+)\b")


@dataclass(frozen=True)
class GpuProgram:
    """Everything of an engine but the bytes of its weights. code: symbol -> what the kernel compiled to.

    tables: values that are made of positions alone
    lora: room for adapters
    """

    gpu: Gpu
    buckets: tuple[Bucket, ...]
    kernels: dict[str, GpuKernel]
    code: dict[str, CompiledKernel]
    weights: tuple[PackedWeight, ...]
    kv: KvCache
    probes: dict[str, str]
    vocab_size: int
    workspace: Workspace
    table: list[dict[str, Any]]
    step_bytes: int
    tables: frozenset[str]
    lora: LoraRoom | None = None

    def target_facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {}

    def plan(self, written: dict[str, Weight]) -> Plan:
        kernels = {name: kernel_json(kernel, self.code[name]) for name, kernel in self.kernels.items()}
        return Plan(self.kv, written, self.buckets, self.probes, kernels, self.workspace)

    def kernel_table(self) -> list[dict[str, Any]]:
        return self.table

    def memory(self) -> dict[str, Any]:
        """Sizes in bytes, of one GPU. step_bytes: of a step's inputs and outputs; fixed_bytes: all but the KV cache;
        kv_tokens: that KV_FRACTION of the device's other memory holds, 0 where nothing is left."""
        report = memory_report(self.weights, self.buckets, self.kv, self.lora)
        code = sum(len(compiled.cubin) for compiled in self.code.values())
        fixed = report["weights_bytes"] + report["arena_bytes"] + self.workspace.bytes + self.step_bytes + code
        fixed += report.get("lora_bytes", 0)
        left = max(0, self.gpu.memory_bytes - fixed)
        blocks = int(KV_FRACTION * left) // self.kv.block_bytes // len(self.kv.windows)
        return report | {"workspace_bytes": self.workspace.bytes, "step_bytes": self.step_bytes, "code_bytes": code,
                         "fixed_bytes": fixed, "device_bytes": self.gpu.memory_bytes,
                         "kv_tokens": blocks * self.kv.block_size}

    def warnings(self) -> tuple[str, ...]:
        """What the user should know of it."""
        memory = self.memory()
        if memory["kv_tokens"]:
            return ()
        return (f"weights and arena take {memory['fixed_bytes'] / 1e9:.1f} GB; one GPU has "
                f"{memory['device_bytes'] / 1e9:.1f} GB, so that no KV cache fits: a precision of fewer bits, or "
                "several GPUs (--tensor-parallel), need less of each",)

    def facts(self) -> dict[str, Any]:
        """More of the manifest."""
        counts = {str(bucket.tokens): self.count_launches(bucket) for bucket in self.buckets}
        return {"launches_per_layer": {tokens: max(layers.values(), default=0)
                                       for tokens, (layers, _) in counts.items()},
                "launches_outside_layers": {tokens: others for tokens, (_, others) in counts.items()},
                **({"lora": self.lora.to_json()} if self.lora else {})}

    def count_launches(self, bucket: Bucket) -> tuple[dict[int, int], int]:
        """(layer -> its launches, launches of a step that belong to none).

        A launch belongs to the layer that its node's origin names; where it does the work of several nodes, to that of
        the first: the sum over a layer's choices is that layer's, though it makes the norm of the next one too, and the
        embedding is of no layer, though it makes the first norm. Nor are tables, which the first layer may name and all
        of them read; and what stands behind the last matrix of the last layer, for others leave that to the next one's
        first: a norm behind the block, last norm, head and sampling. Those for LoRA adapters are not counted.
        """
        launches = [launch for launch in bucket.launches if not launch.adapters]
        matches = [None if launch.writes and launch.writes.keys() <= self.tables else _LAYER.search(launch.origin)
                   for launch in launches]
        found = [int(match[1] or match[2]) if match else None for match in matches]
        inside = [number for number, launch in enumerate(launches)
                  if found[number] is not None and launch.op in _ENDS_A_LAYER]
        layers = Counter(layer for layer in found[:max(inside, default=-1) + 1] if layer is not None)
        return dict(layers), len(found) - layers.total()

    def members(self, compiler: str, cache: BuildCache | None = None) -> dict[str, bytes]:
        """Member of the engine -> its bytes."""
        found = {f"code/{name}.cubin": self.code[name].cubin for name in self.kernels}
        return found | {f"code/{kernel.module}.py": kernel.source.encode() for kernel in self.kernels.values()
                        if kernel.source}


def generate(graph: Graph, gpu: Gpu, floats: str, limits: dict[str, int], block_size: int,
             progress: Callable[[str], None] = lambda symbol: None, cache: Path | None = None) -> GpuProgram:
    """Lower the graph for every token bucket, choose the kernels and compile them.

    floats: element type of the values between launches. Raises CannotCompile.
    """
    weights = WeightTable()
    vocab = int(graph.types[graph.outputs[0]].shape[-1])
    kv = plan_kv_cache(graph, block_size, limits["max_seq_len"])
    stored, ways = stored_types(graph, floats), dict[Any, Any]()
    lowered: list[tuple[GpuLowering, Arena]] = []
    for tokens in token_buckets(limits["max_num_tokens"]):
        bindings = {"T": tokens, "L": min(tokens, limits["max_batch_size"])}
        lowering = GpuLowering(graph=graph, tokens=tokens, bindings=bindings, limits=limits, weights=weights, kv=kv,
                               gpu=gpu, floats=floats, stored=stored, emitters=EMITTERS, ways=ways)
        lowering.emit_all()
        emit_sample(lowering, vocab)
        lowered.append((lowering, lowering.plan_arena([request.buffers for request in lowering.requests])))
    chooser = Chooser(gpu, cache, progress)
    choices = chooser.choose([request for lowering, _ in lowered for request in lowering.requests])
    launches = [launch for choice in choices for launch in choice.candidate.launches]
    workspace = _workspace(launches)
    kernels = {launch.kernel.symbol: launch.kernel for launch in launches}
    buckets, chosen = [], iter(choices)
    asked: list[tuple[int, Request, Choice]] = []
    for lowering, arena in lowered:
        made = [(request, next(chosen)) for request in lowering.requests]
        asked += [(lowering.tokens, request, choice) for request, choice in made]
        buckets.append(_bucket(lowering, arena, made, workspace))
    code = {symbol: chooser.code[symbol] for symbol in kernels}
    require_native(asked, code)
    written = set.intersection(*({name for launch in bucket.launches for name in launch.writes} for bucket in buckets))
    probes = {label: value for label, value in graph.probes.items() if value in written}
    layout = StepLayout(Limits(**limits), vocab, block_size, len(kv.windows))
    return GpuProgram(gpu, tuple(buckets), kernels, code, tuple(weights.entries.values()), kv, probes, vocab,
                      workspace, kernel_report(asked, code, gpu.arch), layout.num_bytes, _tables(graph),
                      lora_room(graph))


def _tables(graph: Graph) -> frozenset[str]:
    """Values that no token id has a part in."""
    of_tokens = {"token_ids"}
    for node in graph.nodes:
        if not of_tokens.isdisjoint(node.values):
            of_tokens.update(node.outputs)
    return frozenset(name for node in graph.nodes for name in node.outputs if name not in of_tokens)


def _workspace(launches: Sequence[GpuLaunch]) -> Workspace:
    """Arrivals of all launches at its beginning, partial results behind them; and what ranks signal each other."""
    zeroed = max((launch.zeroed_bytes for launch in launches), default=0)
    zeroed = -(-zeroed // _ALIGNMENT) * _ALIGNMENT
    partial = max((launch.scratch_bytes for launch in launches), default=0)
    return Workspace(zeroed + -(-partial // _ALIGNMENT) * _ALIGNMENT, zeroed,
                     max((launch.signal_bytes for launch in launches), default=0))


def _bucket(lowering: GpuLowering, arena: Arena, made: Sequence[tuple[Request, Choice]],
            workspace: Workspace) -> Bucket:
    shared = {"arrived": Arg("workspace"), "partial": Arg("workspace", offset=workspace.zeroed_bytes)}
    launches: list[Launch] = []
    for request, choice in made:
        launches += [_launch(request, launch, {**request.args, **shared}) for launch in choice.candidate.launches]
    logits, *others = lowering.graph.outputs
    outputs = {("logits" if name == logits else name): Output(
        arena.offsets[lowering.places[name].arg.name], lowering.width(name), lowering.type(name).dtype.value)
        for name in (logits, *others)}
    return Bucket(lowering.tokens, tuple(launches), arena.offsets, arena.size, arena.bound, arena.unshared, outputs)


def _launch(request: Request, launch: GpuLaunch, args: dict[str, Arg]) -> Launch:
    parameters = launch.kernel.parameters
    numbers = {name: number for number, (name, _) in enumerate(parameters)}
    given = tuple(_argument(args.get(name, NULL), kind) for name, kind in parameters)
    missing = [name for name in numbers if name not in args]
    assert not missing, f"{launch.kernel.symbol} in {request.origin}: nothing is given for {missing}"
    writes = {value: Write(numbers[name], shape, dtype) for value, (name, shape, dtype) in request.writes.items()
              if name in numbers}
    return Launch(launch.kernel.symbol, given, request.origin, writes=writes, op=request.op, grid=launch.grid,
                  adapters=request.adapters)


def _argument(arg: Arg, kind: str | TensorMap) -> Arg:
    if isinstance(kind, str):
        return arg
    return Arg(arg.kind, arg.name, arg.offset, arg.part, (*kind.shape, kind.stride))


def kernel_json(kernel: GpuKernel, code: CompiledKernel) -> dict[str, Any]:
    """Its entry in a plan: what a launch needs, and what its source is."""
    parameters = [[name, kind if isinstance(kind, str) else {"tensormap": kind.dtype, "block": list(kind.block)}]
                  for name, kind in kernel.parameters]
    return {"code": f"code/{kernel.symbol}.cubin", "entry": code.entry, "threads": 32 * code.num_warps,
            "shared_bytes": code.shared_bytes, "cluster": code.cluster, "scratch_bytes": code.scratch_bytes,
            "programmatic_launch": code.programmatic_launch,
            "parameters": parameters, "tensor_maps": [dict(one) for one in code.tensor_maps],
            "module": kernel.module, "function": kernel.function, "constants": dict(kernel.constants),
            "num_warps": kernel.num_warps, "num_stages": kernel.num_stages,
            "source_sha256": source_digest(kernel.module, kernel.source)}

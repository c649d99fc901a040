"""From the final graph to launches on a CPU: one kernel a node, every operand placed."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ingot.plugins.kernel import CpuKernel

from ..errors import CannotCompile
from ..ir.graph import Node
from ..ir.types import Dim, DType
from ..plan.lowering import BaseLowering
from ..plan.plan import NULL, Arg, Bucket, Launch, Write
from ..tune.problems import P
from ..tune.records import Records
from .join_rows import join_rows
from .repeat import repeat_small_launches


@dataclass(kw_only=True)
class Lowering(BaseLowering):
    """The launches of one token bucket; emitters.py adds them node by node."""

    isa: str
    tuning: Records | None = None
    emitters: Mapping[str, Callable[[Lowering, Node], None]]
    launches: list[Launch] = field(default_factory=list)
    kernels: dict[str, CpuKernel] = field(default_factory=dict)
    _drafts: dict[str, str] = field(default_factory=dict)
    _row_bytes: dict[str, int] = field(default_factory=dict)

    def run(self) -> Bucket:
        self.emit_all()
        self.launches = repeat_small_launches(self.launches, self.kernels, self.sizes, self.tokens)
        kept = {self.buffer(value) for value in (*self.graph.outputs, *self.graph.probes.values())}
        self.launches = join_rows(self.launches, self.kernels, self._row_bytes, kept, self.tokens)
        used = {launch.kernel for launch in self.launches}
        self.kernels = {name: kernel for name, kernel in self.kernels.items() if name in used}
        arena = self.plan_arena([launch.reads for launch in self.launches])
        return Bucket(self.tokens, tuple(self.launches), arena.offsets, arena.size, arena.bound, arena.unshared,
                      self.outputs(arena))

    def emit(self, node: Node) -> None:
        if node.op not in self.emitters:
            types = ", ".join(str(self.type(value)) for value in node.values)
            raise CannotCompile(f"{node.op}({types}): CPU targets have no kernel for this operator\n"
                                f"  in {node.origin or 'an operation without a name'}")
        self.emitters[node.op](self, node)

    def tuned(self, problem: P) -> P:
        """The problem with the tactic that was measured for it, if one was."""
        return problem if self.tuning is None else self.tuning.tuned(problem) or problem

    def scratch(self, size_bytes: int) -> Arg:
        """Memory for the launches of one node alone."""
        name = f"scratch{len(self.launches)}"
        self.sizes[name] = size_bytes
        return Arg("value", name)

    def draft(self, value: str) -> Arg:
        """Memory for the launches of one node alone, in which a value takes shape."""
        name = f"scratch{len(self.launches)}.{value}"
        self.sizes[name] = self._bytes(value)
        self._drafts[name] = value
        return Arg("value", name)

    def kv_args(self, slot: int) -> list[Arg]:
        """Keys, values, the scales of both or nothing, and the table of their blocks."""
        scaled = self.kv_slot(slot).key_scale_offset is not None
        parts = [Arg("kv", str(slot), 0, part) if scaled or len(part) == 1 else NULL
                 for part in ("k", "v", "k_scale", "v_scale")]
        return [*parts, Arg("input", "block_tables", self.table_offset(slot))]

    def launch(self, node: Node, kernel: CpuKernel, args: list[Arg], writes: Mapping[str, int] | None = None,
               op: str = "", rows: Dim = "", adapters: bool = False) -> None:
        """Add a launch. writes: value -> number of the argument that receives it; op: the node's, if not said; rows:
        see Launch, of values that it writes whole; adapters: see Launch."""
        self.kernels[kernel.symbol] = kernel
        buffers = tuple(dict.fromkeys(a.name for a in args if a.kind == "value"))
        types = {name: self.type(self._drafts.get(name, name)) for name in writes or {}}
        shown = {name: Write(arg, types[name].shape, types[name].dtype.value) for name, arg in (writes or {}).items()}
        if rows:
            self._row_bytes.update({args[arg].name: self._bytes(name) // self.count(rows)
                                    for name, arg in (writes or {}).items() if types[name].dtype == DType.F32})
        self.launches.append(Launch(kernel.symbol, tuple(args), node.origin, buffers, shown, op=op or node.op,
                                    rows=str(rows), adapters=adapters))

"""From the final graph to launches on a GPU: for each node the ways to compute it, every operand placed.

Which of them is taken is decided afterwards for all token buckets together (choose.py): where values lie does not
depend on it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.plugins.gpu.kernel import Candidate, Candidates
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES, GpuScheme

from ..errors import CannotCompile
from ..ir.graph import Node
from ..ir.types import Dim, concrete, product, split_dim
from ..plan.lowering import BaseLowering
from ..plan.plan import Arg
from ..targets import Gpu
from ..weights.packed import ROWS, PackedWeight, Packing
from .storage import ELEMENT_BYTES, PLAN_DTYPES

MAX_FEW_TOKENS = 8
"""In steps of up to so many tokens matrices and attention prepare their inputs themselves: they wait for weights."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class Request:
    """A launch, or a few in a row, to be chosen among candidates.

    precision  whose operations the cost model counts: a precision of the target
    native     the matrix instruction that computes a linear layer of that precision must show in the code
    args       parameter of a kernel -> what it gets; "partial" and "arrived" are the workspace's
    buffers    that it reads or writes, in the arena
    writes     value -> (parameter, shape, element type in the plan)
    adapters   it has nothing to do in a step without LoRA adapters
    """

    op: str
    origin: str
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    precision: str
    native: bool
    args: Mapping[str, Arg]
    buffers: tuple[str, ...]
    writes: Mapping[str, tuple[str, tuple[Dim, ...], str]]
    adapters: bool = False


Range = tuple[str, int, int | None]
"""A value that a launch makes, the first element of it, and the stride between its rows, as in Place."""


@dataclass(kw_only=True)
class GpuLowering(BaseLowering):
    """The requests of one token bucket; emitters.py adds them node by node.

    floats   element type of floating values in memory
    stored   value -> its element type in memory
    ways     problems that were looked at, for all buckets of a build
    quantized  what a matrix gets in the place of a value, in which form: parameter -> place
    absorbed   value -> the node that makes it, if its readers do the node's work themselves
    made       the first outputs of nodes whose work an earlier launch has done
    unmade     result of a norm -> that norm, where adapters read what nobody else needs in memory
    """

    gpu: Gpu
    floats: str
    stored: Mapping[str, str]
    emitters: Mapping[str, Callable[[GpuLowering, Node], None]]
    ways: dict[Any, Candidates] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    quantized: dict[tuple[Range, str], dict[str, Arg]] = field(default_factory=dict)
    absorbed: dict[str, Node] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    unmade: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._producers = self.graph.producers()

    @property
    def few(self) -> bool:
        return self.tokens <= MAX_FEW_TOKENS

    def emit(self, node: Node) -> None:
        if node.outputs[0] in self.made:
            return
        if node.op not in self.emitters:
            types = ", ".join(str(self.type(value)) for value in node.values)
            raise CannotCompile(f"{node.op}({types}): GPU targets have no kernel for this operator\n"
                                f"  in {node.origin or 'an operation without a name'}")
        self.emitters[node.op](self, node)

    # --- what emitters ask ---

    def element_bytes(self, value: str) -> int:
        return ELEMENT_BYTES[self.stored[value]]

    def row_symbol(self, value: str, node: Node) -> str:
        """ "T" or "L"; the kernel of the node knows no other numbers of rows."""
        rows = self.rows(value)
        if rows not in ("T", "L"):
            raise CannotCompile(f"{node.op} of {self.type(value)}: its kernel takes a row for each token\n"
                                f"  in {node.origin}")
        return str(rows)

    def rows_a_token(self, value: str) -> int:
        """How many rows of the last dimension belong to a token, or to a row of logits."""
        return split_dim(self.rows(value))[0]

    def identity(self, value: str) -> Range:
        """Which elements a value is, however they are seen."""
        place = self.place(value)
        return self.root(value), place.offset, place.stride

    def root(self, value: str) -> str:
        """What a value is a view of."""
        while (node := self._producers.get(value)) is not None and self._is_view(node):
            value = node.values[0]
        return value

    def is_next(self, first: Node, second: Node) -> bool:
        """Whether only views stand between two nodes."""
        order = [node for node in self.graph.nodes if not self._is_view(node)]
        return order[order.index(first) + 1] is second

    def x_stride(self, value: str) -> int:
        """Elements between rows; 0 where they lie close."""
        stride = self.stride(value)
        return 0 if stride == self.width(value) else stride

    def candidates(self, problem: Any, find: Callable[[Any, Any], Candidates]) -> Candidates:
        """What a plugin's tactics offer; asked once for each problem."""
        key = find, problem
        if key not in self.ways:
            self.ways[key] = find(problem, self.gpu.device)
        return self.ways[key]

    def scheme(self, node: Node) -> GpuScheme:
        """How a matrix holds its weights and takes its inputs. Raises CannotCompile where those are not as values lie
        in memory."""
        scheme = GPU_SCHEMES[node.attrs["scheme"]]
        if not scheme.quantized and scheme.activation != self.floats:
            raise CannotCompile(f"{node.op} in {scheme.name} takes its inputs in {scheme.activation}; values of this "
                                f"engine are held in {self.floats}\n  in {node.origin}")
        return scheme

    def matrix(self, value: str, scheme: str) -> tuple[PackedWeight, dict[str, Arg]]:
        """The packed matrix, and its arrays: w, w_scale, …"""
        packed = self.weights.packed(self.graph.constants[value], Packing(scheme, ROWS), value)
        return packed, {name: Arg("weight", packed.name, offset) for name, (offset, _) in packed.parts.items()}

    def temporary(self, name: str, size_bytes: int) -> Arg:
        """Memory that is no value of the graph."""
        assert name not in self.sizes, name
        self.sizes[name] = size_bytes
        return Arg("value", name)

    def kv_args(self, slot: int) -> dict[str, Arg]:
        """Parameter -> keys, values, their scales, and the table of their blocks."""
        parts = {"k_part": "k", "v_part": "v"}
        if self.kv_slot(slot).key_scale_offset is not None:
            parts |= {"k_scales": "k_scale", "v_scales": "v_scale"}
        found = {parameter: Arg("kv", str(slot), 0, part) for parameter, part in parts.items()}
        return found | {"block_table": Arg("input", "block_tables", self.table_offset(slot))}

    def request(self, node: Node, found: Candidates, args: Mapping[str, Arg], writes: Mapping[str, str],
                precision: str = "", native: bool = False, op: str = "", adapters: bool = False) -> None:
        """Ask for a launch. writes: value -> parameter that receives it; op: the node's, if not said; adapters: see
        Request.

        Raises CannotCompile where no candidate is legal, with the reasons.
        """
        refused = tuple((refusal.name, refusal.reason) for refusal in found.refused)
        if not found.legal:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise CannotCompile(f"{node.op} has no kernel on {self.gpu.arch.name}: {reasons}\n  in {node.origin}")
        for name, arg in args.items():
            if arg.kind != "null" and arg.offset % _ALIGNMENT:
                raise CannotCompile(f"{op or node.op}: {name} begins {arg.offset} bytes into its row; kernels of GPUs "
                                    f"need a multiple of {_ALIGNMENT}\n  in {node.origin}")
        buffers = tuple(dict.fromkeys(arg.name for arg in args.values() if arg.kind == "value"))
        shown = {value: (parameter, self.type(value).shape, PLAN_DTYPES[self.stored[value]])
                 for value, parameter in writes.items()}
        self.requests.append(Request(op or node.op, node.origin, found.legal, refused, precision or self._float_rate(),
                                     native, {**args, "sizes": Arg("input", "sizes")}, buffers, shown, adapters))

    def elements(self, value: str) -> int:
        """In the largest step of the bucket."""
        count = product(concrete(self.type(value).shape, dict(self.bindings)))
        assert isinstance(count, int)
        return count

    def _float_rate(self) -> str:
        return self.floats if self.floats in self.gpu.arch.precisions else "fp32"

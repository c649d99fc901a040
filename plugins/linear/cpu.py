"""The kernels that multiply activations with a packed matrix."""
from __future__ import annotations

from dataclasses import dataclass

from ..kernel import CpuKernel
from ..quantize.cpu import rounding, row_count
from ..quantize.reference import row_bytes
from ..scheme import Scheme

MAX_FUSED_ROWS = 8
"""Up to so many tokens a kernel can round its input itself."""

_CACHE_BYTES = 512 << 10
"""Activations of a block of tokens: half of a usual second-level cache; but not so few that weights are read often."""


@dataclass(frozen=True)
class Tactic:
    """How a matrix is walked. All ways give the same result, to the bit. 0: what the model of the processor says, which
    is the registers and caches that its instruction set lets expect (linear.h and the functions below).

    rows, panels  of the largest tile: tokens, and 16 output channels each
    k_step        channels of K at a time, whose weights stay in a cache for all rows; of schemes in floats only
    block_rows    tokens that are taken through all panels together
    ahead         how far ahead of its use a weight is fetched, in bytes
    """

    rows: int = 0
    panels: int = 0
    k_step: int = 0
    block_rows: int = 0
    ahead: int = 0

    @property
    def tag(self) -> str:
        """For a kernel's symbol: "r4p2a4096"; "" for the model's choice."""
        return "".join(f"{name[0]}{value}" for name, value in vars(self).items() if value)


MODEL = Tactic()


@dataclass(frozen=True)
class Problem:
    """y[rows, n] = x[rows, k] w[n, k]^T (+ bias[n]) (+ residual[rows, n])

    m           the largest number of rows in a step: decides between the ways to compute, not what is allowed
                beyond 1 and MAX_FUSED_ROWS
    rows        "T" the tokens of a step, "L" its rows of logits
    x_stride    elements between rows of a float x; 0: k
    float_input a kernel of rounded inputs takes x as float32 and rounds it itself (each worker all of it): saves a
                launch for m <= MAX_FUSED_ROWS
    tactic      how, where it was measured
    """

    n: int
    k: int
    scheme: Scheme
    m: int
    rows: str = "T"
    bias: bool = False
    residual: bool = False
    x_stride: int = 0
    float_input: bool = False
    tactic: Tactic = MODEL

    def __post_init__(self) -> None:
        assert not self.float_input or (self.scheme.rounds_inputs and self.m <= MAX_FUSED_ROWS), self

    @property
    def size_class(self) -> int:
        """1, 8, or 0 for any number of rows."""
        return 1 if self.m == 1 else 8 if self.m <= 8 else 0


def emit(problem: Problem) -> CpuKernel:
    """args: x, w, y, then bias and residual where there are.

    x f32 [rows, k], or u8 [rows, row_bytes(k, scheme)] as the quantize kernel writes it for a scheme of rounded inputs
    without float_input; w from pack(); y f32 [rows, n]; bias f32 [n], readable up to the next multiple of 64 bytes;
    residual f32 [rows, n], may be y itself.
    """
    p = problem
    prepare = ""
    source, stride = "args[0]", 4 * (p.x_stride or p.k)
    if p.scheme.rounds_inputs:
        stride = row_bytes(p.k, p.scheme)
        if p.float_input:
            source = "rows"
            prepare = (f"_Alignas(64) uint8_t rows[{(p.size_class or MAX_FUSED_ROWS) * stride}];\n"
                       + rounding("args[0]", "rows", row_count(p.rows), p.k, p.x_stride or p.k, p.scheme, "0, 1")
                       + "\n")
    bias, residual = "args[3]" if p.bias else "NULL", f"args[{3 + p.bias}]" if p.residual else "NULL"
    tile, max_rows, panels, k_step = tile_arguments(p.scheme, p.size_class, p.k, p.tactic)
    if p.residual:
        k_step = str(p.k)  # y may be the residual: it cannot hold sums on the way
    begin, end = tile_registers(p.scheme, p.size_class)
    body = (f"{prepare}{begin}"
            f"const ingot_matmul job = {{.x = {source}, .x_stride = {stride}, .share = 1, .w = args[1],\n"
            f"                          .y = args[2], .bias = {bias}, .residual = {residual},\n"
            f"                          .n = {p.n}, .k = {p.k}, .ahead = {ahead(p.scheme, p.size_class, p.tactic)}}};\n"
            f"ingot_linear({tile}, {max_rows}, {panels}, {k_step}, &job, {row_count(p.rows)},\n"
            f"             {block_rows(p.scheme, p.k, p.tactic)}, worker, num_workers);{end}")
    return CpuKernel(_symbol(p), "linear/linear.h", body, choice=p)


def tile_arguments(scheme: Scheme, size_class: int, k: int, tactic: Tactic = MODEL) -> tuple[str, str, str, str]:
    """The C words for: tile function, its largest rows and panels, channels of K at a time.

    With few tokens the weights come from memory, and do so fastest as one stream.
    """
    most = "INGOT_PAIR_ROWS" if scheme.act_bits == 16 else "INGOT_ROWS"
    most = "INGOT_INTEGER_ROWS" if scheme.is_integer and size_class == 0 else most
    rows = "1" if size_class == 1 else str(tactic.rows or most)
    by_row = scheme.is_integer and scheme.weight_bits == 8 and scheme.act_group == 0
    tile = scheme.name + "_row" * by_row
    tile = f"INGOT_TILE({tile})" if scheme.rounds_inputs else f"ingot_tile_{tile}"
    panels = "1" if size_class == 1 or (size_class and scheme.rounds_inputs) else "INGOT_PANELS"
    step = "INGOT_PAIR_K_STEP" if scheme.act_bits == 16 else "INGOT_FLOAT_K_STEP"
    k_step = str(k) if scheme.is_integer or size_class else str(tactic.k_step or step)
    return tile, rows, str(tactic.panels or panels), k_step


def tile_registers(scheme: Scheme, size_class: int) -> tuple[str, str]:
    """The C statements around a launch that may multiply by AMX: of integers more than 8 tokens at a time."""
    if not scheme.rounds_inputs or (scheme.is_integer and size_class):
        return "", ""
    shape = "INGOT_TILES_OF_BYTES" if scheme.is_integer else "INGOT_TILES_OF_PAIRS"
    return f"ingot_begin_tiles({shape});\n", "\ningot_end_tiles();"


def ahead(scheme: Scheme, size_class: int, tactic: Tactic = MODEL) -> str:
    """In C, how far ahead of its use a weight is fetched."""
    kind = "ROUNDED" if scheme.rounds_inputs else "BF16" if scheme.weight_bits == 16 and size_class == 1 else "FLOAT"
    of_one = "_OF_ONE" if size_class == 1 and kind != "FLOAT" else ""
    return str(tactic.ahead or f"INGOT_{kind}_AHEAD{of_one}")


def block_rows(scheme: Scheme, k: int, tactic: Tactic = MODEL) -> int:
    """Tokens that are taken through all panels together."""
    row = row_bytes(k, scheme) if scheme.rounds_inputs else 4 * k
    return tactic.block_rows or min(256, max(64, _CACHE_BYTES // row // 16 * 16))


def tactics(problem: Problem) -> tuple[Tactic, ...]:
    """What is worth measuring for a problem of this size class, the model's choice first."""
    if problem.size_class == 1:
        shapes = [Tactic(panels=panels) for panels in (1, 2)]
        return (MODEL, *shapes, *(Tactic(ahead=ahead) for ahead in (1024, 2048, 4096, 8192, 16384)))
    shapes = [Tactic(rows=rows, panels=panels) for rows in (2, 4, 8) for panels in (1, 2)]
    if problem.size_class == 8:
        return (MODEL, *shapes, *(Tactic(ahead=ahead) for ahead in (2048, 16384)))
    blocks = [Tactic(block_rows=rows) for rows in (32, 64, 128, 256)]
    steps = [] if problem.scheme.is_integer or problem.residual else [Tactic(k_step=step) for step in (256, 1024)]
    return (MODEL, *shapes[2:], *blocks, *steps)


def _symbol(p: Problem) -> str:
    size = {1: "m1", 8: "m8", 0: "mx"}[p.size_class]
    options = [(p.rows != "T", p.rows.replace("*", "")), (p.bias, "bias"), (p.residual, "residual"),
               (p.float_input, "quantize"), (p.x_stride not in (0, p.k), f"x{p.x_stride}"),
               (p.tactic != MODEL, p.tactic.tag)]
    return "_".join(["linear", p.scheme.tag, f"n{p.n}", f"k{p.k}", size, *(name for on, name in options if on)])

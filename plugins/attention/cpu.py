"""The attention kernels of the CPU target."""
from __future__ import annotations

from dataclasses import dataclass

from ..constants import float_in_c, symbol
from ..kernel import CpuKernel

_INCLUDE = "attention/attention.h"
_MAX_RANGES = 16
KV_TYPES = {"f32": "INGOT_KV_F32", "bf16": "INGOT_KV_BF16", "i8": "INGOT_KV_I8"}
_KV_TYPE_BYTES = {"f32": 4, "bf16": 2, "i8": 1}


def block_stride(block_bytes: int, kv_dtype: str) -> int:
    """Elements of the cache from one block to the next."""
    assert block_bytes % _KV_TYPE_BYTES[kv_dtype] == 0, (block_bytes, kv_dtype)
    return block_bytes // _KV_TYPE_BYTES[kv_dtype]


@dataclass(frozen=True)
class Tactic:
    """How a context and its keys are cut; 0: what the model says. Results differ in their last bits.

    rows       of an item of many rows at most, a multiple of 64: tokens times the query heads of a key/value head
    keys       that such an item takes at a time, a multiple of 48
    min_range  keys of a part of the context at least, where few tokens leave workers idle; a multiple of 16
    """

    rows: int = 0
    keys: int = 0
    min_range: int = 0

    def __post_init__(self) -> None:
        assert not (self.rows % 64 or self.keys % 48 or self.min_range % 16), self

    @property
    def tag(self) -> str:
        """For a kernel's symbol: "r128k96"; "" for the model's choice."""
        return "".join(f"{name[0]}{value}" for name, value in vars(self).items() if value)


MODEL = Tactic()


@dataclass(frozen=True)
class Attention:
    """The constants of one attention.

    q_stride, out_stride: floats from a token's row to the next; 0: rows without gaps.
    block_bytes: of a block of the cache, with all its layers. kv_dtype: "f32" | "bf16" | "i8".
    window, chunk, softcap: 0 means none; see the reference. tactic: how, where it was measured.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    block_bytes: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    kv_dtype: str = "bf16"
    q_stride: int = 0
    out_stride: int = 0
    tactic: Tactic = MODEL

    def __post_init__(self) -> None:
        assert self.q_heads % self.kv_heads == 0, self
        assert self.block_size % 4 == 0, "keys are taken by fours, which must lie in one block"
        assert self.kv_dtype in KV_TYPES, self

    def _symbol(self, name: str) -> str:
        c = self
        return symbol(name, f"q{c.q_heads}", f"kv{c.kv_heads}", f"k{c.key_dim}", f"v{c.value_dim}", f"b{c.block_size}",
                      f"s{c.block_bytes}", c.kv_dtype,
                      f"w{c.window}" if c.window else "", f"c{c.chunk}" if c.chunk else "",
                      f"qs{c.q_stride}" if c.q_stride else "", f"os{c.out_stride}" if c.out_stride else "",
                      c.tactic.tag, float(c.scale), float(c.softcap))

    @property
    def rows(self) -> int:
        """Of an item of many rows at most, never less than one token's heads. By the model 128, or 64 of large heads:
        their scores and one tile of keys stay in the first-level cache, or nearly.
        """
        rows = self.tactic.rows or (128 if self.key_dim + self.value_dim <= 256 else 64)
        return max(rows, -(-(self.q_heads // self.kv_heads) // 64) * 64)

    @property
    def keys(self) -> int:
        return self.tactic.keys or 48

    @property
    def _in_c(self) -> str:
        c = self
        return (f"const ingot_attention c = {{.q_heads = {c.q_heads}, .kv_heads = {c.kv_heads}, "
                f".key_dim = {c.key_dim}, .value_dim = {c.value_dim},\n"
                f"    .block_size = {c.block_size}, .kv_type = {KV_TYPES[c.kv_dtype]}, "
                f".block_stride = {block_stride(c.block_bytes, c.kv_dtype)},\n    "
                f".q_stride = {c.q_stride or c.q_heads * c.key_dim}, "
                f".out_stride = {c.out_stride or c.q_heads * c.value_dim},\n"
                f"    .window = {c.window}, .chunk = {c.chunk}, .rows = {c.rows}, .keys = {c.keys}, "
                f".min_range = {c.tactic.min_range or 64},\n    "
                f".scale = {float_in_c(c.scale)}, .softcap = {float_in_c(c.softcap)}}};\n")


def attention(problem: Attention) -> CpuKernel:
    """First of two launches. args: q f32 [T, Hq, Dk] (rows q_stride apart), K cache, V cache, their scales or
    null, block table, sinks f32 [Hq] or null, scratch (`scratch_bytes`), out f32 [T, Hq, Dv] (rows out_stride apart).
    """
    p = problem
    work = f"ATTENTION_WORK({p.rows}, {p.keys}, {p.key_dim}, {p.value_dim})"
    return CpuKernel(p._symbol("attention"), _INCLUDE,
                     f"{p._in_c}_Alignas(64) float work[{work}];\n"
                     "ingot_attention_run(step, args, worker, num_workers, c, work);", choice=p)


def attention_combine(problem: Attention) -> CpuKernel:
    """Second launch; before it, nothing is there for long contexts. args: scratch, sinks or null, what the first launch
    wrote, or null if that is `out` itself, out.
    """
    return CpuKernel(problem._symbol("attention_combine"), _INCLUDE,
                     f"{problem._in_c}ingot_attention_combine(step, args, worker, num_workers, c);")


def scratch_bytes(problem: Attention, max_tokens: int, max_seqs: int) -> int:
    """Size of the scratch of a step with at most so many tokens and sequences."""
    rows = _MAX_RANGES * min(max_tokens, max_seqs) * problem.q_heads
    row_floats = -(-(problem.value_dim + 2) // 16) * 16
    return 4 * rows * row_floats


def tactics(problem: Attention) -> tuple[Tactic, ...]:
    """What is worth measuring, the model's choice first."""
    rows = [Tactic(rows=rows, keys=keys) for rows in (64, 128, 192) for keys in (48, 96, 144)]
    return (MODEL, *rows, *(Tactic(min_range=keys) for keys in (32, 128, 256)))

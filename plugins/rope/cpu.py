"""The kernels before attention of the CPU target: per-head norm, rope, write to the KV cache."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..attention.cpu import KV_TYPES, block_stride
from ..constants import float_in_c, symbol
from ..kernel import CpuKernel


@dataclass(frozen=True)
class Rope:
    """The constants of the prologue of one attention.

    block_bytes: of a block of the cache, with all its layers.
    q_heads 0: no queries pass through; kv_heads 0: nothing is written to the cache (another attention's is shared).
    rotary: how many elements of a head turn, beginning with rotary_begin; 0: none.
    interleaved: element 2i turns with 2i + 1; else i with i + rotary / 2.
    table_width: of cos and sin; `rotary` (one factor an element) or rotary / 2 (one a pair); 0: rotary.
    norm: rms_norm of every head of q and k before it turns.
    Strides in floats from a token to the next, 0: no gap.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    block_bytes: int
    kv_dtype: str = "bf16"
    rotary: int = 0
    rotary_begin: int = 0
    interleaved: bool = False
    table_width: int = 0
    table_stride: int = 0
    norm: bool = False
    eps: float = 0.0
    q_stride: int = 0
    q_out_stride: int = 0
    k_stride: int = 0
    v_stride: int = 0

    def __post_init__(self) -> None:
        assert self.rotary % 2 == 0 and self.rotary_begin + self.rotary <= self.key_dim, self
        assert self.table_width in (0, self.rotary, self.rotary // 2), self
        assert self.kv_dtype in KV_TYPES, self

    def _kernel(self, name: str, call: str) -> CpuKernel:
        c = self
        width = c.table_width or c.rotary
        strides = [c.q_stride or c.q_heads * c.key_dim, c.q_out_stride or c.q_heads * c.key_dim,
                   c.k_stride or c.kv_heads * c.key_dim, c.v_stride or c.kv_heads * c.value_dim]
        integers: dict[str, int | str] = {
            "q_heads": c.q_heads, "kv_heads": c.kv_heads, "key_dim": c.key_dim, "value_dim": c.value_dim,
            "block_size": c.block_size, "kv_type": KV_TYPES[c.kv_dtype],
            "block_stride": block_stride(c.block_bytes, c.kv_dtype),
            **dict(zip(("q_stride", "q_out_stride", "k_stride", "v_stride"), strides, strict=True)),
            "rotary": c.rotary, "rotary_begin": c.rotary_begin, "interleaved": int(c.interleaved),
            "table_width": width, "table_stride": c.table_stride or width, "norm": int(c.norm)}
        fields = ", ".join(f".{field} = {value}" for field, value in integers.items())
        words = [*(value for field, value in integers.items() if field != "kv_type"), c.kv_dtype]
        return CpuKernel(
            symbol(name, *words, float(c.eps)), "rope/rope.h",
            f"const ingot_rope c = {{{fields}, .eps = {float_in_c(c.eps)}}};\n"
            f"float work[{c.key_dim}];\ningot_rope_run(step, {call}, worker, num_workers, c, work);")


def _cache(first: int) -> str:
    """In C, what five arguments say: keys, values, scales of keys, scales of values (null without), block table."""
    k, v, k_scales, v_scales, table = (f"args[{first + i}]" for i in range(5))
    return f"(ingot_kv){{{k}, {k_scales}}}, (ingot_kv){{{v}, {v_scales}}}, {table}"


def rope_kv_write(problem: Rope) -> CpuKernel:
    """args: q f32 [T, Hq, Dk], k f32 [T, Hkv, Dk], v f32 [T, Hkv, Dv] (rows of tokens apart as the strides say),
    cos, sin f32 [T, table_width], q norm weight [Dk], k norm weight [Dk], q out, K cache, V cache, their scales, block
    table.

    q out may be q where the strides agree. What the constants exclude may be null; a null weight is all ones.
    """
    return problem._kernel("rope_kv_write", ", ".join([*(f"args[{i}]" for i in range(8)), _cache(8)]))


def rope(problem: Rope) -> CpuKernel:
    """Of q alone. args: q, cos, sin, q out; q out may be q. kv_heads and norm are not looked at."""
    return replace(problem, kv_heads=0, norm=False)._kernel(
        "rope", "args[0], 0, 0, args[1], args[2], 0, 0, args[3], (ingot_kv){0, 0}, (ingot_kv){0, 0}, 0")


def kv_write(problem: Rope) -> CpuKernel:
    """Of k and v as they are. args: k, v, K cache, V cache, their scales, block table.

    Of the constants only the cache and strides count.
    """
    plain = replace(problem, q_heads=0, norm=False, rotary=0, rotary_begin=0, table_width=0)
    return plain._kernel("kv_write", f"0, args[0], args[1], 0, 0, 0, 0, 0, {_cache(2)}")

"""The prologue of attention on a GPU: norm per head, rotary embedding and the write to the cache in one launch."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Parameter, Refusal, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS


@dataclass(frozen=True)
class Problem:
    """q, k and v of m tokens as kernel rope_kv_write takes them.

    q_heads 0     only the cache is written; kv_heads 0: it is not, q alone passes
    rotary, rotary_begin  elements of a head that turn, and where they begin
    norm_eps    of the norm of each head of q and k; None: there is none
    kv_type     of the cache: "bf16", "fp16", "fp32", "fp8" (with static scales if `static`), "int8" (a scale a head and
                token, beside the values)
    max_blocks  row length of the block table
    """

    m: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    q_stride: int
    k_stride: int
    v_stride: int
    rotary: int
    float_type: str
    kv_type: str
    block_size: int
    block_bytes: int
    max_blocks: int
    rotary_begin: int = 0
    interleaved: bool = False
    norm_eps: float | None = None
    static: bool = False


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    name = f"rope_kv_write.{p.kv_type}"
    if p.kv_heads and p.kv_type == "fp8" and not device.has_fp8:
        return Candidates(refused=(Refusal(name, f"fp8 needs sm_89 or newer, this is {device.arch}"),))
    if p.kv_heads and p.block_bytes % 16:
        return Candidates(refused=(Refusal(name, f"KV blocks of {p.block_bytes} bytes are not aligned to 16"),))
    element, cache = f"*{ELEMENTS[p.float_type]}", f"*{ELEMENTS[p.kv_type]}"
    normed, turned, writes, passes = p.norm_eps is not None, p.rotary > 0, p.kv_heads > 0, p.q_heads > 0
    scales = "*fp32" if p.kv_type == "int8" and writes else None
    static = "*fp32" if p.kv_type == "fp8" and p.static and writes else None
    inputs = "*i32" if writes else None
    wanted: dict[str, Parameter | None] = {
        "q": element if passes else None, "k": element if writes else None, "v": element if writes else None,
        "cos": "*fp32" if turned else None, "sin": "*fp32" if turned else None,
        "q_norm": "*fp32" if normed and passes else None, "k_norm": "*fp32" if normed and writes else None,
        "q_out": element if passes else None, "k_part": cache if writes else None, "v_part": cache if writes else None,
        "k_scales": scales, "v_scales": scales, "k_static": static, "v_static": static,
        "positions": inputs, "token_seq": inputs, "block_table": inputs, "sizes": "*i32"}
    block = max(32, 1 << (max(p.key_dim, p.value_dim) - 1).bit_length())
    heads = p.q_heads + 2 * p.kv_heads
    kernel = GpuKernel(
        symbol("rope_kv_write", p.kv_type, f"q{p.q_heads}", f"kv{p.kv_heads}", f"d{p.key_dim}", f"v{p.value_dim}",
               f"r{p.rotary}", p.rotary_begin or "", "interleaved" if p.interleaved else "",
               f"norm{p.norm_eps}" if normed else "", "static" if static else "", p.float_type,
               f"{p.q_stride}_{p.k_stride}_{p.v_stride}", f"{p.block_bytes}_{p.max_blocks}"),
        "ingot.plugins.rope.gpu", "rope_kv_write",
        *arguments(wanted, {
            "Q_HEADS": p.q_heads, "KV_HEADS": p.kv_heads, "D": p.key_dim, "DV": p.value_dim, "Q_STRIDE": p.q_stride,
            "K_STRIDE": p.k_stride, "V_STRIDE": p.v_stride, "ROTARY": p.rotary, "BEGIN": p.rotary_begin,
            "INTERLEAVED": p.interleaved, "EPS": p.norm_eps or 0.0, "BLOCK_SIZE": p.block_size,
            "BLOCK_BYTES": p.block_bytes, "MAX_BLOCKS": p.max_blocks, "TO": p.kv_type, "BLOCK": block}), 1, 1)
    moved = p.m * ((2 * p.q_heads + p.kv_heads) * p.key_dim + p.kv_heads * p.value_dim) * BYTES[p.float_type]
    written = p.m * p.kv_heads * (p.key_dim + p.value_dim) * BYTES[p.kv_type]
    return Candidates((Candidate(name, (GpuLaunch(kernel, (p.m, heads, 1)),), Cost(moved + written, 0)),))

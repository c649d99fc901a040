"""Attention on a GPU: how many tokens share a tile, how much of the context a block takes, and in how many parts."""
from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from ..gpu.device import Device
from ..gpu.kernel import (
    Candidate,
    Candidates,
    Constant,
    Cost,
    GpuKernel,
    GpuLaunch,
    Parameter,
    Refusal,
    arguments,
    symbol,
)
from ..quantize.tactics import BYTES, ELEMENTS, element, output, row_bytes, unsupported_row

MAX_FUSED = 8
"""Up to so many tokens a step attention turns and writes keys and values itself: all of them lie in one tile."""


@dataclass(frozen=True)
class Rope:
    """As in rope/tactics.py. Strides between tokens in elements."""

    q_stride: int
    k_stride: int
    v_stride: int
    rotary: int
    rotary_begin: int = 0
    interleaved: bool = False
    norm_eps: float | None = None


@dataclass(frozen=True)
class Problem:
    """m            the most tokens of a step in this bucket, of at most max_batch sequences
    context      tokens of a sequence that the choice is made for; any length is served
    window, chunk, softcap  0: none
    kv_type      of the cache, as in rope_kv_write
    y_type       the result is quantized too, by token: "fp8", "int8", each also with sums ("fp8_sum32"), "fp8_block",
                 "nvfp4"; "": it is not
    q_stride     elements between tokens of q; 0: dense. With rope that of rope counts
    rope         what rope_kv_write does is done here too: q, k and v are as the projection leaves them. For few tokens
    """

    m: int
    max_batch: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    float_type: str
    kv_type: str
    block_size: int
    block_bytes: int
    max_blocks: int
    context: int = 2048
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    static: bool = False
    q_stride: int = 0
    y_type: str = ""
    rope: Rope | None = None

    def __post_init__(self) -> None:
        assert self.q_heads % self.kv_heads == 0 and not (self.window and self.chunk), self

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def max_tokens_seen(self) -> int:
        seen = min([self.context, *(reach for reach in (self.window, self.chunk) if reach)])
        return max(1, seen)


@dataclass(frozen=True)
class Tile:
    """Tokens of a sequence that share a tile, positions of a step, parts of the context."""

    tokens: int
    positions: int
    splits: int
    warps: int
    stages: int


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    name = f"attention.{p.kv_type}"
    if p.kv_type == "fp8" and not device.has_fp8:
        return Candidates(refused=(Refusal(name, f"fp8 needs sm_89 or newer, this is {device.arch}"),))
    if reason := unsupported_row(p.q_heads * p.value_dim, p.y_type or p.float_type, device):
        return Candidates(refused=(Refusal(name, reason),))
    if max(p.key_dim, p.value_dim) > 512:
        return Candidates(refused=(Refusal(name, f"heads of {p.key_dim} and {p.value_dim} elements; up to 512"),))
    if p.block_bytes % 16 or p.block_size % 16:
        return Candidates(refused=(Refusal(name, f"KV blocks of {p.block_bytes} bytes and {p.block_size} tokens: both "
                                                 "must be multiples of 16"),))
    if p.rope is not None and p.m > MAX_FUSED:
        return Candidates(refused=(Refusal(name, f"keys and values of up to {MAX_FUSED} tokens are written here, this "
                                                 f"bucket has {p.m}"),))
    legal, refused = [], []
    for tile in tiles_of(p, device):
        shown = f"{name} {tile.tokens}x{tile.positions}" + (f" split {tile.splits}" if tile.splits > 1 else "")
        shown += f", {tile.warps} warps" if tile.warps != 4 else ""
        need = shared_bytes(p, tile)
        if need > device.shared_per_block:
            refused.append(Refusal(shown, f"needs {need} bytes of shared memory, {device.arch} has "
                                          f"{device.shared_per_block} a block"))
        else:
            legal.append(Candidate(shown, (launch(p, tile),), cost(p, tile), need))
    return Candidates(tuple(legal), tuple(refused))


def tiles_of(p: Problem, device: Device) -> list[Tile]:
    """Few tokens: one a tile, since every sequence may have but one. Many: as the matrix instruction likes."""
    tiles = []
    large = max(p.key_dim, p.value_dim) > 128
    eight = p.kv_type in ("fp8", "int8")
    # Values that are widened in registers, and steps that are wide for a tall tile, spill them where the matrix
    # instruction reads from registers.
    tall = not large and (device.has_warpgroup_mma or not eight)
    for rows in (16,) if p.m <= p.max_batch else (16, 64, 128) if tall else (16, 64):
        tokens = p.m if p.rope is not None else max(1, rows // p.group)
        if rows > 16 and tokens > p.m:
            continue
        wide = not large and not eight and (rows == 16 or device.has_warpgroup_mma)
        for positions in (32, 64) if large else (64, 128) if wide else (64,):
            blocks = num_tiles(p, tokens) * p.kv_heads
            warps = [8 if rows >= 128 or (rows >= 64 and eight and not device.has_warpgroup_mma) else 4]
            if large and p.rope is not None and tokens * p.group > 16:
                warps = [4, 8]  # turned queries of two rows of fragments spill where four warps hold them
            for splits in (1, 2, 4, 8, 16):
                enough = splits == 1 or (blocks * splits <= 4 * device.num_sms
                                         and p.max_tokens_seen >= splits * positions)
                if enough:
                    tiles += [_deepest(p, device, Tile(tokens, positions, splits, count, 1)) for count in warps]
    return list(dict.fromkeys(tiles))


def _deepest(p: Problem, device: Device, tile: Tile) -> Tile:
    """With as many stages as shared memory allows, at most three."""
    stages = [n for n in (1, 2, 3) if shared_bytes(p, replace(tile, stages=n)) <= device.shared_per_block]
    return replace(tile, stages=max(stages, default=1))


def num_tiles(p: Problem, tokens: int) -> int:
    """Enough for any division of m tokens into sequences (group_of in gpu/math.py)."""
    return p.m // tokens + min(p.max_batch, p.m)


def rows_of(p: Problem, tile: Tile) -> int:
    return max(16, 1 << (tile.tokens * p.group - 1).bit_length())


def shared_bytes(p: Problem, tile: Tile) -> int:
    """Of the pipeline's buffers; the compiler has the last word."""
    wide, element = _power(p.key_dim) + _power(p.value_dim), BYTES[p.kv_type]
    queries = rows_of(p, tile) * _power(p.key_dim) * BYTES[p.float_type]
    return int(tile.stages * tile.positions * wide * element + queries)


def cost(p: Problem, tile: Tile) -> Cost:
    sequences = min(p.max_batch, p.m)
    reads = sequences * p.max_tokens_seen * p.kv_heads * (p.key_dim + p.value_dim) * BYTES[p.kv_type]
    reads *= -(-(p.m // sequences) // tile.tokens)
    moved = p.m * p.q_heads * (p.key_dim + p.value_dim) * BYTES[p.float_type]
    if tile.splits > 1:
        moved += 8 * num_tiles(p, tile.tokens) * p.kv_heads * tile.splits * rows_of(p, tile) * (_power(p.value_dim) + 2)
    if p.y_type:
        row = p.q_heads * p.value_dim
        moved += p.m * (2 * row * BYTES[p.float_type] + row_bytes(row, p.y_type))
    return Cost(reads + moved, 2.0 * p.m * p.max_tokens_seen * p.q_heads * (p.key_dim + p.value_dim))


def launch(p: Problem, tile: Tile) -> GpuLaunch:
    floats, cache = f"*{ELEMENTS[p.float_type]}", f"*{ELEMENTS[p.kv_type]}"
    scales = "*fp32" if p.kv_type == "int8" else None
    static = "*fp32" if p.kv_type == "fp8" and p.static else None
    split = tile.splits > 1
    rope = p.rope or Rope(p.q_stride or p.q_heads * p.key_dim, 0, 0, 0)
    new = floats if p.rope is not None else None
    turns = "*fp32" if rope.rotary else None
    norm = "*fp32" if rope.norm_eps is not None else None
    wanted: dict[str, Parameter | None] = {
        "q": floats, "k": new, "v": new, "cos": turns, "sin": turns, "q_norm": norm, "k_norm": norm,
        "k_part": cache, "v_part": cache, "k_scales": scales, "v_scales": scales, "k_static": static,
        "v_static": static, "sinks": "*fp32" if p.sinks else None, "out": floats, "y": None, "y_scale": None,
        "y_factor": None, "y_sum": None, "query_start": "*i32", "context_len": "*i32", "block_table": "*i32",
        "sizes": "*i32", "partial": "*fp32" if split else None,
        "arrived": "*i32" if split or p.y_type else None}
    if p.y_type:
        wanted |= output(p.y_type, False)[0]
    rows, wide = rows_of(p, tile), _power(p.value_dim)
    constants: dict[str, Constant] = {
        "Q_HEADS": p.q_heads, "KV_HEADS": p.kv_heads, "D": p.key_dim, "DV": p.value_dim, "DP": _power(p.key_dim),
        "DVP": wide, "Q_STRIDE": rope.q_stride, "K_STRIDE": rope.k_stride, "V_STRIDE": rope.v_stride,
        "ROTARY": rope.rotary, "BEGIN": rope.rotary_begin, "INTERLEAVED": rope.interleaved,
        "EPS": rope.norm_eps or 0.0, "KV": p.kv_type, "SCALE": p.scale, "WINDOW": p.window, "CHUNK": p.chunk,
        "SOFTCAP": p.softcap, "BLOCK_SIZE": p.block_size, "BLOCK_BYTES": p.block_bytes, "MAX_BLOCKS": p.max_blocks,
        "QB": tile.tokens, "QP": 1 << (tile.tokens - 1).bit_length(), "BM": rows, "BN": tile.positions,
        "SPLITS": tile.splits, "STEPS": p.max_batch.bit_length() + 1,
        **element(p.y_type)}
    words = [p.kv_type, p.float_type, f"q{p.q_heads}", f"kv{p.kv_heads}", f"d{p.key_dim}", f"v{p.value_dim}",
             f"{tile.tokens}x{tile.positions}", f"s{tile.splits}"]
    options = ((f"w{p.window}", p.window), (f"c{p.chunk}", p.chunk), (f"cap{p.softcap}", p.softcap), ("sinks", p.sinks),
               ("static", static), (p.y_type, p.y_type), (_rope_word(rope), p.rope or p.q_stride),
               (f"{tile.warps}warps", tile.warps != 4))
    words += [word for word, used in options if used]
    kernel = GpuKernel(symbol("attention", *words, f"{p.scale:.6g}", f"{p.block_bytes}_{p.max_blocks}_{p.max_batch}"),
                       "ingot.plugins.attention.gpu", "paged_attention", *arguments(wanted, constants), tile.warps,
                       tile.stages)
    tiles = num_tiles(p, tile.tokens)
    grid = (tiles, p.kv_heads, tile.splits)
    groups = tiles * p.kv_heads if split else 0
    return GpuLaunch(kernel, grid, 4 * groups * tile.splits * rows * (wide + 2),
                     4 * (groups + (tiles if p.y_type else 0)))


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _rope_word(rope: Rope) -> str:
    return "_".join(["rope", *(str(value) for value in astuple(rope))])

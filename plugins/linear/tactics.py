"""The ways to compute a linear layer on a GPU: for a problem and a device, the legal candidates and the refused ones.

Two shapes of the same kernel. Context: tiles large enough that Tensor Cores are the limit. Generation: the weights come
from memory once, and the K dimension is split until all multiprocessors read; the last split to finish adds up.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ..gpu.device import Device
from ..gpu.kernel import (
    SIZES,
    Candidate,
    Candidates,
    Constant,
    Cost,
    GpuKernel,
    GpuLaunch,
    Parameter,
    Refusal,
    TensorMap,
    arguments,
    symbol,
)
from .gpu_arithmetic import defers, scaling, widening
from .gpu_formats import ELEMENTS, FORMATS, GROUP, Format

MODULE = "ingot.plugins.linear.gpu"
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "nvfp4": 0.5}
_MAX_PREPARED = 16
"""Up to so many tokens a kernel normalises and quantizes its own input: every block repeats that work."""

_SPLIT_ROWS = 64
"""Up to so many tokens K is split."""


@dataclass(frozen=True)
class Problem:
    """y[M, n] = epilogue(prologue(x[M, k]) W[n, k]^T)

    m           the most rows of a step in this bucket
    format      key of gpu_formats.FORMATS
    activation  type of x in the matrix instruction, one of the format's
    float_type  "bf16", "fp16" or "fp32": of the residual, of y, and of x where the kernel prepares it itself
    rows        "T" the tokens of a step, "L" its rows of logits
    quantizes   x comes in float_type, and the kernel quantizes it by token
    token_scales  quantized x comes with a scale a token (fp8_block: a group of a token; nvfp4: a factor a token beside
                the scales of its blocks); else its static scale is part of `scale`
    norm_eps    x is normalised first (rms_norm); None: it is not
    post_norm   what is normalised is rms_norm(x) by another weight, added to a residual; the sum is an output
    gated       activation of the gate; the weights are the gate's n rows, then n others: y = act(gate) * other. Or
                "clamped_swiglu" (gpu/math.py)
    y_type      "" float_type, or another floating type; "fp8", "int8": quantized by a static scale
    x_stride    elements between rows of x; 0: dense
    experts     > 0: so many matrices; each of the m tokens goes through `choices` of them, and y has m * choices rows
    shared      the choices of a token read the same row of x; else x has a row for each
    sum_choices  y [m, n] is the sum over the choices of a token, by weights f32 [m, choices]; for few tokens
    """

    m: int
    n: int
    k: int
    format: str
    activation: str
    float_type: str = "bf16"
    rows: str = "T"
    quantizes: bool = False
    token_scales: bool = False
    scale: bool = False
    bias: bool = False
    residual: bool = False
    norm_eps: float | None = None
    post_norm: bool = False
    gated: str = ""
    y_type: str = ""
    x_stride: int = 0
    experts: int = 0
    choices: int = 1
    shared: bool = True
    sum_choices: bool = False

    def __post_init__(self) -> None:
        assert self.activation in FORMATS[self.format].activations, self
        assert self.format != "fp8_block" or self.quantizes != self.token_scales, f"a scale a group: {self}"
        assert not (self.quantizes and (self.token_scales or self.activation not in ("fp8", "int8", "nvfp4"))), self
        assert not (self.norm_eps is not None and self.token_scales), f"a norm of quantized values: {self}"
        assert not self.post_norm or (self.norm_eps is not None and not self.experts), self
        assert self.experts or (self.choices == 1 and not self.sum_choices), self
        assert not self.experts or self.sum_choices or not self.residual, f"a residual of each choice: {self}"
        assert not self.sum_choices or not (self.gated or self.y_type or self.norm_eps is not None), self

    @property
    def num_rows(self) -> int:
        """Of y."""
        return self.m * self.choices

    @property
    def num_matrices(self) -> int:
        return max(1, self.experts)

    @property
    def rows_a_matrix(self) -> int:
        """That a matrix has on the average."""
        return -(-self.num_rows // self.num_matrices)

    @property
    def x_type(self) -> str:
        """Of x in memory."""
        return self.float_type if self.quantizes else self.activation

    @property
    def weights(self) -> Format:
        return FORMATS[self.format]

    @property
    def sum_group(self) -> int:
        """Quantized x comes with the sums of so many channels, which the minimums of their groups are multiplied with;
        0: it does not."""
        quantized = self.activation in ("fp8", "int8") and not self.quantizes
        return self.weights.channels_per_scale if quantized and self.weights.minimum else 0

    @property
    def precision(self) -> str:
        """The precision whose instruction the kernel must show."""
        if self.format == "fp8_block":
            return "fp8"
        if self.weights.is_int4:
            return "w4a8" if self.activation in ("fp8", "int8") else "int4"
        return self.format


@dataclass(frozen=True)
class Tile:
    """Features, tokens and channels of a block's step; parts of K; depth of the pipeline; copies by descriptor, and
    by warps that do nothing else; both factors of a gate as one product of twice the features."""

    features: int
    tokens: int
    channels: int
    splits: int = 1
    warps: int = 4
    stages: int = 3
    tma: bool = False
    specialize: bool = False
    one_product: bool = False


def candidates(problem: Problem, device: Device) -> Candidates:
    """Every legal tile, in a fixed order, and why others are not."""
    name = f"linear.{problem.format if problem.format == 'fp8_block' else problem.precision}"
    if reason := unsupported(problem, device):
        return Candidates(refused=(Refusal(name, reason),))
    legal, refused = [], []
    for tile in tiles_of(problem, device):
        shown = f"{name} {tile.features}x{tile.tokens}x{tile.channels}" + \
            (f" split {tile.splits}" if tile.splits > 1 else "") + (" tma" if tile.tma else "") + \
            (" specialized" if tile.specialize else "")
        need = shared_bytes(problem, tile)
        if need > device.shared_per_block:
            refused.append(Refusal(shown, f"needs {need} bytes of shared memory, {device.arch} has "
                                          f"{device.shared_per_block} a block"))
        else:
            legal.append(Candidate(shown, (launch(problem, tile),), cost(problem, tile), need))
    return Candidates(tuple(legal), tuple(refused))


def unsupported(problem: Problem, device: Device) -> str:
    """Why no tile can serve the problem; "" if some can."""
    p = problem
    if "fp8" in (p.precision, p.activation, p.y_type) and not device.has_fp8:
        return f"fp8 needs sm_89 or newer, this is {device.arch}"
    if p.format == "fp8_block" and p.k % GROUP:
        return f"fp8_block needs a multiple of {GROUP} channels, got {p.k}"
    if p.format == "fp8_block" and p.n % GROUP and (p.gated or p.experts):
        return f"matrices of fp8_block that lie one below the other need a multiple of {GROUP} rows, got {p.n}"
    if p.format == "nvfp4" and not device.has_fp4:
        return f"nvfp4 needs sm_100a or newer, this is {device.arch}"
    if p.activation == "int8" and device.capability == 103:
        return f"{device.arch} has no int8 Tensor Cores worth the name"
    if not has_aligned_rows(p.format, p.x_type, p.k) or p.x_stride * _BYTES[p.x_type] % 16:
        return f"rows of {p.k} channels do not start at multiples of 16 bytes"
    if p.m > _MAX_PREPARED and (p.quantizes or p.norm_eps is not None):
        return f"norm and quantization inside the kernel serve up to {_MAX_PREPARED} rows, this bucket has {p.m}"
    if p.m > _MAX_PREPARED and p.sum_choices:
        return f"the sum over choices inside the kernel serves up to {_MAX_PREPARED} tokens, this bucket has {p.m}"
    return ""


def has_aligned_rows(format: str, x_type: str, k: int) -> bool:
    """Whether rows of k channels of the weights and of x begin at multiples of 16 bytes."""
    row_bytes = FORMATS[format].stored_row(k) * {"fp32": 4, "bf16": 2, "fp16": 2}.get(FORMATS[format].weights, 1)
    return row_bytes % 16 == 0 and k * _BYTES[x_type] % 16 == 0


def tiles_of(p: Problem, device: Device) -> list[Tile]:
    """Those that are offered, legal or not."""
    return _few_tokens(p, device) if p.rows_a_matrix <= _SPLIT_ROWS else _many_tokens(p, device)


def _few_tokens(p: Problem, device: Device) -> list[Tile]:
    """All tokens of a matrix in one tile; narrow tiles of features, and K split, so that every multiprocessor reads."""
    tokens = max(16, 1 << (p.rows_a_matrix - 1).bit_length())
    feature_steps: tuple[int, ...] = (64, 128) if device.has_warpgroup_mma else (32, 64)
    if p.format == "nvfp4" and device.has_warpgroup_mma:
        feature_steps = (128,)  # block-scaled tcgen05 takes no fewer; below, triton falls back to bf16
    elif defers(p.format, p.activation) and (p.gated or (p.sum_choices and not device.has_warpgroup_mma)):
        feature_steps = feature_steps[:1]  # four accumulators, or sums that are kept for several tokens
    # An input that the kernel makes goes through one buffer to both products of a gate. In a pipeline triton 3.9.0
    # waits for the first of them alone before it writes the next: with tcgen05 the second may still be reading. Where
    # sums are scaled in every step, both are waited for.
    one_product = bool(p.gated) and (p.norm_eps is not None or p.quantizes) and 100 <= device.capability < 120 \
        and not defers(p.format, p.activation)
    warps = 8 if one_product and p.weights.is_int4 else 4  # to widen twice as many weights takes their registers
    tiles = []
    for features, step in product(feature_steps, _channel_steps(p)):
        blocks = -(-p.n // features) * row_tiles(p, tokens)
        for splits in (1, 2, 4, 8, 16):
            enough = blocks * splits <= 4 * device.num_sms
            even = -(-p.k // step) % splits == 0
            if splits == 1 or (enough and even and p.k >= splits * step * 2):
                stages = _stages(p, device, features, tokens, step, 5)
                tiles.append(Tile(features, tokens, step, splits, warps, stages, one_product=one_product))
    return tiles


def _many_tokens(p: Problem, device: Device) -> list[Tile]:
    """Large tiles. Of equals the first is taken: copies by descriptor need fewer registers and instructions."""
    one_accumulator = not p.gated and not defers(p.format, p.activation)
    widest = one_accumulator and not p.experts and p.rows_a_matrix > 128 and device.has_warpgroup_mma
    if device.capability >= 100 and FORMATS[p.format].bits == 8:
        widest = False  # scaling what comes from tensor memory takes more registers than 256 tokens leave
    tiles = []
    for tokens, step, tma in product((64, 128, 256) if widest else (64, 128), _channel_steps(p), (True, False)):
        if tma and p.format == "fp32":
            continue  # no matrix instruction waits for its operands
        if tma and not (device.has_warpgroup_mma or (device.has_tma and FORMATS[p.format].bits > 4)):
            continue  # four bits come to registers in another order than mma.sync takes them: they would spill
        if (tokens > (128 if one_accumulator else 64) and not tma) or tokens * step > 256 * 128:
            continue  # addresses of the tile's rows do not fit the registers beside the sums
        if not one_accumulator and tokens > 64 and (
                not device.has_warpgroup_mma or (p.format == "fp8_block" and device.capability >= 100)):
            continue  # a second accumulator does not fit the registers
        if p.gated and defers(p.format, p.activation) and p.weights.is_int4 and p.format != "int4" and tokens > 64:
            continue  # nor do sums of two groups, or what minimums take
        blocks = -(-p.n // 128) * row_tiles(p, tokens)
        # Widening four bits takes what registers mma.sync leaves on sm_120.
        wide = tokens >= 128 or not one_accumulator or (p.weights.is_int4 and device.capability >= 120)
        stages, warps = _stages(p, device, 128, tokens, step, 4), 8 if wide else 4
        for splits in (1, 2, 4):
            if splits > 1 and (blocks * splits > device.num_sms or -(-p.k // step) % splits):
                continue
            tile = Tile(128, tokens, step, splits, warps, stages, tma)
            # Triton specializes warps for tcgen05 and for mma.sync with descriptors; for wgmma it changes nothing.
            # A tile of 256 tokens, or two accumulators, leave too few registers for it.
            if tma and device.capability >= 100 and FORMATS[p.format].bits > 4 and tokens == 128 and one_accumulator:
                tiles.append(replace(tile, specialize=True))
            tiles.append(tile)
    return tiles


def row_tiles(p: Problem, tokens: int) -> int:
    """Tiles that cover the rows however they fall to the experts: numbered by group_of (gpu/math.py), or a row each."""
    return min(p.num_rows // tokens + p.experts, p.num_rows) if p.experts else -(-p.num_rows // tokens)


def _channel_steps(p: Problem) -> tuple[int, ...]:
    if p.format == "fp8_block" or p.weights.is_int4:
        return (p.weights.step if p.weights.is_int4 else GROUP,)
    if p.format == "nvfp4":
        return (128, 256)
    return {32: (32,), 16: (64, 128), 8: (128, 256)}[FORMATS[p.format].bits]


def _stages(p: Problem, device: Device, features: int, tokens: int, step: int, most: int) -> int:
    """As deep as shared memory allows."""
    fitting = [n for n in range(2, most + 1) if shared_bytes(p, Tile(features, tokens, step, stages=n)) <=
               device.shared_per_block]
    return max(fitting, default=2)


def shared_bytes(p: Problem, tile: Tile) -> int:
    """Shared memory that the pipeline's buffers take; the compiler has the last word."""
    weights = tile.features * tile.channels * FORMATS[p.format].bits // 8 * (2 if p.gated else 1)
    tokens = int(tile.tokens * tile.channels * _BYTES[p.x_type])
    epilogue = tile.features * tile.tokens * 4
    return max(tile.stages * (weights + tokens), epilogue)


def cost(p: Problem, tile: Tile) -> Cost:
    """Of experts as many are read as there are rows, at most all."""
    rows = p.n * (2 if p.gated else 1)
    x_rows = p.m if p.shared else p.num_rows
    num_bytes = 1.0 * min(p.num_matrices, p.num_rows) * FORMATS[p.format].weight_bytes(rows, p.k)
    y_rows = p.m if p.sum_choices else p.num_rows
    num_bytes += x_rows * p.k * _BYTES[p.x_type] + y_rows * p.n * _BYTES[p.y_type or p.float_type]
    num_bytes += p.residual * y_rows * p.n * _BYTES[p.float_type]
    num_bytes += 2 * x_rows * p.weights.num_scales(p.k) if p.sum_group else 0
    if p.sum_choices:
        num_bytes += 2 * 4 * tile.splits * p.num_rows * p.n
    elif tile.splits > 1:
        num_bytes += 2 * 4 * tile.splits * tile.tokens * rows * row_tiles(p, tile.tokens)
    blocks = -(-p.n // tile.features) * row_tiles(p, tile.tokens)
    weights = tile.features * (2 if p.gated else 1) * FORMATS[p.format].bits / 8
    # To find the scales of tokens, the part of a split reads the whole row first.
    readings = 1 + tile.splits * (p.quantizes and p.format != "fp8_block") * (1 + p.post_norm)
    readings += p.post_norm * (1 + tile.splits)
    through_cache = blocks * p.k * (weights + readings * tile.tokens * _BYTES[p.x_type])
    tiles = row_tiles(p, tile.tokens)
    instructions = widening(p.format, p.activation) + scaling(p.format, p.activation) * tile.tokens
    return Cost(num_bytes, 2.0 * p.num_rows * rows * p.k, through_cache, instructions * tiles * rows * p.k)


def launch(p: Problem, tile: Tile) -> GpuLaunch:
    """The kernel of that tile and its grid."""
    form = FORMATS[p.format]
    parameters, constants = _parameters(p, form, tile)
    blocks = -(-p.n // tile.features) * row_tiles(p, tile.tokens)
    groups = p.format.removeprefix("int4_") if form.is_int4 and p.format != "int4" else ""
    words = [p.format if p.format == "fp8_block" else p.precision, p.activation if form.is_int4 else "", groups,
             f"n{p.n}", f"k{p.k}", p.rows, f"{tile.features}x{tile.tokens}x{tile.channels}"]
    options = ((f"s{tile.splits}", tile.splits > 1), ("tma", tile.tma), ("ws", tile.specialize),
               ("one_product", tile.one_product),
               ("quantize", p.quantizes), ("token", p.token_scales), ("scaled", p.scale), ("bias", p.bias),
               ("residual", p.residual), (f"norm{p.norm_eps}", p.norm_eps is not None),
               ("post", p.post_norm), (p.gated, p.gated),
               (p.y_type, p.y_type), (p.float_type, p.float_type != "bf16"),
               (f"x{p.x_stride}", p.x_stride not in (0, p.k)), (f"e{p.experts}of{p.choices}", p.experts),
               ("shared", p.experts and p.shared), ("by_row", dict(constants)["BY_ROW"]),
               (f"sums{dict(constants)['SUM_ROWS']}", p.sum_choices))
    words += [word for word, used in options if used]
    kernel = GpuKernel(symbol("linear", *words), MODULE, "linear", parameters, constants, tile.warps, tile.stages)
    if p.sum_choices:
        return GpuLaunch(kernel, (blocks, tile.splits, 1), 4 * p.num_rows * tile.splits * p.n,
                         4 * -(-p.n // tile.features))
    if tile.splits == 1:
        return GpuLaunch(kernel, (blocks, 1, 1))
    slot = ((2 if p.gated else 1) * tile.features + 1) * tile.tokens
    return GpuLaunch(kernel, (blocks, tile.splits, 1), 4 * blocks * tile.splits * slot, 4 * blocks)


def _parameters(p: Problem, form: Format, tile: Tile,
                ) -> tuple[tuple[tuple[str, Parameter], ...], tuple[tuple[str, Constant], ...]]:
    row = form.stored_row(p.k)
    x_elements = p.k // 2 if p.x_type == "nvfp4" else p.k
    stride = p.x_stride or x_elements
    halves = form.bits == 4
    x: Parameter = f"*{ELEMENTS[p.x_type]}"
    w: Parameter = f"*{form.weights}"
    if tile.tma:
        width = tile.channels // 2 if halves else tile.channels
        w = TensorMap(form.weights, (p.num_matrices * p.n * (2 if p.gated else 1), row), row, (tile.features, width))
        if not p.experts:  # rows of experts lie scattered
            x = TensorMap(ELEMENTS[p.x_type], (p.m, x_elements), stride, (tile.tokens, width))
    nvfp4 = p.format == "nvfp4"
    wanted: dict[str, Parameter | None] = {
        "x": x, "w": w, "y": f"*{ELEMENTS[p.y_type or p.float_type]}", "sizes": "*i32",
        "order": "*i32" if p.experts else None, "starts": "*i32" if p.experts else None,
        "weights": "*fp32" if p.sum_choices else None,
        "x_scale": "*fp32" if p.token_scales and not nvfp4 else "*fp8e4nv" if p.x_type == "nvfp4" else None,
        "x_factor": "*fp32" if p.token_scales and nvfp4 else None,
        "x_sum": "*fp16" if p.sum_group else None, "w_scale": f"*{form.scales}" if form.scales else None,
        "w_minimum": f"*{form.scales}" if form.minimum else None,
        "scale": "*fp32" if p.scale else None, "bias": "*fp32" if p.bias else None,
        "residual": f"*{ELEMENTS[p.float_type]}" if p.residual else None,
        "norm_weight": "*fp32" if p.norm_eps is not None else None,
        "added": f"*{ELEMENTS[p.float_type]}" if p.post_norm else None,
        "added_weight": "*fp32" if p.post_norm else None,
        "total": f"*{ELEMENTS[p.float_type]}" if p.post_norm else None,
        "y_scale": "*fp32" if p.y_type in ("fp8", "int8") else None,
        "partial": "*fp32" if tile.splits > 1 or p.sum_choices else None,
        "arrived": "*i32" if tile.splits > 1 or p.sum_choices else None}
    constants: dict[str, Constant] = {
        "ROWS": SIZES[p.rows], "N": p.n, "K": p.k, "X_STRIDE": stride,
        "WEIGHTS": "int4" if form.is_int4 else p.format, "W_ROW": row,
        "GROUP": form.channels_per_scale if form.is_int4 else 0,
        "QUANTIZE": p.activation if p.quantizes else "", "DEFER": defers(p.format, p.activation), "GATED": p.gated,
        "EPS": p.norm_eps or 0.0, "TO": p.y_type or p.float_type, "BM": tile.tokens, "BN": tile.features,
        "BK": tile.channels, "SPLITS": tile.splits, "X_TMA": tile.tma and not p.experts,
        "W_TMA": tile.tma, "EXPERTS": p.experts, "EP": power_of_two(p.experts) if p.experts else 0,
        "SHARE": p.choices if p.shared else 1, "CHOICES": p.choices, "STEPS": p.experts.bit_length() + 1,
        "BY_ROW": p.experts > 0 and row_tiles(p, tile.tokens) == p.num_rows,
        "SUM_ROWS": power_of_two(max(8, p.m)) if p.sum_choices else 0, "SPECIALIZE": tile.specialize,
        "ONE_PRODUCT": tile.one_product}
    return arguments(wanted, constants)


def power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()

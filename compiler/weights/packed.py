"""The packed weights of an engine: which blobs there are, how large they get, and how each is made."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import Lock

import numpy as np

from ingot.plugins.linear import native
from ingot.plugins.linear.compensate import Feedback, feedback
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.native import NotFinite
from ingot.plugins.linear.pack import pack, packed_size, unpack
from ingot.plugins.scheme import BLOCK, PANEL, SCHEMES

from ..calibration.statistics import MAX_BLOCK
from ..ir.types import DType
from .carried import carried
from .evaluate import TensorSource, evaluate
from .expr import WeightExpr
from .rows import blob_parts, blob_size, pack_rows
from .stored import bf16_rows

PANELS, ROWS = "panels", "rows"
"""Layouts of packed matrices."""

ROWS_AT_A_TIME = 64 * PANEL
"""Rows of a matrix that are in memory as float32 at a time: bounds the build's memory whatever the model's size."""


@dataclass(frozen=True)
class Packing:
    """scheme  "": the elements as they are, row-major; else how the matrix [N, K], or each expert's of [E, N, K], is
            rounded
    layout  PANELS for the matrix kernels of CPUs, scheme is a key of SCHEMES; ROWS for those of GPUs, scheme is a key
            of GPU_SCHEMES
    """

    scheme: str = ""
    layout: str = PANELS


RAW = Packing()

_CHANNELS = 32
"""Of formats of eight bits with one scale a row."""

Moments = Callable[[int], Sequence[np.ndarray] | None]
"""Number of an expert, 0 for a plain matrix -> second moments of its inputs, f32 [k, k] for each block of channels, or
None where they are not known; see calibration/statistics.py."""


def _inputs(moments: Moments, group: int, width: int) -> Callable[[int], Feedback | None]:
    """The last is kept: rows of one matrix follow each other. A rank's part of the channels is not known apart."""
    @lru_cache(maxsize=1)
    def of(expert: int) -> Feedback | None:
        found = moments(expert)
        return None if found is None or sum(map(len, found)) != width else feedback(found, group)

    def alone(expert: int) -> Feedback | None:
        with lock:  # pieces that are made side by side wait for the first
            return of(expert)

    lock = Lock()
    return alone


@dataclass(frozen=True)
class Piece:
    """begin: where it lies in the blob, in bytes. make: gives it, u8."""

    begin: int
    make: Callable[[], np.ndarray]


@dataclass(frozen=True)
class PackedWeight:
    """parameters: what the model calls the constants that are joined in it, such as those of q, k and v."""

    name: str
    expr: WeightExpr
    packing: Packing
    label: str
    parameters: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        if self.packing == RAW:
            return self.expr.size_bytes
        if self.packing.layout == ROWS:
            return blob_size(self.parts)
        *experts, n, k = self.expr.shape
        return math.prod(experts) * packed_size(n, k, SCHEMES[self.packing.scheme])

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Of layout "rows": array of the kernel (w, w_scale, …) -> where it begins in the blob, and its bytes."""
        assert self.packing.layout == ROWS, self
        return blob_parts(self.expr.shape, GPU_SCHEMES[self.packing.scheme].weights)

    @property
    def is_carried(self) -> bool:
        """Whether the checkpoint holds it in the very numbers of its format, so that nothing is rounded."""
        if self.packing == RAW or self.packing.layout != ROWS:
            return False
        return carried(self.expr, GPU_SCHEMES[self.packing.scheme].format) is not None

    @property
    def shared(self) -> int:
        """Matrices at the end of a stack that are parts of one shared expert (passes/join_shared_experts.py)."""
        joins = len(self.expr.shape) == 3 and len(self.parameters) > 1
        return self.expr.inputs[1].shape[0] if joins else 0

    @property
    def group(self) -> int:
        """Channels that are rounded together for the inputs they meet, where the scheme's weights can be; else 0."""
        if self.packing == RAW or self.is_carried:
            return 0
        if self.packing.layout == ROWS:
            form = GPU_SCHEMES[self.packing.scheme].weights
            return _CHANNELS if form.name in ("fp8", "int8") else form.channels_per_scale if form.bits == 4 else 0
        return BLOCK if SCHEMES[self.packing.scheme].weight_bits == 4 else 0

    def make(self, source: TensorSource, moments: Moments | None = None) -> np.ndarray:
        """The blob, u8. Evaluates the expression a piece at a time. Raises what the checkpoint raises.

        moments: of the inputs that meet this matrix; weights are then rounded for these inputs, not each for itself.
        """
        return self._joined(self.pieces(source, moments))

    def pieces(self, source: TensorSource, moments: Moments | None = None) -> list[Piece]:
        """The blob in parts that may be made in any order, and side by side: the same bytes as `make` gives."""
        width = self.expr.shape[-1] if self.expr.shape else 0
        inputs = _inputs(moments, self.group, width) if moments is not None and self.group else None
        if self.packing == RAW:
            return [Piece(0, lambda: evaluate(self.expr, source).reshape(-1).view(np.uint8))]
        if self.packing.layout == ROWS:
            form = GPU_SCHEMES[self.packing.scheme].weights
            return [Piece(0, lambda: pack_rows(self.expr, source, form, ROWS_AT_A_TIME, inputs))]
        *experts, n, k = self.expr.shape
        scheme = SCHEMES[self.packing.scheme]
        narrow = inputs is None and native.is_used() and (scheme.weight_bits == 4 or scheme.weight_group > 0)

        def make(begin: int, end: int) -> np.ndarray:
            bits = bf16_rows(self.expr, source, (begin, end)) if narrow else None
            if bits is not None:
                with suppress(NotFinite):  # evaluation tells where
                    return pack(bits.reshape(-1, k), scheme)
            part = evaluate(self.expr, source, rows=(begin, end))
            return pack(part.reshape(-1, k), scheme, inputs(begin if experts else 0) if inputs is not None else None)

        rows, step = self.expr.shape[0], 1 if experts else ROWS_AT_A_TIME
        row_bytes = packed_size(n if experts else PANEL, k, scheme) // (1 if experts else PANEL)
        pieces = [Piece(begin * row_bytes, partial(make, begin, min(begin + step, rows)))
                  for begin in range(0, rows, step)]
        # What is known of the inputs of an expert is large: one after the other.
        return [Piece(0, lambda: self._joined(pieces))] if experts and inputs is not None else pieces

    def _joined(self, pieces: Sequence[Piece]) -> np.ndarray:
        if len(pieces) == 1:
            return pieces[0].make()
        blob, at = np.empty(self.size_bytes, np.uint8), 0
        for piece in pieces:
            packed = piece.make()
            assert piece.begin == at, (self.label, piece.begin, at)
            blob[at:at + packed.size] = packed
            at += packed.size
        assert at == blob.size, f"{self.label}: packed {at} bytes, expected {blob.size}"
        return blob

    def piece_bytes(self, calibrated: bool) -> int:
        """Memory that making a piece takes at most, roughly: its rows in float32 a few times, and what is known of its
        inputs; none for elements as they are, which are the blob itself."""
        if self.packing == RAW:
            return 0
        *experts, n, k = self.expr.shape
        moments = min(k, MAX_BLOCK) if calibrated and self.group else 0
        return 16 * (n if experts else min(n, ROWS_AT_A_TIME)) * k + 32 * moments * moments + 4 * k * moments

    def unpacked(self, blob: np.ndarray) -> np.ndarray:
        """What a blob of layout "panels" is worth, float32 in the shape of the expression."""
        *experts, n, k = self.expr.shape
        matrices = [unpack(part, n, k, SCHEMES[self.packing.scheme]) for part in blob.reshape(math.prod(experts), -1)]
        return np.stack(matrices).reshape(self.expr.shape)

    def values(self, source: TensorSource, moments: Moments | None = None) -> np.ndarray:
        """What the blob is worth, float32 in the shape of the expression: whole in memory."""
        if self.packing == RAW:
            return evaluate(self.expr, source)
        if self.packing.layout == PANELS:
            return self.unpacked(self.make(source, moments))
        if self.is_carried:
            return evaluate(self.expr, source)
        n, k = self.expr.shape[-2:]
        scheme, w = GPU_SCHEMES[self.packing.scheme], evaluate(self.expr, source).reshape(-1, n, k)
        inputs = _inputs(moments, self.group, k) if moments is not None and self.group else None
        parts = [scheme.stored(part, inputs(expert) if inputs is not None else None) for expert, part in enumerate(w)]
        return np.stack(parts).reshape(self.expr.shape)


@dataclass
class WeightTable:
    """Every weight that the plan refers to, each once: what is equal in recipe and packing is one blob."""

    entries: dict[tuple[WeightExpr, Packing], PackedWeight] = field(default_factory=dict)

    def name(self, expr: WeightExpr, packing: Packing, label: str) -> str:
        return self.packed(expr, packing, label).name

    def packed(self, expr: WeightExpr, packing: Packing, label: str) -> PackedWeight:
        key = expr, packing
        if key not in self.entries:
            text = f"{label} {packing.scheme or DType(expr.type.dtype).value} {list(expr.shape)}"
            # A matrix that the model stores the other way round is named for its transpose.
            parameters = tuple(part.removesuffix(".permute") for part in label.split("+"))
            self.entries[key] = PackedWeight(f"w{len(self.entries)}", expr, packing, text, parameters)
        return self.entries[key]

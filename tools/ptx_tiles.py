"""Linear and attention kernels in the tiles that engines choose, as cases of tools/ptx_check.py --tiles.

The tests of the kernels take small tiles, which hold neither the widest products of wgmma, nor those of tcgen05 with
128 rows or with scales of blocks, nor warps that only copy. Here the tiles are those that a problem of a model's size
is offered on the architecture, the first of each extent and way to copy; the problem that runs is smaller. Matrices
whose inputs come as they are multiplied ("tile"), and for few tokens those that make them ("own_input").
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ingot.plugins.attention import tactics as attention
from ingot.plugins.gpu.device import Device
from ingot.plugins.linear import tactics as linear
from tests.plugins.gpu import test_attention, test_linear
from tests.plugins.gpu.support import device

from .gpu_check.cases import Case

FORMS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "bf16"), ("int4_g32m", "bf16"),
         ("int4", "fp8"), ("int4_g32m", "fp8"), ("int4_g64m", "int8"), ("nvfp4", "nvfp4"), ("fp8_block", "fp8"))
_FEATURES, _CHANNELS = 144, 1024
_FEW, _MANY = (8, 5), (200, 150)
"""Rows of the bucket, and of the step."""
_HEAD_SIZES, _CACHES = (64, 128), ("bf16", "fp8", "int8")
_Q_HEADS, _KV_HEADS = 8, 2
_ATTENTION_SUMS = 4e-3


def tile_cases(arch: str) -> list[Case]:
    """Every case of the architecture, linear ones first."""
    return [*_linear(device(arch)), *_attention(device(arch))]


def _linear(where: Device) -> Iterator[Case]:
    for form, activation in FORMS:
        for gated in ("", "silu"):
            for rows, step in (_FEW, _MANY):
                small = linear_problem(rows, _FEATURES, _CHANNELS, form, activation, gated)
                yield from _linear_tiles(where, "tile", small, step)
            made_inside = own_input_problem(_FEW[0], _FEATURES, _CHANNELS, form, activation, gated)
            yield from _linear_tiles(where, "own_input", made_inside, _FEW[1])


def _linear_tiles(where: Device, kind: str, small: linear.Problem, step: int) -> Iterator[Case]:
    """Of a matrix of 4096 x 4096, for the small problem."""
    large = dataclasses.replace(small, n=4096, k=4096)
    if linear.unsupported(large, where):
        return
    for tile in _first(linear.tiles_of(large, where), lambda tile: (
            tile.features, tile.tokens, tile.channels if kind == "own_input" else 0, tile.tma, tile.specialize)):
        yield Case(f"linear.{kind}[{small.format}-{small.activation}-{small.gated}-{tile}]", test_linear,
                   functools.partial(test_linear.check, p=small, tile=tile, rows=step))


def linear_problem(rows: int, features: int, channels: int, form: str, activation: str,
                   gated: str = "") -> linear.Problem:
    """Inputs that are quantized elsewhere, with a scale a token where there is one."""
    return linear.Problem(rows, features, channels, form, activation, scale=True, gated=gated,
                          token_scales=activation in ("fp8", "int8"))


def own_input_problem(rows: int, features: int, channels: int, form: str, activation: str,
                      gated: str = "") -> linear.Problem:
    """Inputs that the kernel normalises, and quantizes where it multiplies fewer than 16 bits. Quantized, in float32:
    many values of 16 bits lie just between two of eight."""
    quantizes = activation in ("fp8", "int8", "nvfp4")
    return linear.Problem(rows, features, channels, form, activation, "fp32" if quantizes else activation, scale=True,
                          gated=gated, quantizes=quantizes, norm_eps=1e-6)


def _attention(where: Device) -> Iterator[Case]:
    for kv_type in _CACHES:
        for size in _HEAD_SIZES:
            offered: list[attention.Tile] = []
            for rows in (1, 8, 512):
                p = attention.Problem(rows, 4, _Q_HEADS, _KV_HEADS, size, size, size**-0.5, "bf16", kv_type, 16,
                                      2 * 16 * _KV_HEADS * size * 2, 64)
                offered += attention.tiles_of(p, where) if attention.candidates(p, where).legal else []
            for tile in _first(offered, lambda tile: (tile.tokens, tile.positions, tile.splits > 1)):
                yield Case(f"attention.tile[{kv_type}-{size}-{tile}]", test_attention,
                           functools.partial(check_attention, tile=tile, kv_type=kv_type, size=size))


def check_attention(runner: Any, tile: attention.Tile, kv_type: str, size: int) -> None:
    """Contexts and single tokens in one step; a tile of one token takes single tokens alone."""
    lengths, counts = ([90, 61, 12], [1, 1, 1]) if tile.tokens == 1 else ([9, 170, 70, 5], [9, 113, 1, 5])
    test_attention.check(runner, tile, lengths, counts, _Q_HEADS, _KV_HEADS, size, size, "bf16", kv_type,
                         sums=_ATTENTION_SUMS)


def _first(tiles: list[Any], key: Callable[[Any], tuple[Any, ...]]) -> list[Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for tile in tiles:
        found.setdefault(key(tile), tile)
    return list(found.values())

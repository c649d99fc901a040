# mypy: allow-untyped-defs, allow-incomplete-defs
"""What a mixture of experts needs beside its matrices: the choice of experts, their rows side by side, and the sum."""
import triton
import triton.language as tl

from ..gpu.math import narrow


@triton.jit
def _best(key, number):
    """The largest of a tile [G, S] and, of equals, the smallest number."""
    most = tl.max(tl.max(key, 1), 0)
    return tl.min(tl.min(tl.where(key == most, number, 1 << 30), 1), 0)


@triton.jit
def route(logits, bias, ids, weights, sizes, ROWS: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr,
          SCORES: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr,
          GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_BEST: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """The CHOICES best of E experts for each token, best first, of equals the smaller number.

    logits f32 [T, E] -> ids i32 [T, CHOICES], weights f32 [T, CHOICES]
    SCORES "softmax" over all experts, "sigmoid", or "softmax_of_chosen". bias f32 [E] counts for the choice alone.
    GROUPS > 1: only experts of KEPT groups can be chosen, of those whose GROUP_BEST best have the largest sum.
    NORMALISE: the weights of a token are divided by their sum + EPS. FACTOR multiplies them.
    The tile has a row [S] for each of G groups.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    SIZE: tl.constexpr = E // GROUPS
    group, at = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    number = group * SIZE + at
    there = (group < GROUPS) & (at < SIZE)
    x = tl.load(logits + token * E + number, mask=there, other=float("-inf"))
    if SCORES == "sigmoid":
        scores = tl.where(there, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        if SCORES == "softmax":
            scores = scores / tl.sum(tl.sum(scores, 1), 0)
    key = x
    if bias is not None:
        key = scores + tl.load(bias + number, mask=there, other=0.0)
    elif GROUPS > 1:
        key = scores
    key = tl.where(there, key, float("-inf"))
    if GROUPS > 1:
        total = tl.zeros((G, 1), tl.float32)
        rest = key
        for _ in tl.static_range(GROUP_BEST):
            most = tl.max(rest, 1)[:, None]
            total += most
            place = tl.min(tl.where(rest == most, at, 1 << 30), 1)[:, None]
            rest = tl.where(at == place, float("-inf"), rest)
        total = tl.where(group < GROUPS, total, float("-inf"))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            best = _best(tl.where(kept, float("-inf"), total), group)
            kept = kept | (group == best)
        key = tl.where(kept, key, float("-inf"))
    total = 1.0
    if NORMALISE or SCORES == "softmax_of_chosen":
        total = EPS
        rest = key
        for _ in tl.static_range(CHOICES):
            best = _best(rest, number)
            total += tl.sum(tl.sum(tl.where(number == best, scores, 0.0), 1), 0)
            rest = tl.where(number == best, float("-inf"), rest)
    rest = key
    for j in tl.static_range(CHOICES):
        best = _best(rest, number)
        weight = tl.sum(tl.sum(tl.where(there & (number == best), scores, 0.0), 1), 0)
        tl.store(ids + token * CHOICES + j, best)
        tl.store(weights + token * CHOICES + j, weight / total * FACTOR)
        rest = tl.where(number == best, float("-inf"), rest)


@triton.jit
def sort_by_expert(ids, order, starts, sizes, ROWS: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr,
                   BLOCK: tl.constexpr):
    """The rows 0 .. T * CHOICES by their expert, in their order within each; one block an expert.

    ids i32 [T, CHOICES] -> order i32 [T * CHOICES], starts i32 [E + 1]
    """
    expert = tl.program_id(0)
    count = tl.load(sizes + ROWS) * CHOICES
    at = tl.arange(0, BLOCK)
    begin = expert * 0
    for first in range(0, count, BLOCK):
        row = first + at
        its = tl.load(ids + row, mask=row < count, other=E)
        begin += tl.sum((its < expert).to(tl.int32), 0)
    tl.store(starts + expert, begin)
    if expert == E - 1:
        tl.store(starts + E, count)
    for first in range(0, count, BLOCK):
        row = first + at
        mine = (tl.load(ids + row, mask=row < count, other=E) == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - 1, row, mask=mine > 0)
        begin += tl.sum(mine, 0)


@triton.jit
def combine(x, weights, residual, y, sizes, ROWS: tl.constexpr, D: tl.constexpr, CHOICES: tl.constexpr,
            BLOCK: tl.constexpr):
    """y [T, D] = residual + sum over the choices of weights [T, CHOICES] * x [T, CHOICES, D]."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(CHOICES):
        v = tl.load(x + (token * CHOICES + j) * D + at, mask=at < D, other=0.0).to(tl.float32)
        acc += v * tl.load(weights + token * CHOICES + j)
    if residual is not None:
        acc += tl.load(residual + token * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(y + token * D + at, narrow(acc, y.dtype.element_ty), mask=at < D)

# mypy: allow-untyped-defs, allow-incomplete-defs
"""What a mixture of experts needs beside its matrices: the choice of experts, their rows side by side, and the sum."""
import triton
import triton.language as tl

from ..gpu.math import narrow


@triton.jit
def route(logits, bias, ids, weights, sizes, ROWS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
          CHOICES: tl.constexpr, SCORES: tl.constexpr, NORMALISE: tl.constexpr, FACTOR: tl.constexpr):
    """The CHOICES best of E experts for each token, best first, of equals the smaller number.

    logits f32 [T, E] -> ids i32 [T, CHOICES], weights f32 [T, CHOICES]
    SCORES "softmax" over all experts, "sigmoid", or "softmax_of_chosen". bias f32 [E] counts for the choice alone.
    NORMALISE: the weights of a token sum to one. FACTOR multiplies them.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf"))
    if SCORES == "sigmoid":
        scores = tl.where(e < E, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        scores = tl.exp(x - tl.max(x, 0))
        if SCORES == "softmax":
            scores = scores / tl.sum(scores, 0)
    key = x
    if bias is not None:
        key = scores + tl.load(bias + e, mask=e < E, other=0.0)
    key = tl.where(e < E, key, float("-inf"))
    total = 1.0
    if NORMALISE or SCORES == "softmax_of_chosen":
        total = 0.0
        rest = key
        for _ in tl.static_range(CHOICES):
            best = tl.argmax(rest, 0)
            total += tl.sum(tl.where(e == best, scores, 0.0), 0)
            rest = tl.where(e == best, float("-inf"), rest)
    rest = key
    for j in tl.static_range(CHOICES):
        best = tl.argmax(rest, 0)
        weight = tl.sum(tl.where(e == best, scores, 0.0), 0)
        tl.store(ids + token * CHOICES + j, best.to(tl.int32))
        tl.store(weights + token * CHOICES + j, weight / total * FACTOR)
        rest = tl.where(e == best, float("-inf"), rest)


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

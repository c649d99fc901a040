"""What sampling computes, in numpy.

    logits ─▶ log probabilities (of the model's own distribution, before anything else)
       └─▶ allowed tokens, logit bias, bans ─▶ penalties ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ a token

Up to the temperature this is vLLM's order, so that a bias is penalised as the logit that it becomes, and log
probabilities ("raw_logprobs") do not depend on how the answer is sampled. The order of the truncations is that of
transformers' logits processors: each looks at what the one before has left. (vLLM applies min-p first, so that top-p of
its rest keeps fewer tokens.)

Weights are defined to the last bit, as multiples of 2^-34 whose sums float64 holds exactly, and so is the exponential
function they come from: on every device equal logits give equal tokens.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

UNIT = 2.0**-34
F32 = np.float32
Operand = np.ndarray | np.float32

_LOG2E, _LN2_HIGH, _LN2_LOW = F32(1.44269504088896341), F32(float.fromhex("0x1.62e4p-1")), F32(
    float.fromhex("0x1.7f7d1cp-20"))
_ROUND = F32(1.5 * 2**23)
# (e^r - 1 - r) / r^2 on |r| <= ln2 / 2, as in cpu/scalar_math.h
_POLYNOMIAL = tuple(F32(c) for c in (1.381314243e-03, 8.369418792e-03, 4.166845605e-02, 1.666651517e-01,
                                     4.999999404e-01))


@dataclass(frozen=True)
class Row:
    """How a token is chosen. history: token -> count (0: it stands in the prompt alone). allowed: None: every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stream: int = 0
    history: Mapping[int, int] = field(default_factory=dict)
    biases: Sequence[tuple[int, float]] = ()
    allowed: np.ndarray | None = None


def choose(logits: np.ndarray, row: Row, position: int) -> int:
    """The token that follows, from logits f32 [V] at `position`; -1 if they are no numbers or nothing is allowed.

    Greedy is the smallest id of the most probable tokens.
    """
    if not (logits < np.inf).all() or logits.max() == -np.inf:
        return -1
    x = modify(logits, row)
    if x.max() == -np.inf:
        return -1
    if row.temperature == 0:
        return int(x.argmax())
    kept = truncate(x, weights(x, row.temperature), row)
    running = np.cumsum(kept)
    return int(np.searchsorted(running, uniform(row.seed, position, row.stream) * running[-1], side="right"))


def modify(logits: np.ndarray, row: Row) -> np.ndarray:
    """f32 [V]: mask, biases (-inf bans), then repetition, frequency and presence penalties."""
    x = logits.astype(F32)
    if row.allowed is not None:
        x[~row.allowed] = -np.inf
    for token, value in row.biases:
        x[token] += F32(value)
    for token, count in row.history.items():
        value, repetition = float(x[token]), float(F32(row.repetition_penalty))
        value = value / repetition if value > 0 else value * repetition
        value -= float(F32(row.frequency_penalty)) * count
        value -= float(F32(row.presence_penalty)) if count else 0.0
        x[token] = min(value, float(np.finfo(F32).max))
    return x


def weights(x: np.ndarray, temperature: float) -> np.ndarray:
    """f64 [V]: exp((x - max) / temperature), rounded to multiples of UNIT."""
    with np.errstate(over="ignore"):  # logits near the ends of float32: the difference is -inf, the weight 0
        scores = (x - x.max()) * (F32(1) / F32(temperature))
    return np.round(exp(scores).astype(np.float64) / UNIT) * UNIT


def exp(x: np.ndarray) -> np.ndarray:
    """f32: e^x by the operations of vf_exp in cpu/simd.h, each rounded as there."""
    x = np.clip(x, F32(-104), F32(89))
    shifted = _fma(x, _LOG2E, _ROUND)
    n = shifted - _ROUND
    r = _fma(n, -_LN2_LOW, _fma(n, -_LN2_HIGH, x))
    p: Operand = _POLYNOMIAL[0]
    for c in _POLYNOMIAL[1:]:
        p = _fma(p, r, c)
    return np.ldexp(_fma(p, r * r, r) + F32(1), n.astype(np.int32)).astype(F32)


def _fma(a: Operand, b: Operand, c: Operand) -> np.ndarray:
    """a b + c of f32, rounded once: the product is exact in float64, and so is the sum's error there (Knuth's two-sum),
    which decides when the float64 sum lies halfway between two f32."""
    product, addend = np.multiply(a, b, dtype=np.float64), np.float64(c)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    # Rounding to odd: the last bit says that something was lost, so that the second rounding is as the only one.
    bits = np.asarray(total).view(np.int64)
    away = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + away, bits)
    return odd.view(np.float64).astype(F32)


def truncate(x: np.ndarray, w: np.ndarray, row: Row) -> np.ndarray:
    """The weights w f64 [V] of the logits x f32 [V], 0 where top-k, top-p or min-p drop a token."""
    order = np.argsort(-x, kind="stable")  # the most probable first, of equals the smaller id
    kept = w[order]
    if row.top_k:
        kept[row.top_k:] = 0
    if F32(row.top_p) < 1:
        goal = float(F32(row.top_p)) * kept.sum()
        kept[max(int(np.searchsorted(np.cumsum(kept), goal)), 0) + 1:] = 0
    kept[kept < float(F32(row.min_p))] = 0
    result = np.zeros_like(w)
    result[order] = kept
    return result


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """f64 [V], of the model's own distribution."""
    x = logits.astype(np.float64) - logits.max()
    return x - np.log(np.exp(x).sum())


def ranking(logits: np.ndarray) -> np.ndarray:
    """Tokens by probability, the most probable first, of equals the smaller id; a token's rank is its place from 1."""
    return np.argsort(-logits, kind="stable")


def uniform(seed: int, position: int, stream: int) -> float:
    """A multiple of 2^-53 in [0, 1), by Philox4x32-10."""
    counter = [position & 0xFFFFFFFF, position >> 32, stream, 0]
    words = philox(counter, [seed & 0xFFFFFFFF, seed >> 32])
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011): four words of 32 bits from four and a key of two."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c

# mypy: allow-untyped-defs, allow-incomplete-defs
"""From logits to tokens and log probabilities on a GPU, to the bit as reference.py: one block a row of logits.

Weights are integers, multiples of 2^-34, so that their sums are exact in any order. Tokens that have one are listed
once; what top-k, top-p and min-p keep of them is then found by bisection over the bits of logits, without sorting.
"""
import triton
import triton.language as tl

from ..gpu.math import INTERPRETED

_NONE: tl.constexpr = tl.constexpr(float("-inf"))
_FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_HALF_UNIT: tl.constexpr = tl.constexpr(8388608.0)
"""2^23: what is added to a smaller number that is not negative rounds it to an integer."""

_ROUND: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def _fma(a, b, c):
    """a b + c rounded once, float32. The interpreter would round twice: there the product is exact in float64."""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _exp(x):
    """e^x as vf_exp in cpu/simd.h computes it, to the bit."""
    x = tl.minimum(tl.maximum(x, -104.0), 89.0)
    zero = x * 0.0
    n = _fma(x, zero + 1.44269504088896341, zero + _ROUND) - _ROUND
    r = _fma(n, zero - 1.428606765330187045037746429443359375e-06, _fma(n, zero - 0.693145751953125, x))
    p = zero + 1.381314243e-03
    p = _fma(p, r, zero + 8.369418792e-03)
    p = _fma(p, r, zero + 4.166845605e-02)
    p = _fma(p, r, zero + 1.666651517e-01)
    p = _fma(p, r, zero + 4.999999404e-01)
    mantissa = _fma(p, r * r, r) + 1.0
    # Two factors, each a normal number: n reaches -150.
    whole = n.to(tl.int32)
    first = whole >> 1
    second = whole - first
    return mantissa * ((first + 127) << 23).to(tl.float32, bitcast=True) * \
        ((second + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak, inverse):
    """The integer weight i64 of logits x: e^((x - peak) / temperature) in units of 2^-34."""
    scaled = _exp((x - peak) * inverse) * 17179869184.0
    whole = tl.where(scaled < _HALF_UNIT, (scaled + _HALF_UNIT) - _HALF_UNIT, scaled)
    return tl.where(x == _NONE, 0.0, whole).to(tl.int64)


@triton.jit
def _key(x):
    """An integer i32 that orders as x does; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _modify(x, y, masks, bias_ids, bias_values, history_ids, history_counts, row, mask_row, num_biases, num_history,
            repetition, presence, frequency, V: tl.constexpr, BLOCK: tl.constexpr, BIASES: tl.constexpr,
            HISTORY: tl.constexpr, MASKS: tl.constexpr):
    """y [V] = x [V] after mask, biases and penalties, the last ones in float64. Ids of a list are distinct. Several
    threads may read an element of y that one of them stores: none may be so late that it reads what was stored."""
    at = tl.arange(0, BLOCK)
    for first in range(0, V, BLOCK):
        token = first + at
        v = tl.load(x + token, mask=token < V, other=_NONE)
        if mask_row >= 0:
            word = tl.load(masks + mask_row * MASKS + token // 32, mask=token < V, other=0)
            v = tl.where((word >> (token % 32)) & 1 == 1, v, _NONE)
        tl.store(y + token, v, mask=token < V)
    tl.debug_barrier()
    for first in range(0, num_biases, BLOCK):
        i = first + at
        token = tl.load(bias_ids + row * BIASES + i, mask=i < num_biases, other=-1)
        there = (token >= 0) & (token < V)
        v = tl.load(y + token, mask=there, other=0.0)
        v += tl.load(bias_values + row * BIASES + i, mask=there, other=0.0)
        tl.debug_barrier()
        tl.store(y + token, v, mask=there)
    tl.debug_barrier()
    for first in range(0, num_history, BLOCK):
        i = first + at
        token = tl.load(history_ids + row * HISTORY + i, mask=i < num_history, other=-1)
        there = (token >= 0) & (token < V)
        count = tl.load(history_counts + row * HISTORY + i, mask=there, other=0)
        v = tl.load(y + token, mask=there, other=0.0).to(tl.float64)
        v = tl.where(v > 0, v / repetition, v * repetition)
        v = v - frequency * count.to(tl.float64)
        v = tl.where(count > 0, v - presence, v)
        tl.debug_barrier()
        tl.store(y + token, tl.where(v > _FLT_MAX, _FLT_MAX, v).to(tl.float32), mask=there)
    tl.debug_barrier()


@triton.jit
def _peak(x, V: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, smallest token that has it, any NaN or +infinity) of x f32 [V]."""
    at = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _NONE, tl.float32)
    where = tl.full((BLOCK,), V, tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        token = first + at
        v = tl.load(x + token, mask=token < V, other=_NONE)
        wrong = wrong | ((v != v) | (v == float("inf"))).to(tl.int32)
        better = v > best
        where = tl.where(better, token, where)
        best = tl.where(better, v, best)
    peak = tl.max(best, 0)
    return peak, tl.min(tl.where(best == peak, where, V), 0), tl.max(wrong, 0)


@triton.jit
def _above(keys, weights, count, key, BLOCK: tl.constexpr):
    """(number, sum of the weights) of the listed tokens with a key of at least `key`."""
    at = tl.arange(0, BLOCK)
    number = count * 0
    total = count.to(tl.int64) * 0
    for first in range(0, count, BLOCK):
        i = first + at
        inside = (i < count) & (tl.load(keys + i, mask=i < count, other=0) >= key)
        number += tl.sum(inside.to(tl.int32), 0)
        total += tl.sum(tl.where(inside, tl.load(weights + i, mask=i < count, other=0), 0), 0)
    return number, total


@triton.jit
def _choose(x, ids, keys, weights, peak, inverse, top_k, top_p, min_p, uniform, V: tl.constexpr, BLOCK: tl.constexpr):
    """The token that `uniform` i64 (in units of 2^-53) falls on when each of those kept has a share of [0, 1) in
    proportion to its weight, in the order of ids. ids, keys i32 [V] and weights i64 [V] are scratch."""
    at = tl.arange(0, BLOCK)
    count = top_k * 0
    for first in range(0, V, BLOCK):
        token = first + at
        v = tl.load(x + token, mask=token < V, other=_NONE)
        w = _weight(v, peak, inverse)
        heavy = (w > 0).to(tl.int32)
        place = count + tl.cumsum(heavy, 0) - 1
        tl.store(ids + place, token, mask=heavy > 0)
        tl.store(keys + place, _key(v), mask=heavy > 0)
        tl.store(weights + place, w, mask=heavy > 0)
        count += tl.sum(heavy, 0)
    tl.debug_barrier()
    # Kept are the tokens above the key `cut` and the first `equals` of those with it: a prefix of the order by logit,
    # then by id, as top-k and top-p want it.
    cut = top_k * 0 - 2147483647 - 1
    equals = count
    number, total = _above(keys, weights, count, cut, BLOCK)
    if (top_k > 0) & (top_k < count):
        low, high = cut.to(tl.int64), cut.to(tl.int64) + 4294967295
        while low < high:  # the largest key that enough tokens reach
            middle = (low + high + 1) >> 1
            number, _ = _above(keys, weights, count, middle.to(tl.int32), BLOCK)
            low = tl.where(number >= top_k, middle, low)
            high = tl.where(number >= top_k, high, middle - 1)
        cut = low.to(tl.int32)
        above, sum_above = _above(keys, weights, count, cut + 1, BLOCK)
        number, sum_at = _above(keys, weights, count, cut, BLOCK)
        equals = top_k - above
        total = sum_above + (sum_at - sum_above) // (number - above) * equals
    if top_p < 1.0:
        exact = top_p.to(tl.float64) * total.to(tl.float64)
        goal = exact.to(tl.int64)
        goal = tl.maximum(tl.where(goal.to(tl.float64) < exact, goal + 1, goal), 1)
        low, high = cut.to(tl.int64), cut.to(tl.int64) * 0 + 2147483647
        while low < high:  # the largest key whose tokens weigh enough
            middle = (low + high + 1) >> 1
            _, weighed = _above(keys, weights, count, middle.to(tl.int32), BLOCK)
            low = tl.where(weighed >= goal, middle, low)
            high = tl.where(weighed >= goal, high, middle - 1)
        cut = low.to(tl.int32)
        above, sum_above = _above(keys, weights, count, cut + 1, BLOCK)
        number, sum_at = _above(keys, weights, count, cut, BLOCK)
        one = (sum_at - sum_above) // (number - above)
        equals = ((goal - sum_above + one - 1) // one).to(tl.int32)
    exact = min_p.to(tl.float64) * 17179869184.0
    least = exact.to(tl.int64)
    least = tl.where(least.to(tl.float64) < exact, least + 1, least)
    kept_total = total * 0
    seen = count * 0
    for first in range(0, count, BLOCK):
        i = first + at
        key = tl.load(keys + i, mask=i < count, other=0)
        w = tl.load(weights + i, mask=i < count, other=0)
        same = ((key == cut) & (i < count)).to(tl.int32)
        kept = (i < count) & (w >= least) & ((key > cut) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equals)))
        seen += tl.sum(same, 0)
        tl.store(weights + i, tl.where(kept, w, 0), mask=i < count)
        kept_total += tl.sum(tl.where(kept, w, 0), 0)
    tl.debug_barrier()
    goal = (uniform.to(tl.float64) * 1.1102230246251565e-16 * kept_total.to(tl.float64)).to(tl.int64)
    running = total * 0
    token = count * 0 - 1
    first = count * 0
    while (first < count) & (token < 0):
        i = first + at
        reached = running + tl.cumsum(tl.load(weights + i, mask=i < count, other=0), 0)
        found = tl.min(tl.where((reached > goal) & (i < count), i, 2147483647), 0)
        if found < 2147483647:
            token = tl.load(ids + found)
        running = tl.max(reached, 0)
        first += BLOCK
    return token


@triton.jit
def _uniform(seed_low, seed_high, position, stream):
    """53 random bits i64 by Philox4x32-10 (Salmon et al. 2011); all arguments i32."""
    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    zero = position * 0
    low, high, _, _ = tl.philox(seed, position, zero, stream, zero)
    wide = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return (wide >> 11).to(tl.int64)


@triton.jit
def _report(x, peak, token, count, logprob, rank, top_ids, top_logprobs, V: tl.constexpr, BLOCK: tl.constexpr):
    """Log probability and rank of a token, and the `count` best, of the model's own distribution."""
    at = tl.arange(0, BLOCK)
    total = peak.to(tl.float64) * 0
    there = tl.maximum(token, 0)
    value = tl.load(x + there)
    better = token * 0
    for first in range(0, V, BLOCK):
        i = first + at
        v = tl.load(x + i, mask=i < V, other=_NONE)
        total += tl.sum(_exp(v - peak), 0).to(tl.float64)
        before = (v > value) | ((v == value) & (i < token))
        better += tl.sum((before & (i < V)).to(tl.int32), 0)
    log_total = tl.log(total.to(tl.float32))
    tl.store(logprob, tl.where(token < 0, float("nan"), value - peak - log_total))
    tl.store(rank, tl.where(token < 0, 0, better + 1))
    last, last_id = peak * 0 + float("inf"), token * 0 - 1
    for j in range(count):
        best = tl.full((BLOCK,), _NONE, tl.float32)
        where = tl.full((BLOCK,), V, tl.int32)
        for first in range(0, V, BLOCK):
            i = first + at
            v = tl.load(x + i, mask=i < V, other=_NONE)
            left = (i < V) & ((v < last) | ((v == last) & (i > last_id)))
            take = left & ((v > best) | (where == V))
            where = tl.where(take, i, where)
            best = tl.where(take, v, best)
        highest = tl.max(tl.where(where < V, best, _NONE), 0)
        chosen = tl.min(tl.where((where < V) & (best == highest), where, V), 0)
        tl.store(top_ids + j, tl.where(chosen < V, chosen, -1))
        tl.store(top_logprobs + j, tl.where(chosen < V, highest - peak - log_total, _NONE))
        last, last_id = highest, chosen


@triton.jit
def sample(logits, counts, rows, history_ids, history_counts, bias_ids, bias_values, masks, positions, logit_rows,
           tokens, logprobs, ranks, top_ids, top_logprobs, modified, listed, keys, weights, V: tl.constexpr,
           HISTORY: tl.constexpr, BIASES: tl.constexpr, MASKS: tl.constexpr, MAX_LOGPROBS: tl.constexpr,
           BLOCK: tl.constexpr):
    """One row a block; counts[0] rows of logits f32 [L, V].

    rows            i32 and f32 [.., 16]: the records ingot_sampling_row of sampling.h
    history_ids, history_counts i32 [.., HISTORY], bias_ids i32 and bias_values f32 [.., BIASES], masks i32 [.., MASKS]
    positions i32 [T], logit_rows i32 [L]
    tokens, ranks i32 [L], logprobs f32 [L], top_ids i32 and top_logprobs f32 [L, MAX_LOGPROBS]
    modified f32, listed, keys i32, weights i64 [L, V]: scratch
    """
    row = tl.program_id(0)
    if row >= tl.load(counts):
        return
    record = rows + row * 16
    numbers = record.to(tl.pointer_type(tl.float32))
    target = tl.load(record)
    if target == -2:
        return
    wide = row.to(tl.int64) * V
    x = logits + wide
    peak, best, wrong = _peak(x, V, BLOCK)
    good = (wrong == 0) & (peak > _NONE)
    token = target
    if target < 0:
        token = target * 0 - 1
        if good:
            num_history, num_biases, mask_row = tl.load(record + 12), tl.load(record + 13), tl.load(record + 14)
            temperature = tl.load(numbers + 2)
            y = x
            own_peak = peak
            token = best
            if (num_history > 0) | (num_biases > 0) | (mask_row >= 0):
                y = modified + wide
                _modify(x, y, masks, bias_ids, bias_values, history_ids, history_counts, row, mask_row, num_biases,
                        num_history, tl.load(numbers + 6).to(tl.float64), tl.load(numbers + 7).to(tl.float64),
                        tl.load(numbers + 8).to(tl.float64), V, BLOCK, BIASES, HISTORY, MASKS)
                own_peak, token, wrong = _peak(y, V, BLOCK)
                if own_peak == _NONE:
                    token = target * 0 - 1
            if (temperature > 0) & (token >= 0):
                position = tl.load(positions + tl.load(logit_rows + row))
                uniform = _uniform(tl.load(record + 10), tl.load(record + 11), position, tl.load(record + 9))
                token = _choose(y, listed + wide, keys + wide, weights + wide, own_peak,
                                tl.div_rn(temperature * 0 + 1.0, temperature), tl.load(record + 3),
                                tl.load(numbers + 4), tl.load(numbers + 5), uniform, V, BLOCK)
    if not good:
        token = target * 0 - 1
    tl.store(tokens + row, token)
    num_logprobs = tl.load(record + 1)
    if num_logprobs >= 0:
        if good:
            _report(x, peak, token, num_logprobs, logprobs + row, ranks + row, top_ids + row * MAX_LOGPROBS,
                    top_logprobs + row * MAX_LOGPROBS, V, BLOCK)
        else:
            tl.store(logprobs + row, float("nan"))
            tl.store(ranks + row, 0)
            at = tl.arange(0, 32)
            tl.store(top_ids + row * MAX_LOGPROBS + at, -1, mask=at < num_logprobs)
            tl.store(top_logprobs + row * MAX_LOGPROBS + at, _NONE, mask=at < num_logprobs)

/* Queries, and the weights of the softmax, as pairs of bfloat16, where the instruction set multiplies such pairs.
 *
 * The sum l of the weights is that of the rounded ones: weights that are divided by it add up to 1 whatever rounding
 * did to them, so that what all values have in common comes through unchanged. With the exact sum an error of up to
 * 2^-8 of it would stay where many weights are rounded the same way, as with equal scores. */
#ifndef INGOT_ATTENTION_PAIRS_H
#define INGOT_ATTENTION_PAIRS_H
#include "attention/attention_types.h"

#ifdef VF_PAIRS
/* 2 VF_LANES elements of a query times scale, those from the n-th on 0. */
INGOT_INLINE vf ingot_query_pairs(const float *x, int n, float scale) {
    vf low = n >= VF_LANES ? vf_load(x) : vf_load_first(x, n), high = vf_zero();
    if (n >= 2 * VF_LANES) high = vf_load(x + VF_LANES);
    else if (n > VF_LANES) high = vf_load_first(x + VF_LANES, n - VF_LANES);
    return vf_to_pairs(low * vf_set1(scale), high * vf_set1(scale));
}

/* sqrt(2) 2^r + 2^-8 on |r| <= 1/2, error of the power 7.5e-5 of it (minimax); 2^-8 is half a unit of a bfloat16 in
 * [1, 2), so that cutting the sum off rounds the power. */
#define WEIGHT_C0 (1.414111853e+00f + 0x1p-8f)
#define WEIGHT_C1 9.804190993e-01f
#define WEIGHT_C2 3.431039453e-01f
#define WEIGHT_C3 7.802452147e-02f

/* What the weights of scores that are at most m take off. */
INGOT_INLINE vf ingot_weight_offset(vf m) { return vf_fma(m, vf_set1(-INGOT_LOG2E), vf_set1(-0.5f)); }

/* e^(score - m), to be cut off to a bfloat16. Below 2^-126 that is subnormal, and so counts as 0. NaN stays one: the
 * lower half of those that come from bfloat16, or from arithmetic, is 0, and so the exponent is not added to. */
INGOT_INLINE vf ingot_weight(vf score, vf offset) {
    /* max returns its second operand when one is NaN */
    vf x = vf_max(vf_set1(-127.0f), vf_fma(score, vf_set1(INGOT_LOG2E), offset));
    vf shifted = x + vf_set1(INGOT_ROUND), r = x - (shifted - vf_set1(INGOT_ROUND));
    vf p = vf_fma(vf_set1(WEIGHT_C3), r, vf_set1(WEIGHT_C2));
    p = vf_fma(p, r, vf_set1(WEIGHT_C1));
    p = vf_fma(p, r, vf_set1(WEIGHT_C0));
    return vf_shift_exponent(p, shifted);
}

/* The sum of pairs. */
INGOT_INLINE vf ingot_add_pairs(vf pairs, vf sum) {
    return vf_dot_pairs(pairs, vf_set1(ingot_from_bits(0x3f803f80u)), sum);
}

/* Scores of `keys` neighbours, a multiple of 2 VF_LANES, become their weights, in half the room; returns the sum. */
INGOT_INLINE float ingot_few_weights(float *row, int keys, float m) {
    vf sum = vf_zero(), offset = ingot_weight_offset(vf_set1(m));
    for (int j = 0; j < keys; j += 2 * VF_LANES) {
        vf pairs = vf_cut_to_pairs(ingot_weight(vf_load(row + j), offset),
                                   ingot_weight(vf_load(row + j + VF_LANES), offset));
        vf_store(row + j / 2, pairs);
        sum = ingot_add_pairs(pairs, sum);
    }
    return vf_hsum(sum);
}

/* The same of scores that lie `row` floats apart, of as many queries as a vector has lanes: two keys a row. */
INGOT_INLINE vf ingot_many_weights(float *column, int row, int keys, vf m) {
    vf sum = vf_zero(), sum2 = vf_zero(), offset = ingot_weight_offset(m);
    int j = 0;
    for (; j + 4 <= keys; j += 4) {
        float *from = column + j * row, *to = column + j / 2 * row;
        vf pairs = vf_cut_lanes_to_pairs(ingot_weight(vf_load(from), offset),
                                         ingot_weight(vf_load(from + row), offset));
        vf pairs2 = vf_cut_lanes_to_pairs(ingot_weight(vf_load(from + 2 * row), offset),
                                          ingot_weight(vf_load(from + 3 * row), offset));
        vf_store(to, pairs);
        vf_store(to + row, pairs2);
        sum = ingot_add_pairs(pairs, sum);
        sum2 = ingot_add_pairs(pairs2, sum2);
    }
    if (j < keys) {
        vf pairs = vf_cut_lanes_to_pairs(ingot_weight(vf_load(column + j * row), offset),
                                         ingot_weight(vf_load(column + (j + 1) * row), offset));
        vf_store(column + j / 2 * row, pairs);
        sum = ingot_add_pairs(pairs, sum);
    }
    return sum + sum2;
}

/* total[i][..] += p[i] (even, odd) for `rows` rows, p being ATTENTION_FEW_KEYS floats apart, and `vectors` vectors of
 * two values, either of which may be absent, null. columns: of the values. rows, vectors: literals. */
INGOT_INLINE void ingot_few_pair(int rows, int vectors, int columns, const float *p, const uint16_t *even,
                                 const uint16_t *odd, vf total[4][4]) {
    INGOT_UNROLL
    for (int v = 0; v < vectors; v += 2) {
        const int n = columns - v * VF_LANES;
        vf first = even ? ingot_kv_load_pairs(even, (size_t)(v * VF_LANES), n) : vf_zero();
        vf second = odd ? ingot_kv_load_pairs(odd, (size_t)(v * VF_LANES), n) : vf_zero();
        vf low = vf_interleave_elements_low(first, second), high = vf_interleave_elements_high(first, second);
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) {
            vf factor = vf_set1(p[i * ATTENTION_FEW_KEYS]);
            total[i][v] = vf_dot_pairs(factor, low, total[i][v]);
            if (v + 1 < vectors) total[i][v + 1] = vf_dot_pairs(factor, high, total[i][v + 1]);
        }
    }
}
#endif

#endif

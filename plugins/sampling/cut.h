/* Which tokens top-k and top-p keep, without sorting the vocabulary.
 *
 * Both keep a prefix of the tokens in the order of falling logits, of equals the smaller id first: the shortest one that
 * reaches a number of tokens, or a sum of weights. Where it ends is found by bisection over the logits, three thresholds
 * a pass; once few tokens are left between the thresholds that are known, only these are looked at. */
#ifndef INGOT_CUT_H
#define INGOT_CUT_H
#include "weights.h"

#define INGOT_CUT_LIST 1024       /* tokens that are copied to a list of their own */
#define INGOT_CUT_VALUE_ROUNDS 12 /* passes that halve the distance twice, before passes that halve the keys twice */

/* How many tokens have x >= at, and their weight. */
typedef struct { float at; int count; double sum; } ingot_above;

/* Kept are tokens with x > at, and of those with x == at the first `ties`. */
typedef struct { float at; int ties, num_equal; } ingot_cut;

/* An integer that grows with the float by one from each to the next; of both zeros it is 0. */
INGOT_INLINE int32_t ingot_float_key(float x) {
    uint32_t bits = ingot_bits(x);
    return (int32_t)(bits >> 31 ? 0x80000000u - bits : bits);
}
INGOT_INLINE float ingot_key_float(int32_t key) {
    return ingot_from_bits(key < 0 ? 0x80000000u - (uint32_t)key : (uint32_t)key);
}

INGOT_INLINE void ingot_measure(const float *x, const float *w, int n, ingot_above above[3]) {
    vd sums[3] = {{0}};
    int counts[3] = {0};
    for (int i = 0; i < n; i += VF_LANES) {
        vf lanes = ingot_lanes(x, i, n, INGOT_NONE), weights = vf_load(w + i);
        INGOT_UNROLL
        for (int j = 0; j < 3; j++) {
            vf at = vf_set1(above[j].at);
            counts[j] += __builtin_popcount(vf_at_least(lanes, at));
            sums[j] += __builtin_convertvector(vf_where_at_least(lanes, at, weights), vd);
        }
    }
    for (int j = 0; j < 3; j++) {
        above[j].count = counts[j];
        above[j].sum = vd_hsum(sums[j]);
    }
}

/* Copies what lies in [low, high), in its order; how many that is. */
INGOT_INLINE int ingot_between(const float *x, const float *w, int n, float low, float high, float *list_x,
                               float *list_w) {
    int count = 0;
    for (int i = 0; i < n; i += VF_LANES) {
        vf lanes = ingot_lanes(x, i, n, INGOT_NONE);
        unsigned found = vf_at_least(lanes, vf_set1(low)) & ~vf_at_least(lanes, vf_set1(high));
        for (; found; found &= found - 1) {
            int k = i + __builtin_ctz(found);
            list_x[count] = x[k];
            list_w[count] = w[k];
            count++;
        }
    }
    return count;
}

/* The shortest prefix of at least `count` tokens (or with count = 0, of at least the weight `sum`); there is one, and it
 * ends with a token that has a weight. w holds whole vectors. */
static ingot_cut ingot_find_cut(const float *x, const float *w, int n, float peak, float temperature, int count,
                                double sum) {
    float list_x[INGOT_CUT_LIST + VF_LANES], list_w[INGOT_CUT_LIST + VF_LANES];
    float lowest = peak - INGOT_NEGLIGIBLE * 1.1f * temperature;
    if (!(lowest < peak)) lowest = ingot_key_float(ingot_float_key(peak) - 1);
    ingot_above low = {lowest, n, 0}, high = {ingot_key_float(ingot_float_key(peak) + 1), 0, 0}, base = {0};
    for (int round = 0;; round++) {
        int32_t key = ingot_float_key(low.at);
        int64_t gap = (int64_t)ingot_float_key(high.at) - key;
        if (gap <= 1) break;
        ingot_above tried[3];
        for (int j = 0; j < 3; j++) {
            tried[j].at = round < INGOT_CUT_VALUE_ROUNDS ? low.at + (high.at - low.at) * (0.25f * (float)(j + 1))
                                                         : ingot_key_float((int32_t)(key + gap * (j + 1) / 4));
        }
        ingot_measure(x, w, n, tried);
        for (int j = 0; j < 3; j++) {
            if (!(tried[j].at > low.at && tried[j].at < high.at)) continue;
            tried[j].count += base.count;
            tried[j].sum += base.sum;
            if (count ? tried[j].count >= count : tried[j].sum >= sum) {
                low = tried[j];
            } else {
                high = tried[j];
                break;
            }
        }
        if (x != list_x && low.count - high.count <= INGOT_CUT_LIST) {
            n = ingot_between(x, w, n, low.at, high.at, list_x, list_w);
            x = list_x;
            w = list_w;
            base = high;
        }
    }
    ingot_cut cut = {low.at, count - high.count, low.count - high.count};
    if (!count) {
        int i = 0; /* the first of the equal ones: later ones may have been dropped before */
        while (x[i] != low.at) i++;
        double each = w[i];
        cut.ties = (int)((sum - high.sum) / each);
        if (cut.ties < 1) cut.ties = 1;
        while (high.sum + cut.ties * each < sum) cut.ties++;
    }
    return cut;
}

/* Tokens that are not kept weigh nothing from now on. */
static void ingot_apply_cut(ingot_cut cut, const float *x, float *w, int n) {
    vf at = vf_set1(cut.at);
    int ties = cut.ties;
    for (int i = 0; i < n; i += VF_LANES) {
        vf lanes = ingot_lanes(x, i, n, INGOT_NONE);
        vf_store(w + i, vf_where_at_least(lanes, at, vf_load(w + i)));
        if (cut.ties == cut.num_equal) continue;
        for (unsigned equal = vf_at_least(lanes, at) & ~vf_above(lanes, at); equal; equal &= equal - 1) {
            if (--ties < 0) w[i + __builtin_ctz(equal)] = 0.0f;
        }
    }
}

#endif

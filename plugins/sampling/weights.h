/* Rows of logits as vectors, and the weights of their tokens.
 *
 * A token's weight is exp((x - peak) / temperature), rounded to a multiple of 2^-34: the most probable token weighs 1.
 * A float64 holds any sum of 2^19 such weights exactly, so sums are the same in whatever order, on however many workers
 * and with vectors of whatever width they are taken. Tokens 2^35 times less probable than the best weigh nothing. */
#ifndef INGOT_WEIGHTS_H
#define INGOT_WEIGHTS_H
#include "cpu/simd.h"

#define INGOT_WEIGHT_UNIT 0x1p-34f
#define INGOT_WEIGHT_ROUND 0x1.8p18 /* a double that it is added to is rounded to a multiple of the unit */
#define INGOT_NEGLIGIBLE 25.0f      /* exp(-25) rounds to no weight */
#define INGOT_NONE (-__builtin_inff())

/* As many float64 as vf has float32. */
typedef double vd __attribute__((vector_size(2 * sizeof(vf))));

INGOT_INLINE double vd_hsum(vd x) {
    double sum = 0;
    for (int i = 0; i < VF_LANES; i++) sum += x[i];
    return sum;
}

/* Lane i in bit i: a > b, a >= b; and b where a >= t, else 0. */
#if VF_LANES == 16
INGOT_INLINE unsigned vf_above(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INGOT_INLINE unsigned vf_at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INGOT_INLINE vf vf_where_at_least(vf a, vf t, vf b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, t, _CMP_GE_OQ), b);
}
#elif VF_LANES == 8
INGOT_INLINE unsigned vf_above(vf a, vf b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INGOT_INLINE unsigned vf_at_least(vf a, vf b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INGOT_INLINE vf vf_where_at_least(vf a, vf t, vf b) { return _mm256_and_ps(_mm256_cmp_ps(a, t, _CMP_GE_OQ), b); }
#else
INGOT_INLINE unsigned vf_lane_bits(uint32x4_t mask) {
    static const uint32_t bits[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(mask, vld1q_u32(bits)));
}
INGOT_INLINE unsigned vf_above(vf a, vf b) { return vf_lane_bits(vcgtq_f32(a, b)); }
INGOT_INLINE unsigned vf_at_least(vf a, vf b) { return vf_lane_bits(vcgeq_f32(a, b)); }
INGOT_INLINE vf vf_where_at_least(vf a, vf t, vf b) {
    return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a, t), vreinterpretq_u32_f32(b)));
}
#endif

/* x[i ..]; beyond n lanes hold `rest`. */
INGOT_INLINE vf ingot_lanes(const float *x, int i, int n, float rest) {
    return i + VF_LANES <= n ? vf_load(x + i) : vf_keep_first(vf_load_first(x + i, n - i), n - i, rest);
}

/* The largest of x, or NaN if one of them is NaN or +infinity; -infinity for tokens that are ruled out is fine. */
INGOT_INLINE float ingot_peak(const float *x, int n) {
    vf peaks[4], limit = vf_set1(__builtin_inff());
    for (int k = 0; k < 4; k++) peaks[k] = vf_set1(INGOT_NONE);
    unsigned all = VF_LANES == 16 ? 0xffffu : (1u << VF_LANES) - 1, numbers = all;
    int i = 0;
    for (; i + 4 * VF_LANES <= n; i += 4 * VF_LANES) {
        INGOT_UNROLL
        for (int k = 0; k < 4; k++) {
            vf lanes = vf_load(x + i + k * VF_LANES);
            numbers &= vf_above(limit, lanes);
            peaks[k] = vf_max(lanes, peaks[k]);
        }
    }
    for (; i < n; i += VF_LANES) {
        vf lanes = ingot_lanes(x, i, n, INGOT_NONE);
        numbers &= vf_above(limit, lanes);
        peaks[0] = vf_max(lanes, peaks[0]);
    }
    float peak = vf_hmax(vf_max(vf_max(peaks[0], peaks[1]), vf_max(peaks[2], peaks[3])));
    return numbers == all ? peak : __builtin_nanf("");
}

/* The first i with x[i] >= value; there is one. */
INGOT_INLINE int ingot_first(const float *x, int n, float value) {
    for (int i = 0;; i += VF_LANES) {
        unsigned found = vf_at_least(ingot_lanes(x, i, n, INGOT_NONE), vf_set1(value));
        if (found) return i + __builtin_ctz(found);
    }
}

INGOT_INLINE vd ingot_weigh_lanes(vf x, vf peak, vf inverse) {
    vd exact = __builtin_convertvector(vf_exp((x - peak) * inverse), vd);
    return (exact + INGOT_WEIGHT_ROUND) - INGOT_WEIGHT_ROUND;
}

/* The sum of the weights. inverse: of the temperature. */
INGOT_INLINE double ingot_weigh(const float *x, int n, float peak, float inverse) {
    vd sums = {0};
    for (int i = 0; i < n; i += VF_LANES) {
        sums += ingot_weigh_lanes(ingot_lanes(x, i, n, INGOT_NONE), vf_set1(peak), vf_set1(inverse));
    }
    return vd_hsum(sums);
}

/* The same, and w = the weights; w has room for whole vectors. */
INGOT_INLINE double ingot_weigh_into(float *w, const float *x, int n, float peak, float inverse) {
    vd sums = {0};
    for (int i = 0; i < n; i += VF_LANES) {
        vd weights = ingot_weigh_lanes(ingot_lanes(x, i, n, INGOT_NONE), vf_set1(peak), vf_set1(inverse));
        sums += weights;
        vf_store(w + i, __builtin_convertvector(weights, vf));
    }
    return vd_hsum(sums);
}

/* Weights below `least` become 0; the sum of the others. w holds whole vectors. */
INGOT_INLINE double ingot_drop_light(float *w, int n, float least) {
    vd sums = {0};
    for (int i = 0; i < n; i += VF_LANES) {
        vf lanes = vf_load(w + i), kept = vf_where_at_least(lanes, vf_set1(least), lanes);
        vf_store(w + i, kept);
        sums += __builtin_convertvector(kept, vd);
    }
    return vd_hsum(sums);
}

/* The first i at which *running, to which the weights are added, exceeds `goal`; -1 if it never does. */
INGOT_INLINE int ingot_pick(const float *w, int n, double *running, double goal) {
    for (int i = 0; i < n; i += 4 * VF_LANES) {
        int end = i + 4 * VF_LANES < n ? i + 4 * VF_LANES : n;
        vd sums = {0};
        for (int k = i; k < end; k += VF_LANES) sums += __builtin_convertvector(ingot_lanes(w, k, n, 0.0f), vd);
        double after = *running + vd_hsum(sums);
        if (after > goal) {
            double sum = *running;
            for (int k = i;; k++) {
                sum += (double)w[k];
                if (sum > goal) return k;
            }
        }
        *running = after;
    }
    return -1;
}

#endif

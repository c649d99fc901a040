/* Softmax, running sums and reductions of rows of contiguous elements. */
#ifndef INGOT_ROWS_H
#define INGOT_ROWS_H
#include "cpu/ingot_kernel.h"
#include "cpu/simd.h"

/* y = exp(x - max(x)) / sum of these; y may be x. */
INGOT_INLINE void ingot_softmax_row(const float *x, float *y, int n) {
    vf peaks = vf_set1(-__builtin_inff()), sums = vf_zero();
    int i = 0, rest = n % VF_LANES, whole = n - rest;
    for (; i < whole; i += VF_LANES) peaks = vf_max(vf_load(x + i), peaks);
    if (rest) peaks = vf_max(vf_keep_first(vf_load_first(x + i, rest), rest, -__builtin_inff()), peaks);
    vf peak = vf_set1(vf_hmax(peaks));
    for (i = 0; i < whole; i += VF_LANES) {
        vf e = vf_exp(vf_load(x + i) - peak);
        vf_store(y + i, e);
        sums = sums + e;
    }
    if (rest) {
        vf e = vf_keep_first(vf_exp(vf_load_first(x + i, rest) - peak), rest, 0.0f);
        vf_store_first(y + i, e, rest);
        sums = sums + e;
    }
    float factor = 1.0f / vf_hsum(sums);
    for (i = 0; i < n; i++) y[i] *= factor;
}

INGOT_INLINE void ingot_cumsum_row_f32(const float *x, float *y, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) y[i] = sum += x[i];
}

INGOT_INLINE void ingot_cumsum_row_i32(const int32_t *x, int32_t *y, int n) {
    uint32_t sum = 0;
    for (int i = 0; i < n; i++) y[i] = (int32_t)(sum += (uint32_t)x[i]);
}

#endif

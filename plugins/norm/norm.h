/* Normalisation of rows of float32. Sums run in vectors with four accumulators, in an order that only the length of a
 * row decides. */
#ifndef INGOT_NORM_H
#define INGOT_NORM_H
#include "cpu/ingot_kernel.h"
#include "cpu/simd.h"

/* Sum of (x - shift)^power over n elements; power: 1 or 2, a literal. */
INGOT_INLINE float ingot_row_moment(const float *x, int n, float shift, int power) {
    vf sum[4], mean = vf_set1(shift), one = vf_set1(1.0f);
    sum[0] = sum[1] = sum[2] = sum[3] = vf_zero();
    int i = 0;
    for (; i + 4 * VF_LANES <= n; i += 4 * VF_LANES) {
        INGOT_UNROLL
        for (int v = 0; v < 4; v++) {
            vf d = vf_load(x + i + v * VF_LANES) - mean;
            sum[v] = vf_fma(d, power == 1 ? one : d, sum[v]);
        }
    }
    for (; i + VF_LANES <= n; i += VF_LANES) {
        vf d = vf_load(x + i) - mean;
        sum[0] = vf_fma(d, power == 1 ? one : d, sum[0]);
    }
    if (i < n) {
        vf d = vf_keep_first(vf_load_first(x + i, n - i) - mean, n - i, 0.0f);
        sum[1] = vf_fma(d, power == 1 ? one : d, sum[1]);
    }
    return vf_hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* y = x / sqrt(mean(x^2) + eps) [* weight]; weight may be null, y may be x. */
INGOT_INLINE void ingot_rms_norm_row(const float *x, const float *weight, float *y, int n, float eps) {
    float factor = 1.0f / __builtin_sqrtf(ingot_row_moment(x, n, 0.0f, 2) * (1.0f / (float)n) + eps);
    if (weight) {
        for (int i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
    } else {
        for (int i = 0; i < n; i++) y[i] = x[i] * factor;
    }
}

/* y = (x - mean(x)) / sqrt(var(x) + eps) [* weight] [+ bias]; weight and bias may be null, y may be x. */
INGOT_INLINE void ingot_layer_norm_row(const float *x, const float *weight, const float *bias, float *y, int n,
                                       float eps) {
    float mean = ingot_row_moment(x, n, 0.0f, 1) * (1.0f / (float)n);
    float factor = 1.0f / __builtin_sqrtf(ingot_row_moment(x, n, mean, 2) * (1.0f / (float)n) + eps);
    for (int i = 0; i < n; i++) y[i] = (x[i] - mean) * factor;
    if (weight) {
        for (int i = 0; i < n; i++) y[i] *= weight[i];
    }
    if (bias) {
        for (int i = 0; i < n; i++) y[i] += bias[i];
    }
}

enum { INGOT_RMS_NORM, INGOT_LAYER_NORM };

typedef struct {
    int kind, dim;
    int x_stride, r_stride, y_stride; /* floats from one row to the next; of s: y_stride */
    int x_group;                      /* so many rows of x lie side by side, x_stride apart from the next so many */
    float eps;
} ingot_norm;

/* Rows of x, or of s = x + r, which is stored as well (r and s: both null or neither; s may be x or r). */
INGOT_INLINE void ingot_norm_rows(int rows, const float *x, const float *r, const float *weight, const float *bias,
                                  float *y, float *s, int worker, int num_workers, ingot_norm c) {
    int begin, end;
    ingot_split(rows, worker, num_workers, &begin, &end);
    for (int row = begin; row < end; row++) {
        const float *from = x + (ptrdiff_t)(row / c.x_group) * c.x_stride + row % c.x_group * c.dim;
        float *to = y + (ptrdiff_t)row * c.y_stride;
        if (r) {
            const float *other = r + (ptrdiff_t)row * c.r_stride;
            float *sum = s + (ptrdiff_t)row * c.y_stride;
            for (int i = 0; i < c.dim; i++) sum[i] = from[i] + other[i];
            from = sum;
        }
        if (c.kind == INGOT_RMS_NORM) ingot_rms_norm_row(from, weight, to, c.dim, c.eps);
        else ingot_layer_norm_row(from, weight, bias, to, c.dim, c.eps);
    }
}

#endif

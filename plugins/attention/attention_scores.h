/* Scores of few rows: a dot product along the head for each row and key, of integers where keys are of 8 bits; then
 * a query is quantized likewise. So it is where keys are multiplied as pairs of bfloat16. */
#ifndef INGOT_ATTENTION_SCORES_H
#define INGOT_ATTENTION_SCORES_H
#include "attention/attention_pairs.h"
#include "linear/integer_vectors.h"

/* Rows that share one load of a key or a value. */
#define FEW_BLOCK (VF_REGISTERS == 32 ? 4 : 3)

/* A vector of a key of floats, from element i on; what is n or more elements behind it is 0. */
INGOT_INLINE vf ingot_few_key(int kind, const void *cache, size_t i, int n, int type) {
#ifdef VF_PAIRS
    if (kind == GEMM_PAIRS) return ingot_kv_load_pairs(cache, i, n);
#endif
    (void)kind;
    return n >= VF_LANES ? ingot_kv_load(cache, i, type) : ingot_kv_load_first(cache, i, n, type);
}

/* scores[i][0 .. 3] of `rows` queries with the four keys from element `k` on; kind, rows: literals. */
INGOT_INLINE void ingot_few_scores_of(int kind, int rows, const float *q, int q_row, const void *cache, size_t k,
                                      int dim, int type, float *scores) {
    const int width = kind == GEMM_PAIRS ? 2 * VF_LANES : VF_LANES;
    vf sum[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = vf_zero();
    for (int d = 0; d < dim; d += width) {
        vf query[4];
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) query[i] = vf_load(q + i * q_row + d / width * VF_LANES);
        INGOT_UNROLL
        for (int j = 0; j < 4; j++) {
            vf key = ingot_few_key(kind, cache, k + (size_t)(j * dim + d), dim - d, type);
            INGOT_UNROLL
            for (int i = 0; i < rows; i++) sum[i][j] = ingot_gemm_step(kind, query[i], key, sum[i][j]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        vf_hsum4(scores + i * ATTENTION_FEW_KEYS, sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
}

/* Floats of a query as products of integers take it: bytes, padded with zeros, then what the sums begin with. */
#define FEW_BYTES(dim) ATTENTION_ALIGN(dim, 64)
#define FEW_INTEGER_ROW(dim) (FEW_BYTES(dim) / 4 + VF_LANES)

/* x[dim] to 8 bits; returns the scale. A row with an infinity or a NaN becomes zeros, with that as its scale. */
INGOT_INLINE float ingot_few_quantize(const float *x, int dim, float *row) {
    int8_t *q = (int8_t *)row;
    int32_t *start = (int32_t *)(row + FEW_BYTES(dim) / 4);
    float inverse, scale = ingot_scale_of(ingot_max_magnitude(x, dim), &inverse);
    memset(row, 0, sizeof(float) * (size_t)FEW_INTEGER_ROW(dim));
    if (inverse != 0.0f) (void)ingot_quantize_values(x, dim, inverse, q);
    for (int d = 0; d < dim; d++) start[d / 4 % VF_LANES] -= VI_SHIFT_I8 * q[d];
    return scale;
}

/* The same of quantized queries with four keys of 8 bits, from `keys` on. The bytes behind a row, which belong to the
 * block too, are multiplied with zeros. */
INGOT_INLINE void ingot_few_products_of(int rows, const float *q, int q_row, const float *q_scale, const int8_t *keys,
                                        const float *k_scale, int dim, float *scores) {
    vi sum[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = vi_load(q + i * q_row + FEW_BYTES(dim) / 4);
    }
    for (int d = 0; d < dim; d += VI_BYTES) {
        vi query[4];
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) query[i] = vi_load((const int8_t *)(q + i * q_row) + d);
        INGOT_UNROLL
        for (int j = 0; j < 4; j++) {
            vi key = vi_prepare_i8(vi_load(keys + j * dim + d));
            INGOT_UNROLL
            for (int i = 0; i < rows; i++) sum[i][j] = vi_step_i8(sum[i][j], key, query[i]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) { /* integers below 2^24: exact as floats, in whatever order they are added */
        float *to = scores + i * ATTENTION_FEW_KEYS;
        vf_hsum4(to, vi_to_float(sum[i][0]), vi_to_float(sum[i][1]), vi_to_float(sum[i][2]), vi_to_float(sum[i][3]));
        INGOT_UNROLL
        for (int j = 0; j < 4; j++) to[j] *= q_scale[i] * k_scale[j];
    }
}

/* Scores of the first FEW_BLOCK rows or, if there are less, of all, with four keys from element `k` on; k_scale: of
 * those keys, and q_scale: where they are of 8 bits. */
INGOT_INLINE void ingot_few_scores(int kind, int rows, const float *q, int q_row, const float *q_scale,
                                   const void *cache, size_t k, const float *k_scale, int dim, int type,
                                   float *scores) {
    if (type == INGOT_KV_I8) {
        const int8_t *keys = (const int8_t *)cache + k;
        switch (rows) {
            case 1: ingot_few_products_of(1, q, q_row, q_scale, keys, k_scale, dim, scores); break;
            case 2: ingot_few_products_of(2, q, q_row, q_scale, keys, k_scale, dim, scores); break;
            case 3: ingot_few_products_of(3, q, q_row, q_scale, keys, k_scale, dim, scores); break;
            default: ingot_few_products_of(FEW_BLOCK, q, q_row, q_scale, keys, k_scale, dim, scores); break;
        }
        return;
    }
    switch (rows) {
        case 1: ingot_few_scores_of(kind, 1, q, q_row, cache, k, dim, type, scores); break;
        case 2: ingot_few_scores_of(kind, 2, q, q_row, cache, k, dim, type, scores); break;
        case 3: ingot_few_scores_of(kind, 3, q, q_row, cache, k, dim, type, scores); break;
        default: ingot_few_scores_of(kind, FEW_BLOCK, q, q_row, cache, k, dim, type, scores); break;
    }
}

#endif

/* Tiles of matrices in float32 and bfloat16. Sums are float32, one fused multiply-add after the other along K; where
 * the inputs are bfloat16 too, one pair of products after the other. */
#ifndef INGOT_TILE_FLOAT_H
#define INGOT_TILE_FLOAT_H
#include "../cpu/gemm.h"
#include "panel.h"

typedef vf ingot_sums[INGOT_TILE_ROWS][INGOT_TILE_PANELS][INGOT_PARTS];
typedef vf ingot_weights[INGOT_TILE_PANELS][INGOT_PARTS];

/* K is cut into pieces for the cache's sake; y holds the sums in between. */
INGOT_INLINE void ingot_begin_sums(const ingot_matmul *job, ingot_sums sums, const int rows, const int panels,
                                   int k_begin, int row, int panel) {
    INGOT_FOR_TILE(rows, panels)
        sums[r][p][h] = k_begin == 0 ? vf_zero() : ingot_load_output(job, row + r, panel + p, h);
}

INGOT_INLINE void ingot_end_sums(const ingot_matmul *job, ingot_sums sums, const int rows, const int panels,
                                 int k_end, int row, int panel) {
    INGOT_FOR_TILE(rows, panels) {
        if (k_end == job->k) ingot_finish(job, row + r, panel + p, h, sums[r][p][h], NULL);
        else ingot_store_output(job, row + r, panel + p, h, sums[r][p][h]);
    }
}

/* Lanes of 32 bits, which of x and w hold a number or a pair of them each: those from `begin` to `end` of the `depth`
 * that a row has. kind: of GEMM_FLOATS and GEMM_PAIRS. */
INGOT_INLINE void ingot_add_lanes(const ingot_matmul *job, const int kind, ingot_sums sums, const int rows,
                                  const int panels, int begin, int end, int depth, int row, int panel) {
    const size_t panel_floats = (size_t)depth * INGOT_PANEL;
    const float *w = (const float *)job->w + (size_t)panel * panel_floats;
    const float *x[INGOT_TILE_ROWS];
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = (const float *)ingot_row(job, row + r);
    for (int k = begin; k < end; k++) {
        ingot_weights weights;
        INGOT_UNROLL for (int p = 0; p < panels; p++) {
            const float *from = w + (size_t)p * panel_floats + (size_t)k * INGOT_PANEL;
            ingot_fetch(from, job->ahead, (size_t)(depth - k) * 64, panels, panel_floats * 4);
            INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) weights[p][h] = vf_load(from + h * VF_LANES);
        }
        INGOT_UNROLL for (int r = 0; r < rows; r++) {
            const vf value = vf_set1(x[r][k]);
            INGOT_FOR_PARTS(panels) sums[r][p][h] = ingot_gemm_step(kind, weights[p][h], value, sums[r][p][h]);
        }
    }
}

INGOT_INLINE void ingot_tile_fp32(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    ingot_sums sums;
    ingot_begin_sums(job, sums, rows, panels, k_begin, row, panel);
    ingot_add_lanes(job, GEMM_FLOATS, sums, rows, panels, k_begin, k_end, job->k, row, panel);
    ingot_end_sums(job, sums, rows, panels, k_end, row, panel);
}

#ifdef VF_PAIRS
/* bfloat16 by bfloat16, over rows that ingot_round_to_pairs wrote. k_begin is even, k_end too unless it is K. */
INGOT_INLINE void ingot_tile_bf16_pairs(const ingot_matmul *job, const int rows, const int panels, int k_begin,
                                        int k_end, int row, int panel) {
    ingot_sums sums;
    ingot_begin_sums(job, sums, rows, panels, k_begin, row, panel);
    ingot_add_lanes(job, GEMM_PAIRS, sums, rows, panels, k_begin / 2, (k_end + 1) / 2, (job->k + 1) / 2, row, panel);
    ingot_end_sums(job, sums, rows, panels, k_end, row, panel);
}
#endif

/* A 32-bit lane holds two bfloat16 of neighbouring channels of K: the even one below. */
INGOT_INLINE void ingot_widen_pairs(const uint16_t *from, vf *even, vf *odd) {
#if VF_LANES == 16
    const __m512i pairs = _mm512_loadu_si512(from);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
#elif VF_LANES == 8
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)from);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
#else
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(from));
    *even = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    *odd = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
#endif
}

/* One pair of channels of K, or its even one alone where K ends: there is no x to read for the other. */
INGOT_INLINE void ingot_add_pair(const ingot_matmul *job, const uint16_t *w, size_t panel_pairs, const float *const *x,
                                 ingot_sums sums, const int rows, const int panels, int pair, const int whole) {
    ingot_weights even, odd;
    INGOT_UNROLL for (int p = 0; p < panels; p++) {
        const uint16_t *from = w + 2 * INGOT_PANEL * ((size_t)p * panel_pairs + (size_t)pair);
        ingot_fetch(from, job->ahead, (panel_pairs - (size_t)pair) * 64, panels, panel_pairs * 64);
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++)
            ingot_widen_pairs(from + 2 * h * VF_LANES, &even[p][h], &odd[p][h]);
    }
    INGOT_FOR_TILE(rows, panels) {
        sums[r][p][h] = vf_fma(even[p][h], vf_set1(x[r][2 * pair]), sums[r][p][h]);
        if (whole) sums[r][p][h] = vf_fma(odd[p][h], vf_set1(x[r][2 * pair + 1]), sums[r][p][h]);
    }
}

/* k_begin is even, k_end too unless it is K. */
INGOT_INLINE void ingot_tile_bf16(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    const size_t panel_pairs = (size_t)(job->k + 1) / 2;
    const uint16_t *w = (const uint16_t *)job->w + 2 * INGOT_PANEL * panel_pairs * (size_t)panel;
    const float *x[INGOT_TILE_ROWS];
    ingot_sums sums;
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = (const float *)ingot_row(job, row + r);
    ingot_begin_sums(job, sums, rows, panels, k_begin, row, panel);
    for (int pair = k_begin / 2; pair < k_end / 2; pair++)
        ingot_add_pair(job, w, panel_pairs, x, sums, rows, panels, pair, 1);
    if (k_end % 2) ingot_add_pair(job, w, panel_pairs, x, sums, rows, panels, k_end / 2, 0);
    ingot_end_sums(job, sums, rows, panels, k_end, row, panel);
}

#endif

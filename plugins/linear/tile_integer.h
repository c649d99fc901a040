/* Tiles of matrices in 8 and 4 bits, over rows that "quantize/quantize.h" wrote. 32 channels of K at a time: their
 * weights are brought to registers, then multiplied with one token after the other in integers. */
#ifndef INGOT_TILE_INTEGER_H
#define INGOT_TILE_INTEGER_H
#include "../quantize/quantize.h"
#include "integer_vectors.h"
#include "panel.h"

#define INGOT_W4_BLOCK_BYTES 320
#define INGOT_W8_BLOCK_BYTES 512

/* The 64 bytes of `part` at `from`, for each of the next `lines` lines. */
INGOT_INLINE void ingot_fetch_ahead(const uint8_t *from, const int lines, int part) {
    if (part == 0)
        INGOT_UNROLL for (int line = 0; line < lines; line++)
            __builtin_prefetch(from + INGOT_AHEAD_BYTES + 64 * line);
}

/* y += sx * scale * dot(q, xq) + minimum * (sx * sum(xq)), block after block. */
INGOT_INLINE void ingot_tile_w4a8(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    const int k32 = ingot_k32(job->k), blocks = k32 / INGOT_BLOCK;
    const uint8_t *w = job->w + (size_t)panel * (size_t)blocks * INGOT_W4_BLOCK_BYTES;
    const uint8_t *x[INGOT_MAX_TILE_ROWS];
    vf sums[INGOT_MAX_TILE_ROWS][INGOT_PARTS];
    INGOT_UNROLL for (int r = 0; r < rows; r++) {
        x[r] = ingot_row(job, row + r);
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) sums[r][h] = vf_zero();
    }
    for (int b = 0; b < blocks; b++, w += INGOT_W4_BLOCK_BYTES) {
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) {
            vi weights[VI_BLOCK];
            ingot_fetch_ahead(w, INGOT_W4_BLOCK_BYTES / 64, h);
            INGOT_UNROLL for (int j = 0; j < 4; j++) {
                const vi bytes = vi_load(w + 64 * j + VI_BYTES * h);
                weights[j] = vi_low_nibbles(bytes);
                weights[j + 4] = vi_high_nibbles(bytes);
            }
            const vf scale = vf_load_f16((const uint16_t *)(w + 256) + VF_LANES * h);
            const vf minimum = vf_load_f16((const uint16_t *)(w + 288) + VF_LANES * h);
            INGOT_UNROLL for (int r = 0; r < rows; r++) {
                const float *x_scale = (const float *)(x[r] + k32), *x_sum = x_scale + blocks;
                const vi dot = vi_block_u4(weights, (const int8_t *)x[r] + INGOT_BLOCK * b);
                sums[r][h] = vf_fma(scale * vf_set1(x_scale[b]), vi_to_float(dot), sums[r][h]);
                sums[r][h] = vf_fma(minimum, vf_set1(x_sum[b]), sums[r][h]);
            }
        }
    }
    INGOT_UNROLL for (int r = 0; r < rows; r++)
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) ingot_finish(job, row + r, panel, h, sums[r][h], NULL);
}

/* The weights of block b, part h, ready for vi_block_i8. */
INGOT_INLINE void ingot_load_i8(const uint8_t *w, int h, vi *weights) {
    ingot_fetch_ahead(w, INGOT_W8_BLOCK_BYTES / 64, h);
    INGOT_UNROLL for (int j = 0; j < VI_BLOCK; j++) weights[j] = vi_prepare_i8(vi_load(w + 64 * j + VI_BYTES * h));
}

/* Activation scales by group: y = scale * sum over blocks of sx * dot(w, xq). */
INGOT_INLINE void ingot_tile_int8(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    const int k32 = ingot_k32(job->k), blocks = k32 / INGOT_BLOCK;
    const uint8_t *w = job->w + (size_t)panel * (size_t)(INGOT_PANEL * k32 + 64);
    const uint8_t *x[INGOT_MAX_TILE_ROWS];
    vf sums[INGOT_MAX_TILE_ROWS][INGOT_PARTS];
    INGOT_UNROLL for (int r = 0; r < rows; r++) {
        x[r] = ingot_row(job, row + r);
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) sums[r][h] = vf_zero();
    }
    for (int b = 0; b < blocks; b++, w += INGOT_W8_BLOCK_BYTES) {
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) {
            vi weights[VI_BLOCK];
            ingot_load_i8(w, h, weights);
            INGOT_UNROLL for (int r = 0; r < rows; r++) {
                const float *x_scale = (const float *)(x[r] + k32);
                const int32_t *offset = (const int32_t *)(x_scale + blocks);
                const vi dot = vi_block_i8(vi_start_i8(offset + b), weights, (const int8_t *)x[r] + INGOT_BLOCK * b);
                sums[r][h] = vf_fma(vf_set1(x_scale[b]), vi_to_float(dot), sums[r][h]);
            }
        }
    }
    INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) {
        const vf scale = vf_load((const float *)w + VF_LANES * h);
        INGOT_UNROLL for (int r = 0; r < rows; r++) ingot_finish(job, row + r, panel, h, sums[r][h], &scale);
    }
}

/* One activation scale a token: the sum over all of K is an integer. */
INGOT_INLINE void ingot_tile_int8_row(const ingot_matmul *job, const int rows, const int panels, int k_begin,
                                      int k_end, int row, int panel) {
    const int k32 = ingot_k32(job->k), blocks = k32 / INGOT_BLOCK;
    const uint8_t *w = job->w + (size_t)panel * (size_t)(INGOT_PANEL * k32 + 64);
    const uint8_t *x[INGOT_MAX_TILE_ROWS];
    vi sums[INGOT_MAX_TILE_ROWS][INGOT_PARTS];
    INGOT_UNROLL for (int r = 0; r < rows; r++) {
        x[r] = ingot_row(job, row + r);
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) sums[r][h] = vi_start_i8((const int32_t *)(x[r] + k32) + 1);
    }
    for (int b = 0; b < blocks; b++, w += INGOT_W8_BLOCK_BYTES) {
        INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) {
            vi weights[VI_BLOCK];
            ingot_load_i8(w, h, weights);
            INGOT_UNROLL for (int r = 0; r < rows; r++)
                sums[r][h] = vi_block_i8(sums[r][h], weights, (const int8_t *)x[r] + INGOT_BLOCK * b);
        }
    }
    INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++) {
        const vf scale = vf_load((const float *)w + VF_LANES * h);
        INGOT_UNROLL for (int r = 0; r < rows; r++) {
            const vf sum = vi_to_float(sums[r][h]) * vf_set1(*(const float *)(x[r] + k32));
            ingot_finish(job, row + r, panel, h, sum, &scale);
        }
    }
}

#endif

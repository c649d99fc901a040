/* Tiles of matrices in 8 and 4 bits, over rows that "quantize/quantize.h" wrote. Products are summed in integers over
 * 32 channels of K, then scaled and added up in float32. */
#ifndef INGOT_TILE_INTEGER_H
#define INGOT_TILE_INTEGER_H
#include "../quantize/quantize.h"
#include "integer_vectors.h"
#include "panel.h"

#define INGOT_W4_BLOCK_BYTES 320
#define INGOT_W8_BLOCK_BYTES 512
/* Two blocks and their scales. */
#define INGOT_W8_PAIR_BYTES (2 * INGOT_W8_BLOCK_BYTES + 64)

typedef const uint8_t *ingot_rows[INGOT_TILE_ROWS];
typedef vf ingot_float_tile[INGOT_TILE_ROWS][INGOT_TILE_PANELS][INGOT_PARTS];
typedef vi ingot_integer_tile[INGOT_TILE_ROWS][INGOT_TILE_PANELS][INGOT_PARTS];

/* The scales of a row, one a block; the sums or offsets follow them. */
INGOT_INLINE const float *ingot_scales(const uint8_t *row, int k) { return (const float *)(row + ingot_k32(k)); }

/* y += sx * scale * dot(q, xq) + minimum * (sx * sum(xq)), block after block. */
INGOT_INLINE void ingot_tile_w4a8(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = (size_t)blocks * INGOT_W4_BLOCK_BYTES;
    const uint8_t *w = job->w + (size_t)panel * panel_bytes;
    ingot_rows x;
    ingot_float_tile sums;
    (void)k_begin, (void)k_end;
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = ingot_row(job, row + r);
    INGOT_FOR_TILE(rows, panels) sums[r][p][h] = vf_zero();
    for (int b = 0; b < blocks; b++, w += INGOT_W4_BLOCK_BYTES) {
        ingot_integer_tile dots;
        INGOT_FOR_TILE(rows, panels) dots[r][p][h] = vi_set1(0);
        INGOT_UNROLL for (int p = 0; p < panels; p++)
            INGOT_UNROLL for (int line = 0; line < INGOT_W4_BLOCK_BYTES / 64; line++)
                ingot_fetch(w + (size_t)p * panel_bytes + 64 * line, job->ahead,
                            (size_t)(blocks - b) * INGOT_W4_BLOCK_BYTES, panels, panel_bytes);
        INGOT_UNROLL for (int j = 0; j < 4; j++) {
            vi low[INGOT_TILE_PANELS][INGOT_PARTS], high[INGOT_TILE_PANELS][INGOT_PARTS];
            INGOT_FOR_PARTS(panels) {
                const vi bytes = vi_load(w + (size_t)p * panel_bytes + 64 * j + VI_BYTES * h);
                low[p][h] = vi_low_nibbles(bytes);
                high[p][h] = vi_high_nibbles(bytes);
            }
            INGOT_UNROLL for (int r = 0; r < rows; r++) {
                const uint8_t *from = x[r] + INGOT_BLOCK * b + 4 * j;
                const vi x_low = vi_repeat(from), x_high = vi_repeat(from + 16);
                INGOT_FOR_PARTS(panels)
                    dots[r][p][h] = vi_step_u4(vi_step_u4(dots[r][p][h], low[p][h], x_low), high[p][h], x_high);
            }
        }
        INGOT_FOR_PARTS(panels) {
            const uint16_t *scales = (const uint16_t *)(w + (size_t)p * panel_bytes + 256) + VF_LANES * h;
            const vf scale = vf_load_f16(scales), minimum = vf_load_f16(scales + INGOT_PANEL);
            INGOT_UNROLL for (int r = 0; r < rows; r++) {
                const float *x_scale = ingot_scales(x[r], job->k) + b, *x_sum = x_scale + blocks;
                const vf dot = vi_to_float(vi_end_u4(dots[r][p][h]));
                sums[r][p][h] = vf_fma(scale * vf_set1(*x_scale), dot, sums[r][p][h]);
                sums[r][p][h] = vf_fma(minimum, vf_set1(*x_sum), sums[r][p][h]);
            }
        }
    }
    INGOT_FOR_TILE(rows, panels) ingot_finish(job, row + r, panel + p, h, sums[r][p][h], NULL);
}

/* dots += one block of 8-bit weights, of which w is that of the first panel and `left` bytes remain in it. */
INGOT_INLINE void ingot_add_block_i8(const ingot_matmul *job, ingot_integer_tile dots, const uint8_t *w,
                                     size_t panel_bytes, size_t left, const uint8_t *const *x, int begin,
                                     const int rows, const int panels) {
    INGOT_UNROLL for (int p = 0; p < panels; p++)
        INGOT_UNROLL for (int line = 0; line < INGOT_W8_BLOCK_BYTES / 64; line++)
            ingot_fetch(w + (size_t)p * panel_bytes + 64 * line, job->ahead, left, panels, panel_bytes);
    INGOT_UNROLL for (int j = 0; j < INGOT_BLOCK / 4; j++) {
        vi weights[INGOT_TILE_PANELS][INGOT_PARTS];
        INGOT_FOR_PARTS(panels)
            weights[p][h] = vi_prepare_i8(vi_load(w + (size_t)p * panel_bytes + 64 * j + VI_BYTES * h));
        INGOT_UNROLL for (int r = 0; r < rows; r++) {
            const vi four = vi_repeat(x[r] + begin + 4 * j);
            INGOT_FOR_PARTS(panels) dots[r][p][h] = vi_step_i8(dots[r][p][h], weights[p][h], four);
        }
    }
}

/* The scales of the output channels stand behind the weights of each panel. */
INGOT_INLINE vf ingot_channel_scales(const uint8_t *end, size_t panel_bytes, int p, int h) {
    return vf_load((const float *)(end + (size_t)p * panel_bytes) + VF_LANES * h);
}

/* Activation scales by group: y = scale * (sum over blocks of sx * dot(w, xq)). */
INGOT_INLINE void ingot_tile_int8(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                  int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = (size_t)blocks * INGOT_W8_BLOCK_BYTES + 64;
    const uint8_t *w = job->w + (size_t)panel * panel_bytes;
    ingot_rows x;
    ingot_float_tile sums;
    (void)k_begin, (void)k_end;
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = ingot_row(job, row + r);
    INGOT_FOR_TILE(rows, panels) sums[r][p][h] = vf_zero();
    for (int b = 0; b < blocks; b++, w += INGOT_W8_BLOCK_BYTES) {
        ingot_integer_tile dots;
        INGOT_FOR_TILE(rows, panels)
            dots[r][p][h] = vi_start_i8((const int32_t *)(ingot_scales(x[r], job->k) + blocks + b));
        ingot_add_block_i8(job, dots, w, panel_bytes, (size_t)(blocks - b) * INGOT_W8_BLOCK_BYTES, x,
                           INGOT_BLOCK * b, rows, panels);
        INGOT_FOR_TILE(rows, panels)
            sums[r][p][h] = vf_fma(vf_set1(ingot_scales(x[r], job->k)[b]), vi_to_float(dots[r][p][h]), sums[r][p][h]);
    }
    INGOT_FOR_PARTS(panels) {
        const vf scale = ingot_channel_scales(w, panel_bytes, p, h);
        INGOT_UNROLL for (int r = 0; r < rows; r++) ingot_finish(job, row + r, panel + p, h, sums[r][p][h], &scale);
    }
}

/* Weight scales of 32 channels too: y = sum over blocks of sx * scale * dot(w, xq). */
INGOT_INLINE void ingot_tile_int8g32(const ingot_matmul *job, const int rows, const int panels, int k_begin, int k_end,
                                     int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = (size_t)blocks * INGOT_W8_BLOCK_BYTES + ((size_t)blocks + 1) / 2 * 64;
    const uint8_t *from = job->w + (size_t)panel * panel_bytes, *end = from + panel_bytes;
    ingot_rows x;
    ingot_float_tile sums;
    (void)k_begin, (void)k_end;
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = ingot_row(job, row + r);
    INGOT_FOR_TILE(rows, panels) sums[r][p][h] = vf_zero();
    for (int b = 0; b < blocks; b++) {
        const uint8_t *scales = from + (size_t)(b / 2) * INGOT_W8_PAIR_BYTES + 32 * (b % 2);
        const uint8_t *w = scales + 64 + (INGOT_W8_BLOCK_BYTES - 32) * (b % 2);
        ingot_integer_tile dots;
        INGOT_FOR_TILE(rows, panels)
            dots[r][p][h] = vi_start_i8((const int32_t *)(ingot_scales(x[r], job->k) + blocks + b));
        INGOT_UNROLL for (int p = 0; p < panels; p++)
            ingot_fetch(scales + (size_t)p * panel_bytes, job->ahead, (size_t)(end - scales), panels,
                        panel_bytes);
        ingot_add_block_i8(job, dots, w, panel_bytes, (size_t)(end - w), x, INGOT_BLOCK * b, rows, panels);
        INGOT_FOR_PARTS(panels) {
            const vf scale = vf_load_f16((const uint16_t *)(scales + (size_t)p * panel_bytes) + VF_LANES * h);
            INGOT_UNROLL for (int r = 0; r < rows; r++) {
                const vf both = scale * vf_set1(ingot_scales(x[r], job->k)[b]);
                sums[r][p][h] = vf_fma(both, vi_to_float(dots[r][p][h]), sums[r][p][h]);
            }
        }
    }
    INGOT_FOR_TILE(rows, panels) ingot_finish(job, row + r, panel + p, h, sums[r][p][h], NULL);
}

/* One activation scale a token: the sum over all of K is an integer. */
INGOT_INLINE void ingot_tile_int8_row(const ingot_matmul *job, const int rows, const int panels, int k_begin,
                                      int k_end, int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = (size_t)blocks * INGOT_W8_BLOCK_BYTES + 64;
    const uint8_t *w = job->w + (size_t)panel * panel_bytes;
    ingot_rows x;
    ingot_integer_tile sums;
    (void)k_begin, (void)k_end;
    INGOT_UNROLL for (int r = 0; r < rows; r++) x[r] = ingot_row(job, row + r);
    INGOT_FOR_TILE(rows, panels) sums[r][p][h] = vi_start_i8((const int32_t *)(ingot_scales(x[r], job->k) + 1));
    for (int b = 0; b < blocks; b++, w += INGOT_W8_BLOCK_BYTES)
        ingot_add_block_i8(job, sums, w, panel_bytes, (size_t)(blocks - b) * INGOT_W8_BLOCK_BYTES, x,
                           INGOT_BLOCK * b, rows, panels);
    INGOT_FOR_PARTS(panels) {
        const vf scale = ingot_channel_scales(w, panel_bytes, p, h);
        INGOT_UNROLL for (int r = 0; r < rows; r++) {
            const vf sum = vi_to_float(sums[r][p][h]) * vf_set1(*ingot_scales(x[r], job->k));
            ingot_finish(job, row + r, panel + p, h, sum, &scale);
        }
    }
}

#endif

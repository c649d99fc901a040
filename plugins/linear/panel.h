/* Packed matrices, and what every kernel that multiplies with one has in common.
 *
 * A matrix w[N, K] lies as panels of 16 output channels, one after the other in the order in which they are read, each
 * a multiple of 64 bytes; N is padded with zeros. Inside a panel:
 *   fp32   float    w[K][16]
 *   bf16   uint16_t w[K2 / 2][16][2]              K2 = K rounded up to 2
 *   int8   int8_t   w[K32 / 4][16][4]             K32 = K rounded up to 32
 *          float    scale[16]                     weight = scale * w
 *   int8g32 for every 64 channels of K, 1088 bytes (for a last 32, 576):
 *          f16      scale[2][16]                  of the first 32 channels, of the others
 *          int8_t   w[16][16][4]
 *   w4a8   for every 32 channels of K, 320 bytes:
 *          uint8_t  w[4][16][4]                   low nibbles: channels 4j + i, high nibbles: channels 16 + 4j + i
 *          f16      scale[16], minimum[16]        weight = scale * nibble + minimum
 *
 * The sum over K is taken in the same order, with the same roundings, by every kernel for a scheme. So a token's
 * result depends neither on the number of workers, nor on the other tokens, nor on their number. */
#ifndef INGOT_PANEL_H
#define INGOT_PANEL_H
#include "../cpu/ingot_kernel.h"
#include "../cpu/simd.h"

#define INGOT_PANEL 16
/* Vectors that the output channels of a panel take. */
#define INGOT_PARTS (INGOT_PANEL / VF_LANES)
/* The most tokens and panels that a tile has. */
#define INGOT_TILE_ROWS 8
#define INGOT_TILE_PANELS 2

/* As max_rows below: of tiles that take any number of tokens up to INGOT_MOST_ROWS. */
#define INGOT_ANY_ROWS 0
#define INGOT_MOST_ROWS 32

/* Loops over the vectors of a tile: row r, panel p, part h. */
#define INGOT_FOR_PARTS(panels) \
    INGOT_UNROLL for (int p = 0; p < (panels); p++) INGOT_UNROLL for (int h = 0; h < INGOT_PARTS; h++)
#define INGOT_FOR_TILE(rows, panels) INGOT_UNROLL for (int r = 0; r < (rows); r++) INGOT_FOR_PARTS(panels)

/* y[row, :] = x[row, :] w^T (+ bias) (+ residual[row, :]) for rows of one matrix.
 * index: the rows that count, where they are not 0, 1, 2, ...; row i then reads x at index[i] / share. */
typedef struct ingot_matmul {
    const uint8_t *x;
    size_t x_stride;            /* bytes from row to row */
    const int32_t *index;
    int share;
    const uint8_t *w;
    float *y;                   /* rows of n */
    const float *bias;          /* [n] or NULL */
    const float *residual;      /* as y, or NULL; may be y itself */
    int n, k;
    size_t ahead;               /* how far ahead of its use a weight is fetched, in bytes */
} ingot_matmul;

/* Computes `rows` tokens from `row` on x `panels` panels from `panel` on x channels [k_begin, k_end) of K; rows (unless
 * there may be any) and panels are constants. Only kernels in floats are given K in pieces. */
typedef void (*ingot_tile)(const ingot_matmul *job, int rows, int panels, int k_begin, int k_end, int row, int panel);

/* Fetches the line that is `ahead` bytes behind `from` in the order of reading: `left` bytes from `from` on the panel
 * ends, and as `panels` of them are read side by side, the next to read follows behind those. Into the second-level
 * cache: the first-level one is full of activations, and its few pending misses are left to the loads. */
INGOT_INLINE void ingot_fetch(const void *from, size_t ahead, size_t left, const int panels, size_t panel_bytes) {
    __builtin_prefetch((const uint8_t *)from + ahead + (ahead < left ? 0 : (size_t)(panels - 1) * panel_bytes), 0, 2);
}

INGOT_INLINE const uint8_t *ingot_row(const ingot_matmul *job, int row) {
    return job->x + (size_t)(job->index ? job->index[row] / job->share : row) * job->x_stride;
}

INGOT_INLINE float *ingot_output(const ingot_matmul *job, int row, int panel, int part) {
    size_t y_row = (size_t)(job->index ? job->index[row] : row);
    return job->y + y_row * (size_t)job->n + panel * INGOT_PANEL + part * VF_LANES;
}

/* Output channels of a part of a panel that exist, 0 to VF_LANES. */
INGOT_INLINE int ingot_valid(const ingot_matmul *job, int panel, int part) {
    int left = job->n % INGOT_PANEL == 0 ? VF_LANES : job->n - panel * INGOT_PANEL - part * VF_LANES;
    return left < 0 ? 0 : left < VF_LANES ? left : VF_LANES;
}

INGOT_INLINE vf ingot_load_output(const ingot_matmul *job, int row, int panel, int part) {
    int valid = ingot_valid(job, panel, part);
    const float *y = ingot_output(job, row, panel, part);
    return valid == VF_LANES ? vf_load(y) : vf_load_first(y, valid);
}

INGOT_INLINE void ingot_store_output(const ingot_matmul *job, int row, int panel, int part, vf value) {
    int valid = ingot_valid(job, panel, part);
    float *y = ingot_output(job, row, panel, part);
    if (valid == VF_LANES) vf_store(y, value);
    else vf_store_first(y, value, valid);
}

/* Writes sum (* scale) + bias + residual; the first addition is fused, so that every kernel rounds alike. */
INGOT_INLINE void ingot_finish(const ingot_matmul *job, int row, int panel, int part, vf sum, const vf *scale) {
    int valid = ingot_valid(job, panel, part);
    vf value = job->bias ? vf_load(job->bias + panel * INGOT_PANEL + part * VF_LANES) : vf_zero();
    if (scale) value = vf_fma(sum, *scale, value);
    else if (job->bias) value = sum + value;
    else value = sum;
    if (job->residual) {
        const float *r = job->residual + (ingot_output(job, row, panel, part) - job->y);
        value = value + (valid == VF_LANES ? vf_load(r) : vf_load_first(r, valid));
    }
    ingot_store_output(job, row, panel, part, value);
}

/* Rows [begin, end) of `panels` panels. The largest tiles first, then smaller ones for the rest: no row is computed
 * that does not exist. `k_step` channels of K at a time, their weights staying in the cache for all rows. */
INGOT_INLINE void ingot_rows_of_panels(ingot_tile tile, const ingot_matmul *job, const int max_rows, const int panels,
                                       const int k_step, int panel, int begin, int end) {
    for (int k = 0; k < job->k; k += k_step) {
        const int k_end = k_step < job->k - k ? k + k_step : job->k;
        for (int row = begin; row < end;) {
            const int left = end - row, most = left < INGOT_MOST_ROWS ? left : INGOT_MOST_ROWS;
            if (max_rows == INGOT_ANY_ROWS) { tile(job, most, panels, k, k_end, row, panel); row += most; }
            else if (max_rows >= 16 && left >= 16) { tile(job, 16, panels, k, k_end, row, panel); row += 16; }
            else if (max_rows >= 8 && left >= 8) { tile(job, 8, panels, k, k_end, row, panel); row += 8; }
            else if (max_rows >= 4 && left >= 4) { tile(job, 4, panels, k, k_end, row, panel); row += 4; }
            else if (max_rows >= 2 && left >= 2) { tile(job, 2, panels, k, k_end, row, panel); row += 2; }
            else { tile(job, 1, panels, k, k_end, row, panel); row += 1; }
        }
    }
}

/* Rows [row_begin, row_end) of panels [begin, end), `width` panels at a time where there are so many. */
INGOT_INLINE void ingot_panels(ingot_tile tile, const ingot_matmul *job, const int max_rows, const int width,
                               const int k_step, int begin, int end, int row_begin, int row_end) {
    int panel = begin;
    for (; panel + width <= end; panel += width)
        ingot_rows_of_panels(tile, job, max_rows, width, k_step, panel, row_begin, row_end);
    if (width > 1)
        for (; panel < end; panel++)
            ingot_rows_of_panels(tile, job, max_rows, 1, k_step, panel, row_begin, row_end);
}

#endif

/* Tiles of matrices by AMX: registers of 16 rows of 64 bytes, and instructions that add the product of two of them to a
 * third one of 16 tokens x 16 output channels (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1,
 * chapter 18, volume 2: LDTILECFG, TILELOADD, TDPBSSD, TDPBF16PS).
 *
 * What multiplies is rows of activations as they lie in memory by weights as they are packed: 4 channels of K (of
 * bfloat16: 2) of 16 output channels are a row of a tile, 64 bytes.
 *
 * Integers: a tile takes one block of 32 channels of K, whose sums go to memory and from there, scaled, to the sums in
 * float32: the same numbers in the same order as in "tile_integer.h", which fewer than 16 tokens take.
 * Pairs of bfloat16: TDPBF16PS adds up the even and the odd channels apart, 16 pairs at a time, and so rounds otherwise
 * than VDPBF16PS does. It serves any number of tokens, so that a token's result depends on no others. */
#ifndef INGOT_AMX_H
#define INGOT_AMX_H
#include "tile_float.h"
#include "tile_integer.h"

/* Shapes that tiles 0 to 7 have in a launch: see ingot_tile_rows. */
enum { INGOT_TILES_OF_BYTES, INGOT_TILES_OF_PAIRS };

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define INGOT_AMX 1
/* Tokens of a tile. */
#define INGOT_AMX_ROWS 16

/* What was written is in memory: gcc's intrinsics do not tell it what they read. */
#define INGOT_TILE_FENCE() __asm__ volatile("" ::: "memory")

/* Bytes: sums in 0 and 1, a block's inputs in 2 and 3, its weights in 4 and 5.
 * Pairs: sums in 0 to 3, inputs of 32 channels in 4 and 5, weights in 6 and 7. */
INGOT_INLINE void ingot_begin_tiles(const int shape) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tiles;
    memset(&tiles, 0, sizeof tiles);
    tiles.palette = 1;
    for (int i = 0; i < (shape == INGOT_TILES_OF_BYTES ? 6 : 8); i++) {
        const int of_bytes = shape == INGOT_TILES_OF_BYTES;
        tiles.row_bytes[i] = of_bytes && (i == 2 || i == 3) ? INGOT_BLOCK : 64;
        tiles.rows[i] = of_bytes && i >= 4 ? INGOT_BLOCK / 4 : INGOT_AMX_ROWS;
    }
    INGOT_TILE_FENCE();
    _tile_loadconfig(&tiles);
}

/* The registers are in their initial state between launches: a thread that is interrupted there has none to save. */
INGOT_INLINE void ingot_end_tiles(void) { _tile_release(); }

/* The inputs of up to 16 tokens. */
typedef struct ingot_tile_rows {
    const uint8_t *x[INGOT_AMX_ROWS];
    size_t stride;              /* bytes from row to row, if they lie at equal distances */
    int is_scattered;
} ingot_tile_rows;

/* `count` rows from `row` on, the last one repeated up to 16: what is computed of the others is not written. */
INGOT_INLINE ingot_tile_rows ingot_rows_of_tile(const ingot_matmul *job, int row, int count) {
    ingot_tile_rows rows;
    for (int r = 0; r < INGOT_AMX_ROWS; r++) rows.x[r] = ingot_row(job, row + (r < count ? r : count - 1));
    rows.is_scattered = count > 1 && (job->index || count < INGOT_AMX_ROWS);
    rows.stride = count > 1 ? job->x_stride : 0;
    return rows;
}

/* `bytes` bytes at `at` of every row, side by side. */
INGOT_INLINE void ingot_gather(const ingot_tile_rows *rows, size_t at, const int bytes, uint8_t *out) {
    INGOT_UNROLL for (int r = 0; r < INGOT_AMX_ROWS; r++) memcpy(out + bytes * r, rows->x[r] + at, (size_t)bytes);
}

/* Tile numbers are parts of instructions: macros, not functions. */
#define INGOT_LOAD_INPUTS(tile, rows, at, bytes) \
    do { \
        if ((rows)->is_scattered) { \
            _Alignas(64) uint8_t gathered[64 * INGOT_AMX_ROWS]; \
            ingot_gather(rows, at, bytes, gathered); \
            INGOT_TILE_FENCE(); \
            _tile_loadd(tile, gathered, bytes); \
        } else { \
            _tile_loadd(tile, (rows)->x[0] + (at), (rows)->stride); \
        } \
    } while (0)

/* Of a panel in one of these schemes: 8-bit weights with a scale a row, with a scale a block, 4-bit ones. */
enum { INGOT_AMX_INT8, INGOT_AMX_INT8G32, INGOT_AMX_W4A8 };

INGOT_INLINE size_t ingot_amx_panel_bytes(const int scheme, int blocks) {
    const size_t count = (size_t)blocks;
    if (scheme == INGOT_AMX_W4A8) return count * INGOT_W4_BLOCK_BYTES;
    return count * INGOT_W8_BLOCK_BYTES + (scheme == INGOT_AMX_INT8 ? 64 : (count + 1) / 2 * 64);
}

/* Where the scales of a block stand; of INT8 the scales of the panel. */
INGOT_INLINE const uint8_t *ingot_amx_scales(const int scheme, const uint8_t *panel, int blocks, int b) {
    if (scheme == INGOT_AMX_W4A8) return panel + (size_t)b * INGOT_W4_BLOCK_BYTES + 256;
    if (scheme == INGOT_AMX_INT8G32) return panel + (size_t)(b / 2) * INGOT_W8_PAIR_BYTES + 32 * (b % 2);
    return panel + (size_t)blocks * INGOT_W8_BLOCK_BYTES;
}

/* The 8-bit weights of a block, 8 rows of 64 bytes; those of 4 bits are widened to `wide`, in the first-level cache. */
INGOT_INLINE const uint8_t *ingot_amx_weights(const int scheme, const uint8_t *panel, int b, uint8_t *wide) {
    if (scheme == INGOT_AMX_INT8) return panel + (size_t)b * INGOT_W8_BLOCK_BYTES;
    if (scheme == INGOT_AMX_INT8G32)
        return panel + (size_t)(b / 2) * INGOT_W8_PAIR_BYTES + 64 + (size_t)(b % 2) * INGOT_W8_BLOCK_BYTES;
    INGOT_UNROLL for (int j = 0; j < 4; j++) {
        const vi bytes = vi_load(panel + (size_t)b * INGOT_W4_BLOCK_BYTES + 64 * j);
        vi_store(wide + 64 * j, vi_low_nibbles(bytes));
        vi_store(wide + 256 + 64 * j, vi_high_nibbles(bytes));
    }
    return wide;
}

/* Fetches what lies behind these `bytes`; the rest as in ingot_fetch. */
INGOT_INLINE void ingot_fetch_block(const ingot_matmul *job, const uint8_t *from, const int bytes, size_t left,
                                    const int panels, size_t panel_bytes) {
    INGOT_UNROLL for (int line = 0; line < bytes; line += 64)
        ingot_fetch(from + line, job->ahead, left, panels, panel_bytes);
}

/* out [16 tokens][16 channels] = the products of block b; n: 0 or 1, of the tiles that there are two of. */
#define INGOT_MULTIPLY_BLOCK(n, scheme, job, rows, panel, b, out) \
    do { \
        _Alignas(64) uint8_t wide[INGOT_W8_BLOCK_BYTES]; \
        const uint8_t *weights = ingot_amx_weights(scheme, panel, b, wide); \
        if (scheme == INGOT_AMX_W4A8) { \
            ingot_fetch_block(job, panel + (size_t)(b) * INGOT_W4_BLOCK_BYTES, INGOT_W4_BLOCK_BYTES, 0, 1, 0); \
            INGOT_TILE_FENCE(); \
        } else { \
            ingot_fetch_block(job, weights, INGOT_W8_BLOCK_BYTES, 0, 1, 0); \
        } \
        INGOT_LOAD_INPUTS(2 + n, rows, (size_t)INGOT_BLOCK * (size_t)(b), INGOT_BLOCK); \
        _tile_loadd(4 + n, weights, 64); \
        _tile_zero(n); \
        _tile_dpbssd(n, 2 + n, 4 + n); \
        _tile_stored(n, out, 64); \
    } while (0)

/* sums += the scaled products of block b. */
INGOT_INLINE void ingot_amx_add(const int scheme, vf *sums, const int32_t *dots, const ingot_tile_rows *rows, int k,
                                const uint8_t *scales, int b) {
    const int blocks = ingot_k32(k) / INGOT_BLOCK;
    const uint16_t *halves = (const uint16_t *)scales;
    const vf scale = scheme == INGOT_AMX_INT8 ? vf_zero() : vf_load_f16(halves);
    const vf minimum = scheme == INGOT_AMX_W4A8 ? vf_load_f16(halves + INGOT_PANEL) : vf_zero();
    INGOT_UNROLL for (int r = 0; r < INGOT_AMX_ROWS; r++) {
        const float *x_scale = ingot_scales(rows->x[r], k) + b;
        const vf dot = vi_to_float(vi_load(dots + INGOT_PANEL * r));
        vf both = vf_set1(*x_scale);
        if (scheme != INGOT_AMX_INT8) both = scale * both;
        sums[r] = vf_fma(both, dot, sums[r]);
        if (scheme == INGOT_AMX_W4A8) sums[r] = vf_fma(minimum, vf_set1(x_scale[blocks]), sums[r]);
    }
}

/* 16 tokens x `panels`. Two blocks at a time, so that one is multiplied while the sums of the other are scaled. */
INGOT_INLINE void ingot_amx_blocks(const int scheme, const ingot_matmul *job, const int panels, int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = ingot_amx_panel_bytes(scheme, blocks);
    const ingot_tile_rows rows = ingot_rows_of_tile(job, row, INGOT_AMX_ROWS);
    for (int p = panel; p < panel + panels; p++) {
        const uint8_t *w = job->w + (size_t)p * panel_bytes;
        _Alignas(64) int32_t even[INGOT_AMX_ROWS * INGOT_PANEL], odd[INGOT_AMX_ROWS * INGOT_PANEL];
        vf sums[INGOT_AMX_ROWS];
        INGOT_UNROLL for (int r = 0; r < INGOT_AMX_ROWS; r++) sums[r] = vf_zero();
        int b = 0;
        for (; b + 1 < blocks; b += 2) {
            INGOT_MULTIPLY_BLOCK(0, scheme, job, &rows, w, b, even);
            INGOT_MULTIPLY_BLOCK(1, scheme, job, &rows, w, b + 1, odd);
            ingot_amx_add(scheme, sums, even, &rows, job->k, ingot_amx_scales(scheme, w, blocks, b), b);
            ingot_amx_add(scheme, sums, odd, &rows, job->k, ingot_amx_scales(scheme, w, blocks, b + 1), b + 1);
        }
        if (b < blocks) {
            INGOT_MULTIPLY_BLOCK(0, scheme, job, &rows, w, b, even);
            ingot_amx_add(scheme, sums, even, &rows, job->k, ingot_amx_scales(scheme, w, blocks, b), b);
        }
        vf scale = vf_zero();
        if (scheme == INGOT_AMX_INT8) scale = vf_load((const float *)ingot_amx_scales(scheme, w, blocks, 0));
        INGOT_UNROLL for (int r = 0; r < INGOT_AMX_ROWS; r++)
            ingot_finish(job, row + r, p, 0, sums[r], scheme == INGOT_AMX_INT8 ? &scale : NULL);
    }
}

/* 16 tokens x `panels` with one activation scale a token: the sum over all of K is an integer. */
INGOT_INLINE void ingot_amx_whole_rows(const ingot_matmul *job, const int panels, int row, int panel) {
    const int blocks = ingot_k32(job->k) / INGOT_BLOCK;
    const size_t panel_bytes = ingot_amx_panel_bytes(INGOT_AMX_INT8, blocks);
    const ingot_tile_rows rows = ingot_rows_of_tile(job, row, INGOT_AMX_ROWS);
    for (int p = panel; p < panel + panels; p++) {
        const uint8_t *w = job->w + (size_t)p * panel_bytes;
        _Alignas(64) int32_t dots[INGOT_AMX_ROWS * INGOT_PANEL];
        _tile_zero(0);
        for (int b = 0; b < blocks; b++) {
            ingot_fetch_block(job, w + (size_t)b * INGOT_W8_BLOCK_BYTES, INGOT_W8_BLOCK_BYTES, 0, 1, 0);
            INGOT_LOAD_INPUTS(2, &rows, (size_t)INGOT_BLOCK * (size_t)b, INGOT_BLOCK);
            _tile_loadd(4, w + (size_t)b * INGOT_W8_BLOCK_BYTES, 64);
            _tile_dpbssd(0, 2, 4);
        }
        _tile_stored(0, dots, 64);
        const vf scale = vf_load((const float *)ingot_amx_scales(INGOT_AMX_INT8, w, blocks, 0));
        INGOT_UNROLL for (int r = 0; r < INGOT_AMX_ROWS; r++) {
            const vf sum = vi_to_float(vi_load(dots + INGOT_PANEL * r)) * vf_set1(*ingot_scales(rows.x[r], job->k));
            ingot_finish(job, row + r, p, 0, sum, &scale);
        }
    }
}

/* 32 channels of K, or those that are left, of `tiles` x 16 tokens and of `panels`: sums[2 * tile + panel] += products.
 * w: the pairs of the first panel. */
#define INGOT_PAIR_STEP(tiles, panels, rows, at, w, panel_bytes) \
    do { \
        INGOT_LOAD_INPUTS(4, &(rows)[0], at, 64); \
        if (tiles > 1) INGOT_LOAD_INPUTS(5, &(rows)[1], at, 64); \
        _tile_loadd(6, w, 64); \
        _tile_dpbf16ps(0, 4, 6); \
        if (tiles > 1) _tile_dpbf16ps(2, 5, 6); \
        if (panels > 1) { \
            _tile_loadd(7, (w) + (panel_bytes), 64); \
            _tile_dpbf16ps(1, 4, 7); \
            if (tiles > 1) _tile_dpbf16ps(3, 5, 7); \
        } \
    } while (0)

/* Sums of a tile of `count` tokens: what y holds of the channels before k_begin. */
#define INGOT_BEGIN_PAIRS(n, job, k_begin, row, count, panel, buffer) \
    do { \
        if (k_begin == 0) { \
            _tile_zero(n); \
        } else { \
            for (int r = 0; r < count; r++) \
                vf_store(buffer + INGOT_PANEL * r, ingot_load_output(job, row + r, panel, 0)); \
            INGOT_TILE_FENCE(); \
            _tile_loadd(n, buffer, 64); \
        } \
    } while (0)

#define INGOT_END_PAIRS(n, job, k_end, row, count, panel, buffer) \
    do { \
        _tile_stored(n, buffer, 64); \
        for (int r = 0; r < count; r++) { \
            const vf sum = vf_load(buffer + INGOT_PANEL * r); \
            if (k_end == (job)->k) ingot_finish(job, row + r, panel, 0, sum, NULL); \
            else ingot_store_output(job, row + r, panel, 0, sum); \
        } \
    } while (0)

/* Up to 16 tokens for each of `tiles`, literals; `count` in all. */
INGOT_INLINE void ingot_amx_pairs(const ingot_matmul *job, const int tiles, int count, const int panels, int k_begin,
                                  int k_end, int row, int panel) {
    const size_t panel_bytes = (size_t)(job->k + 1) / 2 * 64;
    const uint8_t *w = job->w + (size_t)panel * panel_bytes;
    const int first = tiles > 1 ? INGOT_AMX_ROWS : count, second = count - first;
    const ingot_tile_rows rows[2] = {ingot_rows_of_tile(job, row, first),
                                     ingot_rows_of_tile(job, row + (second ? first : 0), second ? second : first)};
    _Alignas(64) float buffer[INGOT_AMX_ROWS * INGOT_PANEL] = {0};
    INGOT_BEGIN_PAIRS(0, job, k_begin, row, first, panel, buffer);
    if (panels > 1) INGOT_BEGIN_PAIRS(1, job, k_begin, row, first, panel + 1, buffer);
    if (tiles > 1) INGOT_BEGIN_PAIRS(2, job, k_begin, row + first, second, panel, buffer);
    if (tiles > 1 && panels > 1) INGOT_BEGIN_PAIRS(3, job, k_begin, row + first, second, panel + 1, buffer);
    int k = k_begin;
    for (; k + INGOT_PAIR_CHANNELS <= k_end; k += INGOT_PAIR_CHANNELS) {
        const uint8_t *from = w + (size_t)k * 32;
        const size_t left = panel_bytes - (size_t)k * 32;
        for (int p = 0; p < panels; p++)
            ingot_fetch_block(job, from + (size_t)p * panel_bytes, 1024, left, panels, panel_bytes);
        INGOT_PAIR_STEP(tiles, panels, rows, (size_t)k * 2, from, panel_bytes);
    }
    if (k < k_end) { /* a row of inputs is padded with zeros; a panel is not, and what follows it may be no number */
        _Alignas(64) uint8_t last[2][1024] = {{0}};
        for (int p = 0; p < panels; p++)
            memcpy(last[p], w + (size_t)p * panel_bytes + (size_t)k * 32, (size_t)(k_end - k + 1) / 2 * 64);
        INGOT_TILE_FENCE();
        INGOT_PAIR_STEP(tiles, panels, rows, (size_t)k * 2, last[0], 1024);
    }
    INGOT_END_PAIRS(0, job, k_end, row, first, panel, buffer);
    if (panels > 1) INGOT_END_PAIRS(1, job, k_end, row, first, panel + 1, buffer);
    if (tiles > 1) INGOT_END_PAIRS(2, job, k_end, row + first, second, panel, buffer);
    if (tiles > 1 && panels > 1) INGOT_END_PAIRS(3, job, k_end, row + first, second, panel + 1, buffer);
}

/* The tile functions of this instruction set. */
#define INGOT_AMX_TILE(name, by_tiles) \
    INGOT_INLINE void ingot_amx_##name(const ingot_matmul *job, const int rows, const int panels, int k_begin, \
                                       int k_end, int row, int panel) { \
        if (rows == INGOT_AMX_ROWS) by_tiles; \
        else ingot_tile_##name(job, rows, panels, k_begin, k_end, row, panel); \
    }
INGOT_AMX_TILE(int8, ingot_amx_blocks(INGOT_AMX_INT8, job, panels, row, panel))
INGOT_AMX_TILE(int8g32, ingot_amx_blocks(INGOT_AMX_INT8G32, job, panels, row, panel))
INGOT_AMX_TILE(w4a8, ingot_amx_blocks(INGOT_AMX_W4A8, job, panels, row, panel))
INGOT_AMX_TILE(int8_row, ingot_amx_whole_rows(job, panels, row, panel))

INGOT_INLINE void ingot_amx_bf16_pairs(const ingot_matmul *job, const int rows, const int panels, int k_begin,
                                       int k_end, int row, int panel) {
    if (rows > INGOT_AMX_ROWS) ingot_amx_pairs(job, 2, rows, panels, k_begin, k_end, row, panel);
    else ingot_amx_pairs(job, 1, rows, panels, k_begin, k_end, row, panel);
}

#define INGOT_TILE(name) ingot_amx_##name
#else
#define INGOT_TILE(name) ingot_tile_##name
INGOT_INLINE void ingot_begin_tiles(const int shape) { (void)shape; }
INGOT_INLINE void ingot_end_tiles(void) {}
#endif

#endif

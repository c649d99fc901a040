/* What LoRA adapters add to linear layers: h = x aᵀ, then y += h b, with the matrices of the adapter in the slot of the
 * token's sequence; bfloat16 weights, sums in float32. Tokens without adapter are left alone.
 *
 * A sum runs over its channels in one order, in vectors, however tokens and rows are cut into tiles: results depend
 * neither on the number of workers nor on what else is in the step. Loads of the last channels of a row may reach 32
 * bytes past a matrix; the device has as many behind the last slot. */
#ifndef INGOT_LORA_H
#define INGOT_LORA_H
#include "../cpu/ingot_kernel.h"
#include "../cpu/simd.h"

#define INGOT_LORA_BLOCK 16   /* tokens that one worker takes through a piece of a matrix */
#define INGOT_LORA_COLUMNS 64 /* of y, of a piece of b */
#define INGOT_LORA_ROWS 4     /* of a, of a tile */
#if VF_REGISTERS > 16
#define INGOT_LORA_TOKENS 4   /* of a tile: their sums stay in registers */
#define INGOT_LORA_VECTORS 4  /* of columns, of a tile */
#else
#define INGOT_LORA_TOKENS 2
#define INGOT_LORA_VECTORS 4
#endif

/* rank rows of k channels for each of num_modules, module_bytes from one to the next, in slots slot_bytes apart. */
typedef struct ingot_lora_inner {
    int k, x_stride, rank, num_modules;
    size_t module_bytes, slot_bytes;
} ingot_lora_inner;

/* width columns of y from start on, by rank rows of h from column on; b begins offset bytes into the slot. */
typedef struct ingot_lora_part {
    int start, width, column;
    size_t offset;
} ingot_lora_part;

INGOT_INLINE int ingot_lora_slot(const ingot_step *step, int token) { return step->adapters[step->token_seq[token]]; }

INGOT_INLINE int ingot_lora_any(const ingot_step *step) {
    for (int seq = 0; seq < step->num_seqs; seq++)
        if (step->adapters[seq] >= 0) return 1;
    return 0;
}

/* The tokens from `token` on, at most INGOT_LORA_TOKENS and before `end`, that have the slot of the first one. */
INGOT_INLINE int ingot_lora_run(const ingot_step *step, int token, int end) {
    const int slot = ingot_lora_slot(step, token);
    int count = 1;
    while (count < INGOT_LORA_TOKENS && token + count < end && ingot_lora_slot(step, token + count) == slot) count++;
    return count;
}

/* h[i][j] = x[i] a[j]ᵀ. tokens, rows: literals. */
INGOT_INLINE void ingot_lora_inner_tile(const float *x, int x_stride, const uint16_t *const *a, float *h, int h_stride,
                                        int k, int tokens, int rows) {
    vf sum[INGOT_LORA_TOKENS][INGOT_LORA_ROWS];
    INGOT_UNROLL
    for (int i = 0; i < tokens; i++) {
        INGOT_UNROLL
        for (int j = 0; j < rows; j++) sum[i][j] = vf_zero();
    }
    int at = 0;
    for (; at + VF_LANES <= k; at += VF_LANES) {
        INGOT_UNROLL
        for (int j = 0; j < rows; j++) {
            const vf weight = vf_load_bf16(a[j] + at);
            INGOT_UNROLL
            for (int i = 0; i < tokens; i++) sum[i][j] = vf_fma(vf_load(x + i * x_stride + at), weight, sum[i][j]);
        }
    }
    if (at < k) {
        INGOT_UNROLL
        for (int j = 0; j < rows; j++) { /* what follows the row may be no number, so that a factor of 0 is not enough */
            const vf weight = vf_keep_first(vf_load_bf16(a[j] + at), k - at, 0.0f);
            INGOT_UNROLL
            for (int i = 0; i < tokens; i++)
                sum[i][j] = vf_fma(vf_load_first(x + i * x_stride + at, k - at), weight, sum[i][j]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < tokens; i++) {
        INGOT_UNROLL
        for (int j = 0; j < rows; j++) h[i * h_stride + j] = vf_hsum(sum[i][j]);
    }
}

/* A tile of `tokens` (a literal) and of as many rows as are left. */
INGOT_INLINE void ingot_lora_inner_rows(const float *x, const uint8_t *a, float *h, int row, int rows,
                                        ingot_lora_inner c, int tokens) {
    const int h_stride = c.num_modules * c.rank;
    const uint16_t *from[INGOT_LORA_ROWS];
    for (int j = 0; j < rows; j++)
        from[j] = (const uint16_t *)(a + (size_t)((row + j) / c.rank) * c.module_bytes) +
                  (size_t)((row + j) % c.rank) * (size_t)c.k;
    if (rows == INGOT_LORA_ROWS) {
        ingot_lora_inner_tile(x, c.x_stride, from, h + row, h_stride, c.k, tokens, INGOT_LORA_ROWS);
    } else {
        for (int j = 0; j < rows; j++)
            ingot_lora_inner_tile(x, c.x_stride, from + j, h + row + j, h_stride, c.k, tokens, 1);
    }
}

/* h f32 [T, num_modules * rank] = x aᵀ; x f32 [T, k]. a: of the first module, in slot 0. */
INGOT_INLINE void ingot_lora_shrink(const ingot_step *step, const float *x, const uint8_t *a, float *h, int worker,
                                    int num_workers, ingot_lora_inner c) {
    if (!ingot_lora_any(step)) return;
    const int rows = c.num_modules * c.rank, groups = (rows + INGOT_LORA_ROWS - 1) / INGOT_LORA_ROWS;
    const int blocks = (step->num_tokens + INGOT_LORA_BLOCK - 1) / INGOT_LORA_BLOCK;
    int begin, end;
    ingot_split(blocks * groups, worker, num_workers, &begin, &end);
    for (int piece = begin; piece < end; piece++) {
        const int first = piece / groups * INGOT_LORA_BLOCK, row = piece % groups * INGOT_LORA_ROWS;
        const int last = first + INGOT_LORA_BLOCK < step->num_tokens ? first + INGOT_LORA_BLOCK : step->num_tokens;
        const int count = rows - row < INGOT_LORA_ROWS ? rows - row : INGOT_LORA_ROWS;
        for (int token = first; token < last;) {
            const int slot = ingot_lora_slot(step, token), tokens = ingot_lora_run(step, token, last);
            if (slot >= 0) {
                const uint8_t *matrix = a + (size_t)slot * c.slot_bytes;
                const float *from = x + (size_t)token * (size_t)c.x_stride;
                float *to = h + (size_t)token * (size_t)rows;
                switch (tokens) {
                case 1: ingot_lora_inner_rows(from, matrix, to, row, count, c, 1); break;
                case 2: ingot_lora_inner_rows(from, matrix, to, row, count, c, 2); break;
#if INGOT_LORA_TOKENS > 2
                case 3: ingot_lora_inner_rows(from, matrix, to, row, count, c, 3); break;
                case 4: ingot_lora_inner_rows(from, matrix, to, row, count, c, 4); break;
#endif
                }
            }
            token += tokens;
        }
    }
}

/* y[i] += h[i] b over `columns` columns, which are whole vectors where they are as many as a tile's. tokens, vectors:
 * literals. */
INGOT_INLINE void ingot_lora_outer_tile(float *y, int y_stride, const float *h, int h_stride, const uint16_t *b,
                                        int width, int rank, int columns, int tokens, int vectors) {
    vf sum[INGOT_LORA_TOKENS][INGOT_LORA_VECTORS];
    INGOT_UNROLL
    for (int i = 0; i < tokens; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) sum[i][v] = vf_zero();
    }
    for (int r = 0; r < rank; r++, b += width) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            const vf weight = vf_load_bf16(b + v * VF_LANES);
            INGOT_UNROLL
            for (int i = 0; i < tokens; i++) sum[i][v] = vf_fma(vf_set1(h[i * h_stride + r]), weight, sum[i][v]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < tokens; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            float *to = y + i * y_stride + v * VF_LANES;
            const int left = columns - v * VF_LANES;
            if (left >= VF_LANES) vf_store(to, vf_load(to) + sum[i][v]);
            else vf_store_first(to, vf_load_first(to, left) + sum[i][v], left);
        }
    }
}

INGOT_INLINE void ingot_lora_outer_columns(float *y, int y_stride, const float *h, int h_stride, const uint16_t *b,
                                           int width, int rank, int columns, int tokens) {
    const int tile = INGOT_LORA_VECTORS * VF_LANES;
    int at = 0;
    for (; at + tile <= columns; at += tile)
        ingot_lora_outer_tile(y + at, y_stride, h, h_stride, b + at, width, rank, tile, tokens, INGOT_LORA_VECTORS);
    for (; at < columns; at += VF_LANES)
        ingot_lora_outer_tile(y + at, y_stride, h, h_stride, b + at, width, rank, columns - at, tokens, 1);
}

/* y f32 [T, y_stride] plus h b in the columns of each part. b: of slot 0. h f32 [T, h_stride] */
INGOT_INLINE void ingot_lora_expand(const ingot_step *step, float *y, const float *h, const uint8_t *b, int worker,
                                    int num_workers, int y_stride, int h_stride, int rank, size_t slot_bytes,
                                    const ingot_lora_part *parts, int num_parts) {
    if (!ingot_lora_any(step)) return;
    const int blocks = (step->num_tokens + INGOT_LORA_BLOCK - 1) / INGOT_LORA_BLOCK;
    int pieces = 0, begin, end;
    for (int p = 0; p < num_parts; p++) pieces += (parts[p].width + INGOT_LORA_COLUMNS - 1) / INGOT_LORA_COLUMNS;
    ingot_split(blocks * pieces, worker, num_workers, &begin, &end);
    for (int piece = begin; piece < end; piece++) {
        const int first = piece / pieces * INGOT_LORA_BLOCK;
        const int last = first + INGOT_LORA_BLOCK < step->num_tokens ? first + INGOT_LORA_BLOCK : step->num_tokens;
        const ingot_lora_part *part = parts;
        int column = piece % pieces * INGOT_LORA_COLUMNS;
        for (; column >= part->width; part++)
            column -= (part->width + INGOT_LORA_COLUMNS - 1) / INGOT_LORA_COLUMNS * INGOT_LORA_COLUMNS;
        const int left = part->width - column, count = left < INGOT_LORA_COLUMNS ? left : INGOT_LORA_COLUMNS;
        for (int token = first; token < last;) {
            const int slot = ingot_lora_slot(step, token), tokens = ingot_lora_run(step, token, last);
            if (slot >= 0) {
                const uint16_t *matrix = (const uint16_t *)(b + (size_t)slot * slot_bytes + part->offset) + column;
                const float *from = h + (size_t)token * (size_t)h_stride + part->column;
                float *to = y + (size_t)token * (size_t)y_stride + part->start + column;
                switch (tokens) {
                case 1:
                    ingot_lora_outer_columns(to, y_stride, from, h_stride, matrix, part->width, rank, count, 1);
                    break;
                case 2:
                    ingot_lora_outer_columns(to, y_stride, from, h_stride, matrix, part->width, rank, count, 2);
                    break;
#if INGOT_LORA_TOKENS > 2
                case 3:
                    ingot_lora_outer_columns(to, y_stride, from, h_stride, matrix, part->width, rank, count, 3);
                    break;
                case 4:
                    ingot_lora_outer_columns(to, y_stride, from, h_stride, matrix, part->width, rank, count, 4);
                    break;
#endif
                }
            }
            token += tokens;
        }
    }
}

#endif

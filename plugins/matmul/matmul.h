/* Products of two float32 activations of any strides: for the few that no other kernel takes. */
#ifndef INGOT_MATMUL_H
#define INGOT_MATMUL_H
#include "cpu/gemm.h"
#include "cpu/ingot_kernel.h"

/* a [m, k], b [k, n], strides in floats; c [m, n] without gaps. */
typedef struct {
    int m, n, k;
    ptrdiff_t a_row, a_col, b_row, b_col;
} ingot_product;

#define MATMUL_ROWS (8 * GEMM_ROWS) /* of c in one item of work */
#define MATMUL_DEPTH 256            /* of b in one panel */
#define MATMUL_PANEL (MATMUL_DEPTH * GEMM_COLUMNS)

INGOT_INLINE int ingot_matmul_row_blocks(ingot_product s) { return (s.m + MATMUL_ROWS - 1) / MATMUL_ROWS; }
INGOT_INLINE int ingot_matmul_items(ingot_product s) {
    return ingot_matmul_row_blocks(s) * ((s.n + GEMM_COLUMNS - 1) / GEMM_COLUMNS);
}

/* Rows [begin, end) of c times `vectors` vectors of columns, the last with `last` lanes. */
INGOT_INLINE void ingot_matmul_columns(int begin, int end, int vectors, int last, int depth, const float *a,
                                       const float *b, ptrdiff_t b_row, float *c, const float *scale, ingot_product s) {
    int i = begin;
    for (; i + GEMM_ROWS <= end; i += GEMM_ROWS) {
        ingot_gemm_vectors(GEMM_FLOATS, GEMM_ROWS, vectors, last, depth, a + i * s.a_row, s.a_row, s.a_col, b, b_row,
                           c + (ptrdiff_t)i * s.n, s.n, scale);
    }
    for (; i < end; i++) {
        ingot_gemm_vectors(GEMM_FLOATS, 1, vectors, last, depth, a + i * s.a_row, s.a_row, s.a_col, b, b_row,
                           c + (ptrdiff_t)i * s.n, s.n, scale);
    }
}

/* One block of c. panel: MATMUL_PANEL floats, for a part of b whose columns do not lie side by side. */
INGOT_INLINE void ingot_matmul_item(const float *a, const float *b, float *c, int item, ingot_product s, float *panel) {
    static const float keep[GEMM_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    int begin = item % ingot_matmul_row_blocks(s) * MATMUL_ROWS, j = item / ingot_matmul_row_blocks(s) * GEMM_COLUMNS;
    int end = begin + MATMUL_ROWS < s.m ? begin + MATMUL_ROWS : s.m;
    int columns = s.n - j < GEMM_COLUMNS ? s.n - j : GEMM_COLUMNS;
    int vectors = (columns + VF_LANES - 1) / VF_LANES, last = columns - (vectors - 1) * VF_LANES;
    for (int k = 0; k < s.k; k += MATMUL_DEPTH) {
        int depth = s.k - k < MATMUL_DEPTH ? s.k - k : MATMUL_DEPTH;
        const float *from = b + k * s.b_row + j * s.b_col;
        ptrdiff_t row = s.b_row;
        if (s.b_col != 1) {
            for (int d = 0; d < depth; d++) {
                for (int i = 0; i < columns; i++) panel[d * GEMM_COLUMNS + i] = from[d * s.b_row + i * s.b_col];
            }
            from = panel;
            row = GEMM_COLUMNS;
        }
        const float *left = a + k * s.a_col, *scale = k ? keep : 0;
        if (last == VF_LANES) {
            ingot_matmul_columns(begin, end, vectors, VF_LANES, depth, left, from, row, c + j, scale, s);
        } else {
            ingot_matmul_columns(begin, end, vectors, last, depth, left, from, row, c + j, scale, s);
        }
    }
    if (s.k == 0) {
        for (int i = begin; i < end; i++) memset(c + (ptrdiff_t)i * s.n + j, 0, sizeof(float) * (size_t)columns);
    }
}

#endif

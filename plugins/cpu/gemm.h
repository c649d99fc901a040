/* The inner block of matrix products with float32 sums: a few rows of the result in registers while k runs. */
#ifndef INGOT_GEMM_H
#define INGOT_GEMM_H
#include <stddef.h>

#include "simd.h"

/* Rows and vectors of a block: as many accumulators as leave registers for the operands. */
#define GEMM_ROWS 6
#define GEMM_VECTORS (VF_REGISTERS == 32 ? 4 : 2)
#define GEMM_COLUMNS (GEMM_VECTORS * VF_LANES)

/* What a and b hold: numbers, or pairs of bfloat16 (see simd.h), whose two products each add up. */
enum { GEMM_FLOATS, GEMM_PAIRS };

INGOT_INLINE vf ingot_gemm_step(int kind, vf a, vf b, vf c) {
#ifdef VF_PAIRS
    if (kind == GEMM_PAIRS) return vf_dot_pairs(a, b, c);
#endif
    (void)kind;
    return vf_fma(a, b, c);
}

/* c[i][j] = sum over k of a[i][k] b[k][j]  +  (scale ? scale[i] c[i][j] : 0)
 * for i < rows, j < vectors * VF_LANES; of the last vector only the first `last` lanes. Each element is summed in the
 * order of k, so that the result does not depend on how a matrix is cut into blocks.
 * a[i][k] lies at a[i * a_row + k * a_col]; kind, rows, vectors: literals. */
INGOT_INLINE void ingot_gemm_block(int kind, int rows, int vectors, int last, int depth, const float *a,
                                   ptrdiff_t a_row, ptrdiff_t a_col, const float *b, ptrdiff_t b_row, float *c,
                                   ptrdiff_t c_row, const float *scale) {
    vf sum[GEMM_ROWS][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float *from = c + i * c_row + v * VF_LANES;
            if (!scale) sum[i][v] = vf_zero();
            else if (v < vectors - 1 || last == VF_LANES) sum[i][v] = vf_load(from) * vf_set1(scale[i]);
            else sum[i][v] = vf_load_first(from, last) * vf_set1(scale[i]);
        }
    }
    for (int k = 0; k < depth; k++) {
        vf column[4];
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            const float *from = b + k * b_row + v * VF_LANES;
            column[v] = v < vectors - 1 || last == VF_LANES ? vf_load(from) : vf_load_first(from, last);
        }
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) {
            vf factor = vf_set1(a[i * a_row + k * a_col]);
            INGOT_UNROLL
            for (int v = 0; v < vectors; v++) sum[i][v] = ingot_gemm_step(kind, factor, column[v], sum[i][v]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            float *to = c + i * c_row + v * VF_LANES;
            if (v < vectors - 1 || last == VF_LANES) vf_store(to, sum[i][v]);
            else vf_store_first(to, sum[i][v], last);
        }
    }
}

/* The same for a number of vectors that is known late, 1 .. GEMM_VECTORS. */
INGOT_INLINE void ingot_gemm_vectors(int kind, int rows, int vectors, int last, int depth, const float *a,
                                     ptrdiff_t a_row, ptrdiff_t a_col, const float *b, ptrdiff_t b_row, float *c,
                                     ptrdiff_t c_row, const float *scale) {
    switch (vectors) {
        case 1: ingot_gemm_block(kind, rows, 1, last, depth, a, a_row, a_col, b, b_row, c, c_row, scale); break;
        case 2: ingot_gemm_block(kind, rows, 2, last, depth, a, a_row, a_col, b, b_row, c, c_row, scale); break;
#if VF_REGISTERS == 32
        case 3: ingot_gemm_block(kind, rows, 3, last, depth, a, a_row, a_col, b, b_row, c, c_row, scale); break;
        case 4: ingot_gemm_block(kind, rows, 4, last, depth, a, a_row, a_col, b, b_row, c, c_row, scale); break;
#endif
    }
}

#endif

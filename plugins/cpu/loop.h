/* What generated loops call besides scalar_math.h: operators of numpy that C has not, or not with the same meaning.
 * Free of branches wherever a compiler is to vectorise the loop around them. */
#ifndef INGOT_LOOP_H
#define INGOT_LOOP_H
#include "ingot_kernel.h"
#include "scalar_math.h"

/* NaN if either is. A constant is best given as `a`: the second comparison then vanishes. */
INGOT_INLINE float ingot_maximumf(float a, float b) { float most = a > b ? a : b; return a == a ? most : a; }
INGOT_INLINE float ingot_minimumf(float a, float b) { float least = a < b ? a : b; return a == a ? least : a; }
INGOT_INLINE int32_t ingot_maximumi(int32_t a, int32_t b) { return a > b ? a : b; }
INGOT_INLINE int32_t ingot_minimumi(int32_t a, int32_t b) { return a < b ? a : b; }

/* Both sides are computed, so that a compiler sees no branch around the loads of one. */
INGOT_INLINE float ingot_selectf(int condition, float a, float b) { return condition ? a : b; }
INGOT_INLINE int32_t ingot_selecti(int condition, int32_t a, int32_t b) { return condition ? a : b; }

INGOT_INLINE float ingot_signf(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
INGOT_INLINE int32_t ingot_signi(int32_t x) { return (x > 0) - (x < 0); }
INGOT_INLINE float ingot_reciprocalf(float x) { return 1.0f / x; }
INGOT_INLINE float ingot_rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
INGOT_INLINE float ingot_squaref(float x) { return x * x; }
INGOT_INLINE float ingot_cubef(float x) { return x * x * x; }

/* Division towards minus infinity, remainder with the sign of the divisor; division by zero gives zero. */
INGOT_INLINE int32_t ingot_floor_divi(int32_t a, int32_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int32_t)(0u - (uint32_t)a);
    return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
INGOT_INLINE int32_t ingot_modi(int32_t a, int32_t b) {
    if (b == 0 || b == -1) return 0;
    int32_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
INGOT_INLINE float ingot_modf(float a, float b) {
    float rest = __builtin_fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
INGOT_INLINE float ingot_floor_divf(float a, float b) {
    float quotient = (a - ingot_modf(a, b)) / b; /* an integer, but for rounding */
    float whole = __builtin_floorf(quotient);
    whole = quotient - whole > 0.5f ? whole + 1.0f : whole;
    return b == 0.0f ? a / b : whole;
}

/* For exponents >= 0. Wraps around, as numpy's integers do. */
INGOT_INLINE int32_t ingot_powi(int32_t x, int32_t exponent) {
    uint32_t result = 1, factor = (uint32_t)x;
    for (; exponent > 0; exponent >>= 1, factor *= factor) result *= exponent & 1 ? factor : 1u;
    return (int32_t)result;
}

/* Before the loop over the lanes of a reduction: to be one vector operation, not unrolled into pieces of it. */
#ifdef __clang__
#define INGOT_LANES _Pragma("clang loop vectorize_width(16) interleave_count(1) unroll(disable)")
#else
#define INGOT_LANES
#endif

/* Columns from which a loop with fewer rows than workers is divided by columns; pieces are whole cache lines. */
#define INGOT_SPLIT_COLUMNS 512
#define INGOT_COLUMN_PIECE 64

typedef struct { int row_begin, row_end, column_begin, column_end; } ingot_range;

INGOT_INLINE ingot_range ingot_split_grid(int rows, int columns, int worker, int num_workers) {
    ingot_range range = {0, rows, 0, columns};
    if (rows < num_workers && columns >= INGOT_SPLIT_COLUMNS) {
        int pieces = (columns + INGOT_COLUMN_PIECE - 1) / INGOT_COLUMN_PIECE;
        ingot_split(pieces, worker, num_workers, &range.column_begin, &range.column_end);
        range.column_begin *= INGOT_COLUMN_PIECE;
        range.column_end = ingot_minimumi(range.column_end * INGOT_COLUMN_PIECE, columns);
    } else {
        ingot_split(rows, worker, num_workers, &range.row_begin, &range.row_end);
    }
    return range;
}

#endif

/* The best k of a row, in order: topk, sort (k = n) and argmax.
 *
 * Elements are ordered by an integer key, equal ones by their index, so that the order is total and every method gives
 * the same result. NaN counts as larger than infinity, -0 as equal to 0. */
#ifndef INGOT_ORDER_H
#define INGOT_ORDER_H
#include "cpu/ingot_kernel.h"
#include "cpu/simd.h"

enum { INGOT_ORDER_F32, INGOT_ORDER_I32 };

/* An integer that grows with the element; with largest = 0 one that falls. */
INGOT_INLINE int32_t ingot_order_key(const void *x, int i, int type, int largest) {
    int32_t key;
    if (type == INGOT_ORDER_F32) {
        float value = ((const float *)x)[i] + 0.0f; /* -0 becomes 0 */
        int32_t bits = (int32_t)ingot_bits(value);
        key = value != value ? INT32_MAX : bits ^ (bits >> 31 & INT32_MAX);
    } else {
        key = ((const int32_t *)x)[i];
    }
    return largest ? key : ~key;
}

/* Is element a better than element b? */
INGOT_INLINE int ingot_order_before(const void *x, int a, int b, int type, int largest) {
    int32_t first = ingot_order_key(x, a, type, largest), second = ingot_order_key(x, b, type, largest);
    return first > second || (first == second && a < b);
}

/* heap[0 .. size) with the worst element on top, but for heap[root], which sinks to its place. */
INGOT_INLINE void ingot_order_sink(const void *x, int32_t *heap, int root, int size, int type, int largest) {
    int32_t moved = heap[root];
    for (;;) {
        int child = 2 * root + 1;
        if (child >= size) break;
        if (child + 1 < size && ingot_order_before(x, heap[child], heap[child + 1], type, largest)) child++;
        if (!ingot_order_before(x, moved, heap[child], type, largest)) break;
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = moved;
}

/* indices[0 .. k) = the best k of n elements, the best first: a heap of the best so far, then heap sort in place. */
INGOT_INLINE void ingot_order_row(const void *x, int n, int k, int32_t *indices, int type, int largest) {
    for (int i = 0; i < k; i++) indices[i] = i;
    for (int i = k / 2 - 1; i >= 0; i--) ingot_order_sink(x, indices, i, k, type, largest);
    for (int i = k; i < n; i++) {
        if (ingot_order_before(x, i, indices[0], type, largest)) {
            indices[0] = i;
            ingot_order_sink(x, indices, 0, k, type, largest);
        }
    }
    for (int size = k - 1; size > 0; size--) {
        int32_t worst = indices[0];
        indices[0] = indices[size];
        indices[size] = worst;
        ingot_order_sink(x, indices, 0, size, type, largest);
    }
}

/* x [rows, n] -> values [rows, k], indices i32 [rows, k] */
INGOT_INLINE void ingot_order_rows(int rows, const void *x, void *values, int32_t *indices, int n, int k, int type,
                                   int largest, int worker, int num_workers) {
    int begin, end;
    ingot_split(rows, worker, num_workers, &begin, &end);
    for (int row = begin; row < end; row++) {
        const uint32_t *from = (const uint32_t *)x + (ptrdiff_t)row * n;
        uint32_t *to = (uint32_t *)values + (ptrdiff_t)row * k;
        int32_t *found = indices + (ptrdiff_t)row * k;
        ingot_order_row(from, n, k, found, type, largest);
        for (int i = 0; i < k; i++) memcpy(to + i, from + found[i], 4);
    }
}

/* The first of the largest elements. */
INGOT_INLINE int32_t ingot_argmax_row(const void *x, int n, int type) {
    int32_t best = INT32_MIN;
    for (int i = 0; i < n; i++) {
        int32_t key = ingot_order_key(x, i, type, 1);
        best = key > best ? key : best;
    }
    int i = 0;
    while (ingot_order_key(x, i, type, 1) != best) i++;
    return i;
}

#endif

/* Moving elements by index. Elements are copied as they are: `size` is 1, 2 or 4 bytes, a literal. */
#ifndef INGOT_GATHER_H
#define INGOT_GATHER_H
#include "cpu/ingot_kernel.h"
#include "cpu/simd.h"

INGOT_INLINE void ingot_copy_element(void *to, ptrdiff_t i, const void *from, ptrdiff_t j, int size) {
    memcpy((char *)to + i * size, (const char *)from + j * size, (size_t)size);
}

/* y[row][i] = x[row][index[row][i]]; rows of x have `width` elements, those of y and index n.
 * index_stride 0: the same index for all rows. */
INGOT_INLINE void ingot_gather_elements(int rows, const void *x, const int32_t *index, void *y, int width, int n,
                                        int index_stride, int size, int worker, int num_workers) {
    int begin, end;
    ingot_split(rows, worker, num_workers, &begin, &end);
    for (ptrdiff_t row = begin; row < end; row++) {
        const int32_t *from = index + row * index_stride;
        for (int i = 0; i < n; i++) ingot_copy_element(y, row * n + i, x, row * width + from[i], size);
    }
}

/* y = x, then y[row][index[row][i]] = source[row][i] in the order of i; y may be x.
 * source_stride 0: one row for all; source_step 0: one element for all of a row. */
INGOT_INLINE void ingot_scatter_rows(int rows, const void *x, const int32_t *index, const void *source, void *y,
                                     int width, int n, int source_stride, int source_step, int size, int worker,
                                     int num_workers) {
    int begin, end;
    ingot_split(rows, worker, num_workers, &begin, &end);
    if (y != x && begin < end) {
        size_t bytes = (size_t)(end - begin) * (size_t)width * (size_t)size;
        size_t skip = (size_t)begin * (size_t)width * (size_t)size;
        memcpy((char *)y + skip, (const char *)x + skip, bytes);
    }
    for (ptrdiff_t row = begin; row < end; row++) {
        for (int i = 0; i < n; i++) {
            ptrdiff_t from = row * source_stride + i * source_step;
            ingot_copy_element(y, row * width + index[row * n + i], source, from, size);
        }
    }
}

/* y[i] = x[index[i]], whole rows of `bytes`, x_stride bytes apart. */
INGOT_INLINE void ingot_gather_rows(int rows, const void *x, const int32_t *index, void *y, size_t bytes,
                                    size_t x_stride, int worker, int num_workers) {
    int begin, end;
    ingot_split(rows, worker, num_workers, &begin, &end);
    for (ptrdiff_t i = begin; i < end; i++) {
        memcpy((char *)y + (size_t)i * bytes, (const char *)x + (size_t)index[i] * x_stride, bytes);
    }
}

#endif

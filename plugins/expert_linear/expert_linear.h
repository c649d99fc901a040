/* y[t, j, :] = x[t (, j), :] w[ids[t, j]]^T (+ bias[ids[t, j]]): every token's rows by the matrices of its experts.
 *
 * The pairs (token, choice) are sorted by expert, by each worker for itself, so that a matrix is read once for all of
 * its pairs; every matrix is divided among all workers, so that uneven loads of experts do not matter. */
#ifndef INGOT_EXPERT_LINEAR_H
#define INGOT_EXPERT_LINEAR_H
#include "../linear/linear.h"

/* starts[e] .. starts[e + 1] - 1 of order[]: the pairs of expert e, ascending; starts has num_experts + 1 elements.
 * Pairs are numbered from `first`. */
INGOT_INLINE void ingot_sort_by_expert(const int32_t *ids, int first, int num_pairs, int num_experts, int32_t *order,
                                       int32_t *starts) {
    for (int e = 0; e <= num_experts; e++) starts[e] = 0;
    for (int i = 0; i < num_pairs; i++) starts[ids[first + i]]++;
    for (int e = 0, sum = 0; e <= num_experts; e++) {
        sum += starts[e];
        starts[e] = sum; /* the end of expert e; filling from behind makes it the start */
    }
    for (int i = num_pairs - 1; i >= 0; i--) order[--starts[ids[first + i]]] = first + i;
}

/* job: x, y and bias of expert 0; index is set here. order: room for `chunk` pairs, which are taken at a time. */
INGOT_INLINE void ingot_expert_linear(ingot_tile tile, const int max_rows, const int width, const int k_step,
                                      const ingot_matmul *job, const int32_t *ids, int num_pairs, int num_experts,
                                      size_t expert_bytes, int32_t *order, int32_t *starts, const int chunk,
                                      const int block_rows, int worker, int num_workers) {
    int begin, end;
    ingot_split((job->n + INGOT_PANEL - 1) / INGOT_PANEL, worker, num_workers, &begin, &end);
    for (int first = 0; first < num_pairs; first += chunk) {
        const int count = num_pairs - first < chunk ? num_pairs - first : chunk;
        ingot_sort_by_expert(ids, first, count, num_experts, order, starts);
        for (int e = 0; e < num_experts; e++) {
            ingot_matmul expert = *job;
            expert.index = order + starts[e];
            expert.w = job->w + (size_t)e * expert_bytes;
            expert.bias = job->bias ? job->bias + (size_t)e * (size_t)job->n : NULL;
            const int rows = starts[e + 1] - starts[e];
            for (int row = 0; row < rows; row += block_rows)
                ingot_panels(tile, &expert, max_rows, width, k_step, begin, end, row,
                             row + block_rows < rows ? row + block_rows : rows);
        }
    }
}

#endif

/* y = x w^T (+ bias) (+ residual): one matrix, all tokens of the step.
 *
 * The work is cut into (block of tokens) x (panel), and a worker gets a contiguous part of the list, panels fastest:
 * with few tokens, a stretch of the matrix that it reads once from memory. */
#ifndef INGOT_LINEAR_H
#define INGOT_LINEAR_H
#include "amx.h"
#include "tile_float.h"
#include "tile_integer.h"

/* What Tactic (cpu.py) says unless a measurement has said otherwise.
 * The largest tiles: what its accumulators leave of the registers holds weights and activations. */
#if VF_LANES == 16
#define INGOT_ROWS 8
#define INGOT_PANELS 2
#else
#define INGOT_ROWS 4
#define INGOT_PANELS 1
#endif
#ifdef INGOT_AMX
#define INGOT_INTEGER_ROWS INGOT_AMX_ROWS
#define INGOT_PAIR_ROWS INGOT_ANY_ROWS
#else
#define INGOT_INTEGER_ROWS INGOT_ROWS
#define INGOT_PAIR_ROWS INGOT_ROWS
#endif
/* Channels of K whose weights (two panels of fp32: 64 KiB) and activations stay in the second-level cache. */
#define INGOT_FLOAT_K_STEP 512
#define INGOT_PAIR_K_STEP 1024
#define INGOT_FLOAT_AHEAD 4096
/* Widened by the row that waits for them: measured on Zen 4, with vectors of 32 and of 64 bytes. */
#define INGOT_BF16_AHEAD_OF_ONE 1024
#define INGOT_ROUNDED_AHEAD 8192
/* A row by itself waits for the memory alone: the nearer fetch was the faster one on Zen 4. */
#define INGOT_ROUNDED_AHEAD_OF_ONE 2048

/* `tile` with at most max_rows tokens and `width` panels; `block_rows` tokens are taken through all panels together. */
INGOT_INLINE void ingot_linear(ingot_tile tile, const int max_rows, const int width, const int k_step,
                               const ingot_matmul *job, int num_rows, const int block_rows, int worker,
                               int num_workers) {
    const int panels = (job->n + INGOT_PANEL - 1) / INGOT_PANEL;
    const int blocks = (num_rows + block_rows - 1) / block_rows;
    int begin, end;
    ingot_split(panels * blocks, worker, num_workers, &begin, &end);
    while (begin < end) {
        const int block = begin / panels, first = begin % panels;
        const int last = first + end - begin < panels ? first + end - begin : panels;
        const int row_end = (block + 1) * block_rows < num_rows ? (block + 1) * block_rows : num_rows;
        ingot_panels(tile, job, max_rows, width, k_step, first, last, block * block_rows, row_end);
        begin += last - first;
    }
}

#endif

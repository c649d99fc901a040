/* The kernels of the mock engine (mock_engine.py); DIM, HEADS, VOCAB, BLOCK and BLOCK_BYTES are defined in front of this. */
#include "ingot_kernel.h"
#include "pool.h"
#include <string.h>
enum { HEAD_DIM = DIM / HEADS };

static float *cell(float *cache, const int *table, const ingot_step *step, int seq, int position, int head) {
    int block = table[seq * step->max_blocks + position / BLOCK];
    return cache + block * (BLOCK_BYTES / 4) + (head * BLOCK + position % BLOCK) * HEAD_DIM;
}

/* args: token_ids, table [VOCAB, DIM], x [T, DIM] */
INGOT_EXPORT void mock_embed(const ingot_step *step, void *const *args, int worker, int num_workers) {
    const int *ids = args[0];
    int begin, end;
    ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++) {
        memcpy((float *)args[2] + t * DIM, (const float *)args[1] + ids[t] * DIM, DIM * sizeof(float));
    }
}

/* args: x, k cache, v cache, block table */
INGOT_EXPORT void mock_store(const ingot_step *step, void *const *args, int worker, int num_workers) {
    const float *x = args[0];
    int begin, end;
    ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++) {
        for (int i = 0; i < DIM; i++) {
            int seq = step->token_seq[t], p = step->positions[t], head = i / HEAD_DIM;
            cell(args[1], args[3], step, seq, p, head)[i % HEAD_DIM] = x[t * DIM + i];
            cell(args[2], args[3], step, seq, p, head)[i % HEAD_DIM] = 2 * x[t * DIM + i];
        }
    }
}

/* args: null, k cache, v cache, block table, y [T, DIM] */
INGOT_EXPORT void mock_mean(const ingot_step *step, void *const *args, int worker, int num_workers) {
    float *y = args[4];
    int begin, end;
    if (args[0]) return;
    ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++) {
        int seq = step->token_seq[t], length = step->positions[t] + 1;
        for (int i = 0; i < DIM; i++) {
            float sum = 0;
            for (int p = 0; p < length; p++) {
                sum += cell(args[2], args[3], step, seq, p, i / HEAD_DIM)[i % HEAD_DIM]
                     - cell(args[1], args[3], step, seq, p, i / HEAD_DIM)[i % HEAD_DIM];
            }
            y[t * DIM + i] = sum / (float)length;
        }
    }
}

/* args: y, head [VOCAB, DIM], logit_rows, logits [L, VOCAB] */
INGOT_EXPORT void mock_logits(const ingot_step *step, void *const *args, int worker, int num_workers) {
    const float *y = args[0], *head = args[1];
    const int *rows = args[2];
    int begin, end;
    ingot_split(VOCAB, worker, num_workers, &begin, &end);
    for (int row = 0; row < step->num_logits; row++) {
        for (int v = begin; v < end; v++) {
            float sum = 0;
            for (int i = 0; i < DIM; i++) sum += y[rows[row] * DIM + i] * head[v * DIM + i];
            ((float *)args[3])[row * VOCAB + v] = sum;
        }
    }
}

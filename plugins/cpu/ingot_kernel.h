/* The interface between the runtime and the kernels of a CPU engine.
 *
 * A step is a list of launches. Every worker thread walks the whole list and meets the others at a barrier after each
 * launch, so that a kernel sees finished inputs and divides its own work by (worker, num_workers). Shapes are
 * compile-time constants of the kernel; what changes from step to step stands in ingot_step. */
#ifndef INGOT_KERNEL_H
#define INGOT_KERNEL_H
#include <stddef.h>
#include <stdint.h>

/* How the tokens of the step are chosen: plugins/sampling/sampling.h. */
struct ingot_sampling;

/* One step over T = num_tokens tokens of B = num_seqs sequences. The tokens of a sequence are neighbours:
 * those of sequence s are query_start[s] .. query_start[s + 1] - 1, and after this step its context is
 * context_len[s] tokens long, these included.
 *
 * A kernel that reads or writes the KV cache has the block table of its layer among its args: int32 [B, max_blocks].
 * A position in the context of sequence s is found in block table[s * max_blocks + position / block_size] of the
 * cache, slot position % block_size. Entries of blocks whose tokens are all outside the window of the table's layers
 * may hold anything. */
typedef struct ingot_step {
    int32_t num_tokens;         /* T */
    int32_t num_seqs;           /* B */
    int32_t num_logits;         /* L: rows of logits asked for */
    int32_t max_blocks;         /* row length of block tables */
    const int32_t *token_ids;   /* [T] */
    const int32_t *positions;   /* [T] position of the token in its sequence, from 0 */
    const int32_t *token_seq;   /* [T] the sequence of the token */
    const int32_t *logit_rows;  /* [L] the tokens whose logits are asked for */
    const int32_t *query_start; /* [B + 1] */
    const int32_t *context_len; /* [B] */
    const int32_t *adapters;    /* [B] slot of the sequence's LoRA adapter, -1: none */
    const struct ingot_sampling *sampling; /* never null */
} ingot_step;

/* args: the pointers that the plan binds, in the order that the kernel documents. */
typedef void (*ingot_kernel)(const ingot_step *step, void *const *args, int worker, int num_workers);

typedef struct ingot_launch {
    ingot_kernel kernel;
    void *const *args;
} ingot_launch;

/* The part [*begin, *end) of `count` pieces of work that falls to this worker: contiguous, sizes differ by one. */
static inline void ingot_split(int count, int worker, int num_workers, int *begin, int *end) {
    int share = count / num_workers, rest = count % num_workers;
    *begin = worker * share + (worker < rest ? worker : rest);
    *end = *begin + share + (worker < rest);
}

#endif

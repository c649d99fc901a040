/* The worker threads of a CPU engine, and the loop in which they walk the launches of a step.
 *
 * The workers live as long as the pool; the thread that starts a step is none of them, and prepares the next one
 * meanwhile. Between steps they spin for a moment, because the next step usually comes at once, then sleep until it
 * comes. Within a step all workers meet at a barrier between one launch and the next. */
#ifndef INGOT_POOL_H
#define INGOT_POOL_H
#include "ingot_kernel.h"

/* Changes whenever ingot_step, ingot_launch or a function below changes in a way that the runtime must know. */
#define INGOT_ABI_VERSION 3

/* Everything else in an engine's library is hidden. */
#define INGOT_EXPORT __attribute__((visibility("default")))

typedef struct ingot_pool ingot_pool;

INGOT_EXPORT int ingot_abi_version(void);

/* Starts num_workers threads. NULL if num_workers < 1 or the system refuses memory or a thread (see errno). */
INGOT_EXPORT ingot_pool *ingot_pool_create(int num_workers);

/* Ends the threads and frees the pool; NULL is allowed. No step may be under way. */
INGOT_EXPORT void ingot_pool_destroy(ingot_pool *pool);

/* Starts launches begin .. end - 1 and returns. `step` and `launches` must stay as they are until ingot_wait has been
 * called, which must be before anything else is started. One caller at a time. Allocates nothing. */
INGOT_EXPORT void ingot_start(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin,
                              int end);

/* Returns when all workers have finished what was started last; at once if nothing was. */
INGOT_EXPORT void ingot_wait(ingot_pool *pool);

/* Both. */
INGOT_EXPORT void ingot_run(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin,
                            int end);

/* As ingot_run; durations_ns[i - begin] becomes the time that launch i took, until its last worker was done. */
INGOT_EXPORT void ingot_profile(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin,
                                int end, int64_t *durations_ns);

#endif

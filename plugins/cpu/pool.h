/* The worker threads of a CPU engine, and the loop in which they walk the launches of a step.
 *
 * The calling thread is worker 0; workers 1 .. num_workers - 1 are threads that live as long as the pool. Between
 * steps they spin for a moment, because the next step usually comes at once, then sleep until it comes. Within a step
 * all workers meet at a barrier after each launch. */
#ifndef INGOT_POOL_H
#define INGOT_POOL_H
#include "ingot_kernel.h"

/* Changes whenever ingot_step, ingot_launch or a function below changes in a way that the runtime must know. */
#define INGOT_ABI_VERSION 1

/* Everything else in an engine's library is hidden. */
#define INGOT_EXPORT __attribute__((visibility("default")))

typedef struct ingot_pool ingot_pool;

INGOT_EXPORT int ingot_abi_version(void);

/* Starts num_workers - 1 threads. NULL if num_workers < 1 or the system refuses memory or a thread (see errno). */
INGOT_EXPORT ingot_pool *ingot_pool_create(int num_workers);

/* Ends the threads and frees the pool; NULL is allowed. No ingot_run may be under way. */
INGOT_EXPORT void ingot_pool_destroy(ingot_pool *pool);

/* Runs launches begin .. end - 1 and returns when all workers have finished the last one. One caller at a time.
 * Allocates nothing. */
INGOT_EXPORT void ingot_run(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin,
                            int end);

#endif

#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CACHE_LINE 64

/* How long a worker that waits for the next step keeps spinning: longer than what comes between two steps of generation
 * takes, short enough that an idle engine costs nothing. */
#define IDLE_SPIN_NS 200000

/* Pauses before a waiting worker offers its core to others: a few microseconds. Within a step the others are about to
 * arrive, unless there are more threads than cores and one of them needs this very core to get on; between steps the
 * thread that prepares the next one may need it. */
#define SPINS_BEFORE_YIELD 256

/* How often the thread that waits for the end of a step looks for it before it sleeps, some pauses each, giving its
 * core away in between: when there are as many workers as cores, it has the core that one of them needs. */
#define LOOKS_BEFORE_SLEEP 8
#define PAUSES_A_LOOK 16

/* What one thread writes while others spin on something else has a cache line of its own. */
struct ingot_pool {
    /* The step that is under way; written by ingot_start before `epoch` changes. */
    const ingot_step *step;
    const ingot_launch *launches;
    int begin, end;
    /* Where the time of each launch goes, in ns, or null. */
    int64_t *durations;
    int num_workers;
    int stopping;
    struct ingot_worker *workers;

    /* Counts the steps, modulo 2^32; workers wait for it to change. The futex word. */
    _Alignas(CACHE_LINE) atomic_uint epoch;
    /* Workers that sleep on `epoch` or are about to. */
    _Alignas(CACHE_LINE) atomic_int num_sleepers;

    /* The epoch of the last step that all workers have finished; ingot_wait waits for it. A futex word too. */
    _Alignas(CACHE_LINE) atomic_uint finished;
    /* Whether ingot_wait sleeps on `finished` or is about to. */
    _Alignas(CACHE_LINE) atomic_int is_waited_for;
    /* Workers that have not finished the step that is under way. */
    _Alignas(CACHE_LINE) atomic_int num_running;

    /* The barrier: the last to arrive flips `sense`, the others wait for that. */
    _Alignas(CACHE_LINE) atomic_int num_arrived;
    _Alignas(CACHE_LINE) atomic_int sense;
};

struct ingot_worker {
    ingot_pool *pool;
    pthread_t thread;
    int index;
};

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on most cores; isb waits about as long as pause */
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Waits until all workers have called it. `*sense` is the caller's own; equal in all workers between barriers. */
static void barrier(ingot_pool *pool, int *sense) {
    int mine = *sense = !*sense;
    if (atomic_fetch_add_explicit(&pool->num_arrived, 1, memory_order_acq_rel) == pool->num_workers - 1) {
        atomic_store_explicit(&pool->num_arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->sense, mine, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool->sense, memory_order_acquire) != mine; spins++) {
        if (spins < SPINS_BEFORE_YIELD) {
            cpu_pause();
        } else {
            sched_yield();
        }
    }
}

static void wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

/* Sleeps unless the word has changed. */
static void sleep_on(atomic_uint *word, unsigned seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void walk(ingot_pool *pool, int worker, int *sense) {
    const ingot_step *step = pool->step;
    const ingot_launch *launches = pool->launches;
    int num_workers = pool->num_workers, end = pool->end;
    for (int i = pool->begin; i < end; i++) {
        if (i > pool->begin) barrier(pool, sense);
        launches[i].kernel(step, launches[i].args, worker, num_workers);
    }
}

/* The same with a clock beside it: a launch lasts from one barrier to the next, waiting for the last worker included.
 * Reading the clock takes 20 to 30 ns. */
static void walk_timed(ingot_pool *pool, int worker, int *sense) {
    barrier(pool, sense); /* before it some workers may still be waking up */
    int64_t before = now_ns();
    for (int i = pool->begin; i < pool->end; i++) {
        pool->launches[i].kernel(pool->step, pool->launches[i].args, worker, pool->num_workers);
        barrier(pool, sense);
        if (worker > 0) continue;
        int64_t now = now_ns();
        pool->durations[i - pool->begin] = now - before;
        before = now;
    }
}

/* The last worker to finish a step tells ingot_wait, which acquires what all of them wrote. */
static void finish(ingot_pool *pool, unsigned epoch) {
    if (atomic_fetch_sub_explicit(&pool->num_running, 1, memory_order_acq_rel) > 1) return;
    /* Sequentially consistent, as in wait_for_step: either ingot_wait is seen here, or it sees the new value. */
    atomic_store(&pool->finished, epoch);
    if (atomic_load(&pool->is_waited_for)) wake(&pool->finished);
}

/* Returns when pool->epoch is no longer `seen`. */
static void wait_for_step(ingot_pool *pool, unsigned seen) {
    for (int i = 0; i < SPINS_BEFORE_YIELD; i++) {
        if (atomic_load_explicit(&pool->epoch, memory_order_acquire) != seen) return;
        cpu_pause();
    }
    int64_t deadline = now_ns() + IDLE_SPIN_NS;
    do {
        sched_yield();
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if (atomic_load_explicit(&pool->epoch, memory_order_acquire) != seen) return;
            cpu_pause();
        }
    } while (now_ns() < deadline);
    /* Sequentially consistent, as the increment of epoch and the look at num_sleepers in `announce` are: either this
     * sleeper is seen and woken, or the kernel sees the new epoch and does not let it sleep. */
    atomic_fetch_add(&pool->num_sleepers, 1);
    while (atomic_load(&pool->epoch) == seen) sleep_on(&pool->epoch, seen);
    atomic_fetch_sub(&pool->num_sleepers, 1);
}

static void announce(ingot_pool *pool) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->num_sleepers) > 0) wake(&pool->epoch);
}

static void *worker_main(void *argument) {
    struct ingot_worker *self = argument;
    ingot_pool *pool = self->pool;
    int sense = 0;
    for (unsigned epoch = 0;; epoch++) {
        wait_for_step(pool, epoch);
        if (pool->stopping) return NULL;
        if (pool->durations) walk_timed(pool, self->index, &sense);
        else walk(pool, self->index, &sense);
        finish(pool, epoch + 1);
    }
}

int ingot_abi_version(void) { return INGOT_ABI_VERSION; }

/* Ends workers 0 .. num_started - 1, which wait for a step. */
static void stop(ingot_pool *pool, int num_started) {
    pool->stopping = 1;
    announce(pool);
    for (int i = 0; i < num_started; i++) pthread_join(pool->workers[i].thread, NULL);
    free(pool->workers);
    free(pool);
}

ingot_pool *ingot_pool_create(int num_workers) {
    if (num_workers < 1) {
        errno = EINVAL;
        return NULL;
    }
    ingot_pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    struct ingot_worker *workers = calloc((size_t)num_workers, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        errno = ENOMEM;
        return NULL;
    }
    *pool = (ingot_pool){.num_workers = num_workers, .workers = workers};

    /* Signals are for the threads of the program that uses the engine. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = 0, error = 0;
    for (; started < num_workers && !error; started += !error) {
        workers[started] = (struct ingot_worker){.pool = pool, .index = started};
        error = pthread_create(&workers[started].thread, NULL, worker_main, &workers[started]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        stop(pool, started);
        errno = error;
        return NULL;
    }
    return pool;
}

void ingot_pool_destroy(ingot_pool *pool) {
    if (pool) stop(pool, pool->num_workers);
}

static void start(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin, int end,
                  int64_t *durations) {
    if (begin >= end) return;
    pool->step = step;
    pool->launches = launches;
    pool->begin = begin;
    pool->end = end;
    pool->durations = durations;
    atomic_store_explicit(&pool->num_running, pool->num_workers, memory_order_relaxed);
    announce(pool);
}

void ingot_start(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin, int end) {
    start(pool, step, launches, begin, end, NULL);
}

void ingot_wait(ingot_pool *pool) {
    unsigned epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed), seen;
    for (int look = 0; look < LOOKS_BEFORE_SLEEP; look++) {
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if (atomic_load_explicit(&pool->finished, memory_order_acquire) == epoch) return;
            cpu_pause();
        }
        sched_yield();
    }
    atomic_store(&pool->is_waited_for, 1);
    while ((seen = atomic_load(&pool->finished)) != epoch) sleep_on(&pool->finished, seen);
    atomic_store(&pool->is_waited_for, 0);
}

void ingot_run(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin, int end) {
    ingot_start(pool, step, launches, begin, end);
    ingot_wait(pool);
}

void ingot_profile(ingot_pool *pool, const ingot_step *step, const ingot_launch *launches, int begin, int end,
                   int64_t *durations_ns) {
    start(pool, step, launches, begin, end, durations_ns);
    ingot_wait(pool);
}

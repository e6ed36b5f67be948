/* A team of threads that computes a step together: one parallel region per step, with phases inside it.
 *
 * OpenMP's barriers and regions cost microseconds each, and a step of a small model has dozens of phases. Threads take
 * work one item at a time, and a phase ends when its items are done, not when all threads have reached its end: a
 * thread that the system has suspended delays the others only if it holds an item. When it resumes, it finds past
 * phases without items.
 */
#ifndef THREAD_TEAM_H
#define THREAD_TEAM_H

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 4000 /* some 50 us, a phase of a small model; after that, a thread yields its core */

/* The state that the threads of a team share. */
typedef struct {
    _Alignas(64) _Atomic uint64_t ticket; /* phase << 32 | the next item */
    _Alignas(64) atomic_int done;         /* items of the phase that are done */
} SharedWork;

/* One thread's view of its team. */
typedef struct {
    SharedWork *work;
    int thread, size;
    uint32_t phase; /* the phase that this thread is in */
    int mine;       /* items of the phase that this thread has taken */
} ThreadTeam;

/* Initialize the shared state, before the parallel region. */
static inline void work_begin(SharedWork *work)
{
    atomic_store(&work->ticket, 0);
    atomic_store(&work->done, 0);
}

/* Join the team, in the parallel region. */
static inline ThreadTeam team_join(SharedWork *work)
{
    return (ThreadTeam){work, omp_get_thread_num(), omp_get_num_threads(), 0, 0};
}

static inline void end_phase(ThreadTeam *team)
{
    atomic_store_explicit(&team->work->done, 0, memory_order_relaxed);
    atomic_store_explicit(&team->work->ticket, (uint64_t)(team->phase + 1) << 32, memory_order_release);
}

/* Take the next of a phase's `count` items; returns `count` when none is left. All threads pass the same count and
 * call this until none is left. A call also says that the thread's previous item is done. */
static inline int team_take(ThreadTeam *team, int count)
{
    uint64_t ticket = atomic_load_explicit(&team->work->ticket, memory_order_acquire);
    while ((uint32_t)(ticket >> 32) == team->phase && (int)(uint32_t)ticket < count)
        if (atomic_compare_exchange_weak_explicit(&team->work->ticket, &ticket, ticket + 1, memory_order_acquire,
                                                  memory_order_acquire)) {
            team->mine++;
            return (int)(uint32_t)ticket;
        }
    int mine = team->mine;
    team->mine = 0;
    if (mine && atomic_fetch_add_explicit(&team->work->done, mine, memory_order_acq_rel) + mine == count)
        end_phase(team);
    return count;
}

/* Wait for the end of a phase that had items: everything written in it is visible afterwards. */
static inline void team_barrier(ThreadTeam *team)
{
    for (int spins = 0;
         (uint32_t)(atomic_load_explicit(&team->work->ticket, memory_order_acquire) >> 32) == team->phase; spins++) {
        if (spins < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        } else
            sched_yield();
    }
    team->phase++;
}

#endif

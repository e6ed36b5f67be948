/* Threads that go through a step together: one parallel region a step, barriers of its own between its phases.
 *
 * OpenMP's barriers and regions cost microseconds each, and a step of a small model has dozens of phases. Work is
 * handed out an item at a time, so a core that is shared with another process does less of it.
 */
#ifndef TEAM_H
#define TEAM_H

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#define SPINS 4000 /* some 50 us: a phase of a small model. Then others may have the core. */

typedef struct {
    int size;
    _Alignas(64) atomic_int next;       /* the item to be taken */
    _Alignas(64) atomic_int arrived;    /* at the barrier */
    _Alignas(64) atomic_int generation; /* barriers passed */
} Team;

static inline void team_begin(Team *team, int size)
{
    team->size = size;
    atomic_store(&team->next, 0);
    atomic_store(&team->arrived, 0);
    atomic_store(&team->generation, 0);
}

/* The next item of a phase; what is not below the phase's count ends it. */
static inline int team_take(Team *team)
{
    return atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
}

/* All that was written before it is seen by all after it, and items count from 0 again. */
static inline void team_barrier(Team *team)
{
    if (team->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == team->size) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == generation; spins++) {
        if (spins < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        } else
            sched_yield();
    }
}

#endif

/* The part of gcc's OpenMP runtime that the kernels use, on plain threads, for the thread sanitizer, which cannot see
 * the real runtime's synchronization. `make native-tsan` links it into the library. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define MOST_THREADS 64

typedef struct {
    void (*body)(void *);
    void *data;
    int size;
    atomic_int singles; /* single regions that some thread has entered */
    atomic_long taken, end; /* iterations of its only loop, which counts up from 0 by one */
    pthread_barrier_t barrier;
} Region;

static __thread Region *region;
static __thread int number, singles;

int omp_get_thread_num(void) { return region ? number : 0; }
int omp_get_num_threads(void) { return region ? region->size : 1; }
int omp_get_max_threads(void) { return 2; }

typedef struct {
    Region *region;
    int number;
} Member;

static void *run(void *argument)
{
    Member *member = argument;
    region = member->region;
    number = member->number;
    singles = 0;
    region->body(region->data);
    region = NULL;
    return NULL;
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)flags;
    int size = threads ? (int)threads : omp_get_max_threads();
    size = size < MOST_THREADS ? size : MOST_THREADS;
    Region own = {.body = body, .data = data, .size = size};
    Member members[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    pthread_barrier_init(&own.barrier, NULL, (unsigned)size);
    for (int i = 0; i < size; i++)
        members[i] = (Member){&own, i};
    for (int i = 1; i < size; i++)
        pthread_create(&started[i], NULL, run, &members[i]);
    run(&members[0]);
    for (int i = 1; i < size; i++)
        pthread_join(started[i], NULL);
    pthread_barrier_destroy(&own.barrier);
}

void GOMP_barrier(void) { pthread_barrier_wait(&region->barrier); }

/* Return whether this thread is the first to reach its next single region. */
bool GOMP_single_start(void)
{
    int expected = singles++;
    return atomic_compare_exchange_strong(&region->singles, &expected, expected + 1);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *end)
{
    *first = atomic_fetch_add(&region->taken, 1);
    *end = *first + 1;
    return *first < region->end;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first, long *last)
{
    if (start != 0 || step != 1 || chunk != 1)
        abort();
    atomic_store(&region->end, end);
    return GOMP_loop_nonmonotonic_dynamic_next(first, last);
}

void GOMP_loop_end_nowait(void) {}
void GOMP_loop_end(void) { GOMP_barrier(); }

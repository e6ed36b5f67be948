/* Moves the wall clock of a process, as it sees it: the monotonic clock, and other processes, stay as they are.
 *
 * Preloaded (LD_PRELOAD), it adds the number of seconds in the file RAYDIX_WALL_CLOCK, an int64, to the time that
 * the C library tells. Whoever writes to the file moves the clocks of all processes that have it, at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;
static int (*true_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    true_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("RAYDIX_WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!true_clock_gettime) begin(); /* another library's constructor was first */
    int failed = true_clock_gettime(clock, now);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    if (!failed && now) *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *result) {
    struct timespec precise;
    time_t now = clock_gettime(CLOCK_REALTIME, &precise) ? (time_t)-1 : precise.tv_sec;
    if (result) *result = now;
    return now;
}

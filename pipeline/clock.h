/* Time that never jumps. */
#ifndef ACTDUMP_PIPELINE_CLOCK_H
#define ACTDUMP_PIPELINE_CLOCK_H

#include <time.h>

/* Seconds since some moment in the past, monotonic. */
static inline double clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline void clock_sleep(double seconds)
{
    struct timespec time = {.tv_sec = (time_t)seconds,
                            .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

#endif

/* Stands between the engine and a backend, for benchmarks: times every operation, and records the matrix
 * products of a forward so that they can be run again with nothing between them.
 *
 * It replaces the backend's table by one whose operations call the real ones; operations it does not know
 * pass through untimed. One backend a process. Times are those of the calling thread, so a backend that only
 * queues work (CUDA) is not what this is for. */
#ifndef ACTDUMP_BENCH_OPS_WATCH_H
#define ACTDUMP_BENCH_OPS_WATCH_H

#include "kernels/backend.h"

/* What calls of one operation took; products are told apart by their shape. */
struct op_time {
    char name[48]; /* "rms_norm", "linear 3072 x 768" (n x k) */
    int64_t calls;
    double seconds;
    double replayed_s;    /* of products, by ops_watch_replay */
    double multiply_adds; /* of products and of attention (what its mask lets through); 0 else */
};

void ops_watch_install(struct backend *backend);
/* Whether the products that come are recorded. Those of the last recording are forgotten when one starts. */
void ops_watch_record(bool on);
/* Adds the products that come again to nothing: runs the recorded ones and returns the seconds it took. */
double ops_watch_replay(struct backend *backend);

/* Times since the last reset, the longest first; returns how many there are, `max` at most. */
void ops_watch_reset(void);
int ops_watch_get(struct op_time *out, int max);

#endif

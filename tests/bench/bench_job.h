/* A job opened for measuring on the CPU, and passes over its first batches: what the benchmarks share.
 * Failures end the process with the status and the sentence that actdump would have. */
#ifndef ACTDUMP_BENCH_BENCH_JOB_H
#define ACTDUMP_BENCH_BENCH_JOB_H

#include "pipeline/batches.h"
#include "pipeline/device.h"
#include "pipeline/watch.h"

struct bench {
    struct job *job;
    struct model *model;
    struct corpus *corpus;
    struct plan *plan;
    struct backend *backend; /* watched by ops_watch.h */
    struct watch *watch;
    struct replica *replica;
    struct replica *bare; /* NULL until bench_open_bare */
    struct batches *batches;
    struct writer *writer;
    int64_t n_batches; /* of a pass, at most */
    int n_threads;
};

enum pass {
    PASS_BARE,     /* the same forward where nothing is captured */
    PASS_DROPPED,  /* the job's captures: rows chosen and dropped */
    PASS_PRODUCTS, /* the same; after each batch its matrix products are run again */
    PASS_STORE,    /* rows compressed, written and committed: the store's unit 0 is these batches */
    PASS_NEXT_UNIT /* the same as unit 1 while unit 0 is committed, as in a run: from when the forward of unit
                    * 0 is over until that of unit 1 is, and the commit of unit 0 */
};

struct pass_result {
    double tokens, seconds;
    double products_s; /* PASS_PRODUCTS: in products run again, not part of `seconds` */
};

void bench_check(enum status status, const struct error *error);
/* Reads the job, opens all it names. n_batches is the caller's. */
void bench_open(struct bench *bench, const char *path, const char *const *sets, int64_t n_sets);
/* A second replica, as deep as the job's, for PASS_BARE. */
void bench_open_bare(struct bench *bench);
void bench_close(struct bench *bench);
struct pass_result bench_run(struct bench *bench, enum pass pass);

/* Of this process, in MB: the largest resident set of its life, and the one now. */
void bench_memory(double *peak_mb, double *resident_mb);
/* Sorts the values. */
double bench_median(double *values, int n);

#endif

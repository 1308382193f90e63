/* The job file: what to run, on what, what to keep. Parsed and checked; nothing is opened.
 *
 * The format is fixed (schemas/job.schema.json, README). Unknown keys are errors that name the nearest known
 * one; every complaint names the file and the key ("captures.residuals.layers"). Paths are made relative to
 * the job file's folder. All faults here are STATUS_USAGE. */
#ifndef ACTDUMP_PIPELINE_JOB_H
#define ACTDUMP_PIPELINE_JOB_H

#include "kernels/base/dtype.h"
#include "pipeline/corpus.h"

#include <cjson/cJSON.h>

enum job_device { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };

enum positions_kind {
    POSITIONS_ALL,
    POSITIONS_LAST,
    POSITIONS_FIRST,
    POSITIONS_EVERY,
    POSITIONS_LIST,
    POSITIONS_SAMPLE
};

struct positions {
    enum positions_kind kind;
    int64_t n;      /* first: how many; every: the stride */
    int64_t offset; /* every: the first position */
    int64_t
        *list; /* list: ascending, each once; negative ones count from the sequence's end; owned by the job */
    int64_t n_list;
    double fraction; /* sample: each position by itself with this probability */
    uint64_t seed;
    int64_t skip_first;
    int32_t *skip_ids; /* owned by the job */
    int64_t n_skip_ids;
};

struct layer_range { /* first, first + step, ... up to last, both may be negative (from the end) */
    int64_t first, last, step;
};

struct layer_selector {
    bool all;
    struct layer_range *ranges; /* owned by the job */
    int64_t n_ranges;
    const char *
        *kinds; /* "mamba", "attention", ...: the array is owned by the job, the strings are constants */
    int64_t n_kinds;
};

struct job_capture {
    const char *name;
    const char **values; /* paths and globs; the array is owned by the job, strings borrowed from the tree */
    int64_t n_values;
    struct layer_selector layers; /* absent: all */
    struct positions positions;
    int dtype; /* enum dtype, or -1: as computed under the load */
};

struct job {
    cJSON *tree;  /* the file with --set applied, as it goes into store.json; owned, and what strings borrow
                     from */
    char *source; /* the file's name */
    char *checkpoint;
    int load_dtype; /* enum dtype or LOAD_DTYPE_OWN */
    enum job_device device;
    bool tf32;
    struct corpus_options corpus; /* its path and prepend are the next two, its dataset is in the tree */
    char *corpus_path;
    int32_t *corpus_prepend;
    struct job_capture *captures;
    int64_t n_captures;
    char *store_path;
    int64_t chunk_rows;        /* default 1024 */
    int compression;           /* zstd level, default 1; 0: none */
    int64_t unit_tokens;       /* default 65536 */
    int64_t batch_tokens;      /* 0: "auto" */
    int64_t n_threads;         /* 0: "auto" */
    double grace_seconds;      /* default 30 */
    double time_limit_seconds; /* 0: none */
    bool stop_on_nonfinite;
};

/* Reads and checks the file. sets: "a.b=VALUE" each, applied in order before anything is checked. VALUE is
 * JSON, or a bare word taken as a string; null takes the key away. Objects on the way that are missing are
 * made; paths given so are relative to the job file's folder too. Returns owned at *out. */
enum status job_read(const char *path, const char *const *sets, int64_t n_sets, struct job **out,
                     struct error *error);
/* The same from text; `folder` is what relative paths are relative to. */
enum status job_parse(const char *text, size_t length, const char *source, const char *folder,
                      const char *const *sets, int64_t n_sets, struct job **out, struct error *error);
void job_free(struct job *job); /* NULL is fine */

#endif

/* How long a job takes to its first batch, and how much memory it holds then.
 *
 *   bench_start JOB.json [--alone] [--set KEY=VALUE ...]
 *
 * Prints one JSON object: seconds from the start of the process until everything is open and the weights are
 * resident, and until the first batch has run; the largest resident set of the process' life, and the one
 * that is left. With --alone what no start can do without, and nothing else: each tensor that the job's
 * forward needs is read and, where it is a matrix, packed, one after another. Run it more than once: the
 * first run also brings the checkpoint into the page cache. */
#include "kernels/base/memory.h"
#include "pipeline/clock.h"
#include "tests/bench/bench_job.h"
#include "engine/safetensors.h"

#include <stdio.h>
#include <string.h>

enum { MAX_SETS = 16 };

/* The embedding is a table; lm_head is not needed where no value past it is captured. */
static bool is_table(const char *name)
{
    return strstr(name, "embed") != NULL;
}

static void take_tensor(struct backend *backend, const struct checkpoint *checkpoint,
                        const struct checkpoint_tensor *t, enum dtype compute)
{
    struct error e = {0};
    void *memory;
    struct matrix *matrix;
    checkpoint_prefetch(checkpoint, t);
    if (t->n_dims == 2 && !is_table(t->name)) {
        struct tensor w = tensor_make(NULL, t->dtype, t->dims[0], t->dims[1]);
        memcpy(&w.data, &t->data, sizeof w.data); /* it is only read */
        bench_check(backend->ops->matrix_create(backend, &w, compute, t->name, &matrix, &e), &e);
    } else {
        bench_check(memory_allocate(&memory, t->bytes, t->name, &e), &e);
        memcpy(memory, t->data, t->bytes);
    }
    checkpoint_release(checkpoint, t);
}

static void run_alone(const char *path, const char *const *sets, int64_t n_sets, double start)
{
    struct error e = {0};
    struct job *job;
    struct model *model;
    struct backend *backend;
    struct checkpoint *checkpoint;
    size_t bytes = 0;
    double peak_mb, resident_mb;
    bench_check(job_read(path, sets, n_sets, &job, &e), &e);
    bench_check(model_open(job->checkpoint, job->load_dtype, &model, &e), &e);
    bench_check(backend_create_cpu(device_count_threads(job->n_threads, 1), &backend, &e), &e);
    bench_check(checkpoint_open(job->checkpoint, &checkpoint, &e), &e);
    for (int64_t i = 0; i < checkpoint_n_tensors(checkpoint); i++) {
        const struct checkpoint_tensor *t = checkpoint_get(checkpoint, i);
        if (strstr(t->name, "lm_head") != NULL)
            continue;
        bytes += t->bytes;
        take_tensor(backend, checkpoint, t, model->load_dtype);
    }
    double seconds = clock_seconds() - start;
    bench_memory(&peak_mb, &resident_mb);
    printf("{\"alone_s\": %.4f, \"checkpoint_mb\": %.0f, \"peak_mb\": %.0f, \"resident_mb\": %.0f}\n",
           seconds, (double)bytes * 1e-6, peak_mb, resident_mb);
}

static void run_whole(const char *path, const char *const *sets, int64_t n_sets, double start)
{
    struct bench bench = {.n_batches = 1};
    double peak_mb, resident_mb;
    bench_open(&bench, path, sets, n_sets);
    double opened_s = clock_seconds() - start;
    struct pass_result first = bench_run(&bench, PASS_STORE);
    double first_s = clock_seconds() - start;
    bench_memory(&peak_mb, &resident_mb);
    struct pass_result second = bench_run(&bench, PASS_STORE);
    printf("{\"opened_s\": %.4f, \"first_batch_s\": %.4f, \"batch_s\": %.4f, \"later_batch_s\": %.4f, "
           "\"peak_mb\": %.0f, \"resident_mb\": %.0f}\n",
           opened_s, first_s, first.seconds, second.seconds, peak_mb, resident_mb);
    bench_close(&bench);
}

int main(int argc, char **argv)
{
    const char *sets[MAX_SETS], *path = NULL;
    double start = clock_seconds();
    int n_sets = 0;
    bool alone = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--alone") == 0)
            alone = true;
        else if (strcmp(argv[i], "--set") == 0 && i + 1 < argc && n_sets < MAX_SETS)
            sets[n_sets++] = argv[++i];
        else
            path = argv[i];
    }
    if (path == NULL) {
        fputs("usage: bench_start JOB.json [--alone] [--set KEY=VALUE ...]\n", stderr);
        return STATUS_USAGE;
    }
    if (alone)
        run_alone(path, sets, n_sets, start);
    else
        run_whole(path, sets, n_sets, start);
    return STATUS_OK;
}

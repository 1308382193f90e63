/* How near a job comes to its matrix products: one process, the same weights, three things in turn.
 *
 *   bench_model JOB.json [--rounds N] [--batches N] [--set KEY=VALUE ...]
 *
 *   gemm     the matrix products of the job's batches alone: every linear and grouped_linear call of a
 * forward is recorded and run again, with the same matrices and row counts and nothing between forward  the
 * forward, rows chosen and dropped store    the forward, rows compressed and written into a store (the job's
 * path; removed first)
 *
 * Prints tokens/s of each, medians over the rounds, and the ratios. The rounds are interleaved since machines
 * are noisy: a ratio is taken within a round. */
#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/batches.h"
#include "pipeline/clock.h"
#include "pipeline/device.h"
#include "pipeline/store.h"
#include "pipeline/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { MAX_CALLS = 4096, MAX_ROUNDS = 64, MAX_SETS = 16 };

/* One matrix product of a forward. */
struct call {
    struct tensor x, y;
    const struct matrix *w;        /* linear */
    struct matrix *const *experts; /* grouped_linear */
    struct expert_groups groups;   /* with offsets of its own */
};

static struct call calls[MAX_CALLS];
static int n_calls;
static bool recording;
static const struct backend_ops *real;

static void record_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                          struct tensor addend, struct tensor y)
{
    if (recording && n_calls < MAX_CALLS)
        calls[n_calls++] = (struct call){.x = x, .y = y, .w = w};
    real->linear(b, x, w, bias, addend, y);
}

static void record_grouped(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                           struct matrix *const *experts, struct tensor yg)
{
    if (recording && n_calls < MAX_CALLS) {
        struct call *call = &calls[n_calls++];
        *call = (struct call){.x = xg, .y = yg, .experts = experts, .groups = *groups};
        size_t n = (size_t)groups->n_experts + 1;
        call->groups.offsets = malloc(n * sizeof(int32_t));
        memcpy(call->groups.offsets, groups->offsets, n * sizeof(int32_t));
    }
    real->grouped_linear(b, xg, groups, experts, yg);
}

static void forget_calls(void)
{
    for (int i = 0; i < n_calls; i++) {
        if (calls[i].experts != NULL)
            free(calls[i].groups.offsets);
    }
    n_calls = 0;
}

static void replay(struct backend *b)
{
    const struct tensor none = {0};
    for (int i = 0; i < n_calls; i++) {
        if (calls[i].experts != NULL)
            real->grouped_linear(b, calls[i].x, &calls[i].groups, calls[i].experts, calls[i].y);
        else
            real->linear(b, calls[i].x, calls[i].w, NULL, none, calls[i].y);
    }
}

struct bench {
    struct job *job;
    struct model *model;
    struct corpus *corpus;
    struct plan *plan;
    struct backend *backend;
    struct watch *watch;
    struct replica *replica;
    struct batches *batches;
    struct writer *writer;
    int64_t n_batches;
};

static void check(enum status status, const struct error *error)
{
    if (status == STATUS_OK)
        return;
    log_error("%s", error->text);
    exit((int)status);
}

static void set_up(struct bench *b, const char *path, const char *const *sets, int64_t n_sets)
{
    struct error e = {0};
    check(job_read(path, sets, n_sets, &b->job, &e), &e);
    check(model_open(b->job->checkpoint, b->job->load_dtype, &b->model, &e), &e);
    check(corpus_open(&b->job->corpus, b->model->vocab_size, &b->corpus, &e), &e);
    check(plan_create(b->job, b->model, b->corpus, &b->plan, &e), &e);
    check(watch_create(b->plan, &b->watch, &e), &e);
    int n_threads = device_count_threads(b->job->n_threads, 1);
    check(backend_create_cpu(n_threads, &b->backend, &e), &e);
    static struct backend_ops recorder;
    real = b->backend->ops;
    recorder = *real;
    recorder.linear = record_linear;
    recorder.grouped_linear = record_grouped;
    b->backend->ops = &recorder;
    check(replica_create(b->model, b->backend, watch_observer(b->watch), &b->plan->limits, &b->replica, &e),
          &e);
    check(batches_create(b->plan, b->corpus, &b->batches, &e), &e);
    check(store_make_folders(b->job->store_path, &e), &e);
    struct writer_options options = {.folder = b->job->store_path,
                                     .n_threads = device_writer_threads(n_threads)};
    check(writer_create(&b->plan->layout, &options, &b->writer, &e), &e);
}

/* Runs the first n_batches of unit 0 and returns tokens. With `gemms` each batch's products are replayed and
 * only the replay is timed; with a writer the unit is committed. */
static double run(struct bench *b, bool write, double *gemm_s, double *seconds)
{
    struct error e = {0};
    int64_t tokens = 0;
    double start = clock_seconds(), replayed = 0;
    watch_connect(b->watch, b->backend, write ? b->writer : NULL);
    batches_begin(b->batches, 0);
    if (write)
        check(writer_begin(b->writer, 0, 0, &e), &e);
    for (int64_t i = 0; i < b->n_batches; i++) {
        struct batch batch;
        const struct sequence *sequences;
        bool have;
        check(batches_next(b->batches, &batch, &sequences, &have, &e), &e);
        if (!have)
            break;
        recording = gemm_s != NULL;
        check(watch_begin_batch(b->watch, &batch, sequences, &e), &e);
        check(replica_forward(b->replica, &batch, &e), &e);
        check(watch_end_batch(b->watch, &e), &e);
        recording = false;
        tokens += batch.n_tokens;
        if (gemm_s != NULL) {
            double at = clock_seconds();
            replay(b->backend);
            replayed += clock_seconds() - at;
            forget_calls();
        }
    }
    if (write) {
        struct segment_record record;
        bool have;
        check(writer_finish(b->writer, tokens, &e), &e);
        check(writer_collect(b->writer, true, &record, &have, &e), &e);
        segment_record_fini(&record);
    }
    *seconds = clock_seconds() - start - replayed;
    if (gemm_s != NULL)
        *gemm_s = replayed;
    return (double)tokens;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, compare);
    return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

int main(int argc, char **argv)
{
    struct bench b = {.n_batches = 2};
    const char *sets[MAX_SETS], *path = NULL;
    int n_sets = 0, n_rounds = 5;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            n_rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--batches") == 0 && i + 1 < argc)
            b.n_batches = atoi(argv[++i]);
        else if (strcmp(argv[i], "--set") == 0 && i + 1 < argc && n_sets < MAX_SETS)
            sets[n_sets++] = argv[++i];
        else
            path = argv[i];
    }
    if (path == NULL || n_rounds < 1 || n_rounds > MAX_ROUNDS) {
        fputs("usage: bench_model JOB.json [--rounds N] [--batches N] [--set KEY=VALUE ...]\n", stderr);
        return STATUS_USAGE;
    }
    set_up(&b, path, sets, n_sets);
    double gemm[MAX_ROUNDS], forward[MAX_ROUNDS], store[MAX_ROUNDS], share[MAX_ROUNDS], cost[MAX_ROUNDS],
        tokens = 0;
    for (int r = -1; r < n_rounds; r++) { /* round -1 warms up */
        double g, f, s;
        tokens = run(&b, false, &g, &f);
        run(&b, false, NULL, &f);
        run(&b, true, NULL, &s);
        if (r < 0)
            continue;
        gemm[r] = tokens / g;
        forward[r] = tokens / f;
        store[r] = tokens / s;
        share[r] = g / s;
        cost[r] = s / f - 1;
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double flops = replica_gemm_flops_per_token(b.replica), bound = median(gemm, n_rounds);
    printf("{\"family\": \"%s\", \"dtype\": \"%s\", \"backend\": \"%s\", \"context\": %lld, "
           "\"batch_tokens\": %lld, "
           "\"gemm_tokens_s\": %.1f, \"forward_tokens_s\": %.1f, \"store_tokens_s\": %.1f, "
           "\"share_of_gemm_bound\": %.3f, "
           "\"cost_of_writing\": %.3f, \"gemm_gflops\": %.1f, \"peak_mb\": %.0f}\n",
           b.model->name, dtype_name(b.model->load_dtype), b.backend->name, (long long)b.job->corpus.context,
           (long long)b.plan->batch_tokens, bound, median(forward, n_rounds), median(store, n_rounds),
           median(share, n_rounds), median(cost, n_rounds), bound * 2 * flops * 1e-9,
           (double)usage.ru_maxrss / 1024);
    writer_destroy(b.writer);
    batches_destroy(b.batches);
    replica_destroy(b.replica);
    watch_destroy(b.watch);
    backend_destroy(b.backend);
    plan_free(b.plan);
    corpus_close(b.corpus);
    model_close(b.model);
    job_free(b.job);
    return STATUS_OK;
}

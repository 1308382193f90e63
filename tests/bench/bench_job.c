#include "tests/bench/bench_job.h"

#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/clock.h"
#include "pipeline/store.h"
#include "tests/bench/ops_watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bench_check(enum status status, const struct error *error)
{
    if (status == STATUS_OK)
        return;
    log_error("%s", error->text);
    exit((int)status);
}

void bench_open(struct bench *b, const char *path, const char *const *sets, int64_t n_sets)
{
    struct error e = {0};
    memory_tune();
    bench_check(job_read(path, sets, n_sets, &b->job, &e), &e);
    bench_check(model_open(b->job->checkpoint, b->job->load_dtype, &b->model, &e), &e);
    bench_check(corpus_open(&b->job->corpus, b->model->vocab_size, &b->corpus, &e), &e);
    bench_check(plan_create(b->job, b->model, b->corpus, &b->plan, &e), &e);
    bench_check(watch_create(b->plan, &b->watch, &e), &e);
    b->n_threads = device_count_threads(b->job->n_threads, 1);
    bench_check(backend_create_cpu(b->n_threads, &b->backend, &e), &e);
    ops_watch_install(b->backend);
    bench_check(store_make_folders(b->job->store_path, &e), &e);
    struct writer_options options = {.folder = b->job->store_path,
                                     .n_threads = device_writer_threads(b->n_threads)};
    bench_check(writer_create(&b->plan->layout, &options, &b->writer, &e), &e);
    bench_check(
        replica_create(b->model, b->backend, watch_observer(b->watch), &b->plan->limits, &b->replica, &e),
        &e);
    bench_check(batches_create(b->plan, b->corpus, &b->batches, &e), &e);
}

void bench_close(struct bench *b)
{
    watch_destroy(b->watch);
    writer_destroy(b->writer);
    batches_destroy(b->batches);
    replica_destroy(b->bare);
    replica_destroy(b->replica);
    backend_destroy(b->backend);
    plan_free(b->plan);
    corpus_close(b->corpus);
    model_close(b->model);
    job_free(b->job);
}

/* ---------------------------------------------------------------- the same forward without capture */

/* Wants one value, the last that the job wants, and no row of it: the forward then goes as deep. */
struct deepest {
    int layer; /* -1: past the last block */
};

static bool wants_deepest(void *context, enum value_id value, int layer)
{
    const struct deepest *deepest = context;
    return layer == deepest->layer && value == (layer < 0 ? VALUE_FINAL_NORM_OUTPUT : VALUE_LAYER_OUTPUT);
}

static struct row_list no_rows(void *context, enum value_id value, int layer)
{
    (void)context, (void)value, (void)layer;
    return (struct row_list){0};
}

static void ignore(void *context, enum value_id value, int layer, const struct piece *piece)
{
    (void)context, (void)value, (void)layer, (void)piece;
}

void bench_open_bare(struct bench *b)
{
    static struct deepest deepest;
    static const struct observer observer = {
        .context = &deepest, .wants = wants_deepest, .rows = no_rows, .offer = ignore};
    struct error e = {0};
    bool past = false;
    deepest.layer = 0;
    for (int64_t c = 0; c < b->plan->captures.n; c++) {
        const struct capture *capture = &b->plan->captures.list[c];
        for (int64_t i = 0; i < capture->n_columns; i++) {
            const struct column *column = &capture->columns[i];
            deepest.layer = column->layer > deepest.layer ? column->layer : deepest.layer;
            past |= column->value == VALUE_FINAL_NORM_OUTPUT || column->value == VALUE_LOGITS ||
                    column->value == VALUE_LM_HEAD_OUTPUT || column->value == VALUE_NEXT_TOKEN_PROBS;
        }
    }
    deepest.layer = past ? -1 : deepest.layer;
    bench_check(replica_create(b->model, b->backend, &observer, &b->plan->limits, &b->bare, &e), &e);
}

/* ---------------------------------------------------------------- a pass */

static void run_batch(struct bench *b, enum pass pass, const struct batch *batch,
                      const struct sequence *sequences)
{
    struct error e = {0};
    if (pass == PASS_BARE) {
        bench_check(replica_forward(b->bare, batch, &e), &e);
        return;
    }
    ops_watch_record(pass == PASS_PRODUCTS);
    bench_check(watch_begin_batch(b->watch, batch, sequences, &e), &e);
    bench_check(replica_forward(b->replica, batch, &e), &e);
    bench_check(watch_end_batch(b->watch, &e), &e);
    ops_watch_record(false);
}

static bool writes(enum pass pass)
{
    return pass == PASS_STORE || pass == PASS_NEXT_UNIT;
}

/* The batches of a pass; those of a unit of the store where it writes one. */
static void run_unit(struct bench *b, enum pass pass, int64_t unit, struct pass_result *result)
{
    struct error e = {0};
    int64_t tokens = 0;
    watch_connect(b->watch, b->backend, writes(pass) ? b->writer : NULL);
    batches_begin(b->batches, 0);
    if (writes(pass))
        bench_check(watch_begin_unit(b->watch, unit, &e), &e);
    for (int64_t i = 0; i < b->n_batches; i++) {
        struct batch batch;
        const struct sequence *sequences;
        bool have;
        bench_check(batches_next(b->batches, &batch, &sequences, &have, &e), &e);
        if (!have)
            break;
        run_batch(b, pass, &batch, sequences);
        tokens += batch.n_tokens;
        if (pass == PASS_PRODUCTS)
            result->products_s += ops_watch_replay(b->backend);
    }
    if (writes(pass)) {
        bench_check(watch_finish_unit(b->watch, tokens, &e), &e);
        bench_check(watch_settle(b->watch, &e), &e);
    }
    result->tokens = (double)tokens;
}

/* Waits for the commit of the oldest unit that has none. */
static void await_commit(struct bench *b)
{
    struct error e = {0};
    struct segment_record record;
    bool have;
    bench_check(writer_collect(b->writer, true, &record, &have, &e), &e);
    segment_record_fini(&record);
}

struct pass_result bench_run(struct bench *b, enum pass pass)
{
    struct pass_result result = {0};
    if (pass == PASS_NEXT_UNIT)
        run_unit(b, pass, 0, &result);
    double start = clock_seconds();
    run_unit(b, pass, pass == PASS_NEXT_UNIT ? 1 : 0, &result);
    if (writes(pass))
        await_commit(b);
    result.seconds = clock_seconds() - start - result.products_s;
    if (pass == PASS_NEXT_UNIT)
        await_commit(b);
    return result;
}

/* ---------------------------------------------------------------- figures */

void bench_memory(double *peak_mb, double *resident_mb)
{
    char line[256];
    long long kib;
    FILE *file = fopen("/proc/self/status", "r");
    *peak_mb = *resident_mb = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "VmHWM: %lld kB", &kib) == 1)
            *peak_mb = (double)kib / 1024;
        if (sscanf(line, "VmRSS: %lld kB", &kib) == 1)
            *resident_mb = (double)kib / 1024;
    }
    if (file != NULL)
        fclose(file);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, compare);
    return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/* How near a job comes to its matrix products: one process, the same weights, four things in turn.
 *
 *   bench_model JOB.json [--rounds N] [--batches N] [--ops] [--writer] [--quick] [--serve] [--set ...]
 *
 *   products  the matrix products of the job's batches alone: every linear and grouped_linear call of a
 *             forward is recorded and run again, with the same matrices and row counts and nothing between
 *   bare      the forward where nothing is captured
 *   forward   the forward, rows chosen and dropped
 *   store     the forward of a unit of a store (the job's path), its rows compressed and written,
 *             while the unit before it is committed and synced, as in a run
 *
 * Prints one JSON object: tokens/s of each, medians over the rounds, and the ratios. The rounds are
 * interleaved since machines are noisy: a ratio is taken within a round. With --ops also what each operation
 * of the forward took, and products run again; with --writer also the writer alone, given the rows of the
 * last store again, on as many threads as a run gives it and on all; the bare forward and the products are
 * left out then.
 * --quick, for sequences so long that a pass takes minutes: one round without warming up, of the captured
 * forward with its products run again, and of `store` (whose times --ops shows).
 * --serve: passes of `store` with their own commit, one for each line of standard input, each answered by
 * {"tokens", "seconds"}. */
#include "pipeline/clock.h"
#include "pipeline/hdf5_util.h"
#include "pipeline/store.h"
#include "tests/bench/bench_job.h"
#include "tests/bench/ops_watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ROUNDS = 64, MAX_SETS = 16, MAX_OPS = 96 };

struct options {
    const char *path, *sets[MAX_SETS];
    int n_sets, n_rounds;
    bool ops, writer, quick, serve;
};

/* By round. */
struct rounds {
    double products[MAX_ROUNDS], bare[MAX_ROUNDS], forward[MAX_ROUNDS], store[MAX_ROUNDS]; /* seconds */
    double writer[MAX_ROUNDS], writer_all[MAX_ROUNDS];                                     /* seconds */
    double tokens;                                                                         /* of a pass */
};

static bool read_options(int argc, char **argv, struct options *o, struct bench *b)
{
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--rounds") == 0 && more)
            o->n_rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--batches") == 0 && more)
            b->n_batches = atoi(argv[++i]);
        else if (strcmp(argv[i], "--set") == 0 && more && o->n_sets < MAX_SETS)
            o->sets[o->n_sets++] = argv[++i];
        else if (strcmp(argv[i], "--ops") == 0)
            o->ops = true;
        else if (strcmp(argv[i], "--writer") == 0)
            o->writer = true;
        else if (strcmp(argv[i], "--quick") == 0)
            o->quick = true;
        else if (strcmp(argv[i], "--serve") == 0)
            o->serve = true;
        else
            o->path = argv[i];
    }
    return o->path != NULL && o->n_rounds >= 1 && o->n_rounds <= MAX_ROUNDS && b->n_batches >= 1;
}

/* ---------------------------------------------------------------- the writer alone */

/* The rows of one dataset of the store that was written, as the writer was given them. */
struct held {
    char *rows;
    int64_t n;
    size_t row_bytes;
};

static void hold(struct held *held, hid_t file, const struct dataset *d)
{
    struct error e = {0};
    hsize_t dims[1 + VALUE_MAX_AXES] = {0};
    hid_t id = H5Dopen2(file, d->path, H5P_DEFAULT), space = H5Dget_space(id);
    hid_t type = hdf5_type_create(d->source_dtype);
    H5Sget_simple_extent_dims(space, dims, NULL);
    held->n = (int64_t)dims[0];
    held->row_bytes = (size_t)d->width * dtype_size(d->source_dtype);
    held->rows = malloc((size_t)held->n * held->row_bytes + 1);
    if (held->rows == NULL || H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, held->rows) < 0)
        bench_check(hdf5_error(&e, STATUS_RESOURCE, "%s cannot be read back", d->path), &e);
    H5Tclose(type);
    H5Sclose(space);
    H5Dclose(id);
}

static struct held *hold_all(const struct bench *b)
{
    const struct layout *layout = &b->plan->layout;
    struct held *held = calloc((size_t)layout->n_datasets, sizeof *held);
    char name[64], path[4096];
    struct error e = {0};
    hid_t file;
    hdf5_start();
    store_segment_name(0, name);
    snprintf(path, sizeof path, "%s/%s", b->job->store_path, name);
    bench_check(hdf5_open(path, &file, &e), &e);
    for (int64_t i = 0; i < layout->n_datasets; i++)
        hold(&held[i], file, &layout->datasets[i]);
    H5Fclose(file);
    return held;
}

static void drop_all(const struct bench *b, struct held *held)
{
    for (int64_t i = 0; held != NULL && i < b->plan->layout.n_datasets; i++)
        free(held[i].rows);
    free(held);
}

/* A unit's rows, batch after batch, as a forward would hand them over. */
static void append_unit(const struct bench *b, struct writer *writer, const struct held *held, int64_t unit)
{
    const struct layout *layout = &b->plan->layout;
    struct error e = {0};
    bench_check(writer_begin(writer, unit, 0, &e), &e);
    for (int64_t k = 0; k < b->n_batches; k++) {
        for (int64_t i = 0; i < layout->n_datasets; i++) {
            const struct held *h = &held[i];
            int64_t first = h->n * k / b->n_batches, last = h->n * (k + 1) / b->n_batches;
            bench_check(writer_append(writer, i, h->rows + (size_t)first * h->row_bytes, last - first, &e),
                        &e);
        }
    }
    bench_check(writer_finish(writer, 1, &e), &e);
}

static void await_unit(struct writer *writer)
{
    struct segment_record record;
    struct error e = {0};
    bool have;
    bench_check(writer_collect(writer, true, &record, &have, &e), &e);
    segment_record_fini(&record);
}

/* Seconds that a unit takes where one follows the other, as PASS_NEXT_UNIT has them. */
static double write_again(const struct bench *b, const struct held *held, int n_threads)
{
    struct writer_options options = {.folder = b->job->store_path, .n_threads = n_threads};
    struct writer *writer;
    struct error e = {0};
    bench_check(writer_create(&b->plan->layout, &options, &writer, &e), &e);
    append_unit(b, writer, held, 0);
    double start = clock_seconds();
    append_unit(b, writer, held, 1);
    await_unit(writer);
    double seconds = clock_seconds() - start;
    await_unit(writer);
    writer_destroy(writer);
    return seconds;
}

/* ---------------------------------------------------------------- rounds */

/* Every other round the other way round: what a pass leaves in caches is not always the same one's gain. */
static void run_products_round(struct bench *b, struct rounds *r, int i)
{
    static const enum pass passes[] = {PASS_PRODUCTS, PASS_BARE, PASS_DROPPED, PASS_NEXT_UNIT};
    enum { N_PASSES = sizeof passes / sizeof passes[0] };
    for (int k = 0; k < N_PASSES; k++) {
        enum pass pass = passes[i % 2 == 0 ? k : N_PASSES - 1 - k];
        struct pass_result result = bench_run(b, pass);
        r->tokens = result.tokens;
        if (pass == PASS_PRODUCTS)
            r->products[i] = result.products_s;
        else if (pass == PASS_BARE)
            r->bare[i] = result.seconds;
        else if (pass == PASS_DROPPED)
            r->forward[i] = result.seconds;
        else
            r->store[i] = result.seconds;
    }
}

static void run_writer_round(struct bench *b, const struct held *held, struct rounds *r, int i)
{
    struct pass_result dropped = bench_run(b, PASS_DROPPED), store = bench_run(b, PASS_NEXT_UNIT);
    r->forward[i] = dropped.seconds;
    r->store[i] = store.seconds;
    r->writer[i] = write_again(b, held, device_writer_threads(b->n_threads));
    r->writer_all[i] = write_again(b, held, b->n_threads);
    r->tokens = store.tokens;
}

/* Over the rounds. */
struct spread {
    double low, median, high; /* quartiles */
};

/* Of a/b. */
static struct spread spread(const double *a, const double *b, int n)
{
    double values[MAX_ROUNDS];
    for (int i = 0; i < n; i++)
        values[i] = a[i] / b[i];
    double median = bench_median(values, n); /* sorts */
    return (struct spread){values[n / 4], median, values[n - 1 - n / 4]};
}

static double ratio(const double *a, const double *b, int n)
{
    return spread(a, b, n).median;
}

/* Median over the rounds of tokens/s. */
static double rate(const struct rounds *r, const double *seconds, int n)
{
    double values[MAX_ROUNDS];
    for (int i = 0; i < n; i++)
        values[i] = r->tokens / seconds[i];
    return bench_median(values, n);
}

/* ---------------------------------------------------------------- output */

static void print_head(const struct bench *b, double peak_mb, double resident_mb)
{
    printf(
        "{\"family\": \"%s\", \"dtype\": \"%s\", \"backend\": \"%s\", \"context\": %lld, \"batch_tokens\": "
        "%lld, \"batches\": %lld, \"peak_mb\": %.0f, \"resident_mb\": %.0f",
        b->model->name, dtype_name(b->model->load_dtype), b->backend->name, (long long)b->job->corpus.context,
        (long long)b->plan->batch_tokens, (long long)b->n_batches, peak_mb, resident_mb);
}

static void print_products(const struct bench *b, const struct rounds *r, int n)
{
    double products = rate(r, r->products, n);
    struct spread share = spread(r->products, r->store, n), capture = spread(r->forward, r->bare, n);
    printf(
        ", \"gemm_tokens_s\": %.1f, \"gemm_gflops\": %.1f, \"bare_tokens_s\": %.1f, \"forward_tokens_s\": "
        "%.1f, \"store_tokens_s\": %.1f, \"share_of_gemm_bound\": %.4f, \"cost_of_capture\": %.4f, "
        "\"cost_of_writing\": %.4f, \"share_quartiles\": [%.4f, %.4f], \"capture_quartiles\": [%.4f, %.4f]",
        products, products * 2e-9 * replica_gemm_flops_per_token(b->replica), rate(r, r->bare, n),
        rate(r, r->forward, n), rate(r, r->store, n), share.median, capture.median - 1,
        ratio(r->store, r->forward, n) - 1, share.low, share.high, capture.low - 1, capture.high - 1);
}

/* What both on the same processors would allow is the harmonic sum: neither can have them twice. */
static void print_writer(const struct bench *b, const struct rounds *r, const struct held *held, int n)
{
    double bound[MAX_ROUNDS], both[MAX_ROUNDS], raw = 0;
    for (int64_t i = 0; i < b->plan->layout.n_datasets; i++)
        raw += (double)held[i].n * (double)held[i].row_bytes;
    for (int i = 0; i < n; i++) {
        bound[i] = r->forward[i] > r->writer_all[i] ? r->forward[i] : r->writer_all[i];
        both[i] = r->forward[i] + r->writer_all[i];
    }
    printf(", \"forward_tokens_s\": %.1f, \"store_tokens_s\": %.1f, \"writer_tokens_s\": %.1f, "
           "\"writer_all_threads_tokens_s\": %.1f, \"bytes_a_token\": %.0f, \"writer_mb_s\": %.0f, "
           "\"share_of_slower\": %.3f, \"share_of_both\": %.3f",
           rate(r, r->forward, n), rate(r, r->store, n), rate(r, r->writer, n), rate(r, r->writer_all, n),
           raw / r->tokens, raw / r->tokens * rate(r, r->writer_all, n) * 1e-6, ratio(bound, r->store, n),
           ratio(both, r->store, n));
}

/* Since the last reset, in a pass of so many seconds. */
static void print_ops(double seconds)
{
    static struct op_time times[MAX_OPS];
    int n = ops_watch_get(times, MAX_OPS);
    double timed = 0;
    printf(", \"ops\": [");
    for (int i = 0; i < n; i++) {
        const struct op_time *t = &times[i];
        timed += t->seconds;
        printf("%s\n {\"op\": \"%s\", \"calls\": %lld, \"seconds\": %.4f, \"share\": %.4f, \"gflops\": %.1f, "
               "\"replayed_s\": %.4f}",
               i > 0 ? "," : "", t->name, (long long)t->calls, t->seconds, t->seconds / seconds,
               t->seconds > 0 ? 2e-9 * t->multiply_adds / t->seconds : 0, t->replayed_s);
    }
    printf("],\n \"seconds\": %.4f, \"untimed_share\": %.4f", seconds, 1 - timed / seconds);
}

static void measure_quick(struct bench *b, const struct options *o)
{
    struct pass_result products = bench_run(b, PASS_PRODUCTS);
    ops_watch_reset();
    struct pass_result store = bench_run(b, PASS_STORE);
    double peak_mb, resident_mb;
    bench_memory(&peak_mb, &resident_mb);
    print_head(b, peak_mb, resident_mb);
    printf(
        ", \"gemm_tokens_s\": %.1f, \"gemm_gflops\": %.1f, \"forward_tokens_s\": %.1f, \"store_tokens_s\": "
        "%.1f, \"share_of_gemm_bound\": %.4f",
        products.tokens / products.products_s,
        products.tokens / products.products_s * 2e-9 * replica_gemm_flops_per_token(b->replica),
        products.tokens / products.seconds, store.tokens / store.seconds,
        products.products_s / store.seconds);
    if (o->ops)
        print_ops(store.seconds);
    puts("}");
}

static void measure(struct bench *b, const struct options *o)
{
    static struct rounds r;
    double peak_mb, resident_mb;
    bench_run(b, PASS_STORE); /* warms up: primitives are made, memory is touched */
    bench_memory(&peak_mb, &resident_mb);
    struct held *held = o->writer ? hold_all(b) : NULL;
    if (!o->writer) {
        bench_open_bare(b);
        bench_run(b, PASS_BARE);
    }
    for (int i = 0; i < o->n_rounds; i++) {
        if (o->writer)
            run_writer_round(b, held, &r, i);
        else
            run_products_round(b, &r, i);
    }
    print_head(b, peak_mb, resident_mb);
    if (o->writer)
        print_writer(b, &r, held, o->n_rounds);
    else
        print_products(b, &r, o->n_rounds);
    if (o->ops) {
        ops_watch_reset();
        print_ops(bench_run(b, PASS_PRODUCTS).seconds);
    }
    puts("}");
    drop_all(b, held);
}

static void serve(struct bench *b)
{
    char line[64];
    bench_run(b, PASS_STORE);
    puts("{\"ready\": true}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        struct pass_result pass = bench_run(b, PASS_STORE);
        printf("{\"tokens\": %.0f, \"seconds\": %.6f}\n", pass.tokens, pass.seconds);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    struct options options = {.n_rounds = 3};
    struct bench bench = {.n_batches = 2};
    if (!read_options(argc, argv, &options, &bench)) {
        fputs("usage: bench_model JOB.json [--rounds N] [--batches N] [--ops] [--writer] [--quick] [--serve] "
              "[--set KEY=VALUE ...]\n",
              stderr);
        return STATUS_USAGE;
    }
    bench_open(&bench, options.path, options.sets, options.n_sets);
    sync(); /* a commit would else wait for what others wrote before, a checkpoint just made for one */
    if (options.serve)
        serve(&bench);
    else if (options.quick)
        measure_quick(&bench, &options);
    else
        measure(&bench, &options);
    bench_close(&bench);
    return STATUS_OK;
}

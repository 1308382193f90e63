/* What a GPU does with a job: tokens/s of the forward alone and with the job's captures written into a store,
 * the share of the device's peak, what the captures cost, how busy the bus and the compressing threads are.
 *
 *   bench_gpu --probe                                            names the device; 77 where there is none
 *   bench_gpu JOB.json [--rounds N] [--batches N] [--set KEY=VALUE ...]
 *
 * "alone" chooses the captures' rows and drops them on the device; rounds of both are interleaved, medians
 * are printed, as one JSON object. Two peaks: what cuBLAS reaches on a product of 8192 x 8192 x 8192 in the
 * job's dtype, measured here, and what the vendor's data sheet says, where the device is a known one. */
#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "kernels/cuda/cuda_backend.h"
#include "pipeline/batches.h"
#include "pipeline/clock.h"
#include "pipeline/device.h"
#include "pipeline/store.h"
#include "pipeline/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROUNDS = 64, MAX_SETS = 16, SKIPPED = 77 };

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
    int n_rounds, n_writers;
};

/* What one pass took. */
struct pass {
    double tokens, seconds, compressed_s;
    int64_t raw_bytes;
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
    check(backend_create_cuda(0, b->job->tf32, &b->backend, &e), &e);
    plan_expect_converted(b->plan);
    check(watch_create(b->plan, &b->watch, &e), &e);
    check(replica_create(b->model, b->backend, watch_observer(b->watch), &b->plan->limits, &b->replica, &e),
          &e);
    check(batches_create(b->plan, b->corpus, &b->batches, &e), &e);
    check(store_make_folders(b->job->store_path, &e), &e);
    /* The device computes: all of the rank's threads are for writing. */
    b->n_writers = device_count_threads(b->job->n_threads, 1);
    struct writer_options options = {.folder = b->job->store_path, .n_threads = b->n_writers};
    check(writer_create(&b->plan->layout, &options, &b->writer, &e), &e);
}

static void tear_down(struct bench *b)
{
    batches_destroy(b->batches);
    watch_destroy(b->watch);
    writer_destroy(b->writer);
    replica_destroy(b->replica);
    backend_destroy(b->backend);
    plan_free(b->plan);
    corpus_close(b->corpus);
    model_close(b->model);
    job_free(b->job);
}

static void commit(struct bench *b, struct pass *pass)
{
    struct error e = {0};
    struct segment_record record;
    bool have;
    check(watch_finish_unit(b->watch, (int64_t)pass->tokens, &e), &e);
    check(watch_settle(b->watch, &e), &e);
    check(writer_collect(b->writer, true, &record, &have, &e), &e);
    pass->raw_bytes = have ? record.raw_bytes : 0;
    if (have)
        segment_record_fini(&record);
}

/* The first batches of unit 0. */
static struct pass run(struct bench *b, bool write)
{
    struct error e = {0};
    struct pass pass = {0};
    double waited, before, after, wrote, start = clock_seconds();
    writer_times(b->writer, &waited, &before, &wrote);
    watch_connect(b->watch, b->backend, write ? b->writer : NULL);
    check(watch_settle(b->watch, &e), &e);
    batches_begin(b->batches, 0);
    if (write)
        check(watch_begin_unit(b->watch, 0, &e), &e);
    for (int64_t i = 0; i < b->n_batches; i++) {
        struct batch batch;
        const struct sequence *sequences;
        bool have;
        check(batches_next(b->batches, &batch, &sequences, &have, &e), &e);
        if (!have)
            break;
        check(watch_begin_batch(b->watch, &batch, sequences, &e), &e);
        check(replica_start(b->replica, &batch, &e), &e);
        check(watch_end_batch(b->watch, &e), &e);
        pass.tokens += (double)batch.n_tokens;
    }
    if (write)
        commit(b, &pass);
    check(b->backend->ops->synchronize(b->backend, &e), &e);
    pass.seconds = clock_seconds() - start;
    writer_times(b->writer, &waited, &after, &wrote);
    pass.compressed_s = after - before;
    return pass;
}

/* Bytes a second from the device to the host; the best of five. */
static double measure_bus(struct backend *b)
{
    enum { BYTES = 256 << 20 };
    struct error e = {0};
    void *memory, *host = malloc(BYTES);
    double best = 0;
    check(b->ops->allocate(b, &memory, BYTES, "measuring the bus", &e), &e);
    memset(host, 0, BYTES);
    for (int i = 0; i < 5; i++) {
        double start = clock_seconds();
        b->ops->download(b, host, memory, BYTES);
        double rate = BYTES / (clock_seconds() - start);
        best = rate > best ? rate : best;
    }
    check(b->ops->synchronize(b, &e), &e);
    b->ops->release(b, memory);
    free(host);
    return best;
}

/* Multiply-adds a second, twice, of a large product; the best of five rounds of eight. */
static double measure_peak(struct backend *b, enum dtype dtype)
{
    enum { N = 8192, TIMES = 8 };
    struct error e = {0};
    struct matrix *w;
    void *x, *y;
    size_t bytes = (size_t)N * N * dtype_size(dtype);
    struct tensor host = tensor_make(calloc(1, bytes), dtype, N, N);
    double best = 0;
    check(b->ops->matrix_create(b, &host, dtype, "measuring the peak", &w, &e), &e);
    check(b->ops->allocate(b, &x, bytes, "measuring the peak", &e), &e);
    check(b->ops->allocate(b, &y, bytes, "measuring the peak", &e), &e);
    for (int round = 0; round < 5; round++) {
        check(b->ops->synchronize(b, &e), &e);
        double start = clock_seconds();
        for (int i = 0; i < TIMES; i++)
            b->ops->linear(b, tensor_make(x, dtype, N, N), w, NULL, (struct tensor){0},
                           tensor_make(y, dtype, N, N));
        check(b->ops->synchronize(b, &e), &e);
        double rate = 2.0 * N * N * N * TIMES / (clock_seconds() - start);
        best = rate > best ? rate : best;
    }
    b->ops->matrix_destroy(b, w);
    b->ops->release(b, x);
    b->ops->release(b, y);
    free(host.data);
    return best;
}

/* Dense bfloat16 of NVIDIA's data sheets, FLOP/s; 0: not known here. */
static double published_peak(const char *name)
{
    static const struct {
        const char *part;
        double flops;
    } table[] = {{"H200", 989e12}, {"GH200", 989e12}, {"H100 PCIe", 756e12},
                 {"H100", 989e12}, {"A100", 312e12},  {"B200", 2250e12}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strstr(name, table[i].part) != NULL)
            return table[i].flops;
    return 0;
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

static void report(struct bench *b)
{
    double alone[MAX_ROUNDS], stored[MAX_ROUNDS], cost[MAX_ROUNDS], bus[MAX_ROUNDS], packing[MAX_ROUNDS];
    double bus_peak = measure_bus(b->backend), peak = measure_peak(b->backend, b->model->load_dtype);
    double published = b->model->load_dtype == DTYPE_BF16 ? published_peak(b->backend->name) : 0;
    for (int r = -1; r < b->n_rounds; r++) { /* round -1 warms up */
        struct pass bare = run(b, false), full = run(b, true);
        if (r < 0)
            continue;
        alone[r] = bare.tokens / bare.seconds;
        stored[r] = full.tokens / full.seconds;
        cost[r] = full.seconds / bare.seconds - 1;
        bus[r] = (double)full.raw_bytes / full.seconds / bus_peak;
        packing[r] = full.compressed_s / (full.seconds * b->n_writers);
    }
    double rate = median(alone, b->n_rounds), flops = 2 * replica_gemm_flops_per_token(b->replica) * rate;
    printf("{\"family\": \"%s\", \"dtype\": \"%s\", \"backend\": \"%s\", \"context\": %lld, "
           "\"batch_tokens\": %lld, "
           "\"tokens_s\": %.1f, \"stored_tokens_s\": %.1f, \"cost_of_capturing\": %.4f, \"product_flops\": "
           "%.4g, "
           "\"measured_peak\": %.4g, \"share_of_measured_peak\": %.4f, \"published_peak\": %.4g, "
           "\"share_of_published_peak\": %.4f, \"bus_bytes_s\": %.4g, \"bus_utilisation\": %.4f, "
           "\"compressor_utilisation\": %.4f}\n",
           b->model->name, dtype_name(b->model->load_dtype), b->backend->name,
           (long long)b->job->corpus.context, (long long)b->plan->batch_tokens, rate,
           median(stored, b->n_rounds), median(cost, b->n_rounds), flops, peak, flops / peak, published,
           published > 0 ? flops / published : 0, bus_peak, median(bus, b->n_rounds),
           median(packing, b->n_rounds));
}

static int probe(void)
{
    struct error reason = {0};
    int n = backend_cuda_device_count(&reason);
    if (n == 0) {
        printf("%s\n", reason.text);
        return SKIPPED;
    }
    printf("%d GPU%s\n", n, n == 1 ? "" : "s");
    return STATUS_OK;
}

int main(int argc, char **argv)
{
    struct bench b = {.n_batches = 4, .n_rounds = 5};
    const char *sets[MAX_SETS], *path = NULL;
    int n_sets = 0;
    memory_tune();
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--probe") == 0)
            return probe();
        if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            b.n_rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--batches") == 0 && i + 1 < argc)
            b.n_batches = atoi(argv[++i]);
        else if (strcmp(argv[i], "--set") == 0 && i + 1 < argc && n_sets < MAX_SETS)
            sets[n_sets++] = argv[++i];
        else
            path = argv[i];
    }
    if (path == NULL || b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS) {
        fputs("usage: bench_gpu --probe | JOB.json [--rounds N] [--batches N] [--set KEY=VALUE ...]\n",
              stderr);
        return STATUS_USAGE;
    }
    set_up(&b, path, sets, n_sets);
    report(&b);
    tear_down(&b);
    return STATUS_OK;
}

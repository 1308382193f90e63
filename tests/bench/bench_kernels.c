/* Rates of the CPU backend's operations at mamba-130m's shapes (and bamba's heads): GFLOP/s of products,
 * tokens/s of the rest.
 *
 *   bench_kernels [threads [tokens [name]]]   (default: all processors, 2048 tokens, all operations)
 *
 * Each figure is the best of some repetitions. On one thread the processor's time counts, which other work on
 * the machine disturbs little; on more it is the clock's, and on a shared machine only ratios within one run
 * mean anything. */
#include "kernels/backend.h"
#include "kernels/base/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HIDDEN = 768, WIDTH = 1536, STATES = 16, RANK = 48, KERNEL = 4, REPETITIONS = 5 };

struct bench {
    struct backend *backend;
    int64_t n_tokens;
    const char *only; /* an operation's or a product's name; NULL: all */
};

static double now_s(const struct bench *bench)
{
    struct timespec t;
    clock_gettime(bench->backend->n_threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void must(enum status status, const struct error *error)
{
    if (status == STATUS_OK)
        return;
    fprintf(stderr, "bench_kernels: %s\n", error->text);
    exit((int)status);
}

/* A tensor of small random numbers, owned by the caller (memory_free(data)). */
static struct tensor make_tensor(enum dtype dtype, int64_t rows, int64_t cols)
{
    struct error error = {0};
    void *data;
    must(memory_allocate_array(&data, (size_t)(rows * cols), dtype_size(dtype), "a benchmark's tensor",
                               &error),
         &error);
    uint32_t state = 1;
    for (int64_t i = 0; i < rows * cols; i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
        if (dtype == DTYPE_F32)
            ((float *)data)[i] = value;
        else
            ((uint16_t *)data)[i] = f32_to_bf16(value);
    }
    return tensor_make(data, dtype, rows, cols);
}

/* Seconds that `run` takes: the best of REPETITIONS after one to warm up. */
static double measure_s(const struct bench *bench, void (*run)(const struct bench *, void *), void *context)
{
    struct error error = {0};
    double best = 1e30;
    for (int i = 0; i <= REPETITIONS; i++) {
        double start = now_s(bench);
        run(bench, context);
        must(bench->backend->ops->synchronize(bench->backend, &error), &error);
        double taken = now_s(bench) - start;
        if (i > 0 && taken < best)
            best = taken;
    }
    return best;
}

struct product {
    struct tensor x, y;
    struct matrix *w;
};

static void run_product(const struct bench *bench, void *context)
{
    const struct product *p = context;
    bench->backend->ops->linear(bench->backend, p->x, p->w, NULL, (struct tensor){0}, p->y);
}

static bool is_wanted(const struct bench *bench, const char *name)
{
    return bench->only == NULL || strcmp(bench->only, name) == 0;
}

static void bench_product(const struct bench *bench, const char *name, int64_t rows, int64_t n, int64_t k,
                          enum dtype dtype)
{
    if (!is_wanted(bench, name))
        return;
    const struct backend_ops *ops = bench->backend->ops;
    struct error error = {0};
    struct tensor w = make_tensor(dtype, n, k);
    struct product p = {.x = make_tensor(dtype, rows, k), .y = make_tensor(dtype, rows, n)};
    must(ops->matrix_create(bench->backend, &w, dtype, name, &p.w, &error), &error);
    double seconds = measure_s(bench, run_product, &p);
    printf("linear     %-8s %-8s %6lld x %6lld x %5lld  %8.1f GFLOP/s\n", name, dtype_name(dtype),
           (long long)rows, (long long)n, (long long)k,
           2e-9 * (double)rows * (double)n * (double)k / seconds);
    ops->matrix_destroy(bench->backend, p.w);
    memory_free(w.data);
    memory_free(p.x.data);
    memory_free(p.y.data);
}

static void report_tokens(const struct bench *bench, const char *name, enum dtype dtype, double seconds)
{
    printf("%-19s %-8s %23s %10.0f tokens/s\n", name, dtype_name(dtype), "",
           (double)bench->n_tokens / seconds);
}

static void run_scan(const struct bench *bench, void *context)
{
    bench->backend->ops->selective_scan(bench->backend, context);
}

/* x and z, and B, C and the step, are columns of wider rows, as they are in a model. */
static void bench_scan(const struct bench *bench, enum dtype dtype)
{
    const struct run run = {.length = (int32_t)bench->n_tokens};
    struct tensor x = make_tensor(dtype, bench->n_tokens, WIDTH),
                  xz = make_tensor(dtype, bench->n_tokens, 2 * WIDTH);
    struct tensor parameters = make_tensor(dtype, bench->n_tokens, RANK + 2 * STATES);
    struct tensor dt = make_tensor(dtype, bench->n_tokens, WIDTH),
                  y = make_tensor(dtype, bench->n_tokens, WIDTH);
    struct tensor A = make_tensor(DTYPE_F32, STATES, WIDTH), vectors = make_tensor(DTYPE_F32, 2, WIDTH);
    for (int64_t i = 0; i < STATES * WIDTH; i++)
        ((float *)A.data)[i] = -1.0f - (float)(i / WIDTH);
    struct selective_scan_args args = {.x = x,
                                       .dt = dt,
                                       .B = tensor_cols(parameters, RANK, STATES),
                                       .C = tensor_cols(parameters, RANK + STATES, STATES),
                                       .z = tensor_cols(xz, WIDTH, WIDTH),
                                       .dt_bias = vectors.data,
                                       .A = A.data,
                                       .D = (float *)vectors.data + WIDTH,
                                       .state_dim = STATES,
                                       .runs = {.list = &run, .n = 1},
                                       .y = y};
    report_tokens(bench, "selective_scan", dtype, measure_s(bench, run_scan, &args));
    void *const all[] = {x.data, xz.data, parameters.data, dt.data, y.data, A.data, vectors.data};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        memory_free(all[i]);
}

static void run_ssd(const struct bench *bench, void *context)
{
    bench->backend->ops->ssd_scan(bench->backend, context);
}

/* bamba's heads. Steep: softplus(1) times -1 to -24 a token, as Mamba-2 is initialised in transformers, so
 * that most of what a chunk's tokens keep of each other is below what float32 can hold. */
static void bench_ssd(const struct bench *bench, enum dtype dtype, bool is_steep)
{
    enum { HEADS = 24, HEAD_DIM = WIDTH / HEADS, SSD_STATES = 128 };
    const struct run run = {.length = (int32_t)bench->n_tokens};
    struct tensor x = make_tensor(dtype, bench->n_tokens, WIDTH),
                  y = make_tensor(dtype, bench->n_tokens, WIDTH);
    struct tensor B = make_tensor(dtype, bench->n_tokens, SSD_STATES),
                  C = make_tensor(dtype, bench->n_tokens, SSD_STATES),
                  dt = make_tensor(dtype, bench->n_tokens, HEADS);
    float A[HEADS], D[HEADS], dt_bias[HEADS];
    for (int h = 0; h < HEADS; h++) {
        A[h] = -1.0f - (float)h;
        D[h] = 1;
        dt_bias[h] = is_steep ? 1 : -5;
    }
    struct ssd_scan_args args = {.x = x,
                                 .dt = dt,
                                 .B = B,
                                 .C = C,
                                 .dt_bias = dt_bias,
                                 .A = A,
                                 .D = D,
                                 .n_heads = HEADS,
                                 .head_dim = HEAD_DIM,
                                 .state_dim = SSD_STATES,
                                 .n_groups = 1,
                                 .dt_max = INFINITY,
                                 .chunk = 256,
                                 .runs = {.list = &run, .n = 1},
                                 .y = y};
    report_tokens(bench, is_steep ? "ssd_scan, steep" : "ssd_scan", dtype, measure_s(bench, run_ssd, &args));
    void *const all[] = {x.data, y.data, B.data, C.data, dt.data};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        memory_free(all[i]);
}

static void run_conv(const struct bench *bench, void *context)
{
    bench->backend->ops->conv_silu(bench->backend, context);
}

static void bench_conv(const struct bench *bench, enum dtype dtype)
{
    const struct run run = {.length = (int32_t)bench->n_tokens};
    struct tensor xz = make_tensor(dtype, bench->n_tokens, 2 * WIDTH),
                  y = make_tensor(dtype, bench->n_tokens, WIDTH);
    struct tensor weights = make_tensor(DTYPE_F32, KERNEL + 1, WIDTH);
    struct conv_args args = {.x = tensor_cols(xz, 0, WIDTH),
                             .weight = weights.data,
                             .bias = (float *)weights.data + KERNEL * WIDTH,
                             .kernel = KERNEL,
                             .runs = {.list = &run, .n = 1},
                             .y = y};
    report_tokens(bench, "conv_silu", dtype, measure_s(bench, run_conv, &args));
    memory_free(xz.data);
    memory_free(y.data);
    memory_free(weights.data);
}

static void run_norm(const struct bench *bench, void *context)
{
    bench->backend->ops->rms_norm(bench->backend, context);
}

static void bench_norm(const struct bench *bench, enum dtype dtype)
{
    struct tensor x = make_tensor(dtype, bench->n_tokens, HIDDEN),
                  y = make_tensor(dtype, bench->n_tokens, HIDDEN);
    struct tensor weight = make_tensor(DTYPE_F32, 1, HIDDEN);
    struct norm_args args = {.x = x, .weight = weight.data, .group = HIDDEN, .epsilon = 1e-5f, .y = y};
    report_tokens(bench, "rms_norm", dtype, measure_s(bench, run_norm, &args));
    memory_free(x.data);
    memory_free(y.data);
    memory_free(weight.data);
}

static void bench_dtype(const struct bench *bench, enum dtype dtype)
{
    bench_product(bench, "in_proj", bench->n_tokens, 2 * WIDTH, HIDDEN, dtype);
    bench_product(bench, "x_proj", bench->n_tokens, RANK + 2 * STATES, WIDTH, dtype);
    bench_product(bench, "dt_proj", bench->n_tokens, WIDTH, RANK, dtype);
    bench_product(bench, "out_proj", bench->n_tokens, HIDDEN, WIDTH, dtype);
    bench_product(bench, "lm_head", bench->n_tokens / 4 + 1, 50280, HIDDEN, dtype);
    bench_product(bench, "odd", 100, 2 * WIDTH, HIDDEN, dtype);
    bench_product(bench, "single", 1, 2 * WIDTH, HIDDEN, dtype);
    if (is_wanted(bench, "selective_scan"))
        bench_scan(bench, dtype);
    if (is_wanted(bench, "ssd_scan")) {
        bench_ssd(bench, dtype, false);
        bench_ssd(bench, dtype, true);
    }
    if (is_wanted(bench, "conv_silu"))
        bench_conv(bench, dtype);
    if (is_wanted(bench, "rms_norm"))
        bench_norm(bench, dtype);
}

int main(int n_arguments, char **arguments)
{
    struct error error = {0};
    struct bench bench = {.n_tokens = n_arguments > 2 ? atoll(arguments[2]) : 2048,
                          .only = n_arguments > 3 ? arguments[3] : NULL};
    memory_tune();
    if (bench.n_tokens < 1 || bench.n_tokens > 1 << 20) {
        fprintf(stderr, "usage: bench_kernels [threads [tokens, 1 to 1048576 [name]]]\n");
        return STATUS_USAGE;
    }
    must(backend_create_cpu(n_arguments > 1 ? atoi(arguments[1]) : 0, &bench.backend, &error), &error);
    printf("%s, %lld tokens\n", bench.backend->name, (long long)bench.n_tokens);
    bench_dtype(&bench, DTYPE_F32);
    bench_dtype(&bench, DTYPE_BF16);
    backend_destroy(bench.backend);
    return 0;
}

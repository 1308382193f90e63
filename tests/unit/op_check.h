/* What the tests of the CPU's operations share: backends of every instruction set, tensors with guard zones,
 * and a comparison with a float64 reference that says what is wrong and where.
 *
 * Include after cmocka.h. Memory here is the test's own, not the backend's: the CPU's memory is the host's.
 */
#ifndef ACTDUMP_TESTS_OP_CHECK_H
#define ACTDUMP_TESTS_OP_CHECK_H

#include "kernels/backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Bytes before and behind a tensor that nobody may touch, and the byte that fills them. */
#define GUARD_BYTES 512
#define GUARD_BYTE 0x5a

/* A tensor that owns its memory. Columns between cols and stride and the guards hold GUARD_BYTE. */
struct guarded {
    struct tensor t;
    unsigned char *block;
    size_t bytes; /* of the tensor itself, gaps included */
};

static inline struct guarded guarded_create(enum dtype dtype, int64_t rows, int64_t cols, int64_t gap)
{
    struct guarded g = {.t = tensor_make(NULL, dtype, rows, cols)};
    g.t.stride = cols + gap;
    g.bytes = (size_t)(rows * g.t.stride) * dtype_size(dtype);
    g.block = malloc(g.bytes + 2 * GUARD_BYTES);
    assert_non_null(g.block);
    memset(g.block, GUARD_BYTE, g.bytes + 2 * GUARD_BYTES);
    g.t.data = g.block + GUARD_BYTES;
    return g;
}

static inline void guarded_destroy(struct guarded *g)
{
    free(g->block);
    memset(g, 0, sizeof *g);
}

static inline bool is_guard(const unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != GUARD_BYTE)
            return false;
    return true;
}

/* Fails the test where a byte outside the elements was written. */
static inline void guarded_check(const struct guarded *g, const char *what)
{
    size_t element = dtype_size(g->t.dtype), gap = (size_t)(g->t.stride - g->t.cols) * element;

    if (!is_guard(g->block, GUARD_BYTES) || !is_guard(g->block + GUARD_BYTES + g->bytes, GUARD_BYTES))
        fail_msg("%s: written outside the tensor", what);
    for (int64_t r = 0; r < g->t.rows; r++) {
        const unsigned char *row = tensor_row(&g->t, r);
        if (!is_guard(row + (size_t)g->t.cols * element, gap))
            fail_msg("%s: row %lld written past its columns", what, (long long)r);
    }
}

static inline double element_get(const struct tensor *t, int64_t row, int64_t col)
{
    const char *at = (const char *)tensor_row(t, row) + (size_t)col * dtype_size(t->dtype);
    float f;
    uint16_t h;
    int32_t i;

    switch (t->dtype) {
    case DTYPE_F32:
        memcpy(&f, at, sizeof f);
        return f;
    case DTYPE_BF16:
        memcpy(&h, at, sizeof h);
        return bf16_to_f32(h);
    default:
        memcpy(&i, at, sizeof i);
        return i;
    }
}

static inline void element_set(struct tensor *t, int64_t row, int64_t col, float value)
{
    char *at = (char *)tensor_row(t, row) + (size_t)col * dtype_size(t->dtype);
    uint16_t h = f32_to_bf16(value);

    if (t->dtype == DTYPE_F32)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &h, sizeof h);
}

/* xorshift64*: the same numbers everywhere. */
static inline double random_uniform(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (double)((*state * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

/* Near enough to a normal deviate: the sum of twelve uniform ones. */
static inline double random_normal(uint64_t *state)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += random_uniform(state);
    return sum;
}

static inline void tensor_randomize(struct tensor *t, double mean, double deviation, uint64_t *state)
{
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->cols; c++)
            element_set(t, r, c, (float)(mean + deviation * random_normal(state)));
}

static inline struct guarded guarded_random(enum dtype dtype, int64_t rows, int64_t cols, double deviation,
                                            uint64_t *state)
{
    struct guarded g = guarded_create(dtype, rows, cols, 5);
    tensor_randomize(&g.t, 0, deviation, state);
    return g;
}

static inline double *doubles_create(int64_t n)
{
    double *values = calloc((size_t)(n > 0 ? n : 1), sizeof *values);
    assert_non_null(values);
    return values;
}

/* The elements as float64, [rows, cols] without gaps: references read these, which is quicker. */
static inline double *doubles_copy(const struct tensor *t)
{
    double *values = doubles_create(t->rows * t->cols);
    for (int64_t i = 0; i < t->rows * t->cols; i++)
        values[i] = element_get(t, i / t->cols, i % t->cols);
    return values;
}

/* Compares with a float64 reference, [rows, cols] without gaps. An element is right within
 * absolute + relative * |reference|; infinities must be equal. bfloat16 outputs get half a unit in the last
 * place on top. Prints the error's share of the whole, the largest difference and the first bad index, and
 * fails. */
static inline void check_tensor(const struct tensor *t, const double *reference, double absolute,
                                double relative, const char *what)
{
    double error = 0, power = 0, worst = 0;
    int64_t bad = 0, n_bad = 0;

    if (t->dtype == DTYPE_BF16)
        relative += 1.0 / 256;
    for (int64_t i = 0; i < t->rows * t->cols; i++) {
        double got = element_get(t, i / t->cols, i % t->cols), want = reference[i], off = fabs(got - want);
        if (got == want)
            off = 0;
        if (!(off <= absolute + relative * fabs(want))) {
            if (n_bad++ == 0)
                bad = i;
        }
        if (isfinite(off) && off > worst)
            worst = off;
        if (isfinite(off) && isfinite(want)) {
            error += off * off;
            power += want * want;
        }
    }
    if (n_bad > 0 || (t->dtype == DTYPE_F32 && error > 4e-12 * power))
        fail_msg("%s: %lld of %lld elements wrong, first at [%lld, %lld]: got %.9g, expected %.9g; largest "
                 "difference %.3g, NMSE %.3g",
                 what, (long long)n_bad, (long long)(t->rows * t->cols), (long long)(bad / t->cols),
                 (long long)(bad % t->cols), element_get(t, bad / t->cols, bad % t->cols), reference[bad],
                 worst, power > 0 ? error / power : error);
}

/* Fails where rows [first, first + n) of two tensors differ in a bit. */
static inline void check_same_bits(const struct tensor *a, const struct tensor *b, int64_t first, int64_t n,
                                   const char *what)
{
    for (int64_t r = first; r < first + n; r++)
        if (memcmp(tensor_row(a, r), tensor_row(b, r), (size_t)a->cols * dtype_size(a->dtype)) != 0)
            fail_msg("%s: row %lld differs", what, (long long)r);
}

/* One kind of backend: an instruction set and a number of threads. */
struct op_backend {
    const char *isa;
    int n_threads;
};

static const struct op_backend op_backends[] = {
    {"baseline", 1}, {"baseline", 2}, {"avx2", 1}, {"avx2", 2}, {"avx512", 1}, {"avx512", 3},
};

static inline bool isa_is_supported(const char *isa)
{
    if (strcmp(isa, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return true;
}

static inline struct backend *op_backend_create(const struct op_backend *kind)
{
    struct backend *backend = NULL;
    struct error error = {0};

    setenv("ACTDUMP_ISA", kind->isa, 1);
    if (backend_create_cpu(kind->n_threads, &backend, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return backend;
}

/* Operations that flush subnormal numbers must not leave a thread so: others keep them. */
static inline void check_subnormals_live(struct backend *b)
{
    enum { ROWS = 64, COLS = 16 };
    static float x[ROWS * COLS], zeros[ROWS * COLS], sums[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) {
        x[i] = 1e-39f;
        sums[i] = -1;
    }
    b->ops->add(b, tensor_make(x, DTYPE_F32, ROWS, COLS), tensor_make(zeros, DTYPE_F32, ROWS, COLS),
                tensor_make(sums, DTYPE_F32, ROWS, COLS));
    if (memcmp(x, sums, sizeof x) != 0)
        fail_msg("%s: a thread takes subnormal numbers for zeros", b->name);
}

/* Runs one test body on every kind of backend that this machine has. */
static inline void for_each_backend(void (*body)(struct backend *backend))
{
    for (size_t i = 0; i < COUNT(op_backends); i++) {
        if (!isa_is_supported(op_backends[i].isa))
            continue;
        struct backend *backend = op_backend_create(&op_backends[i]);
        body(backend);
        check_subnormals_live(backend);
        struct error error = {0};
        if (backend->ops->synchronize(backend, &error) != STATUS_OK)
            fail_msg("%s: %s", backend->name, error.text);
        backend_destroy(backend);
    }
}

/* Runs end to end, of the lengths given; position 0. */
static inline struct runs runs_make(struct run *list, const int *lengths, int n)
{
    int32_t start = 0;
    for (int i = 0; i < n; i++) {
        list[i] = (struct run){.start = start, .length = lengths[i]};
        start += lengths[i];
    }
    return (struct runs){.list = list, .n = n};
}

static inline int64_t runs_tokens(const struct runs *runs)
{
    return runs->n == 0 ? 0 : runs->list[runs->n - 1].start + (int64_t)runs->list[runs->n - 1].length;
}

#endif

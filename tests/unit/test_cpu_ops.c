/* The CPU backend's frame, matrix products and Mamba-1 operations against float64 references, for every
 * instruction set of this machine, on one thread and more. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "op_check.h"

#include "kernels/base/memory.h"
#include "kernels/cpu/gemm.h"

#include <omp.h>

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double softplus(double x)
{
    return x > 30 ? x : log1p(exp(x));
}

static void check_done(struct backend *b, const char *what)
{
    struct error error = {0};
    if (b->ops->synchronize(b, &error) != STATUS_OK)
        fail_msg("%s: %s: %s", b->name, what, error.text);
}

/* --- the frame --- */

static void memory_run(struct backend *b)
{
    unsigned char *memory = NULL, bytes[100], back[100] = {0};
    struct error error = {0};

    assert_int_equal(b->ops->allocate(b, (void **)&memory, 100, "a test", &error), STATUS_OK);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(memory[i], 0);
        bytes[i] = (unsigned char)(i * 7);
    }
    b->ops->upload(b, memory, bytes, 100);
    b->ops->download(b, back, memory, 100);
    assert_memory_equal(back, bytes, 100);
    b->ops->release(b, memory);
    b->ops->release(b, NULL);
    assert_true(b->is_host);
    assert_true(b->n_threads >= 1);
    backend_destroy(NULL);
}

static void test_memory(void **state)
{
    (void)state;
    for_each_backend(memory_run);
}

/* The first failure is kept, nothing is done after it, synchronize hands it out once. */
static void failure_run(struct backend *b)
{
    uint64_t seed = 3;
    struct guarded x = guarded_random(DTYPE_F32, 4, 9, 1, &seed), y = guarded_create(DTYPE_F32, 4, 9, 0);
    struct error error = {0};
    const struct run run = {.length = 4};
    const struct runs runs = {.list = &run, .n = 1};
    float weight[9 * 2] = {0};
    int32_t rows[4] = {0, 1, 2, 3};
    struct matrix *w = NULL;

    assert_int_equal(b->ops->matrix_create(b, &x.t, DTYPE_F32, "w", &w, NULL), STATUS_OK);
    error_set(&b->error, STATUS_RESOURCE, "first");
    error_set(&b->error, STATUS_BUG, "second");
    b->ops->add(b, x.t, x.t, y.t);
    b->ops->add_scaled(b, x.t, x.t, 2, y.t);
    b->ops->silu_mul(b, x.t, x.t, (struct tensor){0}, y.t);
    b->ops->softplus_gate(b, x.t, x.t, 1, y.t);
    b->ops->embed(b, x.t, rows, y.t);
    b->ops->gather_rows(b, x.t, (struct row_list){.index = rows, .n = 4}, y.t);
    b->ops->collect(b, x.t, NULL, 4, DTYPE_F32, y.t.data);
    b->ops->linear(b, x.t, w, NULL, (struct tensor){0}, tensor_cols(y.t, 0, 4));
    b->ops->rms_norm(b, &(struct norm_args){.x = x.t, .weight = weight, .group = 9, .y = y.t});
    b->ops->conv_silu(b,
                      &(struct conv_args){.x = x.t, .weight = weight, .kernel = 2, .runs = runs, .y = y.t});
    b->ops->selective_scan(b, &(struct selective_scan_args){.x = x.t,
                                                            .dt = x.t,
                                                            .B = tensor_cols(x.t, 0, 1),
                                                            .C = tensor_cols(x.t, 0, 1),
                                                            .dt_bias = weight,
                                                            .A = weight,
                                                            .D = weight,
                                                            .state_dim = 1,
                                                            .runs = runs,
                                                            .y = y.t});
    b->ops->download(b, y.t.data, x.t.data, 16);
    assert_true(is_guard(y.block, y.bytes + 2 * (size_t)GUARD_BYTES));
    assert_int_equal(b->ops->synchronize(b, &error), STATUS_RESOURCE);
    assert_string_equal(error.text, "first");
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    b->ops->matrix_destroy(b, w);
    guarded_destroy(&x);
    guarded_destroy(&y);
}

static void test_failures_are_kept(void **state)
{
    (void)state;
    for_each_backend(failure_run);
}

static void test_instruction_set_is_chosen(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct error error = {0};

    setenv("ACTDUMP_ISA", "pentium", 1);
    assert_int_equal(backend_create_cpu(1, &b, &error), STATUS_USAGE);
    assert_non_null(strstr(error.text, "pentium"));
    assert_non_null(strstr(error.text, "expected baseline, avx2 or avx512"));
    assert_null(b);
    unsetenv("ACTDUMP_ISA");
    assert_int_equal(backend_create_cpu(0, &b, NULL), STATUS_OK);
    assert_true(b->n_threads >= 1);
    backend_destroy(b);
    setenv("ACTDUMP_ISA", "baseline", 1);
    assert_int_equal(backend_create_cpu(3, &b, NULL), STATUS_OK);
    assert_string_equal(b->name, "cpu (baseline, 3 threads)");
    backend_destroy(b);
}

/* A CPU said to have products of bfloat16, and a library that may not use them, as under DNNL_MAX_CPU_ISA:
 * weights are kept in float32, and packing them does not fail. */
static void test_the_library_decides_on_bfloat16(void **state)
{
    (void)state;
    uint16_t zeros[3 * 5] = {0};
    struct tensor w = tensor_make(zeros, DTYPE_BF16, 3, 5);
    struct error error = {0};
    struct gemm *gemm = NULL;
    struct matrix *matrix = NULL;

    assert_int_equal(gemm_create(1, true, &gemm, &error), STATUS_OK);
    if (gemm_pack(gemm, &w, DTYPE_BF16, "w", &matrix, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    if (!__builtin_cpu_supports("avx512bf16"))
        assert_int_equal(matrix->kept, DTYPE_F32);
    gemm_unpack(matrix);
    gemm_destroy(gemm);
}

static void test_create_survives_failing_allocations(void **state)
{
    (void)state;
    enum status status = STATUS_RESOURCE;
    size_t before = memory_in_use();
    int n = 0;

    for (; status != STATUS_OK; n++) {
        struct backend *b = NULL;
        struct error error = {0};
        memory_fail_at(n);
        status = backend_create_cpu(1, &b, &error);
        memory_fail_at(-1);
        assert_true(status == STATUS_OK || (status == STATUS_RESOURCE && b == NULL && error.text[0] != '\0'));
        backend_destroy(b);
        assert_int_equal(memory_in_use(), before);
    }
    assert_true(n > 2);
}

/* --- element-wise operations and norms --- */

struct shape_case {
    int64_t rows, cols;
    enum dtype x, y, out;
};

static const struct shape_case shape_cases[] = {
    {1, 1, DTYPE_F32, DTYPE_F32, DTYPE_F32},     {3, 7, DTYPE_F32, DTYPE_F32, DTYPE_F32},
    {67, 33, DTYPE_F32, DTYPE_BF16, DTYPE_F32},  {130, 16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16},
    {5, 257, DTYPE_BF16, DTYPE_F32, DTYPE_BF16}, {64, 768, DTYPE_F32, DTYPE_BF16, DTYPE_BF16},
    {2, 31, DTYPE_BF16, DTYPE_BF16, DTYPE_F32},  {1, 1000, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16},
};

static void add_case_run(struct backend *b, const struct shape_case *c)
{
    uint64_t seed = 11;
    struct guarded x = guarded_random(c->x, c->rows, c->cols, 2, &seed);
    struct guarded y = guarded_random(c->y, c->rows, c->cols, 2, &seed);
    struct guarded out = guarded_create(c->out, c->rows, c->cols, 3);
    double *sum = doubles_create(c->rows * c->cols), *scaled = doubles_create(c->rows * c->cols);

    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        double left = element_get(&x.t, i / c->cols, i % c->cols),
               right = element_get(&y.t, i / c->cols, i % c->cols);
        sum[i] = left + right;
        scaled[i] = left + right * 2.5;
    }
    b->ops->add(b, x.t, y.t, out.t);
    check_tensor(&out.t, sum, 1e-6, 6e-8, "add");
    b->ops->add_scaled(b, x.t, y.t, 2.5f, out.t);
    check_tensor(&out.t, scaled, 2e-6, 6e-8, "add_scaled");
    guarded_check(&out, "add");
    b->ops->add(b, x.t, y.t, x.t);
    check_tensor(&x.t, sum, 1e-6, 6e-8, "add in place");
    guarded_check(&x, "add in place");
    check_done(b, "add");
    free(sum);
    free(scaled);
    guarded_destroy(&x);
    guarded_destroy(&y);
    guarded_destroy(&out);
}

static void silu_case_run(struct backend *b, const struct shape_case *c)
{
    uint64_t seed = 12;
    struct guarded gate = guarded_random(c->x, c->rows, c->cols, 4, &seed);
    struct guarded up = guarded_random(c->y, c->rows, c->cols, 2, &seed);
    struct guarded out = guarded_create(c->out, c->rows, c->cols, 3),
                   activation = guarded_create(c->x, c->rows, c->cols, 1);
    double *silu = doubles_create(c->rows * c->cols), *product = doubles_create(c->rows * c->cols);

    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        double value = element_get(&gate.t, i / c->cols, i % c->cols);
        silu[i] = value * sigmoid(value);
        product[i] = silu[i] * element_get(&up.t, i / c->cols, i % c->cols);
    }
    b->ops->silu_mul(b, gate.t, up.t, activation.t, out.t);
    check_tensor(&activation.t, silu, 1e-30, 3e-7, "silu");
    check_tensor(&out.t, product, 1e-30, 4e-7, "silu_mul");
    guarded_check(&out, "silu_mul");
    guarded_check(&activation, "silu_mul's activation");
    b->ops->silu_mul(b, gate.t, up.t, (struct tensor){0}, up.t);
    check_tensor(&up.t, product, 1e-30, 4e-7, "silu_mul in place");
    guarded_check(&up, "silu_mul in place");
    check_done(b, "silu_mul");
    free(silu);
    free(product);
    guarded_destroy(&gate);
    guarded_destroy(&up);
    guarded_destroy(&out);
    guarded_destroy(&activation);
}

/* Each row of heads of 1, 3, 16 or 40 elements, and a gate for every element. */
static void softplus_gate_run(struct backend *b, const struct shape_case *c, int head_dim)
{
    uint64_t seed = 13;
    int64_t width = c->cols * head_dim;
    struct guarded x = guarded_random(c->x, c->rows, width, 2, &seed),
                   out = guarded_create(c->out, c->rows, width, 3);
    struct guarded gate = guarded_random(c->y, c->rows, c->cols, 15, &seed);
    double *want = doubles_create(c->rows * width);

    for (int64_t i = 0; i < c->rows * width; i++)
        want[i] = element_get(&x.t, i / width, i % width) *
                  softplus(element_get(&gate.t, i / width, i % width / head_dim));
    b->ops->softplus_gate(b, x.t, gate.t, head_dim, out.t);
    check_tensor(&out.t, want, 1e-30, 4e-7, "softplus_gate");
    guarded_check(&out, "softplus_gate");
    b->ops->softplus_gate(b, x.t, gate.t, head_dim, x.t);
    check_tensor(&x.t, want, 1e-30, 4e-7, "softplus_gate in place");
    guarded_check(&x, "softplus_gate in place");
    check_done(b, "softplus_gate");
    free(want);
    guarded_destroy(&x);
    guarded_destroy(&gate);
    guarded_destroy(&out);
}

static void elementwise_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(shape_cases); i++) {
        add_case_run(b, &shape_cases[i]);
        silu_case_run(b, &shape_cases[i]);
        softplus_gate_run(b, &shape_cases[i], 1);
        softplus_gate_run(b, &shape_cases[i], 3);
        softplus_gate_run(b, &shape_cases[i], 16);
        softplus_gate_run(b, &shape_cases[i], 40);
    }
}

static void test_elementwise_equals_reference(void **state)
{
    (void)state;
    for_each_backend(elementwise_run);
}

/* What silu and softplus give where floats end. -inf times 0 is NaN, as in the formula. */
static void extremes_run(struct backend *b)
{
    float in[] = {NAN, INFINITY, -INFINITY, 0, 100, -100, 88.8f, -88.8f, -103.5f, 3e38f, -3e38f, 1e-40f};
    const double silu[] = {
        NAN, INFINITY, NAN, 0,    100, -100 * sigmoid(-100), 88.8f, (double)-88.8f * sigmoid((double)-88.8f),
        0,   3e38f,    0,   5e-41};
    const double plus[] = {NAN,         INFINITY, 0, log(2), 100, exp(-100), 88.8f, exp((double)-88.8f),
                           exp(-103.5), 3e38f,    0, log(2)};
    float ones[COUNT(in)], out[COUNT(in)];
    int64_t n = COUNT(in);

    for (int64_t i = 0; i < n; i++)
        ones[i] = 1;
    struct tensor x = tensor_make(in, DTYPE_F32, 1, n), one = tensor_make(ones, DTYPE_F32, 1, n),
                  y = tensor_make(out, DTYPE_F32, 1, n);
    b->ops->silu_mul(b, x, one, (struct tensor){0}, y);
    for (int64_t i = 0; i < n; i++)
        assert_true(isnan(silu[i]) ? isnan(out[i])
                                   : (double)out[i] == silu[i] ||
                                         fabs((double)out[i] - silu[i]) <= 1e-36 + 3e-7 * fabs(silu[i]));
    b->ops->softplus_gate(b, one, x, 1, y);
    for (int64_t i = 0; i < n; i++)
        assert_true(isnan(plus[i]) ? isnan(out[i])
                                   : (double)out[i] == plus[i] ||
                                         fabs((double)out[i] - plus[i]) <= 3e-45 + 3e-7 * fabs(plus[i]));
    check_done(b, "extremes");
}

static void test_extremes(void **state)
{
    (void)state;
    for_each_backend(extremes_run);
}

struct norm_case {
    int64_t rows, width, group;
    bool gated, weight_per_group, in_place;
    enum dtype x, y;
};

static const struct norm_case norm_cases[] = {
    {1, 1, 1, false, false, false, DTYPE_F32, DTYPE_F32},
    {5, 7, 7, false, false, true, DTYPE_F32, DTYPE_F32},
    {70, 768, 768, false, false, false, DTYPE_F32, DTYPE_BF16},
    {33, 768, 768, false, false, true, DTYPE_BF16, DTYPE_BF16},
    {9, 96, 24, true, false, false, DTYPE_F32, DTYPE_F32},
    {9, 90, 10, true, false, true, DTYPE_BF16, DTYPE_BF16},
    {20, 12 * 64, 64, false, true, true, DTYPE_F32, DTYPE_F32},
    {20, 5 * 33, 33, true, true, false, DTYPE_BF16, DTYPE_F32},
    {3, 5000, 5000, true, false, false, DTYPE_F32, DTYPE_F32},
};

static void norm_case_run(struct backend *b, const struct norm_case *c)
{
    uint64_t seed = 21;
    struct guarded x = guarded_random(c->x, c->rows, c->width, 3, &seed),
                   y = guarded_create(c->y, c->rows, c->width, 2);
    struct guarded gate = guarded_random(c->x, c->rows, c->width, 2, &seed),
                   weight = guarded_random(DTYPE_F32, 1, c->width, 1, &seed);
    double *want = doubles_create(c->rows * c->width), epsilon = (double)1e-3f;

    for (int64_t first = 0; first < c->rows * c->width; first += c->group) {
        double squares = 0;
        for (int64_t i = first; i < first + c->group; i++) {
            double z = element_get(&gate.t, i / c->width, i % c->width);
            want[i] = element_get(&x.t, i / c->width, i % c->width) * (c->gated ? z * sigmoid(z) : 1);
            squares += want[i] * want[i];
        }
        for (int64_t i = first; i < first + c->group; i++)
            want[i] *= element_get(&weight.t, 0, c->weight_per_group ? i - first : i % c->width) /
                       sqrt(squares / (double)c->group + epsilon);
    }
    struct norm_args args = {.x = x.t,
                             .weight = weight.t.data,
                             .group = c->group,
                             .weight_per_group = c->weight_per_group,
                             .epsilon = 1e-3f,
                             .y = c->in_place ? x.t : y.t};
    if (c->gated)
        args.gate = gate.t;
    b->ops->rms_norm(b, &args);
    check_tensor(&args.y, want, 1e-30, 8e-7, "rms_norm");
    guarded_check(&x, "rms_norm in place");
    guarded_check(&y, "rms_norm");
    check_done(b, "rms_norm");
    free(want);
    guarded_destroy(&x);
    guarded_destroy(&y);
    guarded_destroy(&gate);
    guarded_destroy(&weight);
}

static void norms_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(norm_cases); i++)
        norm_case_run(b, &norm_cases[i]);
}

static void test_norm_equals_reference(void **state)
{
    (void)state;
    for_each_backend(norms_run);
}

/* --- rows --- */

static void check_rows(const struct guarded *out, const struct tensor *x, const int32_t *rows,
                       const char *what)
{
    double *want = doubles_create(out->t.rows * out->t.cols);
    for (int64_t i = 0; i < out->t.rows * out->t.cols; i++) {
        int64_t row = i / out->t.cols;
        want[i] = element_get(x, rows == NULL ? row : rows[row], i % out->t.cols);
        if (out->t.dtype == DTYPE_BF16)
            want[i] = bf16_to_f32(f32_to_bf16((float)want[i]));
    }
    /* No tolerance but that of check_tensor for bfloat16, which is under half a last place here: equal. */
    for (int64_t i = 0; i < out->t.rows * out->t.cols; i++)
        assert_true(element_get(&out->t, i / out->t.cols, i % out->t.cols) == want[i]);
    guarded_check(out, what);
    free(want);
}

static void rows_run(struct backend *b)
{
    static const enum dtype dtypes[][2] = {
        {DTYPE_F32, DTYPE_F32}, {DTYPE_F32, DTYPE_BF16}, {DTYPE_BF16, DTYPE_F32}, {DTYPE_BF16, DTYPE_BF16}};
    static const int64_t widths[] = {1, 13, 64, 300};
    const int32_t rows[] = {0, 3, 4, 17, 40}, ids[] = {7, 7, 0, 49, 3};
    uint64_t seed = 31;

    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (size_t w = 0; w < COUNT(widths); w++) {
            struct guarded x = guarded_random(dtypes[d][0], 50, widths[w], 1, &seed);
            struct guarded out = guarded_create(dtypes[d][1], 5, widths[w], 2),
                           host = guarded_create(dtypes[d][1], 5, widths[w], 0);
            struct guarded all = guarded_create(dtypes[d][1], 50, widths[w], 0);
            b->ops->embed(b, x.t, ids, out.t);
            check_rows(&out, &x.t, ids, "embed");
            b->ops->gather_rows(b, x.t, (struct row_list){.index = rows, .n = 5}, out.t);
            check_rows(&out, &x.t, rows, "gather_rows");
            b->ops->collect(b, x.t, rows, 5, dtypes[d][1], host.t.data);
            check_done(b, "collect");
            check_rows(&host, &x.t, rows, "collect");
            b->ops->collect(b, x.t, NULL, 50, dtypes[d][1], all.t.data);
            check_rows(&all, &x.t, NULL, "collect all");
            guarded_destroy(&x);
            guarded_destroy(&out);
            guarded_destroy(&host);
            guarded_destroy(&all);
        }
    check_done(b, "rows");
}

static void test_rows_are_moved(void **state)
{
    (void)state;
    for_each_backend(rows_run);
}

/* Experts' indices leave as int32 or int64, anything as float16. */
static void other_dtypes_run(struct backend *b)
{
    int32_t indices[6] = {3, -1, 7, 2147483647, 0, 5}, same[6];
    int64_t wide[4];
    float values[3] = {1.5f, -0.0f, 70000};
    uint16_t half[3];
    const int32_t rows[] = {0, 2};

    b->ops->collect(b, tensor_make(indices, DTYPE_I32, 3, 2), NULL, 3, DTYPE_I32, same);
    b->ops->collect(b, tensor_make(indices, DTYPE_I32, 3, 2), rows, 2, DTYPE_I64, wide);
    b->ops->collect(b, tensor_make(values, DTYPE_F32, 1, 3), NULL, 1, DTYPE_F16, half);
    check_done(b, "collect");
    assert_memory_equal(same, indices, sizeof indices);
    assert_true(wide[0] == 3 && wide[1] == -1 && wide[2] == 0 && wide[3] == 5);
    assert_true(half[0] == 0x3e00 && half[1] == 0x8000 && half[2] == 0x7c00);
}

static void test_other_dtypes_are_collected(void **state)
{
    (void)state;
    for_each_backend(other_dtypes_run);
}

/* --- products --- */

enum addend { ADDEND_NONE, ADDEND_Y, ADDEND_F32, ADDEND_BF16 };

struct linear_case {
    int64_t rows, n, k;
    enum dtype x, compute, y;
    bool bias;
    enum addend addend;
    int gap; /* elements between rows of x and y; negative: so many of x alone */
};

static const struct linear_case linear_cases[] = {
    {1, 1, 1, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    {1, 1, 3, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_NONE, 0},
    {5, 1, 3, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_Y, 2},
    {1, 100, 1, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_F32, 0},
    {17, 33, 65, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    {16, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_NONE, 0},
    {32, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y, 0},
    {32, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_F32, 0},
    {32, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_BF16, 0},
    {32, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_Y, 3},
    {530, 70, 20, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y, 0},
    {1100, 31, 9, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_F32, 1},
    {3, 20000, 5, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    /* from here on each thread has rows of its own */
    {800, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y, 0},
    {1531, 33, 17, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_F32, 0},
    {1600, 31, 24, DTYPE_F32, DTYPE_F32, DTYPE_BF16, false, ADDEND_BF16, 2},
    {1607, 40, 31, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, ADDEND_Y, 0},
    {4000, 33, 17, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y,
     0}, /* as many parts a thread as there are */
    {800, 17000, 2, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    {300, 17000, 3, DTYPE_F32, DTYPE_F32, DTYPE_BF16, false, ADDEND_NONE, 0},
    {40, 80, 1536, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    {40, 16, 768, DTYPE_BF16, DTYPE_F32, DTYPE_F32, false, ADDEND_NONE, 0},
    {40, 16, 768, DTYPE_F32, DTYPE_F32, DTYPE_BF16, true, ADDEND_F32, 0},
    {1, 1, 1, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, false, ADDEND_NONE, 0},
    {7, 1, 3, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, ADDEND_NONE, 1},
    {64, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, ADDEND_Y, 0},
    {64, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, false, ADDEND_F32, 0},
    {64, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_F32, false, ADDEND_Y, 0},
    {64, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_F32, true, ADDEND_F32, 0},
    {65, 33, 49, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, ADDEND_BF16, 3},
    {600, 40, 24, DTYPE_F32, DTYPE_BF16, DTYPE_BF16, true, ADDEND_NONE, 0},
    {50, 40, 25, DTYPE_F32, DTYPE_BF16, DTYPE_F32, false, ADDEND_NONE, 0},
    /* x is copied, y is not */
    {64, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y, -3},
    {64, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_BF16, -3},
    {1603, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, false, ADDEND_F32, -2},
    {64, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_F32, false, ADDEND_Y, -1},
    {70, 96, 48, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, ADDEND_Y, -1},
};

static float rounded(double value, enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? bf16_to_f32(f32_to_bf16((float)value)) : (float)value;
}

/* All elements as they are multiplied: rounded to `dtype`, row by row without gaps. */
static double *rounded_elements(const struct tensor *t, enum dtype dtype)
{
    double *values = doubles_copy(t);
    for (int64_t i = 0; i < t->rows * t->cols; i++)
        values[i] = (double)rounded(values[i], dtype);
    return values;
}

/* want = x w^T + bias + addend in float64; slack = the sum of the terms' sizes, which bounds float32's error.
 */
static void reference_linear(const struct linear_case *c, const struct tensor *x, const struct tensor *w,
                             const float *bias, const struct tensor *addend, double *want, double *slack)
{
    double *xs = rounded_elements(x, c->compute), *ws = rounded_elements(w, c->compute);
    for (int64_t t = 0; t < c->rows; t++)
        for (int64_t j = 0; j < c->n; j++) {
            double sum = bias == NULL ? 0 : (double)bias[j], size = fabs(sum);
            for (int64_t i = 0; i < c->k; i++) {
                double term = xs[t * c->k + i] * ws[j * c->k + i];
                sum += term;
                size += fabs(term);
            }
            double plus = addend->data == NULL ? 0 : element_get(addend, t, j);
            want[t * c->n + j] = sum + plus;
            slack[t * c->n + j] = size + fabs(plus);
        }
    free(xs);
    free(ws);
}

/* Elements within `share` of the sum of their terms' sizes, plus half a last place of a bfloat16 output. */
static void check_sums(const struct guarded *y, const double *want, const double *slack, double share,
                       const char *what)
{
    for (int64_t i = 0; i < y->t.rows * y->t.cols; i++) {
        double got = element_get(&y->t, i / y->t.cols, i % y->t.cols);
        double bound = share * slack[i] + (y->t.dtype == DTYPE_BF16 ? fabs(want[i]) / 256 : 0);
        if (!(fabs(got - want[i]) <= bound))
            fail_msg("%s: element [%lld, %lld] is %.9g, expected %.9g within %.3g", what,
                     (long long)(i / y->t.cols), (long long)(i % y->t.cols), got, want[i], bound);
    }
    guarded_check(y, what);
}

static void linear_case_run(struct backend *b, const struct linear_case *c)
{
    uint64_t seed = 41;
    struct guarded x = guarded_create(c->x, c->rows, c->k, abs(c->gap)),
                   y = guarded_create(c->y, c->rows, c->n, c->gap < 0 ? 0 : c->gap);
    struct guarded w = guarded_random(c->compute, c->n, c->k, 1, &seed),
                   bias = guarded_random(DTYPE_F32, 1, c->n, 1, &seed);
    struct guarded addend =
        guarded_random(c->addend == ADDEND_BF16 ? DTYPE_BF16 : DTYPE_F32, c->rows, c->n, 1, &seed);
    double *want = doubles_create(c->rows * c->n), *slack = doubles_create(c->rows * c->n);
    struct matrix *matrix = NULL;
    char what[200];

    tensor_randomize(&x.t, 0, 1, &seed);
    struct tensor plus = {0};
    if (c->addend == ADDEND_Y) {
        tensor_randomize(&y.t, 0, 1, &seed);
        plus = y.t;
    } else if (c->addend != ADDEND_NONE) {
        plus = addend.t;
    }
    const float *bias_data = c->bias ? bias.t.data : NULL;
    reference_linear(c, &x.t, &w.t, bias_data, &plus, want, slack);
    assert_int_equal(b->ops->matrix_create(b, &w.t, c->compute, "w", &matrix, NULL), STATUS_OK);
    b->ops->linear(b, x.t, matrix, bias_data, plus, y.t);
    snprintf(what, sizeof what, "%s: linear %lld x %lld x %lld, addend %d", b->name, (long long)c->rows,
             (long long)c->n, (long long)c->k, c->addend);
    check_done(b, what);
    check_sums(&y, want, slack, 3e-7, what);
    guarded_check(&x, what);
    b->ops->matrix_destroy(b, matrix);
    free(want);
    free(slack);
    guarded_destroy(&x);
    guarded_destroy(&y);
    guarded_destroy(&w);
    guarded_destroy(&bias);
    guarded_destroy(&addend);
}

static void linears_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(linear_cases); i++)
        linear_case_run(b, &linear_cases[i]);
}

static void test_linear_equals_reference(void **state)
{
    (void)state;
    for_each_backend(linears_run);
}

/* Shapes that come again take no new memory, whatever their rows. */
static void no_allocation_run(struct backend *b)
{
    uint64_t seed = 43;
    struct guarded x = guarded_random(DTYPE_F32, 700, 30, 1, &seed),
                   w = guarded_random(DTYPE_F32, 20, 30, 1, &seed);
    struct guarded y = guarded_create(DTYPE_F32, 700, 20, 0);
    struct matrix *matrix = NULL;

    assert_int_equal(b->ops->matrix_create(b, &w.t, DTYPE_F32, "w", &matrix, NULL), STATUS_OK);
    uint64_t before = memory_allocation_count();
    for (int64_t rows = 1; rows <= 700; rows += 33)
        b->ops->linear(b, tensor_rows(x.t, 0, rows), matrix, NULL, (struct tensor){0},
                       tensor_rows(y.t, 0, rows));
    assert_true(memory_allocation_count() == before);
    check_done(b, "linear");
    b->ops->matrix_destroy(b, matrix);
    guarded_destroy(&x);
    guarded_destroy(&w);
    guarded_destroy(&y);
}

static void test_linear_allocates_nothing(void **state)
{
    (void)state;
    for_each_backend(no_allocation_run);
}

/* Rows end where they end: values past them, even NaNs, change nothing, and one row's NaN stays in its row.
 */
static void row_isolation_run(struct backend *b)
{
    uint64_t seed = 44;
    struct guarded x = guarded_random(DTYPE_F32, 64, 40, 1, &seed),
                   w = guarded_random(DTYPE_F32, 50, 40, 1, &seed);
    struct guarded y = guarded_create(DTYPE_F32, 64, 50, 0), again = guarded_create(DTYPE_F32, 64, 50, 0);
    struct matrix *matrix = NULL;

    assert_int_equal(b->ops->matrix_create(b, &w.t, DTYPE_F32, "w", &matrix, NULL), STATUS_OK);
    b->ops->linear(b, tensor_rows(x.t, 0, 37), matrix, NULL, (struct tensor){0}, tensor_rows(y.t, 0, 37));
    for (int64_t r = 36; r < 64; r++)
        element_set(&x.t, r, 5, NAN);
    element_set(&x.t, 3, 0, INFINITY);
    b->ops->linear(b, tensor_rows(x.t, 0, 37), matrix, NULL, (struct tensor){0}, tensor_rows(again.t, 0, 37));
    check_done(b, "linear");
    check_same_bits(&y.t, &again.t, 0, 3, "rows before");
    check_same_bits(&y.t, &again.t, 4, 32, "rows between");
    for (int64_t j = 0; j < 50; j++) {
        assert_true(isnan(element_get(&again.t, 36, j)));
        assert_true(isinf(element_get(&again.t, 3, j)));
    }
    assert_true(is_guard(tensor_row(&y.t, 37), 27 * 50 * 4));
    b->ops->matrix_destroy(b, matrix);
    guarded_destroy(&x);
    guarded_destroy(&w);
    guarded_destroy(&y);
    guarded_destroy(&again);
}

static void test_rows_are_alone(void **state)
{
    (void)state;
    for_each_backend(row_isolation_run);
}

/* Any float file dtype, at an odd address, gives the matrix that its values give. */
static void file_dtypes_run(struct backend *b)
{
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    enum { N = 3, K = 5 };
    float w[N * K], x[K] = {1, -2, 3, 0.5f, -1}, y[N];
    char file[N * K * 4 + 1];

    for (int i = 0; i < N * K; i++)
        w[i] = (float)(i - 7) / 8; /* exact in every dtype */
    for (size_t d = 0; d < COUNT(dtypes); d++) {
        unsigned char converted[N * K * 4];
        struct matrix *matrix = NULL;
        dtype_convert(converted, dtypes[d], w, DTYPE_F32, N * K);
        memcpy(file + 1, converted, sizeof converted);
        struct tensor view = tensor_make(file + 1, dtypes[d], N, K);
        for (enum dtype compute = DTYPE_F32; compute <= DTYPE_BF16; compute++) {
            assert_int_equal(b->ops->matrix_create(b, &view, compute, "w", &matrix, NULL), STATUS_OK);
            b->ops->linear(b, tensor_make(x, DTYPE_F32, 1, K), matrix, NULL, (struct tensor){0},
                           tensor_make(y, DTYPE_F32, 1, N));
            check_done(b, "linear");
            for (int n = 0; n < N; n++) {
                float want = 0;
                for (int k = 0; k < K; k++)
                    want += w[n * K + k] * x[k];
                assert_true(y[n] == want);
            }
            b->ops->matrix_destroy(b, matrix);
        }
    }
    b->ops->matrix_destroy(b, NULL);
}

static void test_matrices_take_file_dtypes(void **state)
{
    (void)state;
    for_each_backend(file_dtypes_run);
}

/* matrix_bytes is what creating one keeps; failing allocations leave nothing behind; impossible shapes are
 * refused. */
static void matrix_memory_run(struct backend *b)
{
    uint64_t seed = 45;
    struct guarded w = guarded_random(DTYPE_F32, 100, 70, 1, &seed);
    size_t before = memory_in_use(), bytes = b->ops->matrix_bytes(b, 100, 70, DTYPE_F32);
    struct matrix *matrix = NULL;
    struct error error = {0};
    enum status status = STATUS_RESOURCE;

    for (int n = 0; status != STATUS_OK; n++) {
        assert_true(memory_in_use() == before);
        error_clear(&error);
        memory_fail_at(n);
        status = b->ops->matrix_create(b, &w.t, DTYPE_F32, "layers.3.weight", &matrix, &error);
        memory_fail_at(-1);
        assert_true(status == STATUS_OK || status == STATUS_RESOURCE);
        if (n > 0 && status != STATUS_OK)
            assert_non_null(strstr(error.text, "layers.3.weight"));
    }
    size_t kept = memory_in_use() - before;
    assert_true(bytes >= 100 * 70 * 4);
    assert_true(kept >= bytes && kept <= bytes + 4096);
    b->ops->matrix_destroy(b, matrix);
    assert_true(memory_in_use() == before);
    struct tensor empty = tensor_rows(w.t, 0, 0);
    assert_int_equal(b->ops->matrix_create(b, &empty, DTYPE_F32, "empty", &matrix, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "empty"));
    assert_true(b->ops->matrix_bytes(b, INT64_MAX, INT64_MAX, DTYPE_F32) == SIZE_MAX);
    assert_true(b->ops->matrix_bytes(b, (int64_t)1 << 40, (int64_t)1 << 10, DTYPE_F32) == (size_t)1 << 52);
    guarded_destroy(&w);
}

static void test_matrix_memory(void **state)
{
    (void)state;
    for_each_backend(matrix_memory_run);
}

/* Of six experts: some without rows, and in `many` enough rows for each thread to have its own. There the
 * shares of two and of three threads end soon after an expert's first row, where what is before it must not
 * run over. */
enum { EXPERTS = 6, TOP_K = 2 };
static const int32_t few_rows[EXPERTS + 1] = {0, 0, 3, 20, 20, 36, 41};
static const int32_t many_rows[EXPERTS + 1] = {0, 0, 330, 431, 645, 865, 1301};
static const int32_t rows_of_parts[EXPERTS + 1] = {0,    1330, 1331, 1331,
                                                   2045, 2861, 4301}; /* several parts a thread */

/* Places of slots in an order that is not theirs, and x's rows: each that of its place's token. */
static void scatter_tokens(const struct tensor *tokens, const struct tensor *x, int top_k, int32_t *order)
{
    for (int64_t i = 0; i < x->rows; i++) {
        order[i] = (int32_t)(i * 7919 % x->rows); /* a prime that divides no case's rows */
        memcpy(tensor_row(x, i), tensor_row(tokens, order[i] / top_k),
               (size_t)x->cols * dtype_size(x->dtype));
    }
}

/* gap: elements between rows. Without any an expert's rows are multiplied over those of the next one. */
static void grouped_case_run(struct backend *b, enum dtype dtype, int64_t n, int64_t k, const int32_t *bounds,
                             int gap)
{
    int32_t offsets[EXPERTS + 1];
    int64_t n_rows = bounds[EXPERTS], n_tokens = (n_rows + TOP_K - 1) / TOP_K;
    uint64_t seed = 51;
    struct guarded x = guarded_create(dtype, n_rows, k, gap), y = guarded_create(dtype, n_rows, n, gap),
                   w[EXPERTS];
    struct guarded tokens = guarded_create(dtype, n_tokens, k, gap),
                   gathered = guarded_create(dtype, n_rows, n, gap), xg = guarded_create(dtype, n_rows, k, 0),
                   order = guarded_create(DTYPE_I32, 1, n_rows, 0);
    struct matrix *experts[EXPERTS] = {0};
    double *want = doubles_create(n_rows * n), *slack = doubles_create(n_rows * n);

    memcpy(offsets, bounds, sizeof offsets);
    tensor_randomize(&tokens.t, 0, 1, &seed);
    scatter_tokens(&tokens.t, &x.t, TOP_K, order.t.data);
    for (int e = 0; e < EXPERTS; e++) {
        w[e] = guarded_random(dtype, n, k, 1, &seed);
        assert_int_equal(b->ops->matrix_create(b, &w[e].t, dtype, "w", &experts[e], NULL), STATUS_OK);
        int64_t first = offsets[e], rows = offsets[e + 1] - first;
        struct linear_case c = {.rows = rows, .n = n, .k = k, .compute = dtype};
        struct tensor part = tensor_rows(x.t, first, rows), none = {0};
        reference_linear(&c, &part, &w[e].t, NULL, &none, want + first * n, slack + first * n);
    }
    struct expert_groups groups = {.order = order.t.data,
                                   .offsets = offsets,
                                   .n_experts = EXPERTS,
                                   .top_k = TOP_K,
                                   .n_tokens = n_tokens};
    for (int i = 0; i < 3; i++) { /* again once threads need not wait for primitives to be made */
        b->ops->grouped_linear(b, x.t, &groups, experts, y.t);
        b->ops->gathered_linear(b, tokens.t, &groups, experts, xg.t, gathered.t);
    }
    check_done(b, "grouped_linear");
    check_sums(&y, want, slack, 3e-7, "grouped_linear");
    check_sums(&gathered, want, slack, 3e-7, "gathered_linear");
    guarded_check(&xg, "gathered_linear's memory");
    for (int e = 0; e < EXPERTS; e++) {
        b->ops->matrix_destroy(b, experts[e]);
        guarded_destroy(&w[e]);
    }
    free(want);
    free(slack);
    struct guarded *all[] = {&x, &y, &tokens, &gathered, &xg, &order};
    for (size_t i = 0; i < COUNT(all); i++)
        guarded_destroy(all[i]);
}

static void grouped_run(struct backend *b)
{
    for (int gap = 0; gap < 2; gap++) {
        grouped_case_run(b, DTYPE_F32, 24, 16, few_rows, gap);
        grouped_case_run(b, DTYPE_F32, 7, 33, few_rows, gap);
        grouped_case_run(b, DTYPE_BF16, 48, 40, few_rows, gap);
        grouped_case_run(b, DTYPE_F32, 512, 40, few_rows, gap); /* kept as [n, k]: ALIASING_FLOATS */
        grouped_case_run(b, DTYPE_BF16, 1024, 24, few_rows, gap);
        grouped_case_run(b, DTYPE_F32, 192, 160, many_rows, gap); /* long enough for threads to meet */
        grouped_case_run(b, DTYPE_BF16, 48, 40, many_rows, gap);
        grouped_case_run(b, DTYPE_F32, 48, 40, rows_of_parts, gap);
    }
}

static void test_grouped_linear_equals_reference(void **state)
{
    (void)state;
    for_each_backend(grouped_run);
}

/* Where OpenMP gives a single thread for the three that were asked for, all rows are still multiplied: the
 * one takes of what the others would have had. */
static void lone_thread_run(struct backend *b)
{
    static const struct linear_case cases[] = {
        {1600, 48, 40, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_Y, 0},
        {4000, 31, 17, DTYPE_F32, DTYPE_F32, DTYPE_F32, true, ADDEND_F32, 1},
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        linear_case_run(b, &cases[i]);
    grouped_case_run(b, DTYPE_F32, 24, 40, many_rows, 0);
}

static void test_lone_thread_takes_all_parts(void **state)
{
    (void)state;
    int levels = omp_get_max_active_levels();
    omp_set_max_active_levels(0);
    for_each_backend(lone_thread_run);
    omp_set_max_active_levels(levels);
}

/* --- convolution and scan --- */

#define MAX_RUNS 12

struct mamba_case {
    const char *name;
    int64_t channels;
    int depth; /* the convolution's taps, the scan's states */
    enum dtype dtype;
    bool gated; /* the scan's z, the convolution's bias */
    bool carry_in;
    int lengths[MAX_RUNS]; /* of the runs, to the first 0 */
};

static const struct mamba_case mamba_cases[] = {
    {"one of all", 1, 1, DTYPE_F32, false, false, {1}},
    {"one channel", 1, 4, DTYPE_F32, true, false, {50}},
    {"one token", 33, 4, DTYPE_F32, true, true, {1}},
    {"runs of one", 20, 4, DTYPE_F32, true, false, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
    {"short after carry", 20, 5, DTYPE_F32, true, true, {2, 1, 3, 9, 1}},
    {"as in mamba", 96, 16, DTYPE_F32, true, false, {100, 1, 40}},
    {"as in mamba, four", 96, 4, DTYPE_BF16, true, true, {100, 1, 40}},
    {"bfloat16", 50, 16, DTYPE_BF16, true, false, {64, 31}},
    {"no gate", 17, 3, DTYPE_BF16, false, false, {33, 2}},
    {"many states", 40, 70, DTYPE_F32, true, true, {80, 5}},
    {"long", 31, 16, DTYPE_F32, true, true, {700}},
    {"runs for two", 40, 16, DTYPE_F32, true, true, {30, 34, 33, 31}},
    {"runs for three", 33, 4, DTYPE_BF16, true, true, {50, 50, 51}},
    {"wider than a stretch", 1100, 16, DTYPE_F32, true, true, {40}},
};

struct mamba_data {
    int n_runs;
    int64_t n_tokens;
    struct run list[MAX_RUNS];
    struct runs runs;
};

static void mamba_data_init(struct mamba_data *data, const struct mamba_case *c)
{
    memset(data, 0, sizeof *data);
    while (data->n_runs < MAX_RUNS && c->lengths[data->n_runs] > 0)
        data->n_runs++;
    data->runs = runs_make(data->list, c->lengths, data->n_runs);
    data->runs.carry_in = c->carry_in;
    data->n_tokens = runs_tokens(&data->runs);
}

/* tail: [kernel-1, C] float64 in and out. */
static void reference_conv(const struct conv_args *a, double *tail, double *y)
{
    int64_t n = a->x.cols, reach = a->kernel - 1;
    double *next = doubles_create(reach * n);

    for (int64_t i = 0; i < a->runs.n; i++)
        for (int64_t c = 0; c < n; c++) {
            const struct run *run = &a->runs.list[i];
            double *line = doubles_create(reach + run->length); /* this channel's inputs, the past in front */
            for (int64_t t = 0; t < reach + run->length; t++)
                line[t] = t >= reach                   ? element_get(&a->x, run->start + t - reach, c)
                          : i == 0 && a->runs.carry_in ? tail[t * n + c]
                                                       : 0;
            for (int64_t t = 0; t < run->length; t++) {
                double sum = a->bias == NULL ? 0 : (double)a->bias[c];
                for (int64_t tap = 0; tap < a->kernel; tap++)
                    sum += (double)a->weight[tap * n + c] * line[t + tap];
                y[(run->start + t) * n + c] = sum * sigmoid(sum);
            }
            for (int64_t t = 0; t < reach; t++)
                next[t * n + c] = line[run->length + t];
            free(line);
        }
    memcpy(tail, next, (size_t)(reach * n) * sizeof *next);
    free(next);
}

static void conv_case_run(struct backend *b, const struct mamba_case *c)
{
    uint64_t seed = 61;
    struct mamba_data data;
    mamba_data_init(&data, c);
    data.runs.carry_out = true;
    int64_t n = c->channels, reach = c->depth - 1;
    struct guarded x = guarded_random(c->dtype, data.n_tokens, n, 1, &seed),
                   y = guarded_create(c->dtype, data.n_tokens, n, 3);
    struct guarded weight = guarded_create(DTYPE_F32, c->depth, n, 0),
                   bias = guarded_random(DTYPE_F32, 1, n, 1, &seed);
    struct guarded tail = guarded_create(DTYPE_F32, reach, n, 0);
    double *want = doubles_create(data.n_tokens * n), *want_tail = doubles_create(reach * n);

    tensor_randomize(&weight.t, 0, 0.7, &seed);
    tensor_randomize(&tail.t, 0, 1, &seed);
    for (int64_t i = 0; i < reach * n; i++)
        want_tail[i] = element_get(&tail.t, i / n, i % n);
    struct conv_args args = {.x = x.t,
                             .weight = weight.t.data,
                             .bias = c->gated ? bias.t.data : NULL,
                             .kernel = c->depth,
                             .runs = data.runs,
                             .tail = tail.t.data,
                             .y = y.t};
    reference_conv(&args, want_tail, want);
    b->ops->conv_silu(b, &args);
    check_done(b, c->name);
    check_tensor(&y.t, want, c->depth * 5e-7, 4e-7, c->name);
    guarded_check(&y, c->name);
    check_tensor(&tail.t, want_tail, 0, 0, "the tail");
    guarded_check(&tail, "the tail");
    free(want);
    free(want_tail);
    guarded_destroy(&x);
    guarded_destroy(&y);
    guarded_destroy(&weight);
    guarded_destroy(&bias);
    guarded_destroy(&tail);
}

/* Everything that one scan has. */
struct scan_data {
    struct mamba_data mamba;
    struct guarded x, dt, B, C, z, dt_bias, A, D, carry, y, betas, outputs, states, decays;
    int32_t *rows; /* the wanted ones */
    int64_t n_rows;
    struct selective_scan_args args;
};

static struct guarded *scan_parts(struct scan_data *d, int i)
{
    struct guarded *const parts[] = {&d->x,       &d->dt,      &d->B,      &d->C,     &d->z,
                                     &d->dt_bias, &d->A,       &d->D,      &d->carry, &d->y,
                                     &d->betas,   &d->outputs, &d->states, &d->decays};
    return i < (int)COUNT(parts) ? parts[i] : NULL;
}

static void scan_data_init(struct scan_data *d, const struct mamba_case *c)
{
    uint64_t seed = 71;
    memset(d, 0, sizeof *d);
    mamba_data_init(&d->mamba, c);
    int64_t T = d->mamba.n_tokens, n = c->channels;
    d->x = guarded_random(c->dtype, T, n, 1, &seed);
    d->dt = guarded_random(c->dtype, T, n, 2, &seed);
    d->B = guarded_random(c->dtype, T, c->depth, 1, &seed);
    d->C = guarded_random(c->dtype, T, c->depth, 1, &seed);
    d->z = guarded_random(c->dtype, T, n, 2, &seed);
    d->dt_bias = guarded_random(DTYPE_F32, 1, n, 1, &seed);
    d->D = guarded_random(DTYPE_F32, 1, n, 1, &seed);
    d->A = guarded_create(DTYPE_F32, c->depth, n, 0);
    d->carry = guarded_create(DTYPE_F32, c->depth, n, 0);
    tensor_randomize(&d->carry.t, 0, 1, &seed);
    for (int64_t i = 0; i < c->depth * n; i++)
        element_set(&d->A.t, i / n, i % n, (float)-exp(2 * random_normal(&seed)));
    d->y = guarded_create(c->dtype, T, n, 3);
    d->betas = guarded_create(DTYPE_F32, T, n, 1);
    d->outputs = guarded_create(DTYPE_F32, T, n, 2);
    d->rows = malloc((size_t)T * sizeof *d->rows);
    assert_non_null(d->rows);
    for (int32_t t = 0; t < T; t++)
        if (t % 5 == 0 || t == T - 1 || t % 7 == 3)
            d->rows[d->n_rows++] = t;
    d->states = guarded_create(DTYPE_F32, d->n_rows, n * c->depth, 4);
    d->decays = guarded_create(DTYPE_F32, d->n_rows, n * c->depth, 0);
    d->args = (struct selective_scan_args){.x = d->x.t,
                                           .dt = d->dt.t,
                                           .B = d->B.t,
                                           .C = d->C.t,
                                           .dt_bias = d->dt_bias.t.data,
                                           .A = d->A.t.data,
                                           .D = d->D.t.data,
                                           .state_dim = c->depth,
                                           .runs = d->mamba.runs,
                                           .carry = d->carry.t.data,
                                           .y = d->y.t,
                                           .betas = d->betas.t,
                                           .outputs = d->outputs.t,
                                           .state_rows = {.index = d->rows, .n = d->n_rows},
                                           .states = d->states.t,
                                           .decay_rows = {.index = d->rows, .n = d->n_rows},
                                           .decays = d->decays.t};
    d->args.runs.carry_out = true;
    if (c->gated)
        d->args.z = d->z.t;
}

static void scan_data_fini(struct scan_data *d)
{
    for (int i = 0; scan_parts(d, i) != NULL; i++)
        guarded_destroy(scan_parts(d, i));
    free(d->rows);
}

struct scan_reference {
    double *y, *betas, *outputs, *states, *decays, *carry;
    double *y_slack, *outputs_slack, *states_slack, *carry_slack; /* sums of the terms' sizes */
};

/* h: state and slack of each of a channel's states. */
static void scan_token(const struct selective_scan_args *a, int64_t t, int64_t c, double (*h)[2],
                       int64_t place, const struct scan_reference *out)
{
    int64_t n = a->x.cols, N = a->state_dim;
    double x = element_get(&a->x, t, c), beta = softplus(element_get(&a->dt, t, c) + (double)a->dt_bias[c]);
    double sum = (double)a->D[c] * x, slack = fabs(sum);
    for (int64_t i = 0; i < N; i++) {
        double A = (double)a->A[i * n + c], drive = beta * element_get(&a->B, t, i) * x;
        h[i][0] = exp(beta * A) * h[i][0] + drive;
        h[i][1] = exp(beta * A) * h[i][1] + fabs(drive);
        sum += element_get(&a->C, t, i) * h[i][0];
        slack += fabs(element_get(&a->C, t, i)) * h[i][1];
        if (place >= 0) {
            out->states[(place * n + c) * N + i] = h[i][0];
            out->states_slack[(place * n + c) * N + i] = h[i][1];
            out->decays[(place * n + c) * N + i] = beta * A;
        }
    }
    double z = a->z.data == NULL ? 0 : element_get(&a->z, t, c),
           gate = a->z.data == NULL ? 1 : z * sigmoid(z);
    out->betas[t * n + c] = beta;
    out->outputs[t * n + c] = sum;
    out->outputs_slack[t * n + c] = slack;
    out->y[t * n + c] = sum * gate;
    out->y_slack[t * n + c] = slack * fabs(gate);
}

static void scan_channel(const struct scan_data *d, const struct run *run, bool carried, int64_t c,
                         const struct scan_reference *out)
{
    const struct selective_scan_args *a = &d->args;
    int64_t n = a->x.cols, N = a->state_dim, place = 0;
    double(*h)[2] = calloc((size_t)N, sizeof *h);
    assert_non_null(h);
    for (int64_t s = 0; s < N && carried; s++) {
        h[s][0] = (double)a->carry[s * n + c];
        h[s][1] = fabs(h[s][0]);
    }
    for (int64_t t = run->start; t < run->start + run->length; t++) {
        while (place < d->n_rows && d->rows[place] < t)
            place++;
        bool wanted = place < d->n_rows && d->rows[place] == t;
        scan_token(a, t, c, h, wanted ? place : -1, out);
    }
    for (int64_t s = 0; s < N; s++) { /* the last run's stay */
        out->carry[s * n + c] = h[s][0];
        out->carry_slack[s * n + c] = h[s][1];
    }
    free(h);
}

static struct scan_reference reference_scan(const struct scan_data *d)
{
    const struct selective_scan_args *a = &d->args;
    int64_t n = a->x.cols, N = a->state_dim, T = a->x.rows;
    struct scan_reference out = {.y = doubles_create(T * n),
                                 .betas = doubles_create(T * n),
                                 .outputs = doubles_create(T * n),
                                 .states = doubles_create(d->n_rows * n * N),
                                 .decays = doubles_create(d->n_rows * n * N),
                                 .carry = doubles_create(N * n),
                                 .y_slack = doubles_create(T * n),
                                 .outputs_slack = doubles_create(T * n),
                                 .states_slack = doubles_create(d->n_rows * n * N),
                                 .carry_slack = doubles_create(N * n)};
    for (int64_t i = 0; i < a->runs.n; i++)
        for (int64_t c = 0; c < n; c++)
            scan_channel(d, &a->runs.list[i], i == 0 && a->runs.carry_in, c, &out);
    return out;
}

static void scan_reference_fini(struct scan_reference *r)
{
    double *const all[] = {r->y,     r->betas,   r->outputs,       r->states,       r->decays,
                           r->carry, r->y_slack, r->outputs_slack, r->states_slack, r->carry_slack};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void scan_case_run(struct backend *b, const struct mamba_case *c)
{
    struct scan_data d;
    char what[200];
    scan_data_init(&d, c);
    snprintf(what, sizeof what, "%s: scan: %s", b->name, c->name);
    struct scan_reference want = reference_scan(&d);
    b->ops->selective_scan(b, &d.args);
    check_done(b, what);
    check_sums(&d.y, want.y, want.y_slack, 1.5e-6, what);
    check_sums(&d.outputs, want.outputs, want.outputs_slack, 1.5e-6, what);
    check_sums(&d.states, want.states, want.states_slack, 1.5e-6, what);
    check_sums(&d.carry, want.carry, want.carry_slack, 1.5e-6, what);
    check_tensor(&d.betas.t, want.betas, 1e-30, 5e-7, what);
    check_tensor(&d.decays.t, want.decays, 1e-30, 6e-7, what);
    for (int i = 0; scan_parts(&d, i) != NULL; i++)
        guarded_check(scan_parts(&d, i), what);
    /* What is not asked for changes nothing of what is. */
    struct guarded y = guarded_create(c->dtype, d.y.t.rows, d.y.t.cols, 0);
    d.args.betas.data = d.args.outputs.data = d.args.states.data = d.args.decays.data = NULL;
    d.args.y = y.t;
    d.args.runs.carry_out = false;
    if (!c->carry_in) {
        b->ops->selective_scan(b, &d.args);
        check_same_bits(&y.t, &d.y.t, 0, y.t.rows, what);
        d.args.y = d.x.t; /* in place */
        b->ops->selective_scan(b, &d.args);
        check_same_bits(&d.x.t, &d.y.t, 0, y.t.rows, what);
        guarded_check(&d.x, what);
    }
    guarded_destroy(&y);
    scan_reference_fini(&want);
    scan_data_fini(&d);
}

static void mamba_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(mamba_cases); i++) {
        conv_case_run(b, &mamba_cases[i]);
        scan_case_run(b, &mamba_cases[i]);
    }
}

static void test_convolution_and_scan_equal_reference(void **state)
{
    (void)state;
    for_each_backend(mamba_run);
}

/* As check_sums, where some of what is wanted is not a number. */
static void check_sums_or_nan(const struct guarded *y, const double *want, const double *slack, double share,
                              const char *what)
{
    for (int64_t i = 0; i < y->t.rows * y->t.cols; i++) {
        double got = element_get(&y->t, i / y->t.cols, i % y->t.cols);
        if (isnan(want[i]) ? !isnan(got) : !(fabs(got - want[i]) <= share * slack[i]))
            fail_msg("%s: element [%lld, %lld] is %.9g, expected %.9g", what, (long long)(i / y->t.cols),
                     (long long)(i % y->t.cols), got, want[i]);
    }
}

/* Among decays like those of models, one that forgets everything, alone and before one that is no number. */
static void odd_decays_run(struct backend *b)
{
    const struct mamba_case c = {"odd decays", 40, 16, DTYPE_F32, true, false, {50}};
    struct scan_data d;
    scan_data_init(&d, &c);
    for (int64_t i = 0; i < 16 * 40; i++)
        element_set(&d.A.t, i / 40, i % 40, -(float)(1 + i / 40));
    element_set(&d.A.t, 5, 20, -INFINITY);
    element_set(&d.A.t, 2, 9, -INFINITY);
    element_set(&d.A.t, 3, 9, NAN);
    struct scan_reference want = reference_scan(&d);
    b->ops->selective_scan(b, &d.args);
    check_done(b, c.name);
    check_sums_or_nan(&d.y, want.y, want.y_slack, 1.5e-6, c.name);
    check_sums_or_nan(&d.states, want.states, want.states_slack, 1.5e-6, c.name);
    assert_true(isnan(element_get(&d.y.t, 49, 9)));
    scan_reference_fini(&want);
    scan_data_fini(&d);
}

static void test_odd_decays_equal_reference(void **state)
{
    (void)state;
    for_each_backend(odd_decays_run);
}

/* A run cut in two, the state handed over, is the whole bit for bit: work is cut by channels, never by
 * tokens. */
static void scan_halves(struct backend *b, bool is_mild)
{
    const struct mamba_case c = {"whole", 40, 16, DTYPE_F32, true, false, {90}};
    struct scan_data d;
    scan_data_init(&d, &c);
    /* Decays like those of models, and one token of steep ones, whose neighbours change with the cut. */
    for (int64_t i = 0; i < 16 * 40 && is_mild; i++)
        element_set(&d.A.t, i / 40, i % 40, -(float)(1 + i / 40));
    for (int64_t i = 0; i < 40 && is_mild; i++)
        element_set(&d.dt.t, 45, i, 60.0f);
    d.args.state_rows.n = d.args.decay_rows.n = 0;
    b->ops->selective_scan(b, &d.args);
    for (int32_t cut = 1; cut < 90; cut += 22) {
        struct guarded y = guarded_create(DTYPE_F32, 90, 40, 1), carry = guarded_create(DTYPE_F32, 16, 40, 0);
        for (int half = 0; half < 2; half++) {
            int32_t first = half == 0 ? 0 : cut, n = half == 0 ? cut : 90 - cut;
            struct run run = {.length = n, .position = first};
            struct selective_scan_args a = d.args;
            a.x = tensor_rows(a.x, first, n), a.dt = tensor_rows(a.dt, first, n),
            a.z = tensor_rows(a.z, first, n);
            a.B = tensor_rows(a.B, first, n), a.C = tensor_rows(a.C, first, n),
            a.y = tensor_rows(y.t, first, n);
            a.betas.data = a.outputs.data = a.states.data = a.decays.data = NULL;
            a.carry = carry.t.data;
            a.runs = (struct runs){.list = &run, .n = 1, .carry_in = half == 1, .carry_out = half == 0};
            b->ops->selective_scan(b, &a);
        }
        check_same_bits(&y.t, &d.y.t, 0, 90, "halves of a scan");
        guarded_destroy(&y);
        guarded_destroy(&carry);
    }
    check_done(b, "scan");
    scan_data_fini(&d);
}

static void scan_halves_run(struct backend *b)
{
    scan_halves(b, false);
    scan_halves(b, true);
}

static void conv_halves_run(struct backend *b)
{
    enum { T = 20, N = 35, KERNEL = 4 };
    uint64_t seed = 81;
    struct guarded x = guarded_random(DTYPE_BF16, T, N, 1, &seed),
                   weight = guarded_create(DTYPE_F32, KERNEL, N, 0);
    struct guarded whole = guarded_create(DTYPE_F32, T, N, 0),
                   tail = guarded_create(DTYPE_F32, KERNEL - 1, N, 0);
    struct run run = {.length = T};
    tensor_randomize(&weight.t, 0, 1, &seed);
    struct conv_args args = {
        .x = x.t, .weight = weight.t.data, .kernel = KERNEL, .runs = {.list = &run, .n = 1}, .y = whole.t};

    b->ops->conv_silu(b, &args);
    for (int32_t step = 1; step < T; step++) {
        struct guarded y = guarded_create(DTYPE_F32, T, N, 0);
        for (int32_t first = 0; first < T; first += step) {
            run.length = T - first < step ? T - first : step;
            run.position = first;
            args.x = tensor_rows(x.t, first, run.length);
            args.y = tensor_rows(y.t, first, run.length);
            args.tail = tail.t.data;
            args.runs.carry_in = first > 0;
            args.runs.carry_out = true;
            b->ops->conv_silu(b, &args);
        }
        check_same_bits(&y.t, &whole.t, 0, T, "pieces of a convolution");
        guarded_destroy(&y);
    }
    check_done(b, "conv_silu");
    guarded_destroy(&x);
    guarded_destroy(&weight);
    guarded_destroy(&whole);
    guarded_destroy(&tail);
}

static void test_pieces_equal_the_whole(void **state)
{
    (void)state;
    for_each_backend(scan_halves_run);
    for_each_backend(conv_halves_run);
}

/* Whatever another run holds, NaNs too, a run's results keep every bit. */
static void neighbours_run(struct backend *b)
{
    const struct mamba_case c = {"neighbours", 35, 16, DTYPE_F32, true, false, {40, 33, 50}};
    struct scan_data d;
    scan_data_init(&d, &c);
    struct guarded y = guarded_create(DTYPE_F32, 123, 35, 0), convolved[2];
    struct guarded weight = guarded_create(DTYPE_F32, 4, 35, 0);
    uint64_t seed = 91;
    tensor_randomize(&weight.t, 0, 1, &seed);
    for (int i = 0; i < 2; i++) {
        convolved[i] = guarded_create(DTYPE_F32, 123, 35, 0);
        struct conv_args conv = {
            .x = d.x.t, .weight = weight.t.data, .kernel = 4, .runs = d.args.runs, .y = convolved[i].t};
        conv.runs.carry_out = false;
        b->ops->conv_silu(b, &conv);
        if (i == 1)
            d.args.y = y.t;
        b->ops->selective_scan(b, &d.args);
        for (int64_t t = 40; t < 73; t++)
            for (int64_t j = 0; j < 35; j++)
                element_set(&d.x.t, t, j, t % 2 ? NAN : 1e30f);
    }
    check_done(b, "neighbours");
    check_same_bits(&d.y.t, &y.t, 0, 40, "scan: run before");
    check_same_bits(&d.y.t, &y.t, 73, 50, "scan: run behind");
    check_same_bits(&convolved[0].t, &convolved[1].t, 0, 40, "conv: run before");
    check_same_bits(&convolved[0].t, &convolved[1].t, 73, 50, "conv: run behind");
    assert_true(isnan(element_get(&y.t, 72, 34)));
    guarded_destroy(&y);
    guarded_destroy(&weight);
    guarded_destroy(&convolved[0]);
    guarded_destroy(&convolved[1]);
    scan_data_fini(&d);
}

static void test_neighbours_are_untouched(void **state)
{
    (void)state;
    for_each_backend(neighbours_run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_failures_are_kept),
        cmocka_unit_test(test_instruction_set_is_chosen),
        cmocka_unit_test(test_the_library_decides_on_bfloat16),
        cmocka_unit_test(test_create_survives_failing_allocations),
        cmocka_unit_test(test_elementwise_equals_reference),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_norm_equals_reference),
        cmocka_unit_test(test_rows_are_moved),
        cmocka_unit_test(test_other_dtypes_are_collected),
        cmocka_unit_test(test_linear_equals_reference),
        cmocka_unit_test(test_linear_allocates_nothing),
        cmocka_unit_test(test_rows_are_alone),
        cmocka_unit_test(test_matrices_take_file_dtypes),
        cmocka_unit_test(test_matrix_memory),
        cmocka_unit_test(test_grouped_linear_equals_reference),
        cmocka_unit_test(test_lone_thread_takes_all_parts),
        cmocka_unit_test(test_convolution_and_scan_equal_reference),
        cmocka_unit_test(test_odd_decays_equal_reference),
        cmocka_unit_test(test_pieces_equal_the_whole),
        cmocka_unit_test(test_neighbours_are_untouched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

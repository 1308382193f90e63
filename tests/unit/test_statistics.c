#include "pipeline/statistics.h"

#include "kernels/base/memory.h"
#include "kernels/base/processors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static float next_float(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / 8388608.0f - 1.0f;
}

/* What the header promises, in the plainest way: one element after another, in long double. */
struct reference {
    long double mean[2048], m2[2048], norm;
    int64_t count[2048], n_norms, n_nonfinite, first;
    double max_abs;
};

static bool is_used(float x, bool mask, bool *bad)
{
    if (isfinite(x))
        return true;
    if (!(mask && x == -INFINITY))
        *bad = true;
    return false;
}

static void refer_column(struct reference *r, const float *x, int64_t n, int64_t width, int64_t c)
{
    long double sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(x[i * width + c])) {
            sum += x[i * width + c];
            r->count[c]++;
        }
    r->mean[c] = r->count[c] > 0 ? sum / r->count[c] : 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(x[i * width + c]))
            r->m2[c] += (x[i * width + c] - r->mean[c]) * (x[i * width + c] - r->mean[c]);
}

static void refer_row(struct reference *r, const float *x, int64_t row, int64_t width, bool mask)
{
    long double squares = 0;
    bool any = false;
    for (int64_t c = 0; c < width; c++) {
        bool bad = false;
        if (is_used(x[row * width + c], mask, &bad)) {
            squares += (long double)x[row * width + c] * x[row * width + c];
            r->max_abs = fmax(r->max_abs, fabs(x[row * width + c]));
        }
        r->n_nonfinite += bad;
        any |= bad;
    }
    if (any && r->first < 0)
        r->first = row;
    if (!any) {
        r->n_norms++;
        r->norm += sqrtl(squares);
    }
}

static void refer(struct reference *r, const float *x, int64_t n, int64_t width, bool mask)
{
    *r = (struct reference){.first = -1};
    for (int64_t c = 0; c < width; c++)
        refer_column(r, x, n, width, c);
    for (int64_t i = 0; i < n; i++)
        refer_row(r, x, i, width, mask);
    if (r->n_norms > 0)
        r->norm /= r->n_norms;
}

static void assert_close(long double found, long double wanted, long double scale)
{
    if (fabsl(found - wanted) > 1e-12L * scale)
        fail_msg("%.17Lg is not %.17Lg", found, wanted);
}

static void assert_is(const struct statistics *s, const struct reference *r, int64_t n, int64_t first_row)
{
    assert_int_equal(s->n_rows, n);
    assert_int_equal(s->n_norms, r->n_norms);
    assert_int_equal(s->n_nonfinite, r->n_nonfinite);
    assert_int_equal(s->first_nonfinite_row, r->first < 0 ? -1 : r->first + first_row);
    assert_true(s->max_abs == r->max_abs);
    assert_close(s->mean_norm, r->norm, r->norm);
    for (int64_t c = 0; c < s->width; c++) {
        assert_int_equal(s->count[c], r->count[c]);
        assert_close(s->mean[c], r->mean[c], 1 + fabsl(r->mean[c]));
        assert_close(s->m2[c], r->m2[c], r->m2[c] + 1e-300L);
    }
}

/* n rows of `width`: an offset by column, and with `spoil` some elements that are not finite. */
static float *make_rows(int64_t n, int64_t width, bool spoil, enum dtype dtype)
{
    void *memory;
    uint64_t state = (uint64_t)(n * 31 + width);
    assert_int_equal(memory_allocate_array(&memory, (size_t)(n * width) + 1, sizeof(float), "rows", NULL),
                     STATUS_OK);
    float *x = memory;
    for (int64_t i = 0; i < n * width; i++) {
        x[i] = next_float(&state) + (float)(i % width % 7) * 100.0f;
        if (dtype == DTYPE_BF16)
            x[i] = bf16_to_f32(f32_to_bf16(x[i]));
        if (dtype == DTYPE_F16)
            x[i] = f16_to_f32(f32_to_f16(x[i]));
        if (spoil && i % 97 == 41)
            x[i] = NAN;
        if (spoil && i % 101 == 17)
            x[i] = INFINITY;
        if (spoil && (i % 5 == 3 || i % width == 1))
            x[i] = -INFINITY;
    }
    return x;
}

/* With the narrowest registers, too, and to the bit: a store does not tell what machine wrote it. */
static void check_same_bits(const struct statistics *wide, const void *rows, enum dtype dtype, int64_t n)
{
    struct statistics narrow;
    assert_int_equal(statistics_init(&narrow, wide->width, wide->minus_infinity_is_mask, NULL), STATUS_OK);
    setenv("ACTDUMP_ISA", "baseline", 1);
    assert_false(processors_have_avx2());
    statistics_of(&narrow, rows, dtype, n, 0);
    unsetenv("ACTDUMP_ISA");
    assert_memory_equal(narrow.mean, wide->mean, statistics_bytes(wide->width));
    assert_memory_equal(&narrow.mean_norm, &wide->mean_norm, sizeof narrow.mean_norm);
    assert_memory_equal(&narrow.max_abs, &wide->max_abs, sizeof narrow.max_abs);
    assert_int_equal(narrow.n_nonfinite, wide->n_nonfinite);
    assert_int_equal(narrow.first_nonfinite_row, wide->first_nonfinite_row);
    statistics_fini(&narrow);
}

static void check_case(int64_t n, int64_t width, bool spoil, bool mask, enum dtype dtype)
{
    struct reference *r = calloc(1, sizeof *r);
    struct statistics s;
    void *stored;
    float *x = make_rows(n, width, spoil, dtype);
    assert_int_equal(memory_allocate_array(&stored, (size_t)(n * width) + 1, dtype_size(dtype), "rows", NULL),
                     STATUS_OK);
    dtype_convert(stored, dtype, x, DTYPE_F32, (size_t)(n * width));
    assert_int_equal(statistics_init(&s, width, mask, NULL), STATUS_OK);
    statistics_of(&s, stored, dtype, n, 1000);
    refer(r, x, n, width, mask);
    assert_is(&s, r, n, 1000);
    statistics_of(&s, stored, dtype, n, 0); /* nothing is left of what it held */
    assert_is(&s, r, n, 0);
    check_same_bits(&s, stored, dtype, n);
    statistics_fini(&s);
    memory_free(stored);
    memory_free(x);
    free(r);
}

static void test_of_rows(void **state)
{
    static const int64_t widths[] = {1, 2, 7, 8, 9, 511, 512, 513, 1025}, counts[] = {0, 1, 3, 4, 5, 8, 33};
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    (void)state;
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++)
        for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++)
            for (size_t d = 0; d < 3; d++) {
                check_case(counts[n], widths[w], false, false, dtypes[d]);
                check_case(counts[n], widths[w], true, false, dtypes[d]);
                check_case(counts[n], widths[w], true, true, dtypes[d]);
            }
}

/* By hand: rows (3, 4) and (-inf, 1) and (NaN, 5). */
static void test_by_hand(void **state)
{
    static const float x[] = {3, 4, -INFINITY, 1, NAN, 5};
    struct statistics s;
    (void)state;
    assert_int_equal(statistics_init(&s, 2, true, NULL), STATUS_OK);
    statistics_of(&s, x, DTYPE_F32, 3, 10);
    assert_int_equal(s.n_rows, 3);
    assert_int_equal(s.n_nonfinite, 1); /* the mask is not counted */
    assert_int_equal(s.first_nonfinite_row, 12);
    assert_int_equal(s.n_norms, 2);
    assert_true(s.mean_norm == (5.0 + 1.0) / 2);
    assert_true(s.max_abs == 5);
    assert_int_equal(s.count[0], 1);
    assert_int_equal(s.count[1], 3);
    assert_true(s.mean[0] == 3 && s.m2[0] == 0);
    assert_close(s.mean[1], 10.0L / 3, 1);
    assert_close(s.m2[1], 42 - 100.0L / 3, 10);
    assert_close(statistics_overall_mean(&s), 13.0L / 4, 1);
    assert_close(statistics_overall_variance(&s), 51.0L / 4 - 169.0L / 16, 10);
    statistics_fini(&s);
    statistics_fini(&s);
}

static void test_empty(void **state)
{
    struct statistics s, other;
    (void)state;
    assert_int_equal(statistics_init(&s, 3, false, NULL), STATUS_OK);
    assert_int_equal(statistics_init(&other, 3, false, NULL), STATUS_OK);
    assert_true(isnan(statistics_overall_mean(&s)) && isnan(statistics_overall_variance(&s)));
    statistics_merge(&s, &other);
    assert_int_equal(s.n_rows, 0);
    assert_int_equal(s.first_nonfinite_row, -1);
    assert_true(s.mean[0] == 0 && s.mean_norm == 0);
    statistics_fini(&s);
    statistics_fini(&other);
}

/* Cut anywhere and merged, the numbers are those of the whole. */
static void check_merge(int64_t n, int64_t width, bool spoil, int64_t step)
{
    struct reference *r = calloc(1, sizeof *r);
    struct statistics total, part;
    float *x = make_rows(n, width, spoil, DTYPE_F32);
    assert_int_equal(statistics_init(&total, width, false, NULL), STATUS_OK);
    assert_int_equal(statistics_init(&part, width, false, NULL), STATUS_OK);
    for (int64_t at = 0; at < n; at += step) {
        statistics_of(&part, x + at * width, DTYPE_F32, n - at < step ? n - at : step, at);
        part.n_overflow = 2;
        statistics_merge(&total, &part);
    }
    refer(r, x, n, width, false);
    assert_is(&total, r, n, 0);
    assert_int_equal(total.n_overflow, 2 * ((n + step - 1) / step));
    statistics_fini(&total);
    statistics_fini(&part);
    memory_free(x);
    free(r);
}

static void test_merge(void **state)
{
    (void)state;
    for (int64_t step = 1; step <= 64; step += 7) {
        check_merge(61, 5, false, step);
        check_merge(61, 5, true, step);
        check_merge(13, 600, true, step);
    }
}

/* A huge first row, as attention sinks are, must not eat the digits of the others. */
static void test_outlier_keeps_digits(void **state)
{
    struct reference *r = calloc(1, sizeof *r);
    struct statistics s;
    float *x = make_rows(400, 16, false, DTYPE_F32);
    (void)state;
    for (int c = 0; c < 16; c++)
        x[c] = 1e6f;
    assert_int_equal(statistics_init(&s, 16, false, NULL), STATUS_OK);
    statistics_of(&s, x + 16, DTYPE_F32, 399, 0);
    refer(r, x + 16, 399, 16, false);
    assert_is(&s, r, 399, 0);
    statistics_of(&s, x, DTYPE_F32, 400, 0);
    refer(r, x, 400, 16, false);
    assert_is(&s, r, 400, 0);
    statistics_fini(&s);
    memory_free(x);
    free(r);
}

static void test_out_of_memory(void **state)
{
    struct statistics s = {0};
    struct error error = {0};
    (void)state;
    memory_fail_at(0);
    assert_int_equal(statistics_init(&s, 4, false, &error), STATUS_RESOURCE);
    memory_fail_at(-1);
    statistics_fini(&s);
    assert_true(statistics_bytes(4) == 4 * 24);
    error_clear(&error);
    assert_int_equal(statistics_init(&s, INT64_MAX / 2, false, &error), STATUS_RESOURCE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_of_rows),       cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_empty),         cmocka_unit_test(test_merge),
        cmocka_unit_test(test_out_of_memory), cmocka_unit_test(test_outlier_keeps_digits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

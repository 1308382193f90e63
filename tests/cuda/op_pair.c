#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/cuda/op_pair.h"

/* xorshift64*: the same numbers everywhere. */
double pair_uniform(struct pair *pair)
{
    pair->random ^= pair->random >> 12;
    pair->random ^= pair->random << 25;
    pair->random ^= pair->random >> 27;
    return (double)((pair->random * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

double pair_normal(struct pair *pair)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += pair_uniform(pair);
    return sum;
}

void pair_note(struct pair *pair, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(pair->row, sizeof pair->row, format, arguments);
    va_end(arguments);
}

static void synchronize(struct pair *pair, struct backend *b)
{
    struct error error = {0};
    if (b->ops->synchronize(b, &error) != STATUS_OK)
        fail_msg("%s: %s: %s", pair->row, b->name, error.text);
}

void pair_synchronize(struct pair *pair)
{
    synchronize(pair, pair->reference);
    synchronize(pair, pair->tested);
}

static struct backend *side(struct pair *pair, int i)
{
    return i == 0 ? pair->reference : pair->tested;
}

struct twin twin_create(struct pair *pair, struct twin_shape shape)
{
    struct twin twin = {.pair = pair};
    size_t element = dtype_size(shape.dtype);
    int64_t stride = shape.cols + shape.gap;
    twin.data_at = GUARD_BYTES + (size_t)shape.shift * element;
    twin.bytes = twin.data_at + (size_t)(shape.rows * stride) * element + GUARD_BYTES;
    twin.before = malloc(twin.bytes);
    twin.after = malloc(twin.bytes);
    assert_true(twin.before != NULL && twin.after != NULL);
    memset(twin.before, GUARD_BYTE, twin.bytes);
    for (int i = 0; i < 2; i++) {
        struct error error = {0};
        struct tensor *t = i == 0 ? &twin.reference : &twin.tested;
        if (side(pair, i)->ops->allocate(side(pair, i), &twin.block[i], twin.bytes, "a test", &error) !=
            STATUS_OK)
            fail_msg("%s", error.text);
        *t = tensor_make((char *)twin.block[i] + twin.data_at, shape.dtype, shape.rows, shape.cols);
        t->stride = stride;
    }
    for (int64_t r = 0; r < shape.rows; r++)
        for (int64_t c = 0; c < shape.cols; c++)
            twin_set(&twin, r, c, NAN);
    twin_upload(&twin);
    return twin;
}

void twin_upload(struct twin *twin)
{
    for (int i = 0; i < 2; i++)
        side(twin->pair, i)->ops->upload(side(twin->pair, i), twin->block[i], twin->before, twin->bytes);
}

struct twin twin_random(struct pair *pair, struct twin_shape shape, double mean, double deviation)
{
    struct twin twin = twin_create(pair, shape);
    for (int64_t r = 0; r < shape.rows; r++)
        for (int64_t c = 0; c < shape.cols; c++)
            twin_set(&twin, r, c, (float)(mean + deviation * pair_normal(pair)));
    twin_upload(&twin);
    return twin;
}

void twin_destroy(struct twin *twin)
{
    for (int i = 0; i < 2; i++)
        if (twin->pair != NULL)
            side(twin->pair, i)->ops->release(side(twin->pair, i), twin->block[i]);
    free(twin->before);
    free(twin->after);
    memset(twin, 0, sizeof *twin);
}

static size_t place(const struct twin *twin, int64_t row, int64_t col)
{
    return twin->data_at + (size_t)(row * twin->tested.stride + col) * dtype_size(twin->tested.dtype);
}

float twin_get(const struct twin *twin, const unsigned char *block, int64_t row, int64_t col)
{
    const unsigned char *at = block + place(twin, row, col);
    float f;
    uint16_t h;
    int32_t i;
    switch (twin->tested.dtype) {
    case DTYPE_F32:
        memcpy(&f, at, sizeof f);
        return f;
    case DTYPE_I32:
        memcpy(&i, at, sizeof i);
        return (float)i;
    default:
        memcpy(&h, at, sizeof h);
        return twin->tested.dtype == DTYPE_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
    }
}

void twin_set(struct twin *twin, int64_t row, int64_t col, float value)
{
    unsigned char *at = twin->before + place(twin, row, col);
    uint16_t h = twin->tested.dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
    int32_t i = value == value ? (int32_t)value : -1;
    if (twin->tested.dtype == DTYPE_F32)
        memcpy(at, &value, sizeof value);
    else if (twin->tested.dtype == DTYPE_I32)
        memcpy(at, &i, sizeof i);
    else
        memcpy(at, &h, sizeof h);
}

/* Fails where a byte outside the elements differs from what was uploaded. */
static void check_guards(const struct twin *twin, const unsigned char *block, const char *what)
{
    const struct tensor *t = &twin->tested;
    size_t element = dtype_size(t->dtype), at = 0;
    for (int64_t r = 0; r <= t->rows; r++) {
        size_t end = r < t->rows ? place(twin, r, 0) : twin->bytes;
        for (; at < end; at++)
            if (block[at] != GUARD_BYTE)
                fail_msg("%s: %s: written outside the elements, before row %lld (byte %lld of the block)",
                         twin->pair->row, what, (long long)r, (long long)at);
        at = end + (size_t)t->cols * element;
    }
}

/* Downloads both sides: the reference into `before`, the one under test into `after`. */
static void fetch(struct twin *twin, const char *what)
{
    struct pair *pair = twin->pair;
    pair->reference->ops->download(pair->reference, twin->before, twin->block[0], twin->bytes);
    pair->tested->ops->download(pair->tested, twin->after, twin->block[1], twin->bytes);
    pair_synchronize(pair);
    check_guards(twin, twin->before, "the reference");
    check_guards(twin, twin->after, what);
}

static bool agrees(double got, double want, double absolute, double relative)
{
    if (isnan(want) || isinf(want))
        return isnan(want) ? isnan(got) : got == want;
    return fabs(got - want) <= absolute + relative * fabs(want);
}

void twin_check(struct twin *twin, const char *what, double absolute, double relative)
{
    const struct tensor *t = &twin->tested;
    double error = 0, power = 0, worst = 0, limit = t->dtype == DTYPE_F32 ? 1e-6 : 1e-4;
    int64_t bad = -1, n_bad = 0;
    fetch(twin, what);
    if (t->dtype != DTYPE_F32)
        relative += 1.0 / 128;
    for (int64_t i = 0; i < t->rows * t->cols; i++) {
        double got = twin_get(twin, twin->after, i / t->cols, i % t->cols);
        double want = twin_get(twin, twin->before, i / t->cols, i % t->cols);
        if (!agrees(got, want, absolute, relative) && n_bad++ == 0)
            bad = i;
        if (isfinite(got) && isfinite(want)) {
            error += (got - want) * (got - want);
            power += want * want;
            worst = fmax(worst, fabs(got - want));
        }
    }
    if (n_bad > 0)
        fail_msg(
            "%s: %s: %lld of %lld elements wrong, first at [%lld, %lld]: got %.9g, expected %.9g; largest "
            "difference %.3g, NMSE %.3g",
            twin->pair->row, what, (long long)n_bad, (long long)(t->rows * t->cols),
            (long long)(bad / t->cols), (long long)(bad % t->cols),
            twin_get(twin, twin->after, bad / t->cols, bad % t->cols),
            twin_get(twin, twin->before, bad / t->cols, bad % t->cols), worst,
            power > 0 ? error / power : error);
    if (power > 0 && error > limit * power)
        fail_msg("%s: %s: NMSE %.3g, largest difference %.3g", twin->pair->row, what, error / power, worst);
}

void twin_check_same(struct twin *twin, const char *what)
{
    const struct tensor *t = &twin->tested;
    fetch(twin, what);
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->cols; c++)
            if (memcmp(twin->before + place(twin, r, c), twin->after + place(twin, r, c),
                       dtype_size(t->dtype)) != 0)
                fail_msg("%s: %s: [%lld, %lld] is %.9g, expected %.9g", twin->pair->row, what, (long long)r,
                         (long long)c, twin_get(twin, twin->after, r, c), twin_get(twin, twin->before, r, c));
}

void run_table_make(struct run_table *table, const int *lengths, bool carry_in, bool carry_out)
{
    *table = (struct run_table){0};
    for (int64_t n = 0; n < (int64_t)COUNT(table->list) && lengths[n] > 0; n++) {
        table->list[n] = (struct run){.start = (int32_t)table->n_tokens, .length = lengths[n]};
        table->n_tokens += lengths[n];
        table->runs.n = n + 1;
    }
    table->runs.list = table->list;
    table->runs.carry_in = carry_in;
    table->runs.carry_out = carry_out;
}

struct row_list rows_make(int64_t n_tokens, int64_t first, int64_t every)
{
    struct row_list rows = {0};
    int32_t *index = malloc((size_t)(n_tokens + 1) * sizeof *index);
    assert_non_null(index);
    for (int64_t r = first; r < n_tokens; r += every)
        index[rows.n++] = (int32_t)r;
    rows.index = index;
    return rows;
}

void scribble(void *memory, size_t bytes)
{
    memset(memory, 0x77, bytes);
}

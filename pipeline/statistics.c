#include "pipeline/statistics.h"

#include "kernels/base/memory.h"
#include "kernels/base/processors.h"

#include <math.h>

/* Rows are taken in groups of GROUP, each in tiles of TILE columns: a tile fits the first-level cache, is
 * converted to float32 once, and its sums go to memory once a group. */
enum { GROUP = 4, TILE = 512 };

/* What gather() is made of is compiled into it twice, for the baseline and for AVX2. Nothing is fused
 * (-ffp-contract=off), and the loops say in which order numbers are added, so both give the same bits. */
#define IN_GATHER static inline __attribute__((always_inline))

/* One group's tile as float32, and where it lies. */
struct tile {
    const float *rows[GROUP];
    int n_rows; /* 1 .. GROUP */
    int64_t first_column, n_columns;
    int64_t first_row; /* of the dataset */
};

/* What a group of rows gathers across its tiles. */
struct group {
    double squares[GROUP];
    bool bad[GROUP]; /* has an element that is not finite */
};

enum status statistics_init(struct statistics *s, int64_t width, bool minus_infinity_is_mask,
                            struct error *error)
{
    void *memory;
    TRY(memory_allocate_array(&memory, (size_t)width, 3 * sizeof(double), "statistics", error));
    statistics_place(s, memory, width, minus_infinity_is_mask);
    return STATUS_OK;
}

void statistics_place(struct statistics *s, void *memory, int64_t width, bool minus_infinity_is_mask)
{
    *s = (struct statistics){.width = width, .minus_infinity_is_mask = minus_infinity_is_mask};
    s->mean = memory;
    s->m2 = s->mean + width;
    s->count = (int64_t *)(void *)(s->m2 + width);
    s->first_nonfinite_row = -1;
}

void statistics_fini(struct statistics *s)
{
    memory_free(s->mean); /* the one block of all three arrays */
    *s = (struct statistics){0};
}

size_t statistics_bytes(int64_t width)
{
    return (size_t)width * 3 * sizeof(double);
}

void statistics_reset(struct statistics *s)
{
    s->n_rows = s->n_nonfinite = s->n_overflow = s->n_norms = 0;
    s->first_nonfinite_row = -1;
    s->mean_norm = s->max_abs = 0;
    memset(s->mean, 0, statistics_bytes(s->width));
}

/* ---------------------------------------------------------------- one tile */

/* Largest magnitude as bits: of float32 they order as the numbers do, and all that are not finite lie on top.
 */
IN_GATHER uint32_t largest_bits(const float *x, int64_t n)
{
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

IN_GATHER bool tile_is_finite(const struct tile *t, double *max_abs)
{
    uint32_t most = 0;
    for (int r = 0; r < t->n_rows; r++) {
        uint32_t bits = largest_bits(t->rows[r], t->n_columns);
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000u)
        return false;
    float value;
    memcpy(&value, &most, sizeof value);
    if (value > *max_abs)
        *max_abs = value;
    return true;
}

/* Sum of squares in eight lanes, so that the compiler may vectorise without reordering on its own. */
IN_GATHER double sum_squares(const float *x, int64_t n)
{
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            lanes[k] += (double)x[i + k] * x[i + k];
    for (int k = 0; i < n; i++, k++)
        lanes[k] += (double)x[i] * x[i];
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

IN_GATHER void add_sums(const struct tile *t, double *restrict sum)
{
    if (t->n_rows == GROUP) {
        const float *a = t->rows[0], *b = t->rows[1], *c = t->rows[2], *d = t->rows[3];
        for (int64_t i = 0; i < t->n_columns; i++)
            sum[i] += ((double)a[i] + b[i]) + ((double)c[i] + d[i]);
        return;
    }
    for (int r = 0; r < t->n_rows; r++)
        for (int64_t i = 0; i < t->n_columns; i++)
            sum[i] += t->rows[r][i];
}

IN_GATHER void add_deviations(const struct tile *t, const double *restrict mean, double *restrict m2)
{
    if (t->n_rows == GROUP) {
        const float *a = t->rows[0], *b = t->rows[1], *c = t->rows[2], *d = t->rows[3];
        for (int64_t i = 0; i < t->n_columns; i++) {
            double p = a[i] - mean[i], q = b[i] - mean[i], r = c[i] - mean[i], s = d[i] - mean[i];
            m2[i] += (p * p + q * q) + (r * r + s * s);
        }
        return;
    }
    for (int r = 0; r < t->n_rows; r++)
        for (int64_t i = 0; i < t->n_columns; i++) {
            double p = t->rows[r][i] - mean[i];
            m2[i] += p * p;
        }
}

/* The same where some element is not finite: one by one. */
static void add_careful_sums(struct statistics *s, const struct tile *t, struct group *g)
{
    double *sum = s->mean + t->first_column;
    int64_t *count = s->count + t->first_column;
    for (int r = 0; r < t->n_rows; r++) {
        double squares = 0;
        for (int64_t i = 0; i < t->n_columns; i++) {
            float x = t->rows[r][i];
            if (isfinite(x)) {
                sum[i] += x;
                squares += (double)x * x;
                if (fabsf(x) > s->max_abs)
                    s->max_abs = fabsf(x);
                continue;
            }
            count[i]--;
            if (s->minus_infinity_is_mask && x == -INFINITY)
                continue;
            s->n_nonfinite++;
            g->bad[r] = true;
            if (s->first_nonfinite_row < 0 || t->first_row + r < s->first_nonfinite_row)
                s->first_nonfinite_row = t->first_row + r;
        }
        g->squares[r] += squares;
    }
}

static void add_careful_deviations(const struct tile *t, const double *mean, double *m2)
{
    for (int r = 0; r < t->n_rows; r++)
        for (int64_t i = 0; i < t->n_columns; i++) {
            float x = t->rows[r][i];
            if (isfinite(x))
                m2[i] += ((double)x - mean[i]) * ((double)x - mean[i]);
        }
}

/* ---------------------------------------------------------------- passes over rows */

/* Rows being read, and room to convert a tile of them into. */
struct source {
    const char *rows;
    enum dtype dtype;
    int64_t n_rows, width, first_row;
    float converted[GROUP][TILE];
};

/* bfloat16 here and not by dtype_convert, which is compiled for the baseline alone. */
IN_GATHER void widen(float *to, const char *from, enum dtype dtype, int64_t n)
{
    const uint16_t *half = (const uint16_t *)(const void *)from;
    if (dtype != DTYPE_BF16) {
        dtype_convert(to, DTYPE_F32, from, dtype, (size_t)n);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        to[i] = bf16_to_f32(half[i]);
}

IN_GATHER struct tile take_tile(struct source *in, int64_t row, int64_t column)
{
    struct tile t = {.first_column = column, .first_row = in->first_row + row};
    t.n_rows = (int)(in->n_rows - row < GROUP ? in->n_rows - row : GROUP);
    t.n_columns = in->width - column < TILE ? in->width - column : TILE;
    size_t size = dtype_size(in->dtype);
    for (int r = 0; r < t.n_rows; r++) {
        const char *from = in->rows + (size_t)((row + r) * in->width + column) * size;
        if (in->dtype == DTYPE_F32) {
            t.rows[r] = (const float *)(const void *)from;
        } else {
            widen(in->converted[r], from, in->dtype, t.n_columns);
            t.rows[r] = in->converted[r];
        }
    }
    return t;
}

/* First pass: sums into s->mean, counts, norms and magnitude. Returns whether every element is finite. */
IN_GATHER bool pass_sums(struct statistics *s, struct source *in)
{
    bool all_finite = true;
    double norms = 0;
    for (int64_t row = 0; row < in->n_rows; row += GROUP) {
        struct group g = {0};
        int n = 0;
        for (int64_t column = 0; column < in->width; column += TILE) {
            struct tile t = take_tile(in, row, column);
            n = t.n_rows;
            if (tile_is_finite(&t, &s->max_abs)) {
                add_sums(&t, s->mean + column);
                for (int r = 0; r < n; r++)
                    g.squares[r] += sum_squares(t.rows[r], t.n_columns);
            } else {
                all_finite = false;
                add_careful_sums(s, &t, &g);
            }
        }
        for (int r = 0; r < n; r++) {
            norms += g.bad[r] ? 0 : sqrt(g.squares[r]);
            s->n_norms += !g.bad[r];
        }
    }
    s->mean_norm = s->n_norms > 0 ? norms / (double)s->n_norms : 0;
    return all_finite;
}

IN_GATHER void pass_deviations(struct statistics *s, struct source *in, bool all_finite)
{
    double unused = 0;
    for (int64_t row = 0; row < in->n_rows; row += GROUP)
        for (int64_t column = 0; column < in->width; column += TILE) {
            struct tile t = take_tile(in, row, column);
            if (all_finite || tile_is_finite(&t, &unused))
                add_deviations(&t, s->mean + column, s->m2 + column);
            else
                add_careful_deviations(&t, s->mean + column, s->m2 + column);
        }
}

IN_GATHER void gather(struct statistics *s, struct source *in)
{
    bool all_finite = pass_sums(s, in);
    for (int64_t i = 0; i < s->width; i++)
        s->mean[i] = s->count[i] > 0 ? s->mean[i] / (double)s->count[i] : 0;
    pass_deviations(s, in, all_finite);
}

static void gather_baseline(struct statistics *s, struct source *in)
{
    gather(s, in);
}

__attribute__((target("avx2"))) static void gather_avx2(struct statistics *s, struct source *in)
{
    gather(s, in);
}

void statistics_of(struct statistics *s, const void *rows, enum dtype dtype, int64_t n, int64_t first_row)
{
    struct source in = {.rows = rows, .dtype = dtype, .n_rows = n, .width = s->width, .first_row = first_row};
    statistics_reset(s);
    s->n_rows = n;
    for (int64_t i = 0; i < s->width; i++)
        s->count[i] = n;
    if (processors_have_avx2())
        gather_avx2(s, &in);
    else
        gather_baseline(s, &in);
}

/* ---------------------------------------------------------------- merging */

void statistics_merge(struct statistics *into, const struct statistics *later)
{
    for (int64_t i = 0; i < into->width; i++) {
        double a = (double)into->count[i], b = (double)later->count[i];
        if (later->count[i] == 0)
            continue;
        double delta = later->mean[i] - into->mean[i];
        into->mean[i] += delta * (b / (a + b));
        into->m2[i] += later->m2[i] + delta * delta * (a * b / (a + b));
        into->count[i] += later->count[i];
    }
    int64_t n_norms = into->n_norms + later->n_norms;
    if (later->n_norms > 0)
        into->mean_norm += (later->mean_norm - into->mean_norm) * ((double)later->n_norms / (double)n_norms);
    into->n_norms = n_norms;
    into->n_rows += later->n_rows;
    into->n_nonfinite += later->n_nonfinite;
    into->n_overflow += later->n_overflow;
    if (later->max_abs > into->max_abs)
        into->max_abs = later->max_abs;
    if (into->first_nonfinite_row < 0)
        into->first_nonfinite_row = later->first_nonfinite_row;
}

double statistics_overall_mean(const struct statistics *s)
{
    double sum = 0, n = 0;
    for (int64_t i = 0; i < s->width; i++) {
        sum += s->mean[i] * (double)s->count[i];
        n += (double)s->count[i];
    }
    return n > 0 ? sum / n : NAN;
}

double statistics_overall_variance(const struct statistics *s)
{
    double mean = statistics_overall_mean(s), sum = 0, n = 0;
    for (int64_t i = 0; i < s->width; i++) {
        double delta = s->mean[i] - mean;
        sum += s->count[i] > 0 ? s->m2[i] + delta * delta * (double)s->count[i] : 0;
        n += (double)s->count[i];
    }
    return n > 0 ? sum / n : NAN;
}

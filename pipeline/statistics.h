/* Exact statistics of a dataset, in float64, from all of its rows: by column mean and variance, and over rows
 * the mean norm, the largest magnitude, what is not finite and what overflowed.
 *
 * Partial results of chunks are merged in the order of the chunks (Chan, Golub and LeVeque 1983, pairwise
 * update), so the numbers depend on the rows and on where chunks end, never on threads or ranks. Elements
 * that are not finite are counted and left out of mean, variance and magnitude; a row that has one is left
 * out of the mean norm. Minus infinity in attention scores is the mask: neither counted nor used. All of it
 * is of the elements as stored, so an element that overflowed is not finite too. */
#ifndef ACTDUMP_PIPELINE_STATISTICS_H
#define ACTDUMP_PIPELINE_STATISTICS_H

#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

struct statistics {
    int64_t width;
    bool minus_infinity_is_mask;
    int64_t n_rows;
    int64_t n_nonfinite;         /* elements */
    int64_t n_overflow;          /* elements that were finite in float32 and are infinite as stored */
    int64_t first_nonfinite_row; /* -1: none; in the dataset's rows */
    int64_t n_norms;             /* rows in mean_norm */
    double mean_norm;            /* Euclidean, over all columns of a row */
    double max_abs;
    int64_t *count; /* [width] finite elements by column */
    double *mean;   /* [width] */
    double *m2;     /* [width] sum of squared differences from the mean */
};

enum status statistics_init(struct statistics *s, int64_t width, bool minus_infinity_is_mask,
                            struct error *error);
void statistics_fini(struct statistics *s); /* a zeroed one is fine */
/* The same as statistics_init in the caller's memory of statistics_bytes(width), aligned to 8; never
 * statistics_fini. */
void statistics_place(struct statistics *s, void *memory, int64_t width, bool minus_infinity_is_mask);
void statistics_reset(struct statistics *s);
size_t statistics_bytes(int64_t width);
/* Replaces s by the statistics of n rows of `width` elements, end to end, whose first is row first_row. */
void statistics_of(struct statistics *s, const void *rows, enum dtype dtype, int64_t n, int64_t first_row);
/* Adds what `later` saw to `into`; rows of `later` come after. */
void statistics_merge(struct statistics *into, const struct statistics *later);
/* Over all elements: mean and (population) variance; not a number where there is no element. */
double statistics_overall_mean(const struct statistics *s);
double statistics_overall_variance(const struct statistics *s);

#endif

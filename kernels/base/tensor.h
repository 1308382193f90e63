/* A view of a matrix in a backend's memory. Views never own. */
#ifndef ACTDUMP_BASE_TENSOR_H
#define ACTDUMP_BASE_TENSOR_H

#include "kernels/base/dtype.h"

/* Element (r, c) lies at data[r * stride + c]. Heads, groups and states are divisions of the columns that the
 * operation names; rows are tokens unless a comment says otherwise. data may be NULL: an optional output that
 * nobody asked for. */
struct tensor {
    void *data;
    enum dtype dtype;
    int64_t rows;
    int64_t cols;
    int64_t stride; /* elements from one row to the next, at least cols */
};

static inline void *tensor_row(const struct tensor *t, int64_t row)
{
    return (char *)t->data + (size_t)(row * t->stride) * dtype_size(t->dtype);
}

/* Rows [first, first + rows) of t. */
static inline struct tensor tensor_rows(struct tensor t, int64_t first, int64_t rows)
{
    if (t.data != NULL)
        t.data = tensor_row(&t, first);
    t.rows = rows;
    return t;
}

/* Columns [first, first + cols) of t. */
static inline struct tensor tensor_cols(struct tensor t, int64_t first, int64_t cols)
{
    if (t.data != NULL)
        t.data = (char *)t.data + (size_t)first * dtype_size(t.dtype);
    t.cols = cols;
    return t;
}

static inline struct tensor tensor_make(void *data, enum dtype dtype, int64_t rows, int64_t cols)
{
    return (struct tensor){.data = data, .dtype = dtype, .rows = rows, .cols = cols, .stride = cols};
}

#endif

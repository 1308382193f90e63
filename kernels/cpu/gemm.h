/* Matrix products by oneDNN: packed weights, and primitives made once for each shape and kept.
 *
 * This file alone knows dnnl.h. It works on what the library takes: dense rows of one of two kinds, float32
 * or bfloat16. linear.c brings everything else (strides, conversions, addends) to that. */
#ifndef ACTDUMP_CPU_GEMM_H
#define ACTDUMP_CPU_GEMM_H

#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

struct gemm;

/* A packed [n, k] weight matrix; what kernels/backend.h calls struct matrix. */
struct matrix {
    int64_t n, k;
    enum dtype compute; /* the load's dtype */
    enum dtype kept;    /* what the product runs in: float32 for bfloat16 loads on CPUs that lack AVX-512 */
    size_t bytes;
    void *data;   /* packed as the library asked for; owned */
    void *memory; /* its dnnl_memory_t; owned */
};

/* Returns owned at *out. native_bf16: products of bfloat16 are the CPU's own. */
enum status gemm_create(int n_threads, bool native_bf16, struct gemm **out, struct error *error);
void gemm_destroy(struct gemm *gemm); /* NULL is fine */

/* What backend_ops says of matrix_create, matrix_destroy and matrix_bytes. */
enum status gemm_pack(struct gemm *gemm, const struct tensor *w, enum dtype compute, const char *name,
                      struct matrix **out, struct error *error);
void gemm_unpack(struct matrix *matrix);
size_t gemm_bytes(struct gemm *gemm, int64_t n, int64_t k, enum dtype compute);

/* y = x w^T + bias (+ y). x: rows of w->k elements of w->kept, end to end; y: rows of w->n elements, end to
 * end, float32, or bfloat16 where w->kept is. Any number of rows; a primitive is made and kept for each
 * number that comes, so ask for few different ones. */
struct gemm_call {
    const void *x;
    const float *bias; /* NULL: none */
    void *y;
    enum dtype y_dtype;
    int64_t rows;
    bool accumulate; /* add to what y holds */
};
enum status gemm_run(struct gemm *gemm, const struct matrix *w, const struct gemm_call *call,
                     struct error *error);

#endif

/* Matrix products by oneDNN: packed weights, and primitives made once for each shape and kept.
 *
 * This file alone knows dnnl.h. It works on what the library takes: dense rows of one of two kinds, float32
 * or bfloat16. linear.c brings everything else (strides, conversions, addends, odd row counts) to that. */
#ifndef ACTDUMP_CPU_GEMM_H
#define ACTDUMP_CPU_GEMM_H

#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

/* Rows of x that go into one product: the library's rate is flat from here on (measured on AVX2 and AVX-512),
 * and the output of very wide matrices should stay in the cache. A tail is rounded up to a multiple of
 * GEMM_ROW_STEP, and taken in two where it is longer than GEMM_ROW_BLOCK, so that a matrix has few
 * primitives: the code made for one takes about 150 KB. The rows of experts, many and short, are taken at
 * once. */
#define GEMM_ROWS 512
#define GEMM_ROWS_WIDE 256
#define GEMM_WIDE 16384
#define GEMM_ROW_STEP 16
#define GEMM_ROW_BLOCK 64

struct gemm;

/* A packed [n, k] weight matrix; what kernels/backend.h calls struct matrix. */
struct matrix {
    int64_t n, k;
    enum dtype compute; /* the load's dtype */
    enum dtype
        kept;     /* what the product runs in: float32 for bfloat16 loads where the CPU has no such product */
    bool packed;  /* in blocks that the library multiplies from as they lie; else each product copies the
                   * matrix into such blocks first (oneDNN 2.6 without AVX-512) */
    void *data;   /* as the library asked for; owned */
    void *memory; /* the library's view of it (dnnl_memory_t); owned */
};

/* Returns owned at *out. native_bf16: the CPU multiplies bfloat16 itself; used where the
 * library may use it too. */
enum status gemm_create(int n_threads, bool native_bf16, struct gemm **out, struct error *error);
void gemm_destroy(struct gemm *gemm); /* NULL is fine */

/* What backend_ops says of matrix_create, matrix_destroy and matrix_bytes. w's data may be aligned to
 * nothing. */
enum status gemm_pack(struct gemm *gemm, const struct tensor *w, enum dtype compute, const char *name,
                      struct matrix **out, struct error *error);
void gemm_unpack(struct matrix *matrix);
size_t gemm_bytes(struct gemm *gemm, int64_t n, int64_t k, enum dtype compute);

struct gemm_call {
    const void *x;      /* [rows, w->k] of w->kept, end to end */
    const float *bias;  /* [w->n] or NULL */
    void *y;            /* [rows, w->n], end to end */
    enum dtype y_dtype; /* float32, or bfloat16 where w->kept is that */
    int64_t rows;       /* at least 1; a primitive is made and kept for each number that comes */
    bool accumulate;    /* add to what y holds */
    bool alone; /* the calling thread computes it by itself, as others may do theirs at the same time */
    int thread; /* its number, below gemm_create's n_threads; where alone */
};

/* y = x w^T + bias (+ y). From one thread, or, where all are `alone`, from as many as gemm_create was told.
 */
enum status gemm_run(struct gemm *gemm, const struct matrix *w, const struct gemm_call *call,
                     struct error *error);

#endif

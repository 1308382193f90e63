/* Matrix products by cuBLAS, which is opened when a backend is made: the program links nothing of it, since
 * machines without a GPU have none and the toolkit that this is built with may have no static one.
 *
 * Row-major like everything here: y[m, n] = x[m, k] w[n, k]^T + beta y. */
#ifndef ACTDUMP_KERNELS_CUDA_BLAS_H
#define ACTDUMP_KERNELS_CUDA_BLAS_H

#include "kernels/cuda/internal.h"

#include <cublas_v2.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What cuBLAS's documentation recommends for Hopper; given by us, so that nothing is allocated later and
 * results do not depend on what else is running. */
#define BLAS_WORKSPACE_BYTES ((size_t)32 << 20)

struct blas_product {
    int64_t m, n, k;
    const void *x, *w;
    void *y;
    int64_t x_stride, y_stride; /* w has no gaps */
    enum dtype in, out;         /* both the same, or bfloat16 in and float32 out */
    float beta;
};

enum status blas_create(struct cuda_backend *cuda, struct blas **out, struct error *error);
void blas_destroy(struct blas *blas); /* NULL is fine */

void blas_run(struct cuda_backend *cuda, const struct blas_product *product);
/* Many products that share n, k, strides, dtypes and beta, in one launch where cuBLAS can (12.5 and later, in
 * == out), else one after the other. */
void blas_run_many(struct cuda_backend *cuda, const struct blas_product *products, int n_products);

/* The functions of cuBLAS that are used. group_gemm may be NULL: older than 12.5. */
struct blas_library {
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*set_workspace)(cublasHandle_t, void *, size_t);
    cublasStatus_t (*set_math_mode)(cublasHandle_t, cublasMath_t);
    const char *(*get_status_name)(cublasStatus_t);
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *,
                           const void *, cudaDataType, int, const void *, cudaDataType, int, const void *,
                           void *, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
    cublasStatus_t (*group_gemm)(cublasHandle_t, const cublasOperation_t *, const cublasOperation_t *,
                                 const int *, const int *, const int *, const void *, const void *const *,
                                 cudaDataType_t, const int *, const void *const *, cudaDataType_t,
                                 const int *, const void *, void *const *, cudaDataType_t, const int *, int,
                                 const int *, cublasComputeType_t);
};

/* Opens libcublas.so; one copy for the process. The sentence says which file was missing. */
enum status blas_library_open(const struct blas_library **out, struct error *error);

#ifdef __cplusplus
}
#endif

#endif

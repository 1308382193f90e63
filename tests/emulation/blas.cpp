/* cuBLAS as far as blas.h names it: column-major products on the CPU, put on streams like everything else. */
#include "state.h"

#include <cstring>
#include <vector>

extern "C" {
#include "kernels/base/dtype.h"
#include "kernels/base/error.h"
#include "kernels/cuda/blas.h"
}

struct emulated_blas {
    cudaStream_t stream;
};

namespace
{

struct product {
    int m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    cudaDataType_t in, out;
    int lda, ldb, ldc;
    bool tf32;
};

float element(const void *data, cudaDataType_t type, int64_t at)
{
    return type == CUDA_R_16BF ? bf16_to_f32(static_cast<const uint16_t *>(data)[at])
                               : static_cast<const float *>(data)[at];
}

/* Ten bits of mantissa, to nearest. */
float round_tf32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* One column of a transposed or plain operand, as floats. */
void take_column(const void *data, cudaDataType_t type, int stride, int column, int k, bool tf32, float *out)
{
    for (int i = 0; i < k; i++) {
        float value = element(data, type, (int64_t)column * stride + i);
        out[i] = tf32 ? round_tf32(value) : value;
    }
}

float dot(const float *a, const float *b, int k)
{
    float sum[8] = {0}, total = 0;
    int i = 0;
    for (; i + 8 <= k; i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] += a[i + j] * b[i + j];
    for (; i < k; i++)
        sum[0] += a[i] * b[i];
    for (float part : sum)
        total += part;
    return total;
}

/* c[i + j ldc] = alpha * (column i of a) . (column j of b) + beta c. */
void run(const product &p)
{
    std::vector<float> a((size_t)p.m * p.k), b((size_t)p.k);
    for (int i = 0; i < p.m; i++)
        take_column(p.a, p.in, p.lda, i, p.k, p.tf32, a.data() + (size_t)i * p.k);
    for (int j = 0; j < p.n; j++) {
        take_column(p.b, p.in, p.ldb, j, p.k, p.tf32, b.data());
        for (int i = 0; i < p.m; i++) {
            int64_t at = (int64_t)j * p.ldc + i;
            float value = p.alpha * dot(a.data() + (size_t)i * p.k, b.data(), p.k);
            if (p.beta != 0)
                value += p.beta * element(p.c, p.out, at);
            if (p.out == CUDA_R_16BF)
                static_cast<uint16_t *>(p.c)[at] = f32_to_bf16(value);
            else
                static_cast<float *>(p.c)[at] = value;
        }
    }
}

bool is_supported(cublasOperation_t ta, cublasOperation_t tb, const product &p)
{
    bool types = p.in == p.out || (p.in == CUDA_R_16BF && p.out == CUDA_R_32F);
    return ta == CUBLAS_OP_T && tb == CUBLAS_OP_N && types && p.m >= 0 && p.n >= 0 && p.lda >= p.k &&
           p.ldb >= p.k && p.ldc >= p.m;
}

cublasStatus_t create(cublasHandle_t *out)
{
    *out = new emulated_blas();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t destroy(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t set_stream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t set_workspace(cublasHandle_t, void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t set_math_mode(cublasHandle_t, cublasMath_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

const char *get_status_name(cublasStatus_t code)
{
    return code == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}

cublasStatus_t gemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                    const void *alpha, const void *a, cudaDataType a_type, int lda, const void *b,
                    cudaDataType, int ldb, const void *beta, void *c, cudaDataType c_type, int ldc,
                    cublasComputeType_t compute, cublasGemmAlgo_t)
{
    product p = {m,
                 n,
                 k,
                 *static_cast<const float *>(alpha),
                 *static_cast<const float *>(beta),
                 a,
                 b,
                 c,
                 a_type,
                 c_type,
                 lda,
                 ldb,
                 ldc,
                 compute == CUBLAS_COMPUTE_32F_FAST_TF32};
    if (!is_supported(ta, tb, p))
        return CUBLAS_STATUS_INVALID_VALUE;
    emulation::counts.products++;
    emulation::stream_push(handle->stream, [=]() { run(p); });
    return CUBLAS_STATUS_SUCCESS;
}

/* The pointers are the device's: read when the work is done. */
cublasStatus_t group_gemm(cublasHandle_t handle, const cublasOperation_t *ta, const cublasOperation_t *tb,
                          const int *m, const int *n, const int *k, const void *alpha, const void *const *a,
                          cudaDataType_t a_type, const int *lda, const void *const *b, cudaDataType_t,
                          const int *ldb, const void *beta, void *const *c, cudaDataType_t c_type,
                          const int *ldc, int n_groups, const int *size, cublasComputeType_t compute)
{
    for (int i = 0; i < n_groups; i++) {
        product p = {m[i],
                     n[i],
                     k[i],
                     static_cast<const float *>(alpha)[i],
                     static_cast<const float *>(beta)[i],
                     nullptr,
                     nullptr,
                     nullptr,
                     a_type,
                     c_type,
                     lda[i],
                     ldb[i],
                     ldc[i],
                     compute == CUBLAS_COMPUTE_32F_FAST_TF32};
        if (size[i] != 1 || a_type != c_type || !is_supported(ta[i], tb[i], p))
            return CUBLAS_STATUS_INVALID_VALUE;
        emulation::counts.grouped_products++;
        emulation::stream_push(handle->stream, [=]() {
            product now = p;
            now.a = a[i], now.b = b[i], now.c = c[i];
            run(now);
        });
    }
    return CUBLAS_STATUS_SUCCESS;
}

struct blas_library library = {create,        destroy,         set_stream, set_workspace,
                               set_math_mode, get_status_name, gemm,       group_gemm};

} // namespace

extern "C" enum status blas_library_open(const struct blas_library **out, struct error *)
{
    library.group_gemm = emulation::knows_grouped ? group_gemm : nullptr;
    *out = &library;
    return STATUS_OK;
}

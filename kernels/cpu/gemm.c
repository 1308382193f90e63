#include "kernels/cpu/gemm.h"
#include "kernels/base/memory.h"

#include <dnnl.h>

struct gemm {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int n_threads;
    bool native_bf16;
};

static enum status check(dnnl_status_t result, const char *what, struct error *error)
{
    if (result == dnnl_success)
        return STATUS_OK;
    enum status status = result == dnnl_out_of_memory ? STATUS_RESOURCE : STATUS_BUG;
    return error_set(error, status, "oneDNN: %s failed with status %d", what, (int)result);
}

static enum status open_library(struct gemm *gemm, struct error *error)
{
    TRY(check(dnnl_engine_create(&gemm->engine, dnnl_cpu, 0), "making an engine", error));
    return check(dnnl_stream_create(&gemm->stream, gemm->engine, dnnl_stream_default_flags),
                 "making a stream", error);
}

enum status gemm_create(int n_threads, bool native_bf16, struct gemm **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct gemm), "the matrix products' state", error));
    struct gemm *gemm = memory;
    gemm->n_threads = n_threads;
    gemm->native_bf16 = native_bf16;
    enum status status = open_library(gemm, error);
    if (status != STATUS_OK) {
        gemm_destroy(gemm);
        return status;
    }
    *out = gemm;
    return STATUS_OK;
}

void gemm_destroy(struct gemm *gemm)
{
    if (gemm == NULL)
        return;
    dnnl_stream_destroy(gemm->stream);
    dnnl_engine_destroy(gemm->engine);
    memory_free(gemm);
}

enum status gemm_pack(struct gemm *gemm, const struct tensor *w, enum dtype compute, const char *name,
                      struct matrix **out, struct error *error)
{
    (void)gemm, (void)w, (void)compute, (void)out;
    return error_set(error, STATUS_BUG, "%s: no matrix products in this build", name);
}

void gemm_unpack(struct matrix *matrix)
{
    memory_free(matrix);
}

size_t gemm_bytes(struct gemm *gemm, int64_t n, int64_t k, enum dtype compute)
{
    (void)gemm;
    return (size_t)(n * k) * dtype_size(compute);
}

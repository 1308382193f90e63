#include "kernels/cuda/cuda_backend.h"
#include "kernels/base/memory.h"
#include "kernels/cuda/blas.h"
#include "kernels/cuda/captures.h"
#include "kernels/cuda/transfer.h"

#define MIB ((size_t)1 << 20)

/* 4 pieces of 16 MiB: one is being filled and one copied, while the others let the host run ahead. A row list
 * of 64 Ki tokens is 256 KiB; a half holds 8 of them. */
static const struct cuda_options default_options = {
    .piece_bytes = 16 * MIB, .n_pieces = 4, .table_bytes = 2 * MIB, .scratch_bytes = 256 * MIB};

void cuda_options_default(struct cuda_options *options)
{
    *options = default_options;
}

static const char *explain(cudaError_t code)
{
    switch (code) {
    case cudaErrorMemoryAllocation:
        return "the device has not enough free memory; a smaller run.batch_tokens needs less";
    case cudaErrorECCUncorrectable:
        return "an uncorrectable memory (ECC) error of the device; it needs a reset, or another device";
    case cudaErrorInsufficientDriver:
        return "the NVIDIA driver is older than this program's CUDA runtime";
    case cudaErrorNoDevice:
        return "no GPU is visible";
    case cudaErrorDevicesUnavailable:
        return "the device is in use by someone who holds it alone";
    case cudaErrorNoKernelImageForDevice:
        return "this program holds no code for a device of this age (compute capability 8.0 is the least)";
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalAddress:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
        return "a kernel faulted; the device's context is lost";
    default:
        return cudaGetErrorString(code);
    }
}

enum status cuda_translate(const struct cuda_backend *cuda, cudaError_t code, const char *what,
                           struct error *error)
{
    if (code == cudaSuccess)
        return STATUS_OK;
    cudaGetLastError(); /* forgets it where it can be forgotten */
    size_t free_bytes = 0, total_bytes = 0;
    if (code != cudaErrorMemoryAllocation || cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess)
        return error_set(error, STATUS_DEVICE, "GPU %d (%s): %s failed: %s (%s)", cuda->options.ordinal,
                         cuda->device_name, what, explain(code), cudaGetErrorName(code));
    return error_set(error, STATUS_DEVICE, "GPU %d (%s): %s failed: %s (%zu MiB of %zu are free)",
                     cuda->options.ordinal, cuda->device_name, what, explain(code), free_bytes / MIB,
                     total_bytes / MIB);
}

enum status cuda_allocate_pinned(const struct cuda_backend *cuda, void **out, size_t bytes, const char *what,
                                 struct error *error)
{
    char doing[160];
    snprintf(doing, sizeof doing, "allocating %zu bytes of pinned host memory for %s", bytes, what);
    cudaError_t code = cudaHostAlloc(out, bytes, cudaHostAllocDefault);
    if (code != cudaErrorMemoryAllocation)
        return cuda_translate(cuda, code, doing, error);
    cudaGetLastError();
    return error_set(
        error, STATUS_RESOURCE,
        "%s failed: the host has not enough memory that may be locked (see ulimit -l and the job's memory "
        "limit)",
        doing);
}

bool cuda_check(struct cuda_backend *cuda, cudaError_t code, const char *what)
{
    return cuda_translate(cuda, code, what, &cuda->base.error) == STATUS_OK;
}

struct cuda_backend *cuda_begin(struct backend *b)
{
    struct cuda_backend *cuda = cuda_get(b);
    if (b->error.status != STATUS_OK)
        return NULL;
    if (!cuda_check(cuda, cudaSetDevice(cuda->options.ordinal), "choosing the device"))
        return NULL;
    for (int i = 0; i < cuda->scratch.n_blocks; i++)
        cuda->scratch.blocks[i].taken = false;
    return cuda;
}

static enum status cuda_allocate(struct backend *b, void **out, size_t bytes, const char *what,
                                 struct error *error)
{
    struct cuda_backend *cuda = cuda_get(b);
    void *memory = NULL;
    char doing[256];
    snprintf(doing, sizeof doing, "allocating %zu bytes for %s", bytes, what);
    TRY(cuda_translate(cuda, cudaSetDevice(cuda->options.ordinal), "choosing the device", error));
    TRY(cuda_translate(cuda, cudaMalloc(&memory, bytes > 0 ? bytes : 1), doing, error));
    cudaError_t code = cudaMemsetAsync(memory, 0, bytes, cuda->compute);
    if (code == cudaSuccess)
        code = cudaStreamSynchronize(cuda->compute);
    if (code != cudaSuccess) {
        cudaFree(memory);
        return cuda_translate(cuda, code, doing, error);
    }
    *out = memory;
    return STATUS_OK;
}

static void cuda_release(struct backend *b, void *memory)
{
    if (memory != NULL)
        cuda_check(cuda_get(b), cudaFree(memory), "releasing device memory");
}

static void cuda_upload(struct backend *b, void *to, const void *from_host, size_t bytes)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        transfer_upload(cuda, to, from_host, bytes);
}

static void cuda_download(struct backend *b, void *to_host, const void *from, size_t bytes)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        transfer_download(cuda, to_host, from, bytes);
}

static void cuda_collect(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype,
                         void *host)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        transfer_collect(cuda, &x, rows, n, dtype, host);
}

static enum status cuda_synchronize(struct backend *b, struct error *error)
{
    struct cuda_backend *cuda = cuda_get(b);
    transfer_finish(cuda);
    cuda_check(cuda, cudaStreamSynchronize(cuda->compute), "running operations");
    cuda_check(cuda, cudaStreamSynchronize(cuda->copy), "copying captured rows to the host");
    enum status status = b->error.status;
    if (status != STATUS_OK)
        error_set(error, status, "%s", b->error.text);
    error_clear(&b->error);
    return status;
}

static void cuda_matrix_destroy(struct backend *b, struct matrix *matrix)
{
    if (matrix == NULL)
        return;
    cuda_release(b, matrix->data);
    memory_free(matrix);
}

static enum status cuda_matrix_create(struct backend *b, const struct tensor *w, enum dtype compute,
                                      const char *name, struct matrix **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct matrix), name, error));
    struct matrix *matrix = memory;
    *matrix = (struct matrix){.dtype = compute, .n = w->rows, .k = w->cols};
    enum status status =
        cuda_allocate(b, &matrix->data, (size_t)(w->rows * w->cols) * dtype_size(compute), name, error);
    struct cuda_backend *cuda = status == STATUS_OK ? cuda_begin(b) : NULL;
    if (cuda != NULL) {
        struct tensor to = tensor_make(matrix->data, compute, w->rows, w->cols);
        transfer_matrix(cuda, w, &to);
    }
    if (status == STATUS_OK && b->error.status != STATUS_OK)
        status = cuda_synchronize(b, error);
    if (status != STATUS_OK) {
        cuda_matrix_destroy(b, matrix);
        return status;
    }
    *out = matrix;
    return STATUS_OK;
}

static size_t cuda_matrix_bytes(struct backend *b, int64_t n, int64_t k, enum dtype compute)
{
    (void)b;
    return (size_t)(n * k) * dtype_size(compute);
}

static void cuda_destroy(struct backend *b)
{
    struct cuda_backend *cuda = cuda_get(b);
    cudaSetDevice(cuda->options.ordinal);
    if (cuda->compute != NULL)
        cudaStreamSynchronize(cuda->compute);
    if (cuda->copy != NULL)
        cudaStreamSynchronize(cuda->copy);
    blas_destroy(cuda->blas);
    transfer_destroy(cuda);
    captures_destroy(cuda);
    staging_destroy(cuda);
    scratch_free(cuda);
    cudaFreeHost(cuda->sizes.host);
    if (cuda->sizes.arrived != NULL)
        cudaEventDestroy(cuda->sizes.arrived);
    if (cuda->compute != NULL)
        cudaStreamDestroy(cuda->compute);
    if (cuda->copy != NULL)
        cudaStreamDestroy(cuda->copy);
    memory_free(cuda);
}

static const struct backend_ops cuda_ops = {
    .destroy = cuda_destroy,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .upload = cuda_upload,
    .download = cuda_download,
    .synchronize = cuda_synchronize,
    .matrix_create = cuda_matrix_create,
    .matrix_destroy = cuda_matrix_destroy,
    .matrix_bytes = cuda_matrix_bytes,
    .embed = cuda_embed,
    .linear = cuda_linear,
    .rms_norm = cuda_rms_norm,
    .add = cuda_add,
    .add_scaled = cuda_add_scaled,
    .silu_mul = cuda_silu_mul,
    .conv_silu = cuda_conv_silu,
    .selective_scan = cuda_selective_scan,
    .ssd_scan = cuda_ssd_scan,
    .rotary = cuda_rotary,
    .attention = cuda_attention,
    .softplus_gate = cuda_softplus_gate,
    .route = cuda_route,
    .group_experts = cuda_group_experts,
    .grouped_linear = cuda_grouped_linear,
    .gathered_linear = cuda_gathered_linear,
    .combine_slots = cuda_combine_slots,
    .ungroup_slots = cuda_ungroup_slots,
    .softmax = cuda_softmax,
    .gather_rows = cuda_gather_rows,
    .collect = cuda_collect,
};

int backend_cuda_device_count(struct error *reason)
{
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code == cudaSuccess && n > 0)
        return n;
    if (code != cudaSuccess)
        cudaGetLastError();
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        error_set(reason, STATUS_DEVICE, "no NVIDIA driver is installed on this machine");
    else
        error_set(reason, STATUS_DEVICE, "no usable GPU: %s",
                  code == cudaSuccess ? "none is visible" : explain(code));
    return 0;
}

/* STATUS_OK where the device is there; else who asked for too much. */
static enum status check_ordinal(int ordinal, struct error *error)
{
    struct error reason = {0};
    int n = backend_cuda_device_count(&reason);
    if (n == 0)
        return error_set(error, STATUS_DEVICE, "%s; set model.device to cpu to run without one", reason.text);
    if (ordinal < 0 || ordinal >= n)
        return error_set(error, STATUS_DEVICE,
                         "GPU %d was asked for, but only %d GPU%s visible to this process", ordinal, n,
                         n == 1 ? " is" : "s are");
    return STATUS_OK;
}

enum status backend_cuda_memory(int ordinal, size_t *free_bytes, size_t *total_bytes, struct error *error)
{
    struct cuda_backend asking = {.options = {.ordinal = ordinal}, .device_name = "asked for its memory"};
    size_t free_now = 0, total = 0;
    TRY(check_ordinal(ordinal, error));
    TRY(cuda_translate(&asking, cudaSetDevice(ordinal), "choosing the device", error));
    TRY(cuda_translate(&asking, cudaMemGetInfo(&free_now, &total), "asking for free memory", error));
    *free_bytes = free_now;
    *total_bytes = total;
    return STATUS_OK;
}

/* An operation's large blocks are two at most, each a quarter longer than what was first asked for; the rest
 * are small. */
size_t backend_cuda_scratch_bytes(void)
{
    return default_options.scratch_bytes / 4 * 10 + 64 * MIB;
}

/* Tells the device's name and size; refuses what the kernels cannot run on. */
static enum status read_properties(struct cuda_backend *cuda, struct error *error)
{
    struct cudaDeviceProp properties;
    TRY(cuda_translate(cuda, cudaSetDevice(cuda->options.ordinal), "choosing the device", error));
    TRY(cuda_translate(cuda, cudaGetDeviceProperties(&properties, cuda->options.ordinal),
                       "reading its properties", error));
    snprintf(cuda->device_name, sizeof cuda->device_name, "%.47s", properties.name);
    cuda->n_processors = properties.multiProcessorCount;
    cuda->max_shared_bytes = properties.sharedMemPerBlockOptin;
    if (properties.major < 8)
        return error_set(error, STATUS_DEVICE,
                         "GPU %d (%s) has compute capability %d.%d; actdump needs 8.0 (A100) or later",
                         cuda->options.ordinal, cuda->device_name, properties.major, properties.minor);
    snprintf(cuda->base.name, sizeof cuda->base.name, "cuda:%d (%.44s)", cuda->options.ordinal,
             cuda->device_name);
    return STATUS_OK;
}

static enum status create_parts(struct cuda_backend *cuda, struct error *error)
{
    const struct cuda_options *options = &cuda->options;
    TRY(read_properties(cuda, error));
    TRY(cuda_translate(cuda, cudaStreamCreateWithFlags(&cuda->compute, cudaStreamNonBlocking),
                       "making a stream", error));
    TRY(cuda_translate(cuda, cudaStreamCreateWithFlags(&cuda->copy, cudaStreamNonBlocking), "making a stream",
                       error));
    TRY(cuda_translate(cuda, cudaEventCreateWithFlags(&cuda->sizes.arrived, cudaEventDisableTiming),
                       "making an event", error));
    TRY(transfer_create(cuda, options->piece_bytes, options->n_pieces, error));
    TRY(captures_create(cuda, error));
    TRY(staging_create(cuda, options->table_bytes, error));
    return blas_create(cuda, &cuda->blas, error);
}

enum status cuda_backend_create(const struct cuda_options *options, struct backend **out, struct error *error)
{
    void *memory;
    TRY(check_ordinal(options->ordinal, error));
    TRY(memory_allocate(&memory, sizeof(struct cuda_backend), "the CUDA backend", error));
    struct cuda_backend *cuda = memory;
    cuda->options = *options;
    cuda->base.ops = &cuda_ops;
    cuda->base.captures = &cuda_captures;
    cuda->base.n_threads = 1;
    snprintf(cuda->device_name, sizeof cuda->device_name, "unknown");
    enum status status = create_parts(cuda, error);
    if (status != STATUS_OK) {
        cuda_destroy(&cuda->base);
        return status;
    }
    *out = &cuda->base;
    return STATUS_OK;
}

enum status backend_create_cuda(int ordinal, bool tf32, struct backend **out, struct error *error)
{
    struct cuda_options options = default_options;
    options.ordinal = ordinal;
    options.tf32 = tf32;
    return cuda_backend_create(&options, out, error);
}

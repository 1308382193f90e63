#include "pipeline/device.h"

#include "kernels/base/processors.h"
#include "kernels/cuda/cuda_backend.h"

#include <unistd.h>

int device_count_threads(int64_t wanted, int node_count)
{
    if (wanted > 0)
        return (int)wanted;
    int mine = processors_count();
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    /* A launcher that binds ranks has divided the processors already. */
    if (mine >= online && node_count > 1)
        mine /= node_count;
    return mine > 1 ? mine : 1;
}

int device_writer_threads(int n_threads)
{
    /* Compressing three layers takes about 1 % of a CPU run. Capturing everything takes as much as computing
     * it: the caller then waits, and while it does there should be a worker for each processor of a small
     * rank; a large one would need more memory for chunks than that is worth. */
    int few = n_threads < 2 ? 1 : 2, half = n_threads / 2 < 8 ? n_threads / 2 : 8,
        quarter = (n_threads + 3) / 4;
    int most = half > quarter ? half : quarter;
    return most > few ? most : few;
}

/* At most: each holds chunks, and what one rank's device gives is hardly ever more than so many can compress.
 */
#define MAX_DEVICE_WRITERS 16

int device_plan_writers(const struct backend *backend, int n_threads)
{
    if (backend->is_host)
        return device_writer_threads(n_threads);
    /* One drives the device, one takes what comes from it. */
    int left = n_threads > 2 ? n_threads - 2 : 1;
    return left < MAX_DEVICE_WRITERS ? left : MAX_DEVICE_WRITERS;
}

/* The GPU of this rank: rank k of a node takes GPU k. */
static enum status open_gpu(const struct device_request *request, int n_devices, struct backend **out,
                            struct error *error)
{
    if (request->node_count > n_devices)
        return error_set(error, STATUS_DEVICE,
                         "this node has %d ranks and %d GPUs that they may use; one rank takes one GPU",
                         request->node_count, n_devices);
    return backend_create_cuda(request->node_rank, request->tf32, out, error);
}

enum status device_get_memory(int ordinal, struct device_memory *out, struct error *error)
{
    *out = (struct device_memory){.operations = backend_cuda_scratch_bytes()};
    return backend_cuda_memory(ordinal, &out->free_bytes, &out->total_bytes, error);
}

enum status device_open(const struct device_request *request, struct backend **out, struct error *error)
{
    struct error reason = {0};
    if (request->device == DEVICE_CPU)
        return backend_create_cpu(request->n_threads, out, error);
    int n_devices = backend_cuda_device_count(&reason);
    if (n_devices > 0)
        return open_gpu(request, n_devices, out, error);
    if (request->device == DEVICE_CUDA)
        return error_set(error, STATUS_DEVICE, "model.device is \"cuda\": %s",
                         reason.status != STATUS_OK ? reason.text
                                                    : "there is no GPU that this process may use");
    return backend_create_cpu(request->n_threads, out, error);
}

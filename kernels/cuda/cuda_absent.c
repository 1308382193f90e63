/* What a build without CUDA says when it is asked for a GPU. */
#include "kernels/cuda/cuda_backend.h"

static enum status say_absent(struct error *error)
{
    return error_set(
        error, STATUS_DEVICE,
        "this actdump was built without CUDA; build it where nvcc is found (ACTDUMP_CUDA=ON) or set "
        "model.device to cpu");
}

int backend_cuda_device_count(struct error *reason)
{
    say_absent(reason);
    return 0;
}

enum status backend_cuda_memory(int ordinal, size_t *free_bytes, size_t *total_bytes, struct error *error)
{
    (void)ordinal;
    (void)free_bytes;
    (void)total_bytes;
    return say_absent(error);
}

size_t backend_cuda_scratch_bytes(void)
{
    return 0;
}

enum status backend_create_cuda(int ordinal, bool tf32, struct backend **out, struct error *error)
{
    (void)ordinal;
    (void)tf32;
    (void)out;
    return say_absent(error);
}

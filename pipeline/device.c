#include "pipeline/device.h"

#include <sched.h>
#include <unistd.h>

int device_count_threads(int64_t wanted, int node_count)
{
    if (wanted > 0)
        return (int)wanted;
    cpu_set_t set;
    int mine = 1;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        mine = CPU_COUNT(&set);
    /* A launcher that binds ranks has divided the processors already. */
    if (mine >= online && node_count > 1)
        mine /= node_count;
    return mine > 1 ? mine : 1;
}

int device_writer_threads(int n_threads)
{
    /* Compressing three layers takes about 1 % of a CPU run; capturing everything may want more than a
     * quarter, and the caller then waits, which the summary says. */
    return (n_threads + 3) / 4;
}

enum status device_open(const struct device_request *request, struct backend **out, struct error *error)
{
    if (request->device == DEVICE_CUDA)
        return error_set(error, STATUS_DEVICE, "model.device is cuda, and this build of actdump has no CUDA");
    return backend_create_cpu(request->n_threads, out, error);
}

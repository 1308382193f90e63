/* Which backend a rank runs on. */
#ifndef ACTDUMP_PIPELINE_DEVICE_H
#define ACTDUMP_PIPELINE_DEVICE_H

#include "kernels/backend.h"
#include "pipeline/job.h"

struct device_request {
    enum job_device device;
    bool tf32;
    int node_rank, node_count; /* this rank among those of its node */
    int n_threads;             /* for compute on the CPU */
};

/* Threads that a rank has for itself: what run.threads says, else the processors it may run on, shared with
 * the node's other ranks where nobody bound them. */
int device_count_threads(int64_t wanted, int node_count);
/* Of a rank's threads, those that compress beside the compute on a CPU. */
int device_writer_threads(int n_threads);
/* The same wherever the backend computes: nearly all where a device does. */
int device_plan_writers(const struct backend *backend, int n_threads);

/* Bytes of a GPU's memory: free now, in all, and what a backend's operations will take for intermediates at
 * most. */
struct device_memory {
    size_t free_bytes, total_bytes, operations;
};
enum status device_get_memory(int ordinal, struct device_memory *out, struct error *error);

/* Opens it: with auto, a GPU where this build and this machine have one, else the CPU. Returns owned at *out.
 */
enum status device_open(const struct device_request *request, struct backend **out, struct error *error);

#endif

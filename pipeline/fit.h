/* Whether what a job needs fits into memory, before any weight is loaded; and how many tokens a batch takes
 * where run.batch_tokens is "auto" and a device computes. */
#ifndef ACTDUMP_PIPELINE_FIT_H
#define ACTDUMP_PIPELINE_FIT_H

#include "pipeline/device.h"
#include "pipeline/plan.h"

/* Bytes of one rank. Sizes of the host's are 0 where they cannot be found out. */
struct fit {
    bool is_host; /* weights, workspace and carried state lie in the host's memory */
    struct replica_memory replica;
    double writer;  /* chunks being filled and compressed */
    double program; /* the program, its libraries and their threads: measured, Debian 12 */
    double ring;    /* captured rows on their way, on the device and in pinned host memory each */
    double host, host_available, host_total; /* needed; what this process may have now, and at most */
    double device;                           /* needed */
    struct device_memory on_device;
};

struct fit_request {
    const struct plan *plan;
    struct backend *backend;
    int device_ordinal;
    int n_threads;  /* of the rank */
    int node_count; /* ranks that share the host's memory */
};

/* From config and corpus alone. */
enum status fit_plan(const struct fit_request *request, struct fit *out, struct error *error);
/* STATUS_DEVICE or STATUS_RESOURCE, with all numbers, where it cannot fit: where a device has less memory
 * free than the job takes there, or the host's ranks together more than the machine, or this process' cgroup,
 * has at all. Where that much is only not free now, `warning` (a sentence; status STATUS_OK: nothing to say)
 * tells. */
enum status fit_check(const struct fit_request *request, const struct fit *fit, struct error *warning,
                      struct error *error);
/* The number of tokens that "auto" stands for on this backend: on the CPU the plan's own; on a device the
 * largest of a few powers of two with which the job takes at most nine tenths of the device's whole memory.
 * Not of what is free: the same job on the same kind of device shall have the same batches. */
enum status fit_choose_batch(const struct fit_request *request, int64_t *batch_tokens, struct error *error);

/* Bytes of memory that this process may have now and at most: of the machine, or less where cgroups allow
 * less. 0 where it cannot be found out. */
void fit_host_memory(double *available, double *total);

#endif

#include "pipeline/fit.h"

#include "pipeline/watch.h"
#include "pipeline/writer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM_BYTES 60e6
#define GIB 1073741824.0

/* Tokens a batch on a device, the largest first: products of that many rows keep it busy, fewer fit where
 * memory is short. */
static const int64_t device_batches[] = {16384, 8192, 4096, 2048};
#define SHARE_OF_DEVICE 0.9

/* ---------------------------------------------------------------- the host's memory */

/* The number in a file of one number; negative where there is none ("max" too). */
static double read_number(const char *path)
{
    double value = -1;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1;
    if (fscanf(file, "%lf", &value) != 1)
        value = -1;
    fclose(file);
    return value;
}

/* A field of a file with lines "name 123" or "Name: 123 kB"; negative where it has none. */
static double read_field(const char *path, const char *name)
{
    char line[256];
    double value = -1;
    size_t n = strlen(name);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, name, n) == 0 && (line[n] == ' ' || line[n] == ':'))
            value = atof(line + n + 1);
    if (file != NULL)
        fclose(file);
    return value;
}

static void take_less(double limit, double used, double *available, double *total)
{
    if (limit <= 0)
        return;
    double left = limit - (used > 0 ? used : 0);
    if (limit < *total)
        *total = limit;
    if (left < *available)
        *available = left > 0 ? left : 0;
}

/* One level of a cgroup: version 2's files, or version 1's. Pages of files that were read count as used there
 * and are given back when memory is wanted. */
static void look_at_cgroup(const char *folder, double *available, double *total)
{
    static const struct {
        const char *limit, *used, *cached;
    } versions[] = {{"memory.max", "memory.current", "inactive_file"},
                    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}};
    char path[4608];
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, versions[i].limit);
        double limit = read_number(path);
        snprintf(path, sizeof path, "%s/%s", folder, versions[i].used);
        double used = read_number(path);
        snprintf(path, sizeof path, "%s/memory.stat", folder);
        double cached = read_field(path, versions[i].cached);
        take_less(limit, used - (cached > 0 ? cached : 0), available, total);
    }
}

/* The process' own cgroup and all above it. */
static void look_at_cgroups(const char *mount, char *cgroup, double *available, double *total)
{
    char folder[4352];
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, cgroup);
        look_at_cgroup(folder, available, total);
        char *slash = strrchr(cgroup, '/');
        if (slash == NULL)
            return;
        *slash = '\0';
    }
}

void fit_host_memory(double *available, double *total)
{
    char line[4096];
    *total = 1024 * read_field("/proc/meminfo", "MemTotal");
    *available = 1024 * read_field("/proc/meminfo", "MemAvailable");
    if (*total <= 0 || *available < 0) {
        *total = *available = 0;
        return;
    }
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        /* "0::/a/b" of version 2, "5:cpu,memory:/a/b" of version 1 */
        char *controllers = strchr(line, ':'),
             *cgroup = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (cgroup == NULL)
            continue;
        *cgroup++ = '\0';
        cgroup[strcspn(cgroup, "\n")] = '\0';
        if (controllers[1] == '\0')
            look_at_cgroups("/sys/fs/cgroup", cgroup, available, total);
        else if (strstr(controllers, "memory") != NULL)
            look_at_cgroups("/sys/fs/cgroup/memory", cgroup, available, total);
    }
    if (file != NULL)
        fclose(file);
}

/* ---------------------------------------------------------------- the sum */

static enum status add_up(const struct fit_request *request, const struct watch *watch, struct fit *out,
                          struct error *error)
{
    const struct plan *plan = request->plan;
    struct backend *backend = request->backend;
    struct writer_options options = {.folder = plan->job->store_path,
                                     .n_threads = device_plan_writers(backend, request->n_threads)};
    struct fit fit = {.is_host = backend->is_host, .program = PROGRAM_BYTES};
    TRY(replica_plan(plan->model, backend, watch_observer((struct watch *)(uintptr_t)watch), &plan->limits,
                     &fit.replica, error));
    double replica = (double)fit.replica.weights + (double)fit.replica.workspace + (double)fit.replica.carry;
    fit.writer = (double)writer_bytes(&plan->layout, &options);
    fit.ring = backend->captures == NULL ? 0 : (double)watch_ring_bytes(plan);
    fit.host = fit.program + fit.writer + fit.ring + (fit.is_host ? replica : 0);
    fit_host_memory(&fit.host_available, &fit.host_total);
    if (!fit.is_host) {
        TRY(device_get_memory(request->device_ordinal, &fit.on_device, error));
        fit.device = replica + fit.ring + (double)fit.on_device.operations;
    }
    *out = fit;
    return STATUS_OK;
}

enum status fit_plan(const struct fit_request *request, struct fit *out, struct error *error)
{
    struct watch *watch;
    TRY(watch_create(request->plan, &watch, error));
    enum status status = add_up(request, watch, out, error);
    watch_destroy(watch);
    return status;
}

static enum status check_device(const struct fit_request *request, const struct fit *fit, struct error *error)
{
    const struct device_memory *m = &fit->on_device;
    if (fit->is_host || fit->device <= (double)m->free_bytes)
        return STATUS_OK;
    return error_set(error, STATUS_DEVICE,
                     "%s: the job does not fit: weights %.2f GiB, workspace %.2f GiB for batches of %" PRId64
                     " tokens, carried state %.2f GiB, captured rows %.2f GiB and operations %.2f GiB make "
                     "%.2f GiB, and %.2f GiB of "
                     "%.2f GiB are free; a smaller run.batch_tokens needs less workspace",
                     request->backend->name, (double)fit->replica.weights / GIB,
                     (double)fit->replica.workspace / GIB, request->plan->batch_tokens,
                     (double)fit->replica.carry / GIB, fit->ring / GIB, (double)m->operations / GIB,
                     fit->device / GIB, (double)m->free_bytes / GIB, (double)m->total_bytes / GIB);
}

static enum status describe_host(const struct fit_request *request, const struct fit *fit, enum status status,
                                 struct error *out)
{
    double needed = fit->host * request->node_count;
    return error_set(out, status,
                     "the job %s into the host's memory: %d rank%s on this machine of %.2f GiB each (weights "
                     "%.2f GiB, workspace "
                     "%.2f GiB, carried state %.2f GiB, chunks %.2f GiB, captured rows %.2f GiB, the program "
                     "%.2f GiB) make %.2f GiB; "
                     "%.2f GiB are free of %.2f GiB that this process may have",
                     needed > fit->host_total ? "does not fit" : "may not fit", request->node_count,
                     request->node_count == 1 ? "" : "s", fit->host / GIB,
                     fit->is_host ? (double)fit->replica.weights / GIB : 0.0,
                     fit->is_host ? (double)fit->replica.workspace / GIB : 0.0,
                     fit->is_host ? (double)fit->replica.carry / GIB : 0.0, fit->writer / GIB,
                     fit->ring / GIB, fit->program / GIB, needed / GIB, fit->host_available / GIB,
                     fit->host_total / GIB);
}

enum status fit_check(const struct fit_request *request, const struct fit *fit, struct error *warning,
                      struct error *error)
{
    TRY(check_device(request, fit, error));
    double needed = fit->host * request->node_count;
    if (fit->host_total <= 0 || needed <= fit->host_available)
        return STATUS_OK;
    if (needed > fit->host_total)
        return describe_host(request, fit, STATUS_RESOURCE, error);
    describe_host(request, fit, STATUS_RESOURCE, warning);
    return STATUS_OK;
}

enum status fit_choose_batch(const struct fit_request *request, int64_t *batch_tokens, struct error *error)
{
    size_t n = sizeof device_batches / sizeof device_batches[0];
    struct plan plan = *request->plan;
    struct fit_request trial = *request;
    *batch_tokens = plan.batch_tokens;
    if (request->backend->is_host)
        return STATUS_OK;
    trial.plan = &plan;
    for (size_t i = 0; i < n; i++) {
        struct fit fit;
        TRY(plan_set_batch_tokens(&plan, device_batches[i], error));
        TRY(fit_plan(&trial, &fit, error));
        *batch_tokens = device_batches[i];
        if (fit.device <= SHARE_OF_DEVICE * (double)fit.on_device.total_bytes)
            break;
    }
    return STATUS_OK;
}

#include "pipeline/schedule.h"

#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/clock.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

struct schedule {
    struct schedule_options options;
    pthread_mutex_t lock;
    bool *done; /* [n_units] */
    int64_t next, in_flight;
    struct error failure; /* or the stop's reason under STATUS_STOPPED */
    struct schedule_progress progress;
    double start_s;
};

enum status schedule_create(const struct schedule_options *options, struct schedule **out,
                            struct error *error)
{
    void *memory, *done;
    TRY(memory_allocate(&memory, sizeof(struct schedule), "the schedule", error));
    enum status status =
        memory_allocate_array(&done, (size_t)options->n_units, sizeof(bool), "the schedule", error);
    if (status != STATUS_OK) {
        memory_free(memory);
        return status;
    }
    struct schedule *schedule = memory;
    schedule->options = *options;
    schedule->done = done;
    schedule->start_s = clock_seconds();
    pthread_mutex_init(&schedule->lock, NULL);
    schedule->progress.units_total = options->n_units;
    for (int64_t u = 0; u < options->n_units; u++) {
        schedule->done[u] = options->done[u];
        schedule->progress.units_done += options->done[u];
        schedule->progress.tokens_total += options->unit_tokens[u];
        schedule->progress.tokens_done += options->done[u] ? options->unit_tokens[u] : 0;
    }
    *out = schedule;
    return STATUS_OK;
}

void schedule_destroy(struct schedule *schedule)
{
    if (schedule == NULL)
        return;
    pthread_mutex_destroy(&schedule->lock);
    memory_free(schedule->done);
    memory_free(schedule);
}

void schedule_next(struct schedule *schedule, struct assignment *out)
{
    pthread_mutex_lock(&schedule->lock);
    *out = (struct assignment){.unit = -1, .in_flight = schedule->in_flight};
    if (schedule->failure.status == STATUS_OK) {
        while (schedule->next < schedule->options.n_units && schedule->done[schedule->next])
            schedule->next++;
        if (schedule->next < schedule->options.n_units) {
            out->unit = schedule->next++;
            schedule->in_flight++;
        }
    }
    pthread_mutex_unlock(&schedule->lock);
}

void schedule_record(struct schedule *schedule, struct segment_record *record)
{
    pthread_mutex_lock(&schedule->lock);
    schedule->done[record->unit] = true;
    schedule->in_flight--;
    schedule->progress.units_done++;
    schedule->progress.tokens_done += schedule->options.unit_tokens[record->unit];
    schedule->options.on_record(schedule->options.context, record);
    pthread_mutex_unlock(&schedule->lock);
}

void schedule_add_tokens(struct schedule *schedule, int64_t tokens)
{
    pthread_mutex_lock(&schedule->lock);
    schedule->progress.tokens_this_run += tokens;
    pthread_mutex_unlock(&schedule->lock);
}

void schedule_fail(struct schedule *schedule, const struct error *error)
{
    pthread_mutex_lock(&schedule->lock);
    /* a failure says more than a stop that came first */
    if (schedule->failure.status == STATUS_OK || schedule->failure.status == STATUS_STOPPED)
        schedule->failure = *error;
    pthread_mutex_unlock(&schedule->lock);
}

void schedule_stop(struct schedule *schedule, const char *why)
{
    pthread_mutex_lock(&schedule->lock);
    if (schedule->failure.status == STATUS_OK) {
        log_warning("stopping: %s", why);
        error_set(&schedule->failure, STATUS_STOPPED, "%s", why);
    }
    pthread_mutex_unlock(&schedule->lock);
}

enum status schedule_status(struct schedule *schedule, struct error *error)
{
    pthread_mutex_lock(&schedule->lock);
    struct error failure = schedule->failure;
    pthread_mutex_unlock(&schedule->lock);
    return failure.status == STATUS_OK ? STATUS_OK : error_set(error, failure.status, "%s", failure.text);
}

void schedule_get_progress(struct schedule *schedule, struct schedule_progress *out)
{
    pthread_mutex_lock(&schedule->lock);
    *out = schedule->progress;
    pthread_mutex_unlock(&schedule->lock);
    out->elapsed_s = clock_seconds() - schedule->start_s;
}

#include "pipeline/run.h"

#include "engine/json.h"
#include "engine/safetensors.h"
#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "kernels/base/processors.h"
#include "pipeline/batches.h"
#include "pipeline/clock.h"
#include "pipeline/device.h"
#include "pipeline/fit.h"
#include "pipeline/files.h"
#include "pipeline/lock.h"
#include "pipeline/progress.h"
#include "pipeline/resume.h"
#include "pipeline/stop.h"
#include "pipeline/watch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Between looks for signals, stops and time limits. */
#define ATTEND_SECONDS 0.02
/* Between writings of store.json while units come in: what a killed job must find out again is cheap to. */
#define MANIFEST_SECONDS 10.0
/* Within this a unit that begins has its file. */
#define BEGIN_SECONDS 0.5
/* A batch of less than this hides the answer to a request for the next unit. */
#define AHEAD_SECONDS 1.0

struct job_run {
    const struct job *job;
    struct ranks *ranks;
    bool is_first; /* rank 0 */
    struct model *model;
    struct corpus *corpus;
    struct plan *plan;
    int64_t batch_tokens;
    struct backend *backend;
    struct watch *watch;
    struct replica *replica;
    struct batches *batches;
    struct writer *writer;
    int n_threads;
    /* rank 0 */
    int lock;
    struct store *store;
    struct schedule *schedule;
    double manifest_written_s;
    struct error manifest_error;
    struct progress progress;
    /* this rank's */
    bool *done; /* [n_units] */
    double start_s, time_limit_s;
    double batch_s;            /* that the last batch took */
    double forward_s, write_s; /* in the forward (rows put into chunks included), waiting for the writer */
    int64_t n_tokens;
    double bytes, raw_bytes; /* of segments that this rank committed */
    pthread_t attendant;
    atomic_bool attending;
};

/* ---------------------------------------------------------------- set-up */

static struct fit_request ask_fit(const struct job_run *run)
{
    return (struct fit_request){.plan = run->plan,
                                .backend = run->backend,
                                .device_ordinal = ranks_node_rank(run->ranks),
                                .n_threads = run->n_threads,
                                .node_count = ranks_node_count(run->ranks)};
}

/* Rank 0: what "auto" stands for. A store that was begun goes on with the batches that it was begun with. */
static enum status choose_batch(struct job_run *run, struct error *error)
{
    struct store *then = NULL;
    struct fit_request request = ask_fit(run);
    double recorded = 0;
    run->batch_tokens = run->plan->batch_tokens;
    if (run->job->batch_tokens > 0 || !run->is_first)
        return STATUS_OK;
    /* one that cannot be read is reported where it is gone on with */
    if (store_exists(run->job->store_path) && store_open(run->job->store_path, &then, NULL) == STATUS_OK)
        json_get_number(cJSON_GetObjectItemCaseSensitive(then->run, "batch_tokens"), &recorded);
    store_close(then);
    if (recorded < 1 || recorded > INT32_MAX)
        return fit_choose_batch(&request, &run->batch_tokens, error);
    run->batch_tokens = (int64_t)recorded;
    return STATUS_OK;
}

static enum status open_inputs(struct job_run *run, struct error *error)
{
    const struct job *job = run->job;
    TRY(model_open(job->checkpoint, job->load_dtype, &run->model, error));
    TRY(corpus_open(&job->corpus, run->model->vocab_size, &run->corpus, error));
    TRY(plan_create(job, run->model, run->corpus, &run->plan, error));
    run->n_threads = device_count_threads(job->n_threads, ranks_node_count(run->ranks));
    struct device_request request = {.device = job->device,
                                     .tf32 = job->tf32,
                                     .node_rank = ranks_node_rank(run->ranks),
                                     .node_count = ranks_node_count(run->ranks),
                                     .n_threads = run->n_threads};
    TRY(device_open(&request, &run->backend, error));
    if (run->backend->captures != NULL)
        plan_expect_converted(run->plan);
    TRY(choose_batch(run, error));
    void *done;
    TRY(memory_allocate_array(&done, (size_t)run->plan->n_units, sizeof(bool), "the schedule", error));
    run->done = done;
    return STATUS_OK;
}

/* All ranks cut the same batches. */
static enum status settle_plan(struct job_run *run, struct error *error)
{
    ranks_broadcast(run->ranks, &run->batch_tokens, sizeof run->batch_tokens);
    TRY(plan_set_batch_tokens(run->plan, run->batch_tokens, error));
    return watch_create(run->plan, &run->watch, error);
}

/* Before any weight is loaded. */
static enum status check_memory(struct job_run *run, struct error *error)
{
    struct fit_request request = ask_fit(run);
    struct fit fit;
    struct error warning = {0};
    TRY(fit_plan(&request, &fit, error));
    TRY(fit_check(&request, &fit, &warning, error));
    if (warning.status != STATUS_OK && run->is_first)
        log_warning("%s", warning.text);
    return STATUS_OK;
}

/* What of the corpus is not as one might think. */
static void mention_corpus(const struct job_run *run)
{
    int64_t n_empty = corpus_n_empty(run->corpus), limit = run->job->corpus.limit;
    if (!run->is_first)
        return;
    if (limit > run->plan->n_sequences)
        log_warning("corpus.limit is %lld, but there are only %lld sequences (%lld tokens)", (long long)limit,
                    (long long)run->plan->n_sequences, (long long)run->plan->n_tokens);
    if (n_empty > 0)
        log_info("%lld of the corpus' %lld documents are empty and give no rows", (long long)n_empty,
                 (long long)corpus_n_documents(run->corpus));
}

/* Rank 0: what the store is and what of it is there. */
static enum status open_store(struct job_run *run, struct error *error)
{
    if (!run->is_first)
        return STATUS_OK;
    char digest[33];
    int64_t bytes;
    TRY(store_make_folders(run->job->store_path, error));
    TRY(lock_acquire(run->job->store_path, &run->lock, error));
    TRY(checkpoint_identify(run->job->checkpoint, digest, &bytes, error));
    struct manifest_facts facts = {.checkpoint_digest = digest,
                                   .checkpoint_bytes = bytes,
                                   .backend = run->backend->name,
                                   .n_threads = run->n_threads};
    TRY(manifest_create(run->plan, run->corpus, &facts, &run->store, error));
    return resume_prepare(run->store, run->corpus, run->done, error);
}

static enum status open_replica(struct job_run *run, struct error *error)
{
    struct writer_options options = {.folder = run->job->store_path,
                                     .n_threads = device_plan_writers(run->backend, run->n_threads),
                                     .stop_on_nonfinite = run->job->stop_on_nonfinite};
    double start = clock_seconds();
    TRY(check_memory(run, error));
    TRY(writer_create(&run->plan->layout, &options, &run->writer, error));
    watch_connect(run->watch, run->backend, run->writer);
    TRY(watch_settle(run->watch, error));
    TRY(replica_create(run->model, run->backend, watch_observer(run->watch), &run->plan->limits,
                       &run->replica, error));
    TRY(batches_create(run->plan, run->corpus, &run->batches, error));
    log_debug("weights loaded in %.1f s; %.2f GiB in use", clock_seconds() - start,
              (double)memory_in_use() / (double)(1 << 30));
    return STATUS_OK;
}

/* ---------------------------------------------------------------- rank 0's book */

static void on_record(void *context, struct segment_record *record)
{
    struct job_run *run = context;
    segment_record_fini(&run->store->segments[record->unit]);
    run->store->segments[record->unit] = *record;
    log_debug("unit %lld: sequences %lld to %lld, %lld tokens, %.1f MB of %.1f MB", (long long)record->unit,
              (long long)record->first_sequence,
              (long long)(record->first_sequence + record->n_sequences - 1), (long long)record->n_tokens,
              (double)record->bytes * 1e-6, (double)record->raw_bytes * 1e-6);
    if (clock_seconds() - run->manifest_written_s < MANIFEST_SECONDS)
        return;
    run->manifest_written_s = clock_seconds();
    store_write(run->store, NULL, &run->manifest_error);
}

static enum status start_schedule(struct job_run *run, struct error *error)
{
    struct error mine = {0};
    if (run->is_first) {
        struct schedule_options options = {.n_units = run->plan->n_units,
                                           .unit_tokens = run->plan->unit_tokens,
                                           .done = run->done,
                                           .on_record = on_record,
                                           .context = run};
        schedule_create(&options, &run->schedule, &mine);
    }
    if (ranks_agree(run->ranks, &mine) != STATUS_OK)
        return error_set(error, mine.status, "%s", mine.text);
    run->manifest_written_s = clock_seconds();
    return ranks_start(run->ranks, run->schedule, run->plan->captures.n, error);
}

/* ---------------------------------------------------------------- stopping */

/* Seconds from the start at which the job must be told to stop; huge where no limit is known. */
static double find_time_limit(const struct job_run *run)
{
    double limit = run->job->time_limit_seconds > 0 ? run->job->time_limit_seconds : 1e18;
    const char *end = getenv("SLURM_JOB_END_TIME"); /* seconds since 1970 */
    if (end != NULL && atof(end) > 0) {
        double left = atof(end) - (double)time(NULL);
        if (left < limit)
            limit = left;
    }
    return limit - run->job->grace_seconds;
}

/* Passes signals and limits on while the compute thread is deep in a batch. */
static void *attend(void *context)
{
    struct job_run *run = context;
    bool reported = false;
    processors_release_thread();
    while (atomic_load(&run->attending)) {
        char why[64];
        if (stop_signal() != 0 && !reported) {
            snprintf(why, sizeof why, "rank %d got %s", ranks_rank(run->ranks), strsignal(stop_signal()));
            ranks_report_stop(run->ranks, why);
            reported = true;
        }
        if (run->is_first && clock_seconds() - run->start_s > run->time_limit_s)
            ranks_report_stop(run->ranks, "the time limit is near");
        if (ranks_poll(run->ranks) != STATUS_OK)
            stop_set_deadline(run->job->grace_seconds);
        clock_sleep(ATTEND_SECONDS);
    }
    return NULL;
}

static enum status start_attendant(struct job_run *run, struct error *error)
{
    run->time_limit_s = find_time_limit(run);
    atomic_store(&run->attending, true);
    int code = pthread_create(&run->attendant, NULL, attend, run);
    if (code == 0)
        return STATUS_OK;
    atomic_store(&run->attending, false);
    return error_set_errno(error, STATUS_RESOURCE, code, "the thread that attends to signals does not start");
}

static void end_attendant(struct job_run *run)
{
    if (atomic_exchange(&run->attending, false))
        pthread_join(run->attendant, NULL);
}

/* Whether the unit at hand is to be dropped: something failed, or what is left of it does not fit before the
 * deadline at the rate so far. Where another rank found no room for a further unit, this one may still fit.
 */
static bool must_drop(struct job_run *run, double unit_start_s, int64_t tokens_done, int64_t tokens_left)
{
    enum status status = ranks_poll(run->ranks);
    if (status == STATUS_OK)
        return false;
    if (status != STATUS_STOPPED && status != STATUS_RESOURCE)
        return true;
    stop_set_deadline(run->job->grace_seconds);
    if (tokens_done == 0)
        return true;
    double rate = (clock_seconds() - unit_start_s) / (double)tokens_done;
    /* a fifth for compressing, closing and syncing */
    return rate * (double)tokens_left > 0.8 * stop_seconds_left();
}

/* ---------------------------------------------------------------- units */

static enum status collect_records(struct job_run *run, bool wait, struct error *error)
{
    for (bool have = true; have;) {
        struct segment_record record;
        TRY(writer_collect(run->writer, wait, &record, &have, error));
        if (!have)
            break;
        run->bytes += (double)record.bytes;
        run->raw_bytes += (double)record.raw_bytes;
        ranks_report(run->ranks, &record);
    }
    return STATUS_OK;
}

static enum status run_batch(struct job_run *run, const struct batch *batch, const struct sequence *sequences,
                             struct error *error)
{
    double start = clock_seconds();
    TRY(watch_begin_batch(run->watch, batch, sequences, error));
    TRY(replica_start(run->replica, batch, error));
    TRY(watch_end_batch(run->watch, error));
    run->batch_s = clock_seconds() - start;
    run->forward_s += run->batch_s;
    run->n_tokens += batch->n_tokens;
    ranks_report_tokens(run->ranks, batch->n_tokens);
    if (run->is_first)
        progress_show(&run->progress, run->schedule);
    return STATUS_OK;
}

/* Bytes left to anyone on the store's file system; huge where it does not say. */
static double room_left(const struct job_run *run)
{
    struct statvfs fs;
    return statvfs(run->job->store_path, &fs) == 0 ? (double)fs.f_bavail * (double)fs.f_frsize : 1e30;
}

/* Before a unit: whether the file system has room for it and for those in flight, at the ratio of raw bytes
 * to bytes that segments came to so far. A check, not a promise: others write too, and the writer reports a
 * disk that fills up all the same.
 *
 * Units in flight were counted when this one was handed out; some are committed by now, others have only
 * begun. Where it matters, their files say what they still have to write, once those that begin now have had
 * the time to make theirs. */
static enum status check_room(struct job_run *run, const struct assignment *unit, struct error *error)
{
    int64_t raw;
    char folder[FILES_PATH_BYTES];
    TRY(plan_unit_bytes(run->plan, run->corpus, unit->unit, &raw, error));
    double need = (double)raw * (run->raw_bytes > 0 ? run->bytes / run->raw_bytes : 1.0);
    if (need * (double)(1 + unit->in_flight) <= room_left(run))
        return STATUS_OK;
    if (unit->in_flight > 0)
        clock_sleep(BEGIN_SECONDS);
    snprintf(folder, sizeof folder, "%s/segments", run->job->store_path);
    double others = files_temporary_missing(folder, unit->unit, need), left = room_left(run);
    if (need + others <= left)
        return STATUS_OK;
    return error_set(error, STATUS_RESOURCE,
                     "%s: the file system is full: unit %lld needs about %.1f MB, units in work %.1f MB, and "
                     "%.1f MB are left; what is committed is whole, and the same command goes on once there "
                     "is room",
                     run->job->store_path, (long long)unit->unit, need * 1e-6, others * 1e-6, left * 1e-6);
}

/* Puts the document and the position of the element that stopped the job into the sentence. */
static void name_nonfinite(struct job_run *run, struct error *error)
{
    struct writer_place place;
    struct sequence s = {.index = -1};
    struct error ignored = {0};
    int64_t position = -1;
    if (!writer_find_nonfinite(run->writer, &place))
        return;
    const struct dataset *d = &run->plan->layout.datasets[place.dataset];
    if (d->rows == ROWS_OF_CAPTURE)
        plan_find_row(run->plan, run->corpus, place.unit, d->capture, place.row, &s, &position, &ignored);
    else
        corpus_describe(run->corpus, run->plan->unit_start[place.unit] + place.row, &s, &ignored);
    if (position >= 0)
        error_prefix(error, "run.on_nonfinite is \"stop\": document %lld, position %lld of its sequence %lld",
                     (long long)s.document, (long long)position, (long long)s.index);
    else
        error_prefix(error, "run.on_nonfinite is \"stop\": document %lld, sequence %lld",
                     (long long)s.document, (long long)s.index);
}

/* A unit asked for before a long batch may be one that another rank, by then idle, could have run: at the
 * job's end that costs a unit's time, and a slow rank need not hide the few milliseconds of an answer. */
static bool is_ahead_worth(const struct job_run *run)
{
    return run->n_tokens > 0 && run->batch_s < AHEAD_SECONDS;
}

/* *dropped: the unit was abandoned because all stop. */
static enum status run_unit(struct job_run *run, const struct assignment *assignment, bool *dropped,
                            struct error *error)
{
    int64_t unit = assignment->unit;
    double start = clock_seconds();
    int64_t tokens = 0;
    *dropped = false;
    TRY(check_room(run, assignment, error));
    batches_begin(run->batches, unit);
    TRY(watch_begin_unit(run->watch, unit, error));
    for (;;) {
        struct batch batch;
        const struct sequence *sequences;
        bool have;
        if (must_drop(run, start, tokens, run->plan->unit_tokens[unit] - tokens)) {
            watch_abandon_unit(run->watch);
            *dropped = true;
            return STATUS_OK;
        }
        TRY(batches_next(run->batches, &batch, &sequences, &have, error));
        if (!have)
            break;
        if (is_ahead_worth(run) && tokens + batch.n_tokens >= run->plan->unit_tokens[unit])
            ranks_ask_ahead(run->ranks);
        TRY(run_batch(run, &batch, sequences, error));
        tokens += batch.n_tokens;
        TRY(collect_records(run, false, error));
    }
    return watch_finish_unit(run->watch, tokens, error);
}

/* After a failure, too, what was finished before it is committed: only the unit at hand is lost. */
static enum status run_units(struct job_run *run, struct error *error)
{
    bool dropped = false;
    enum status status = STATUS_OK;
    while (!dropped && status == STATUS_OK) {
        struct assignment next;
        ranks_next_unit(run->ranks, &next);
        if (next.unit < 0)
            break;
        status = run_unit(run, &next, &dropped, error);
        if (status != STATUS_OK)
            error_prefix(error, "unit %lld", (long long)next.unit);
    }
    if (status != STATUS_OK)
        watch_abandon_unit(run->watch);
    enum status settled = watch_settle(run->watch, error), collected = collect_records(run, true, error);
    return status != STATUS_OK ? status : settled != STATUS_OK ? settled : collected;
}

/* ---------------------------------------------------------------- the end */

static cJSON *summarize(struct job_run *run, enum status status, const double *sums)
{
    int64_t bytes = 0, raw = 0, units = 0;
    for (int64_t u = 0; u < run->store->n_units; u++) {
        units += run->store->segments[u].bytes > 0;
        bytes += run->store->segments[u].bytes;
        raw += run->store->segments[u].raw_bytes;
    }
    double elapsed = clock_seconds() - run->start_s;
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "outcome", status_name(status));
    cJSON_AddNumberToObject(json, "ranks", ranks_count(run->ranks));
    cJSON_AddNumberToObject(json, "units_done", (double)units);
    cJSON_AddNumberToObject(json, "bytes", (double)bytes);
    cJSON_AddNumberToObject(json, "raw_bytes", (double)raw);
    cJSON_AddNumberToObject(json, "tokens_this_run", sums[0]);
    cJSON_AddNumberToObject(json, "seconds", elapsed);
    cJSON_AddNumberToObject(json, "tokens_per_second", sums[0] / elapsed);
    cJSON_AddNumberToObject(json, "forward_seconds", sums[1]);
    cJSON_AddNumberToObject(json, "waiting_for_writer_seconds", sums[2]);
    cJSON_AddNumberToObject(json, "compressing_seconds", sums[3]);
    cJSON_AddNumberToObject(json, "writing_seconds", sums[4]);
    cJSON_AddNumberToObject(json, "peak_memory_bytes", sums[5]);
    return json;
}

/* What of the numbers is odd: said once, at the end. */
static void say_oddities(const char *folder)
{
    char path[4096];
    cJSON *manifest = NULL;
    double n_nonfinite = 0, n_overflow = 0;
    const cJSON *entry;
    snprintf(path, sizeof path, "%s/store.json", folder);
    if (json_read_file(path, STATUS_INPUT, &manifest, NULL) != STATUS_OK)
        return;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItemCaseSensitive(manifest, "statistics"))
    {
        double value;
        if (json_get_number(cJSON_GetObjectItemCaseSensitive(entry, "n_nonfinite"), &value))
            n_nonfinite += value;
        if (json_get_number(cJSON_GetObjectItemCaseSensitive(entry, "n_overflow"), &value))
            n_overflow += value;
    }
    cJSON_Delete(manifest);
    if (n_overflow > 0)
        log_warning("%.0f elements overflowed when stored as float16", n_overflow);
    if (n_nonfinite > 0)
        log_warning("%.0f elements are not finite; actdump info says where the first ones are", n_nonfinite);
}

static void say_summary(const cJSON *json, const struct job_run *run)
{
    double bytes = cJSON_GetObjectItem(json, "bytes")->valuedouble;
    double raw = cJSON_GetObjectItem(json, "raw_bytes")->valuedouble;
    log_info("%lld of %lld units, %.2f GB on disk (%.2f GB raw, ratio %.2f); this run: %.0f tokens in %.1f "
             "s, %.1f tokens/s",
             (long long)cJSON_GetObjectItem(json, "units_done")->valuedouble, (long long)run->plan->n_units,
             bytes * 1e-9, raw * 1e-9, bytes > 0 ? raw / bytes : 0.0,
             cJSON_GetObjectItem(json, "tokens_this_run")->valuedouble,
             cJSON_GetObjectItem(json, "seconds")->valuedouble,
             cJSON_GetObjectItem(json, "tokens_per_second")->valuedouble);
    log_info(
        "over all ranks: forward %.1f s, waiting for the writer %.1f s, compressing %.1f s, writing %.1f s",
        cJSON_GetObjectItem(json, "forward_seconds")->valuedouble,
        cJSON_GetObjectItem(json, "waiting_for_writer_seconds")->valuedouble,
        cJSON_GetObjectItem(json, "compressing_seconds")->valuedouble,
        cJSON_GetObjectItem(json, "writing_seconds")->valuedouble);
}

/* Rank 0: the last store.json, and store.h5 over what is there. */
static enum status close_store(struct job_run *run, enum status outcome, const double *sums,
                               struct error *error)
{
    struct store *store = run->store;
    store->complete = false; /* index_build says otherwise once store.h5 is there */
    store->summary = summarize(run, outcome, sums);
    log_progress("");
    TRY(store_write(store, NULL, error));
    TRY(index_build(store->folder, error));
    say_summary(store->summary, run);
    say_oddities(store->folder);
    return STATUS_OK;
}

/* The status that all ranks end with, from this rank's failure and the schedule's. */
static enum status finish(struct job_run *run, struct error *mine)
{
    double sums[6] = {(double)run->n_tokens, run->forward_s, 0, 0, 0, (double)memory_peak()};
    if (mine->status != STATUS_OK)
        ranks_report_failure(run->ranks, mine);
    ranks_join(run->ranks);
    end_attendant(run);
    stop_cancel_deadline();
    if (run->is_first)
        schedule_status(run->schedule, mine);
    writer_times(run->writer, &sums[2], &sums[3], &sums[4]);
    ranks_sum(run->ranks, sums, 6);
    if (run->is_first) {
        struct error closing = {0};
        if (run->manifest_error.status != STATUS_OK)
            error_set(mine, run->manifest_error.status, "%s", run->manifest_error.text);
        /* what is committed is recorded and indexed even after a failure */
        if (close_store(run, mine->status, sums, &closing) != STATUS_OK)
            error_set(mine, closing.status, "%s", closing.text);
    }
    return ranks_agree(run->ranks, mine);
}

static enum status work(struct job_run *run, struct error *error)
{
    struct error mine = {0};
    if (open_replica(run, &mine) == STATUS_OK)
        start_attendant(run, &mine);
    if (ranks_agree(run->ranks, &mine) != STATUS_OK) {
        end_attendant(run);
        ranks_join(run->ranks);
        return error_set(error, mine.status, "%s", mine.text);
    }
    if (run_units(run, &mine) != STATUS_OK)
        name_nonfinite(run, &mine);
    finish(run, &mine);
    return mine.status == STATUS_OK ? STATUS_OK : error_set(error, mine.status, "%s", mine.text);
}

static void tear_down(struct job_run *run)
{
    batches_destroy(run->batches);
    watch_destroy(run->watch);
    writer_destroy(run->writer);
    replica_destroy(run->replica);
    backend_destroy(run->backend);
    schedule_destroy(run->schedule);
    manifest_free(run->store);
    plan_free(run->plan);
    corpus_close(run->corpus);
    model_close(run->model);
    memory_free(run->done);
    lock_release(run->lock);
}

/* Every unit is committed already. What may be missing is the end of a job that died after its last unit. */
static enum status finish_early(struct job_run *run, struct error *error)
{
    struct error mine = {0};
    const double nothing[6] = {0};
    char index[4096];
    if (run->is_first) {
        snprintf(index, sizeof index, "%s/store.h5", run->job->store_path);
        if (run->store->complete && access(index, F_OK) == 0)
            log_info("%s is complete: all %lld units are done; nothing to do", run->job->store_path,
                     (long long)run->plan->n_units);
        else
            close_store(run, STATUS_OK, nothing, &mine);
    }
    return ranks_agree(run->ranks, &mine) == STATUS_OK ? STATUS_OK
                                                       : error_set(error, mine.status, "%s", mine.text);
}

static enum status run_all(struct job_run *run, struct error *error)
{
    struct error mine = {0};
    open_inputs(run, &mine);
    if (ranks_agree(run->ranks, &mine) != STATUS_OK)
        return error_set(error, mine.status, "%s", mine.text);
    mention_corpus(run);
    if (settle_plan(run, &mine) == STATUS_OK)
        open_store(run, &mine);
    if (ranks_agree(run->ranks, &mine) != STATUS_OK)
        return error_set(error, mine.status, "%s", mine.text);
    ranks_broadcast(run->ranks, run->done, (size_t)run->plan->n_units * sizeof *run->done);
    int64_t n_left = 0;
    for (int64_t u = 0; u < run->plan->n_units; u++)
        n_left += !run->done[u];
    if (n_left == 0)
        return finish_early(run, error);
    TRY(start_schedule(run, error));
    return work(run, error);
}

enum status run_job(const struct job *job, struct ranks *ranks, struct error *error)
{
    struct job_run *run = calloc(1, sizeof *run);
    if (run == NULL)
        return error_set(error, STATUS_RESOURCE, "out of memory for the run");
    run->job = job;
    run->ranks = ranks;
    run->is_first = ranks_rank(ranks) == 0;
    run->lock = -1;
    run->start_s = clock_seconds();
    enum status status = run_all(run, error);
    tear_down(run);
    free(run);
    return status;
}

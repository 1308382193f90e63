#include "pipeline/writer.h"

#include "kernels/base/memory.h"
#include "kernels/base/processors.h"
#include "pipeline/chunk.h"
#include "pipeline/hdf5_util.h"
#include "pipeline/writer_segment.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { WORKER_NICENESS = 3 };

enum slot_kind { SLOT_BEGIN, SLOT_CHUNK, SLOT_FINISH, SLOT_ABANDON };

/* One order in the ring: a chunk, or a mark between chunks. It belongs to the caller until submitted, then to
 * one worker, then (ready) to the HDF5 thread. */
struct slot {
    enum slot_kind kind;
    bool ready; /* under the lock */
    int64_t unit, first_sequence, n_tokens;
    struct writer_chunk chunk; /* which rows: by the caller; bytes and statistics: by a worker */
    int64_t n_overflow;        /* before the rows were handed over */
    char *source;              /* the rows as handed over, zeros after them */
    char *shuffled;            /* stored dtype */
    char *packed;              /* also where a conversion goes before it is shuffled */
    void *statistics_memory;
};

/* A dataset of the unit at hand. */
struct filling {
    char *buffer; /* the current chunk, source dtype */
    int64_t n_filled;
    int64_t n_submitted; /* rows in chunks before it */
    int64_t n_overflow;
};

struct done {
    struct done *next;
    struct segment_record record;
};

struct writer {
    const struct layout *layout;
    int n_threads;

    /* the caller's */
    bool stop_on_nonfinite;
    bool has_unit;
    int64_t unit, first_sequence;
    struct filling *filling; /* [n_datasets] */

    /* the ring; counters only grow, slot i is number i % n_slots */
    pthread_mutex_t lock;
    pthread_cond_t work_added, slot_ready, slot_freed; /* slot_freed also: a unit is done */
    struct slot *slots;
    int64_t n_slots;
    int64_t n_submitted, n_taken, n_written; /* under the lock, like all below */
    bool stop, met_nonfinite;
    struct error failure;
    int64_t n_pending; /* units finished by the caller and not yet committed */
    struct done *first_done, *last_done;
    double waited_s, compressed_s, wrote_s;
    struct writer_place nonfinite; /* where met_nonfinite */

    struct writer_segment segment; /* the HDF5 thread's */

    struct arena arena;
    struct chunk_compressor **compressors; /* [n_threads] */
    pthread_t *workers;                    /* [n_threads] */
    int n_workers_started;
    bool is_hdf5_started;
    pthread_t hdf5_thread;
    _Atomic int next_worker; /* hands each worker its number */
};

/* ---------------------------------------------------------------- memory */

/* The chunk of a dataset that asks for most of one thing. */
struct extremes {
    size_t source_bytes, stored_bytes;
    int64_t statistics_width;
};

static struct extremes find_extremes(const struct layout *layout)
{
    struct extremes most = {0};
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        size_t elements = (size_t)(d->chunk_rows * d->width);
        size_t source = elements * dtype_size(d->source_dtype), stored = elements * dtype_size(d->dtype);
        most.source_bytes = source > most.source_bytes ? source : most.source_bytes;
        most.stored_bytes = stored > most.stored_bytes ? stored : most.stored_bytes;
        if (layout_has_statistics(d) && d->width > most.statistics_width)
            most.statistics_width = d->width;
    }
    return most;
}

/* A forward gives its rows in bursts, a layer's at a time and many at the end, and a ring that fills up stops
 * it: with four slots for each worker a run that captures everything was a fifth faster than with two. */
static int64_t count_slots(int n_threads)
{
    return 4 * (int64_t)n_threads + 4;
}

static void place_slots(struct writer *w, const struct layout *layout, struct arena *arena)
{
    struct extremes most = find_extremes(layout);
    w->slots = arena_take(arena, (size_t)w->n_slots * sizeof *w->slots);
    for (int64_t i = 0; i < w->n_slots; i++) {
        struct slot slot = {.source = arena_take(arena, most.source_bytes),
                            .shuffled = arena_take(arena, layout->compression > 0 ? most.stored_bytes : 0),
                            .packed = arena_take(arena, chunk_bound(most.stored_bytes)),
                            .statistics_memory = arena_take(arena, statistics_bytes(most.statistics_width))};
        if (w->slots != NULL)
            w->slots[i] = slot;
    }
}

/* Hands out the arena's pieces; against a measuring arena it only counts. */
static void place_all(struct writer *w, const struct layout *layout, struct arena *arena)
{
    size_t n = (size_t)layout->n_datasets;
    place_slots(w, layout, arena);
    w->filling = arena_take(arena, n * sizeof *w->filling);
    w->compressors = arena_take(arena, (size_t)w->n_threads * sizeof *w->compressors);
    w->workers = arena_take(arena, (size_t)w->n_threads * sizeof *w->workers);
    for (size_t i = 0; i < n; i++) {
        const struct dataset *d = &layout->datasets[i];
        char *buffer = arena_take(arena, (size_t)(d->chunk_rows * d->width) * dtype_size(d->source_dtype));
        if (w->filling != NULL)
            w->filling[i].buffer = buffer;
    }
    writer_segment_place(&w->segment, layout, arena);
}

size_t writer_bytes(const struct layout *layout, const struct writer_options *options)
{
    struct writer w = {.n_threads = options->n_threads, .n_slots = count_slots(options->n_threads)};
    struct arena arena = {0};
    place_all(&w, layout, &arena);
    return arena.used + sizeof w;
}

/* ---------------------------------------------------------------- shared state */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Keeps the first failure and wakes whoever waits. */
static void keep_failure(struct writer *w, const struct error *failure)
{
    pthread_mutex_lock(&w->lock);
    if (w->failure.status == STATUS_OK)
        w->failure = *failure;
    pthread_cond_broadcast(&w->slot_freed);
    pthread_mutex_unlock(&w->lock);
}

/* Under the lock: the failure so far, as the caller's. */
static enum status tell_failure(const struct writer *w, struct error *error)
{
    if (w->failure.status == STATUS_OK)
        return STATUS_OK;
    return error_set(error, w->failure.status, "%s", w->failure.text);
}

static enum status check_failure(struct writer *w, struct error *error)
{
    pthread_mutex_lock(&w->lock);
    enum status status = tell_failure(w, error);
    pthread_mutex_unlock(&w->lock);
    return status;
}

static bool has_failed(struct writer *w)
{
    return check_failure(w, NULL) != STATUS_OK;
}

/* ---------------------------------------------------------------- workers */

/* Elements that were finite and are infinite as stored. */
static int64_t count_overflow(const struct dataset *d, const void *source, const void *stored, int64_t n)
{
    const uint16_t *half = stored;
    const float *wide = source;
    uint16_t infinity = d->dtype == DTYPE_F16 ? 0x7c00 : 0x7f80;
    int64_t n_overflow = 0;
    if (d->source_dtype != DTYPE_F32)
        return 0;
    for (int64_t i = 0; i < n; i++)
        if ((half[i] & 0x7fff) == infinity)
            n_overflow += isfinite(wide[i]) != 0;
    return n_overflow;
}

/* Turns the slot's rows into the bytes of a chunk. */
static enum status pack_slot(struct writer *w, struct slot *slot, struct chunk_compressor *compressor,
                             struct error *error)
{
    struct writer_chunk *chunk = &slot->chunk;
    const struct dataset *d = &w->layout->datasets[chunk->dataset];
    int64_t n = chunk->n_rows * d->width, n_chunk = chunk->chunk_rows * d->width;
    int64_t n_overflow = slot->n_overflow;
    const char *stored = slot->source;
    if (d->source_dtype != d->dtype) {
        dtype_convert(slot->packed, d->dtype, slot->source, d->source_dtype, (size_t)n_chunk);
        stored = slot->packed;
        if (dtype_is_float(d->dtype) && dtype_size(d->dtype) == 2)
            n_overflow += count_overflow(d, slot->source, stored, n);
    }
    if (layout_has_statistics(d)) {
        statistics_place(&chunk->statistics, slot->statistics_memory, d->width, layout_is_masked(d));
        statistics_of(&chunk->statistics, stored, d->dtype, chunk->n_rows, chunk->first_row);
        chunk->statistics.n_overflow = n_overflow;
    }
    size_t size = dtype_size(d->dtype), bytes = (size_t)n_chunk * size;
    chunk->bytes = stored;
    chunk->n_bytes = bytes;
    if (w->layout->compression == 0)
        return STATUS_OK;
    chunk_shuffle(slot->shuffled, stored, size, bytes);
    chunk->bytes = slot->packed;
    return chunk_compress(compressor, slot->packed, chunk_bound(bytes), slot->shuffled, bytes,
                          &chunk->n_bytes, error);
}

/* The next submitted slot in order; NULL when the writer stops. */
static struct slot *take_slot(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->stop && w->n_taken == w->n_submitted)
        pthread_cond_wait(&w->work_added, &w->lock);
    struct slot *slot = w->stop ? NULL : &w->slots[w->n_taken++ % w->n_slots];
    pthread_mutex_unlock(&w->lock);
    return slot;
}

static void pass_on_slot(struct writer *w, struct slot *slot, double seconds)
{
    pthread_mutex_lock(&w->lock);
    slot->ready = true;
    w->compressed_s += seconds;
    pthread_cond_signal(&w->slot_ready);
    pthread_mutex_unlock(&w->lock);
}

/* Threads that compute a product wait for each other, so a worker that takes the processor from one holds up
 * all. A little less of it goes to workers for that; where they fall behind, the ring fills up, the forward
 * waits, and they have all of it. Linux keeps this by thread; where it is refused nothing is lost. */
static void step_back(void)
{
    id_t thread = (id_t)gettid();
    errno = 0;
    int priority = getpriority(PRIO_PROCESS, thread);
    if (errno == 0)
        setpriority(PRIO_PROCESS, thread, priority + WORKER_NICENESS);
}

static void *run_worker(void *context)
{
    struct writer *w = context;
    processors_release_thread();
    step_back();
    struct chunk_compressor *compressor = w->compressors[atomic_fetch_add(&w->next_worker, 1)];
    struct slot *slot;
    while ((slot = take_slot(w)) != NULL) {
        double began = now_s();
        struct error error = {0};
        if (slot->kind == SLOT_CHUNK && !has_failed(w) && pack_slot(w, slot, compressor, &error) != STATUS_OK)
            keep_failure(w, &error);
        pass_on_slot(w, slot, slot->kind == SLOT_CHUNK ? now_s() - began : 0);
    }
    return NULL;
}

/* ---------------------------------------------------------------- the HDF5 thread */

static enum status refuse_nonfinite(struct writer *w, const struct slot *slot, struct error *error)
{
    int64_t dataset = slot->chunk.dataset, row = slot->chunk.statistics.first_nonfinite_row;
    pthread_mutex_lock(&w->lock);
    w->met_nonfinite = true;
    w->nonfinite = (struct writer_place){.unit = slot->unit, .dataset = dataset, .row = row};
    pthread_mutex_unlock(&w->lock);
    return error_set(error, STATUS_INPUT,
                     "%s: an element is not finite, first in row %" PRId64 " of the unit",
                     w->layout->datasets[dataset].path, row);
}

static enum status write_chunk(struct writer *w, const struct slot *slot, struct error *error)
{
    const struct writer_chunk *chunk = &slot->chunk;
    TRY(writer_segment_write(&w->segment, chunk, error));
    bool has_nonfinite =
        layout_has_statistics(&w->layout->datasets[chunk->dataset]) && chunk->statistics.n_nonfinite > 0;
    return w->stop_on_nonfinite && has_nonfinite ? refuse_nonfinite(w, slot, error) : STATUS_OK;
}

static enum status finish_segment(struct writer *w, const struct slot *slot, struct error *error)
{
    void *rows;
    TRY(memory_allocate_array(&rows, (size_t)w->layout->n_captures, sizeof(int64_t), "a segment's record",
                              error));
    struct done *done = calloc(1, sizeof *done);
    if (done == NULL) {
        memory_free(rows);
        return error_set(error, STATUS_RESOURCE, "out of memory: a segment's record");
    }
    done->record.n_rows = rows;
    enum status status =
        writer_segment_finish(&w->segment, slot->first_sequence, slot->n_tokens, &done->record, error);
    if (status != STATUS_OK) {
        segment_record_fini(&done->record);
        free(done);
        return status;
    }
    pthread_mutex_lock(&w->lock);
    if (w->last_done != NULL)
        w->last_done->next = done;
    else
        w->first_done = done;
    w->last_done = done;
    w->n_pending--;
    pthread_mutex_unlock(&w->lock);
    return STATUS_OK;
}

static enum status write_slot(struct writer *w, const struct slot *slot, struct error *error)
{
    switch (slot->kind) {
    case SLOT_BEGIN:
        return writer_segment_begin(&w->segment, slot->unit, error);
    case SLOT_CHUNK:
        return write_chunk(w, slot, error);
    case SLOT_FINISH:
        return finish_segment(w, slot, error);
    case SLOT_ABANDON:
        writer_segment_discard(&w->segment);
        break;
    }
    return STATUS_OK;
}

/* The slot next in order once a worker is through with it; NULL when the writer stops. */
static const struct slot *await_ready(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    struct slot *slot = &w->slots[w->n_written % w->n_slots];
    while (!w->stop && !slot->ready)
        pthread_cond_wait(&w->slot_ready, &w->lock);
    if (w->stop)
        slot = NULL;
    pthread_mutex_unlock(&w->lock);
    return slot;
}

static void free_slot(struct writer *w, double seconds)
{
    pthread_mutex_lock(&w->lock);
    w->slots[w->n_written % w->n_slots].ready = false;
    w->n_written++;
    w->wrote_s += seconds;
    pthread_cond_broadcast(&w->slot_freed);
    pthread_mutex_unlock(&w->lock);
}

static void *run_hdf5(void *context)
{
    struct writer *w = context;
    const struct slot *slot;
    processors_release_thread();
    hdf5_start();
    while ((slot = await_ready(w)) != NULL) {
        double began = now_s();
        struct error error = {0};
        if (has_failed(w)) {
            writer_segment_discard(&w->segment);
        } else if (write_slot(w, slot, &error) != STATUS_OK) {
            writer_segment_discard(&w->segment);
            keep_failure(w, &error);
        }
        free_slot(w, now_s() - began);
    }
    writer_segment_discard(&w->segment);
    return NULL;
}

/* ---------------------------------------------------------------- create and destroy */

static enum status init_locks(struct writer *w, struct error *error)
{
    if (pthread_mutex_init(&w->lock, NULL) != 0 || pthread_cond_init(&w->work_added, NULL) != 0 ||
        pthread_cond_init(&w->slot_ready, NULL) != 0 || pthread_cond_init(&w->slot_freed, NULL) != 0)
        return error_set(error, STATUS_RESOURCE, "the writer's locks cannot be made");
    return STATUS_OK;
}

static enum status start_threads(struct writer *w, struct error *error)
{
    int errnum = 0;
    for (int i = 0; i < w->n_threads && errnum == 0; i++) {
        errnum = pthread_create(&w->workers[i], NULL, run_worker, w);
        w->n_workers_started += errnum == 0;
    }
    if (errnum == 0) {
        errnum = pthread_create(&w->hdf5_thread, NULL, run_hdf5, w);
        w->is_hdf5_started = errnum == 0;
    }
    if (errnum != 0)
        return error_set_errno(error, STATUS_RESOURCE, errnum, "the writer's threads cannot be started");
    return STATUS_OK;
}

static enum status prepare(struct writer *w, struct error *error)
{
    TRY(init_locks(w, error));
    place_all(w, w->layout, &w->arena);
    TRY(arena_allocate(&w->arena, "the writer's chunks", error));
    place_all(w, w->layout, &w->arena);
    for (int i = 0; i < w->n_threads && w->layout->compression > 0; i++)
        TRY(chunk_compressor_create(w->layout->compression, &w->compressors[i], error));
    return start_threads(w, error);
}

enum status writer_create(const struct layout *layout, const struct writer_options *options,
                          struct writer **out, struct error *error)
{
    assert(options->n_threads >= 1);
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct writer), "the writer", error));
    struct writer *w = memory;
    w->layout = layout;
    w->n_threads = options->n_threads;
    w->stop_on_nonfinite = options->stop_on_nonfinite;
    w->n_slots = count_slots(options->n_threads);
    enum status status = writer_segment_init(&w->segment, layout, options->folder, error);
    if (status == STATUS_OK)
        status = prepare(w, error);
    if (status != STATUS_OK) {
        writer_destroy(w);
        return status;
    }
    *out = w;
    return STATUS_OK;
}

void writer_destroy(struct writer *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->work_added);
    pthread_cond_broadcast(&w->slot_ready);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->n_workers_started; i++)
        pthread_join(w->workers[i], NULL);
    if (w->is_hdf5_started)
        pthread_join(w->hdf5_thread, NULL);
    while (w->first_done != NULL) {
        struct done *done = w->first_done;
        w->first_done = done->next;
        segment_record_fini(&done->record);
        free(done);
    }
    for (int i = 0; w->compressors != NULL && i < w->n_threads; i++)
        chunk_compressor_destroy(w->compressors[i]);
    pthread_cond_destroy(&w->slot_freed);
    pthread_cond_destroy(&w->slot_ready);
    pthread_cond_destroy(&w->work_added);
    pthread_mutex_destroy(&w->lock);
    arena_free(&w->arena);
    memory_free(w);
}

void segment_record_fini(struct segment_record *record)
{
    memory_free(record->n_rows);
    *record = (struct segment_record){0};
}

/* ---------------------------------------------------------------- the caller's side */

/* Waits for the next slot to be free; it is the caller's until submit_slot. */
static enum status acquire_slot(struct writer *w, struct slot **out, struct error *error)
{
    pthread_mutex_lock(&w->lock);
    double began = now_s();
    while (w->n_submitted - w->n_written >= w->n_slots && w->failure.status == STATUS_OK)
        pthread_cond_wait(&w->slot_freed, &w->lock);
    w->waited_s += now_s() - began;
    enum status status = tell_failure(w, error);
    struct slot *slot = &w->slots[w->n_submitted % w->n_slots];
    pthread_mutex_unlock(&w->lock);
    if (status == STATUS_OK)
        *out = slot;
    return status;
}

static void submit_slot(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    w->n_submitted++;
    pthread_cond_signal(&w->work_added);
    pthread_mutex_unlock(&w->lock);
}

static enum status submit_mark(struct writer *w, enum slot_kind kind, int64_t n_tokens, struct error *error)
{
    struct slot *slot;
    TRY(acquire_slot(w, &slot, error));
    slot->kind = kind;
    slot->unit = w->unit;
    slot->first_sequence = w->first_sequence;
    slot->n_tokens = n_tokens;
    if (kind == SLOT_FINISH) {
        pthread_mutex_lock(&w->lock);
        w->n_pending++;
        pthread_mutex_unlock(&w->lock);
    }
    submit_slot(w);
    return STATUS_OK;
}

/* Hands the dataset's current chunk over. A dataset with less than one chunk of rows gets a chunk of its
 * size. */
static enum status submit_chunk(struct writer *w, int64_t dataset, struct error *error)
{
    const struct dataset *d = &w->layout->datasets[dataset];
    struct filling *f = &w->filling[dataset];
    struct slot *slot;
    TRY(acquire_slot(w, &slot, error));
    slot->kind = SLOT_CHUNK;
    slot->unit = w->unit;
    slot->n_overflow = f->n_overflow;
    struct writer_chunk *chunk = &slot->chunk;
    chunk->dataset = dataset;
    chunk->first_row = f->n_submitted;
    chunk->n_rows = f->n_filled;
    chunk->chunk_rows = f->n_submitted > 0 ? d->chunk_rows : layout_chunk_rows(d, f->n_filled);
    size_t row_bytes = (size_t)d->width * dtype_size(d->source_dtype),
           used = (size_t)chunk->n_rows * row_bytes;
    memcpy(slot->source, f->buffer, used);
    memset(slot->source + used, 0, (size_t)(chunk->chunk_rows - chunk->n_rows) * row_bytes);
    f->n_submitted += f->n_filled;
    f->n_filled = f->n_overflow = 0;
    submit_slot(w);
    return STATUS_OK;
}

static void forget_rows(struct writer *w)
{
    for (int64_t i = 0; i < w->layout->n_datasets; i++)
        w->filling[i].n_filled = w->filling[i].n_submitted = w->filling[i].n_overflow = 0;
    w->has_unit = false;
}

enum status writer_begin(struct writer *w, int64_t unit, int64_t first_sequence, struct error *error)
{
    TRY(check_failure(w, error));
    if (w->has_unit)
        return error_set(error, STATUS_BUG, "unit %" PRId64 " is begun before unit %" PRId64 " is finished",
                         unit, w->unit);
    w->unit = unit;
    w->first_sequence = first_sequence;
    TRY(submit_mark(w, SLOT_BEGIN, 0, error));
    w->has_unit = true;
    return STATUS_OK;
}

enum status writer_reserve(struct writer *w, int64_t dataset, int64_t wanted, void **room, int64_t *n,
                           struct error *error)
{
    assert(dataset >= 0 && dataset < w->layout->n_datasets && wanted >= 1);
    const struct dataset *d = &w->layout->datasets[dataset];
    struct filling *f = &w->filling[dataset];
    if (!w->has_unit)
        return error_set(error, STATUS_BUG, "rows of %s come before a unit is begun", d->path);
    if (f->n_filled == d->chunk_rows)
        TRY(submit_chunk(w, dataset, error));
    int64_t left = d->chunk_rows - f->n_filled;
    *room = f->buffer + (size_t)(f->n_filled * d->width) * dtype_size(d->source_dtype);
    *n = wanted < left ? wanted : left;
    return STATUS_OK;
}

enum status writer_advance(struct writer *w, int64_t dataset, int64_t n, struct error *error)
{
    struct filling *f = &w->filling[dataset];
    assert(n >= 0 && f->n_filled + n <= w->layout->datasets[dataset].chunk_rows);
    f->n_filled += n;
    return f->n_filled == w->layout->datasets[dataset].chunk_rows ? submit_chunk(w, dataset, error)
                                                                  : STATUS_OK;
}

void writer_count_overflow(struct writer *w, int64_t dataset, int64_t n)
{
    w->filling[dataset].n_overflow += n;
}

enum status writer_append(struct writer *w, int64_t dataset, const void *rows, int64_t n, struct error *error)
{
    const struct dataset *d = &w->layout->datasets[dataset];
    size_t row_bytes = (size_t)d->width * dtype_size(d->source_dtype);
    const char *from = rows;
    while (n > 0) {
        void *room;
        int64_t m;
        TRY(writer_reserve(w, dataset, n, &room, &m, error));
        memcpy(room, from, (size_t)m * row_bytes);
        TRY(writer_advance(w, dataset, m, error));
        from += (size_t)m * row_bytes;
        n -= m;
    }
    return STATUS_OK;
}

/* All datasets that count the same thing must have got the same rows. */
static enum status check_rows(const struct writer *w, struct error *error)
{
    for (int64_t i = 1; i < w->layout->n_datasets; i++) {
        const struct dataset *d = &w->layout->datasets[i];
        int64_t first = i - 1;
        while (first >= 0 &&
               (w->layout->datasets[first].rows != d->rows ||
                (d->rows == ROWS_OF_CAPTURE && w->layout->datasets[first].capture != d->capture)))
            first--;
        if (first < 0)
            continue;
        int64_t n = w->filling[i].n_submitted + w->filling[i].n_filled;
        int64_t wanted = w->filling[first].n_submitted + w->filling[first].n_filled;
        if (n != wanted)
            return error_set(error, STATUS_BUG, "unit %" PRId64 ": %s got %" PRId64 " rows, %s got %" PRId64,
                             w->unit, d->path, n, w->layout->datasets[first].path, wanted);
    }
    return STATUS_OK;
}

enum status writer_finish(struct writer *w, int64_t n_tokens, struct error *error)
{
    if (!w->has_unit)
        return error_set(error, STATUS_BUG, "a unit is finished before it is begun");
    TRY(check_rows(w, error));
    for (int64_t i = 0; i < w->layout->n_datasets; i++)
        if (w->filling[i].n_filled > 0)
            TRY(submit_chunk(w, i, error));
    TRY(submit_mark(w, SLOT_FINISH, n_tokens, error));
    forget_rows(w);
    return STATUS_OK;
}

void writer_abandon(struct writer *w)
{
    if (!w->has_unit)
        return;
    forget_rows(w);
    submit_mark(w, SLOT_ABANDON, 0, NULL); /* fails only where all is given up already */
}

enum status writer_collect(struct writer *w, bool wait, struct segment_record *record, bool *have,
                           struct error *error)
{
    pthread_mutex_lock(&w->lock);
    while (wait && w->first_done == NULL && w->n_pending > 0 && w->failure.status == STATUS_OK)
        pthread_cond_wait(&w->slot_freed, &w->lock);
    struct done *done = w->first_done;
    enum status status = done == NULL ? tell_failure(w, error) : STATUS_OK;
    if (done != NULL) {
        w->first_done = done->next;
        if (w->first_done == NULL)
            w->last_done = NULL;
    }
    pthread_mutex_unlock(&w->lock);
    if (status != STATUS_OK)
        return status;
    *have = done != NULL;
    if (done != NULL)
        *record = done->record;
    free(done);
    return STATUS_OK;
}

bool writer_find_nonfinite(struct writer *w, struct writer_place *out)
{
    pthread_mutex_lock(&w->lock);
    bool met = w->met_nonfinite;
    if (met)
        *out = w->nonfinite;
    pthread_mutex_unlock(&w->lock);
    return met;
}

void writer_times(const struct writer *w, double *waited_s, double *compressed_s, double *wrote_s)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&w->lock;
    pthread_mutex_lock(lock);
    *waited_s = w->waited_s;
    *compressed_s = w->compressed_s;
    *wrote_s = w->wrote_s;
    pthread_mutex_unlock(lock);
}

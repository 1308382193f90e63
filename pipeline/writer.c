#include "pipeline/writer_state.h"

#include "pipeline/clock.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

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

static void place_slots(struct writer *w, const struct layout *layout, const struct extremes *most,
                        struct arena *arena)
{
    w->slots = arena_take(arena, (size_t)w->n_slots * sizeof *w->slots);
    for (int64_t i = 0; i < w->n_slots; i++) {
        struct slot slot = {.source = arena_take(arena, most->source_bytes),
                            .shuffled = arena_take(arena, layout->compression > 0 ? most->stored_bytes : 0),
                            .packed = arena_take(arena, chunk_bound(most->stored_bytes)),
                            .statistics_memory = arena_take(arena, statistics_bytes(most->statistics_width))};
        if (w->slots != NULL)
            w->slots[i] = slot;
    }
}

/* A chunk's rows go to a worker without a copy where their buffer and a slot's can change places: where they
 * take nearly as much as the largest, and a buffer as large costs little. */
static bool is_traded(size_t bytes, size_t most)
{
    return bytes >= most - most / 8;
}

static void place_filling(struct writer *w, const struct layout *layout, const struct extremes *most,
                          struct arena *arena)
{
    w->filling = arena_take(arena, (size_t)layout->n_datasets * sizeof *w->filling);
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        size_t bytes = (size_t)(d->chunk_rows * d->width) * dtype_size(d->source_dtype);
        bool trades = is_traded(bytes, most->source_bytes);
        char *buffer = arena_take(arena, trades ? most->source_bytes : bytes);
        if (w->filling != NULL)
            w->filling[i] = (struct filling){.buffer = buffer, .is_traded = trades};
    }
}

/* Hands out the arena's pieces; against a measuring arena it only counts. */
static void place_all(struct writer *w, const struct layout *layout, struct arena *arena)
{
    struct extremes most = find_extremes(layout);
    place_slots(w, layout, &most, arena);
    place_filling(w, layout, &most, arena);
    w->compressors = arena_take(arena, (size_t)w->n_threads * sizeof *w->compressors);
    w->workers = arena_take(arena, (size_t)w->n_threads * sizeof *w->workers);
    w->hash_buffer = arena_take(arena, FILES_HASH_BYTES);
    writer_segment_place(&w->segment, layout, arena);
}

size_t writer_bytes(const struct layout *layout, const struct writer_options *options)
{
    struct writer w = {.n_threads = options->n_threads, .n_slots = count_slots(options->n_threads)};
    struct arena arena = {0};
    place_all(&w, layout, &arena);
    return arena.used + sizeof w;
}

/* ---------------------------------------------------------------- create and destroy */

static enum status init_locks(struct writer *w, struct error *error)
{
    if (pthread_mutex_init(&w->lock, NULL) != 0 || pthread_cond_init(&w->work_added, NULL) != 0 ||
        pthread_cond_init(&w->slot_ready, NULL) != 0 || pthread_cond_init(&w->slot_freed, NULL) != 0 ||
        pthread_cond_init(&w->closing_changed, NULL) != 0)
        return error_set(error, STATUS_RESOURCE, "the writer's locks cannot be made");
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
    return writer_start_threads(w, error);
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
    writer_segment_init(&w->segment, layout, &w->folder);
    enum status status = writer_folder_init(&w->folder, options->folder, error);
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
    pthread_cond_broadcast(&w->closing_changed);
    pthread_mutex_unlock(&w->lock);
    writer_join_threads(w);
    writer_free_done(w->closing);
    while (w->first_done != NULL) {
        struct done *done = w->first_done;
        w->first_done = done->next;
        writer_free_done(done);
    }
    for (int i = 0; w->compressors != NULL && i < w->n_threads; i++)
        chunk_compressor_destroy(w->compressors[i]);
    pthread_cond_destroy(&w->closing_changed);
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

static enum status check_failure(struct writer *w, struct error *error)
{
    pthread_mutex_lock(&w->lock);
    enum status status = writer_tell_failure(w, error);
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* Waits for the next slot to be free; it is the caller's until submit_slot. */
static enum status acquire_slot(struct writer *w, struct slot **out, struct error *error)
{
    pthread_mutex_lock(&w->lock);
    double began = clock_seconds();
    while (w->n_submitted - w->n_written >= w->n_slots && w->failure.status == STATUS_OK)
        pthread_cond_wait(&w->slot_freed, &w->lock);
    w->waited_s += clock_seconds() - began;
    enum status status = writer_tell_failure(w, error);
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
    if (f->is_traded) {
        char *filled = f->buffer;
        f->buffer = slot->source;
        slot->source = filled;
    } else {
        memcpy(slot->source, f->buffer, used);
    }
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
    /* After a failure, too, a unit that was closed before is waited for. */
    while (wait && w->first_done == NULL &&
           (w->closing != NULL || (w->n_pending > 0 && w->failure.status == STATUS_OK)))
        pthread_cond_wait(&w->slot_freed, &w->lock);
    struct done *done = w->first_done;
    enum status status = done == NULL ? writer_tell_failure(w, error) : STATUS_OK;
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
    free(done); /* its record is the caller's, and its file has its name */
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

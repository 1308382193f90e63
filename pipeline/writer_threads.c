#include "pipeline/writer_state.h"

#include "kernels/base/processors.h"
#include "pipeline/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum { WORKER_NICENESS = 3 };

/* ---------------------------------------------------------------- failures */

void writer_keep_failure(struct writer *w, const struct error *failure)
{
    pthread_mutex_lock(&w->lock);
    if (w->failure.status == STATUS_OK)
        w->failure = *failure;
    pthread_cond_broadcast(&w->slot_freed);
    pthread_mutex_unlock(&w->lock);
}

enum status writer_tell_failure(const struct writer *w, struct error *error)
{
    if (w->failure.status == STATUS_OK)
        return STATUS_OK;
    return error_set(error, w->failure.status, "%s", w->failure.text);
}

static bool has_failed(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    bool failed = w->failure.status != STATUS_OK;
    pthread_mutex_unlock(&w->lock);
    return failed;
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
    return chunk_compress(compressor, dtype_is_float(d->dtype) ? CHUNK_FLOATS : CHUNK_ANYTHING, slot->packed,
                          chunk_bound(bytes), slot->shuffled, bytes, &chunk->n_bytes, error);
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
        double began = clock_seconds();
        struct error error = {0};
        if (slot->kind == SLOT_CHUNK && !has_failed(w) && pack_slot(w, slot, compressor, &error) != STATUS_OK)
            writer_keep_failure(w, &error);
        pass_on_slot(w, slot, slot->kind == SLOT_CHUNK ? clock_seconds() - began : 0);
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

static struct done *make_done(const struct writer *w, struct error *error)
{
    void *rows;
    if (memory_allocate_array(&rows, (size_t)w->layout->n_captures, sizeof(int64_t), "a segment's record",
                              error) != STATUS_OK)
        return NULL;
    struct done *done = calloc(1, sizeof *done);
    if (done == NULL) {
        memory_free(rows);
        error_set(error, STATUS_RESOURCE, "out of memory: a segment's record");
        return NULL;
    }
    done->file = WRITER_NO_FILE;
    done->record.n_rows = rows;
    return done;
}

/* Closes the segment and hands its file to the publisher, which has none. */
static enum status finish_segment(struct writer *w, const struct slot *slot, struct error *error)
{
    struct done *done = make_done(w, error);
    if (done == NULL)
        return STATUS_RESOURCE;
    enum status status = writer_segment_close(&w->segment, slot->first_sequence, slot->n_tokens, &done->file,
                                              &done->record, error);
    if (status != STATUS_OK) {
        writer_free_done(done);
        return status;
    }
    pthread_mutex_lock(&w->lock);
    w->closing = done;
    pthread_cond_broadcast(&w->closing_changed);
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

/* The slot next in order once a worker is through with it, and, where it ends a segment, once the one before
 * has its name; NULL when the writer stops. */
static const struct slot *await_ready(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    struct slot *slot = &w->slots[w->n_written % w->n_slots];
    while (!w->stop && !slot->ready)
        pthread_cond_wait(&w->slot_ready, &w->lock);
    while (!w->stop && slot->kind == SLOT_FINISH && w->closing != NULL)
        pthread_cond_wait(&w->closing_changed, &w->lock);
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
        double began = clock_seconds();
        struct error error = {0};
        if (has_failed(w)) {
            writer_segment_discard(&w->segment);
        } else if (write_slot(w, slot, &error) != STATUS_OK) {
            writer_segment_discard(&w->segment);
            writer_keep_failure(w, &error);
        }
        free_slot(w, clock_seconds() - began);
    }
    writer_segment_discard(&w->segment);
    return NULL;
}

/* ---------------------------------------------------------------- the publisher */

/* The next closed segment; NULL when the writer stops. */
static struct done *await_closing(struct writer *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->stop && w->closing == NULL)
        pthread_cond_wait(&w->closing_changed, &w->lock);
    struct done *done = w->stop ? NULL : w->closing;
    pthread_mutex_unlock(&w->lock);
    return done;
}

/* Takes it from the publisher: to be collected where it has its name. */
static void pass_on_closing(struct writer *w, bool is_published, double seconds)
{
    pthread_mutex_lock(&w->lock);
    struct done *done = w->closing;
    w->closing = NULL;
    w->wrote_s += seconds;
    if (is_published) {
        if (w->last_done != NULL)
            w->last_done->next = done;
        else
            w->first_done = done;
        w->last_done = done;
        w->n_pending--;
    }
    pthread_cond_broadcast(&w->slot_freed);
    pthread_cond_broadcast(&w->closing_changed);
    pthread_mutex_unlock(&w->lock);
    if (!is_published)
        writer_free_done(done);
}

/* A sync waits for the disk and a checksum reads all of a file: the next segment is written meanwhile. A
 * failure of that one does not keep this one from its name. */
static void *run_publisher(void *context)
{
    struct writer *w = context;
    struct done *done;
    processors_release_thread();
    step_back();
    while ((done = await_closing(w)) != NULL) {
        double began = clock_seconds();
        struct error error = {0};
        bool is_published =
            writer_file_publish(&w->folder, &done->file, w->hash_buffer, &done->record, &error) == STATUS_OK;
        if (!is_published)
            writer_keep_failure(w, &error);
        pass_on_closing(w, is_published, clock_seconds() - began);
    }
    return NULL;
}

/* ---------------------------------------------------------------- start and end */

static int start_thread(struct writer *w, pthread_t *thread, void *(*run)(void *), bool *is_started)
{
    int errnum = pthread_create(thread, NULL, run, w);
    *is_started = errnum == 0;
    return errnum;
}

enum status writer_start_threads(struct writer *w, struct error *error)
{
    int errnum = 0;
    for (int i = 0; i < w->n_threads && errnum == 0; i++) {
        errnum = pthread_create(&w->workers[i], NULL, run_worker, w);
        w->n_workers_started += errnum == 0;
    }
    if (errnum == 0)
        errnum = start_thread(w, &w->hdf5_thread, run_hdf5, &w->is_hdf5_started);
    if (errnum == 0)
        errnum = start_thread(w, &w->publisher, run_publisher, &w->is_publisher_started);
    if (errnum != 0)
        return error_set_errno(error, STATUS_RESOURCE, errnum, "the writer's threads cannot be started");
    return STATUS_OK;
}

void writer_join_threads(struct writer *w)
{
    for (int i = 0; i < w->n_workers_started; i++)
        pthread_join(w->workers[i], NULL);
    if (w->is_hdf5_started)
        pthread_join(w->hdf5_thread, NULL);
    if (w->is_publisher_started)
        pthread_join(w->publisher, NULL);
}

void writer_free_done(struct done *done)
{
    if (done == NULL)
        return;
    writer_file_remove(&done->file);
    segment_record_fini(&done->record);
    free(done);
}

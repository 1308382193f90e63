#include "pipeline/landing.h"

#include "kernels/base/memory.h"
#include "kernels/base/processors.h"
#include "pipeline/clock.h"

#include <pthread.h>
#include <string.h>

/* A note a post, and what else two batches can have. */
#define MAX_NOTES (BACKEND_MAX_POSTS + 16)
/* The ring holds two batches where that is less than this: enough for the device and the landing to go on
 * without waiting for each other's every step. */
#define MAX_RING_BYTES ((int64_t)256 << 20)
#define POST_BYTES ((int64_t)8 << 20)
/* A row of the widest dataset takes a quarter of the ring at most; and what the ring's stretches are rounded
 * up by. */
#define ROWS_IN_RING 4
#define SLACK_BYTES 4096

enum note_kind { NOTE_BEGIN, NOTE_TABLES, NOTE_ROWS, NOTE_FINISH, NOTE_ABANDON };

struct note {
    enum note_kind kind;
    int64_t dataset, n;           /* ROWS */
    int slot;                     /* TABLES */
    int64_t unit, first_sequence; /* BEGIN */
    int64_t n_tokens;             /* FINISH */
};

struct landing {
    struct landing_options options;
    int64_t post_bytes; /* of a post that has more than a row */

    pthread_mutex_t lock;
    pthread_cond_t noted, landed;
    struct note notes[MAX_NOTES]; /* number i lies at i % MAX_NOTES */
    int64_t n_noted, n_landed;    /* under the lock, like all below */
    bool stop;
    struct error failure;

    int64_t tables_at; /* number of the latest TABLES note; -1: none. The caller's */
    double waited_s;   /* the caller's */
    pthread_t thread;
    bool is_started;
};

/* ---------------------------------------------------------------- the landing's thread */

static enum status land_rows(struct landing *l, const struct note *note, struct error *error)
{
    const struct dataset *d = &l->options.layout->datasets[note->dataset];
    size_t row_bytes = (size_t)d->width * dtype_size(d->source_dtype);
    for (int64_t done = 0; done < note->n;) {
        void *room;
        int64_t fits, n_overflow = 0;
        TRY(writer_reserve(l->options.writer, note->dataset, note->n - done, &room, &fits, error));
        TRY(l->options.backend->captures->take(l->options.backend, room, (size_t)fits * row_bytes,
                                               &n_overflow, error));
        if (n_overflow > 0)
            writer_count_overflow(l->options.writer, note->dataset, n_overflow);
        TRY(writer_advance(l->options.writer, note->dataset, fits, error));
        done += fits;
    }
    return STATUS_OK;
}

static enum status land(struct landing *l, const struct note *note, struct error *error)
{
    switch (note->kind) {
    case NOTE_BEGIN:
        return writer_begin(l->options.writer, note->unit, note->first_sequence, error);
    case NOTE_TABLES:
        return l->options.tables.write(l->options.tables.context, note->slot, error);
    case NOTE_ROWS:
        return land_rows(l, note, error);
    case NOTE_FINISH:
        return writer_finish(l->options.writer, note->n_tokens, error);
    case NOTE_ABANDON:
        writer_abandon(l->options.writer);
        break;
    }
    return STATUS_OK;
}

/* The next note; false when the landing ends. */
static bool await_note(struct landing *l, struct note *out)
{
    pthread_mutex_lock(&l->lock);
    while (!l->stop && l->n_landed == l->n_noted)
        pthread_cond_wait(&l->noted, &l->lock);
    bool goes_on = !l->stop;
    if (goes_on)
        *out = l->notes[l->n_landed % MAX_NOTES];
    pthread_mutex_unlock(&l->lock);
    return goes_on;
}

static void *run_landing(void *context)
{
    struct landing *l = context;
    struct note note;
    bool failed = false;
    processors_release_thread();
    while (await_note(l, &note)) {
        struct error error = {0};
        if (!failed)
            failed = land(l, &note, &error) != STATUS_OK;
        pthread_mutex_lock(&l->lock);
        if (error.status != STATUS_OK)
            l->failure = error;
        l->n_landed++;
        pthread_cond_broadcast(&l->landed);
        pthread_mutex_unlock(&l->lock);
    }
    return NULL;
}

/* ---------------------------------------------------------------- the caller's side */

static int64_t widest_row(const struct layout *layout)
{
    int64_t widest = 0;
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        int64_t bytes = d->width * (int64_t)dtype_size(d->source_dtype);
        widest = d->is_value && bytes > widest ? bytes : widest;
    }
    return widest;
}

size_t landing_ring_bytes(const struct layout *layout, int64_t batch_bytes)
{
    int64_t bytes = batch_bytes < MAX_RING_BYTES / 2 ? 2 * batch_bytes : MAX_RING_BYTES;
    int64_t least = ROWS_IN_RING * widest_row(layout);
    return (size_t)((bytes > least ? bytes : least) + ROWS_IN_RING * SLACK_BYTES);
}

static enum status start(struct landing *l, struct error *error)
{
    if (pthread_mutex_init(&l->lock, NULL) != 0 || pthread_cond_init(&l->noted, NULL) != 0 ||
        pthread_cond_init(&l->landed, NULL) != 0)
        return error_set(error, STATUS_RESOURCE, "the locks of captured rows cannot be made");
    int errnum = pthread_create(&l->thread, NULL, run_landing, l);
    if (errnum != 0)
        return error_set_errno(error, STATUS_RESOURCE, errnum,
                               "the thread that brings in captured rows does not start");
    l->is_started = true;
    return STATUS_OK;
}

enum status landing_create(const struct landing_options *options, struct landing **out, struct error *error)
{
    void *memory;
    size_t ring_bytes = landing_ring_bytes(options->layout, options->batch_bytes);
    TRY(options->backend->captures->reserve(options->backend, ring_bytes, error));
    TRY(memory_allocate(&memory, sizeof(struct landing), "captured rows on their way", error));
    struct landing *l = memory;
    int64_t quarter = (int64_t)ring_bytes / ROWS_IN_RING - SLACK_BYTES;
    *l = (struct landing){
        .options = *options, .post_bytes = quarter < POST_BYTES ? quarter : POST_BYTES, .tables_at = -1};
    enum status status = start(l, error);
    if (status != STATUS_OK) {
        landing_destroy(l);
        return status;
    }
    *out = l;
    return STATUS_OK;
}

void landing_destroy(struct landing *l)
{
    if (l == NULL)
        return;
    if (l->is_started) {
        pthread_mutex_lock(&l->lock);
        l->stop = true;
        pthread_cond_broadcast(&l->noted);
        pthread_mutex_unlock(&l->lock);
        pthread_join(l->thread, NULL);
        l->options.backend->captures->drop(l->options.backend);
    }
    pthread_cond_destroy(&l->landed);
    pthread_cond_destroy(&l->noted);
    pthread_mutex_destroy(&l->lock);
    memory_free(l);
}

/* Waits, under the lock, until `n` notes have landed. */
static enum status await_landed(struct landing *l, int64_t n, struct error *error)
{
    double began = clock_seconds();
    while (l->n_landed < n && l->failure.status == STATUS_OK)
        pthread_cond_wait(&l->landed, &l->lock);
    l->waited_s += clock_seconds() - began;
    return l->failure.status == STATUS_OK ? STATUS_OK
                                          : error_set(error, l->failure.status, "%s", l->failure.text);
}

static enum status add_note(struct landing *l, const struct note *note, struct error *error)
{
    pthread_mutex_lock(&l->lock);
    enum status status = await_landed(l, l->n_noted - MAX_NOTES + 1, error);
    if (status == STATUS_OK) {
        l->notes[l->n_noted++ % MAX_NOTES] = *note;
        pthread_cond_signal(&l->noted);
    }
    pthread_mutex_unlock(&l->lock);
    return status;
}

enum status landing_begin(struct landing *l, int64_t unit, int64_t first_sequence, struct error *error)
{
    return add_note(l, &(struct note){.kind = NOTE_BEGIN, .unit = unit, .first_sequence = first_sequence},
                    error);
}

enum status landing_finish(struct landing *l, int64_t n_tokens, struct error *error)
{
    return add_note(l, &(struct note){.kind = NOTE_FINISH, .n_tokens = n_tokens}, error);
}

enum status landing_abandon(struct landing *l, struct error *error)
{
    return add_note(l, &(struct note){.kind = NOTE_ABANDON}, error);
}

enum status landing_note_tables(struct landing *l, int slot, struct error *error)
{
    int64_t before = l->tables_at;
    l->tables_at = l->n_noted;
    TRY(add_note(l, &(struct note){.kind = NOTE_TABLES, .slot = slot}, error));
    pthread_mutex_lock(&l->lock);
    enum status status = await_landed(l, before + 1, error);
    pthread_mutex_unlock(&l->lock);
    return status;
}

/* A post of few enough rows; waits for room. */
static enum status post_some(struct landing *l, struct tensor x, const int32_t *rows, int64_t n,
                             enum dtype dtype, struct error *error)
{
    struct backend *b = l->options.backend;
    pthread_mutex_lock(&l->lock);
    int64_t landed = l->n_landed;
    pthread_mutex_unlock(&l->lock);
    while (!b->captures->post(b, x, rows, n, dtype)) {
        if (b->error.status != STATUS_OK)
            return error_set(error, b->error.status, "%s", b->error.text);
        pthread_mutex_lock(&l->lock);
        /* `landed` was read before the post: what has come since made room already */
        enum status status = await_landed(l, landed + 1, error);
        landed = l->n_landed;
        pthread_mutex_unlock(&l->lock);
        TRY(status);
    }
    return STATUS_OK;
}

enum status landing_post(struct landing *l, int64_t dataset, struct tensor x, const int32_t *rows, int64_t n,
                         struct error *error)
{
    enum dtype dtype = l->options.layout->datasets[dataset].source_dtype;
    int64_t fit = l->post_bytes / (x.cols * (int64_t)dtype_size(dtype));
    fit = fit > 0 ? fit : 1;
    for (int64_t done = 0; done < n;) {
        int64_t some = n - done < fit ? n - done : fit;
        TRY(post_some(l, x, rows + done, some, dtype, error));
        TRY(add_note(l, &(struct note){.kind = NOTE_ROWS, .dataset = dataset, .n = some}, error));
        done += some;
    }
    return STATUS_OK;
}

enum status landing_settle(struct landing *l, struct error *error)
{
    pthread_mutex_lock(&l->lock);
    enum status status = await_landed(l, l->n_noted, error);
    pthread_mutex_unlock(&l->lock);
    return status;
}

double landing_waited(const struct landing *l)
{
    return l->waited_s;
}

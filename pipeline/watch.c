#include "pipeline/watch.h"

#include "kernels/base/memory.h"
#include "pipeline/landing.h"

#include <string.h>

/* A dataset that takes rows of a site. */
struct taker {
    int capture;
    int64_t dataset;
    bool per_sequence;
    int64_t written; /* rows of this batch so far */
};

/* A value at a layer that some capture wants. */
struct site {
    struct taker *takers; /* [n], in `all_takers` */
    int64_t n;
    int64_t row_set; /* index of the set of captures whose rows it needs together */
};

/* The rows that one set of captures wants together. */
struct row_set {
    const bool *captures; /* [n_captures] */
    int32_t *rows;        /* [max_tokens] */
    int64_t n;
};

struct selection {
    int32_t *rows; /* [max_tokens] batch rows, ascending */
    int64_t n;
};

/* A batch and what is taken of it. On a device there are two: the tables of one are written while the next is
 * begun, so both are copies. */
struct chosen {
    struct batch batch;
    const struct sequence *sequences; /* [batch.n_windows] */
    struct selection *selections;     /* [n_captures] */
    int32_t *ids, *window_start;      /* [max_tokens], [max_windows + 1]: the copies, where they are made */
    struct sequence *copies;          /* [max_windows] */
};

struct watch {
    const struct plan *plan;
    struct backend *backend;
    struct writer *writer;
    struct landing *landing; /* NULL: rows go from the backend's memory, which is the host's, into chunks */
    struct observer observer;
    struct error connecting; /* the failure of watch_connect */
    struct error error;      /* the first failure of an offer in this batch */
    int64_t n_windows;
    struct site *sites; /* [VALUE_COUNT * (n_layers + 1)] */
    struct taker *all_takers;
    int64_t n_takers;
    struct chosen chosen[2];
    int now; /* which of them */
    struct row_set *row_sets;
    int64_t n_row_sets;
    bool *set_members;  /* [n_row_sets][n_captures] */
    int32_t *windows;   /* 0, 1, 2, ...: the rows of per-sequence values */
    int32_t *local;     /* scratch: rows within a piece */
    int32_t *positions; /* scratch */
    bool *marks;        /* scratch [max_tokens] */
    struct arena arena;
    struct arena copies; /* of what two batches chose */
};

static struct site *site_of(const struct watch *watch, enum value_id value, int layer)
{
    return &watch->sites[(int64_t)value * (watch->plan->model->n_layers + 1) + layer + 1];
}

/* ---------------------------------------------------------------- the observer */

static bool wants(void *context, enum value_id value, int layer)
{
    return site_of(context, value, layer)->n > 0;
}

static struct row_list rows_of(void *context, enum value_id value, int layer)
{
    struct watch *watch = context;
    if (catalogue_get(value)->per == PER_SEQUENCE)
        return (struct row_list){.index = watch->windows, .n = watch->n_windows};
    const struct row_set *set = &watch->row_sets[site_of(watch, value, layer)->row_set];
    return (struct row_list){.index = set->rows, .n = set->n};
}

/* Index of the first of n ascending rows that is not below `row`. */
static int64_t lower_bound(const int32_t *rows, int64_t n, int32_t row)
{
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (rows[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The rows of `wanted` that the piece holds, as indices into the piece, into watch->local. */
static int64_t rows_in_piece(struct watch *watch, const struct piece *piece, const int32_t *wanted,
                             int64_t n_wanted)
{
    int64_t n = 0;
    if (piece->n == 0)
        return 0;
    if (piece->rows == NULL) {
        for (int64_t i = 0; i < n_wanted && wanted[i] < piece->n; i++)
            watch->local[n++] = wanted[i];
        return n;
    }
    int64_t at = lower_bound(wanted, n_wanted, piece->rows[0]);
    for (int64_t i = 0; i < piece->n && at < n_wanted; i++) {
        if (piece->rows[i] == wanted[at]) {
            watch->local[n++] = (int32_t)i;
            at++;
        }
    }
    return n;
}

static enum status write_rows(struct watch *watch, struct taker *taker, const struct piece *piece, int64_t n)
{
    const struct dataset *dataset = &watch->plan->layout.datasets[taker->dataset];
    const struct backend_ops *ops = watch->backend->ops;
    taker->written += n;
    if (watch->landing != NULL)
        return landing_post(watch->landing, taker->dataset, piece->data, watch->local, n, &watch->error);
    for (int64_t done = 0; done < n && watch->writer != NULL;) {
        void *room;
        int64_t fits;
        TRY(writer_reserve(watch->writer, taker->dataset, n - done, &room, &fits, &watch->error));
        ops->collect(watch->backend, piece->data, watch->local + done, fits, dataset->source_dtype, room);
        TRY(writer_advance(watch->writer, taker->dataset, fits, &watch->error));
        done += fits;
    }
    return STATUS_OK;
}

static void offer(void *context, enum value_id value, int layer, const struct piece *piece)
{
    struct watch *watch = context;
    const struct site *site = site_of(watch, value, layer);
    for (int64_t i = 0; i < site->n && watch->error.status == STATUS_OK; i++) {
        struct taker *taker = &site->takers[i];
        const struct selection *selection = &watch->chosen[watch->now].selections[taker->capture];
        int64_t n = taker->per_sequence ? rows_in_piece(watch, piece, watch->windows, watch->n_windows)
                                        : rows_in_piece(watch, piece, selection->rows, selection->n);
        write_rows(watch, taker, piece, n);
    }
}

/* ---------------------------------------------------------------- creation */

static int64_t count_takers(const struct plan *plan)
{
    int64_t n = 0;
    for (int64_t c = 0; c < plan->captures.n; c++)
        n += plan->captures.list[c].n_columns;
    return n;
}

/* The row set of the captures that take from the site; a new one where no site had the same captures yet. */
static int64_t find_row_set(struct watch *watch, const struct site *site)
{
    int64_t n_captures = watch->plan->captures.n;
    bool *members = watch->set_members + watch->n_row_sets * n_captures;
    memset(members, 0, (size_t)n_captures * sizeof *members);
    for (int64_t i = 0; i < site->n; i++)
        members[site->takers[i].capture] = true;
    for (int64_t s = 0; s < watch->n_row_sets; s++) {
        if (memcmp(watch->set_members + s * n_captures, members, (size_t)n_captures * sizeof *members) == 0)
            return s;
    }
    return watch->n_row_sets++;
}

/* Groups the plan's columns by site: counts first, so that each site's takers lie together. */
static void list_takers(struct watch *watch)
{
    const struct plan *plan = watch->plan;
    for (int64_t c = 0; c < plan->captures.n; c++) {
        for (int64_t i = 0; i < plan->captures.list[c].n_columns; i++) {
            const struct column *column = &plan->captures.list[c].columns[i];
            site_of(watch, column->value, column->layer)->n++;
        }
    }
    int64_t n_sites = (int64_t)VALUE_COUNT * (plan->model->n_layers + 1), at = 0;
    for (int64_t s = 0; s < n_sites; s++) {
        watch->sites[s].takers = watch->all_takers + at;
        at += watch->sites[s].n;
        watch->sites[s].n = 0;
    }
    for (int64_t c = 0; c < plan->captures.n; c++) {
        for (int64_t i = 0; i < plan->captures.list[c].n_columns; i++) {
            const struct column *column = &plan->captures.list[c].columns[i];
            struct site *site = site_of(watch, column->value, column->layer);
            site->takers[site->n++] = (struct taker){.capture = (int)c,
                                                     .dataset = plan->first_dataset[c] + 3 + i,
                                                     .per_sequence = column->per == PER_SEQUENCE};
        }
    }
    for (int64_t s = 0; s < n_sites; s++) {
        if (watch->sites[s].n > 0)
            watch->sites[s].row_set = find_row_set(watch, &watch->sites[s]);
    }
}

static struct selection *take_selections(const struct plan *plan, struct arena *arena)
{
    struct selection *selections = arena_take(arena, (size_t)plan->captures.n * sizeof *selections);
    for (int64_t c = 0; c < plan->captures.n; c++) {
        int32_t *rows = arena_take(arena, (size_t)plan->limits.max_tokens * sizeof *rows);
        if (arena->base != NULL)
            selections[c].rows = rows;
    }
    return selections;
}

/* For a device: a second selection, and copies of two batches. */
static void take_copies(struct watch *watch, struct arena *arena)
{
    size_t max_tokens = (size_t)watch->plan->limits.max_tokens,
           max_windows = (size_t)watch->plan->limits.max_windows;
    watch->chosen[1].selections = take_selections(watch->plan, arena);
    for (int i = 0; i < 2; i++) {
        struct chosen *chosen = &watch->chosen[i];
        chosen->ids = arena_take(arena, max_tokens * sizeof *chosen->ids);
        chosen->window_start = arena_take(arena, (max_windows + 1) * sizeof *chosen->window_start);
        chosen->copies = arena_take(arena, max_windows * sizeof *chosen->copies);
    }
}

static void take_memory(struct watch *watch, struct arena *arena)
{
    const struct plan *plan = watch->plan;
    size_t max_tokens = (size_t)plan->limits.max_tokens, max_windows = (size_t)plan->limits.max_windows;
    size_t n_captures = (size_t)plan->captures.n;
    size_t n_sites = (size_t)VALUE_COUNT * (size_t)(plan->model->n_layers + 1),
           n_takers = (size_t)count_takers(plan);
    size_t longest = max_tokens > max_windows ? max_tokens : max_windows;
    watch->sites = arena_take(arena, n_sites * sizeof *watch->sites);
    watch->all_takers = arena_take(arena, n_takers * sizeof *watch->all_takers);
    watch->n_takers = (int64_t)n_takers;
    watch->chosen[0].selections = take_selections(plan, arena);
    /* there are at most as many sets as takers; one more is scratch for find_row_set */
    watch->set_members = arena_take(arena, (n_takers + 1) * n_captures * sizeof *watch->set_members);
    watch->windows = arena_take(arena, longest * sizeof *watch->windows);
    watch->local = arena_take(arena, longest * sizeof *watch->local);
    watch->positions = arena_take(arena, max_tokens * sizeof *watch->positions);
    watch->marks = arena_take(arena, max_tokens * sizeof *watch->marks);
}

static enum status create_row_sets(struct watch *watch, struct error *error)
{
    void *sets, *rows;
    size_t max_tokens = (size_t)watch->plan->limits.max_tokens, n = (size_t)watch->n_row_sets;
    TRY(memory_allocate_array(&sets, n, sizeof(struct row_set), "sets of rows", error));
    watch->row_sets = sets;
    TRY(memory_allocate_array(&rows, n * max_tokens, sizeof(int32_t), "sets of rows", error));
    for (size_t s = 0; s < n; s++) {
        watch->row_sets[s].captures = watch->set_members + s * (size_t)watch->plan->captures.n;
        watch->row_sets[s].rows = (int32_t *)rows + s * max_tokens;
    }
    return STATUS_OK;
}

enum status watch_create(const struct plan *plan, struct watch **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct watch), "the watch", error));
    struct watch *watch = memory;
    watch->plan = plan;
    watch->observer = (struct observer){.context = watch, .wants = wants, .rows = rows_of, .offer = offer};
    take_memory(watch, &watch->arena);
    enum status status = arena_allocate(&watch->arena, "rows of a batch", error);
    if (status == STATUS_OK) {
        take_memory(watch, &watch->arena);
        for (int64_t i = 0; i < plan->limits.max_windows; i++)
            watch->windows[i] = (int32_t)i;
        list_takers(watch);
        status = create_row_sets(watch, error);
    }
    if (status != STATUS_OK) {
        watch_destroy(watch);
        return status;
    }
    *out = watch;
    return STATUS_OK;
}

void watch_destroy(struct watch *watch)
{
    if (watch == NULL)
        return;
    landing_destroy(watch->landing);
    arena_free(&watch->copies);
    if (watch->row_sets != NULL)
        memory_free(watch->row_sets[0].rows);
    memory_free(watch->row_sets);
    arena_free(&watch->arena);
    memory_free(watch);
}

/* Bytes of rows that a batch comes to at most. */
static int64_t count_batch_bytes(const struct plan *plan)
{
    double bytes = 0;
    for (int64_t i = 0; i < plan->layout.n_datasets; i++) {
        const struct dataset *d = &plan->layout.datasets[i];
        if (d->is_value)
            bytes += (double)plan->limits.max_tokens * (double)d->width * (double)dtype_size(d->source_dtype);
    }
    return bytes < 1e15 ? (int64_t)bytes : (int64_t)1e15;
}

size_t watch_ring_bytes(const struct plan *plan)
{
    return landing_ring_bytes(&plan->layout, count_batch_bytes(plan));
}

static enum status write_chosen(void *context, int slot, struct error *error);

static enum status connect_landing(struct watch *watch, struct error *error)
{
    struct landing_options options = {.layout = &watch->plan->layout,
                                      .backend = watch->backend,
                                      .writer = watch->writer,
                                      .tables = {.context = watch, .write = write_chosen},
                                      .batch_bytes = count_batch_bytes(watch->plan)};
    if (watch->copies.base == NULL) {
        take_copies(watch, &watch->copies);
        TRY(arena_allocate(&watch->copies, "two batches", error));
        take_copies(watch, &watch->copies);
    }
    return landing_create(&options, &watch->landing, error);
}

void watch_connect(struct watch *watch, struct backend *backend, struct writer *writer)
{
    landing_destroy(watch->landing);
    watch->landing = NULL;
    error_clear(&watch->connecting);
    watch->now = 0;
    watch->backend = backend;
    watch->writer = writer;
    if (backend->captures != NULL && writer != NULL)
        connect_landing(watch, &watch->connecting);
}

const struct observer *watch_observer(struct watch *watch)
{
    return &watch->observer;
}

/* ---------------------------------------------------------------- a batch */

static void select_rows(struct watch *watch, int64_t c, const struct batch *batch,
                        const struct sequence *sequences)
{
    struct selection *selection = &watch->chosen[watch->now].selections[c];
    const struct positions *positions = &watch->plan->captures.list[c].spec->positions;
    selection->n = 0;
    for (int64_t w = 0; w < batch->n_windows; w++) {
        int32_t first = batch->window_start[w];
        int64_t n = capture_select(positions, sequences[w].index, batch->ids + first, sequences[w].length,
                                   watch->positions);
        for (int64_t i = 0; i < n; i++)
            selection->rows[selection->n++] = first + watch->positions[i];
    }
}

static void unite_rows(struct watch *watch, struct row_set *set, int64_t n_tokens)
{
    const struct selection *selections = watch->chosen[watch->now].selections;
    memset(watch->marks, 0, (size_t)n_tokens * sizeof *watch->marks);
    for (int64_t c = 0; c < watch->plan->captures.n; c++) {
        for (int64_t i = 0; set->captures[c] && i < selections[c].n; i++)
            watch->marks[selections[c].rows[i]] = true;
    }
    set->n = 0;
    for (int64_t t = 0; t < n_tokens; t++) {
        if (watch->marks[t])
            set->rows[set->n++] = (int32_t)t;
    }
}

static enum status write_sequence(struct watch *watch, const struct sequence *s, struct error *error)
{
    int32_t continues = s->continues;
    TRY(writer_append(watch->writer, DATASET_DOCUMENT, &s->document, 1, error));
    TRY(writer_append(watch->writer, DATASET_START, &s->start, 1, error));
    TRY(writer_append(watch->writer, DATASET_LENGTH, &s->length, 1, error));
    return writer_append(watch->writer, DATASET_CONTINUES, &continues, 1, error);
}

/* rows/sequence, rows/position and rows/input_ids of one window: the selected rows in [at, end). */
static enum status write_window_rows(struct watch *watch, const struct chosen *chosen, int64_t c,
                                     int64_t window, int64_t *at, struct error *error)
{
    const struct selection *selection = &chosen->selections[c];
    const struct batch *batch = &chosen->batch;
    int64_t table = watch->plan->first_dataset[c];
    int32_t first = batch->window_start[window];
    for (; *at < selection->n && selection->rows[*at] < batch->window_start[window + 1]; ++*at) {
        int32_t row = selection->rows[*at], position = row - first;
        TRY(writer_append(watch->writer, table, &chosen->sequences[window].index, 1, error));
        TRY(writer_append(watch->writer, table + 1, &position, 1, error));
        TRY(writer_append(watch->writer, table + 2, &batch->ids[row], 1, error));
    }
    return STATUS_OK;
}

/* The tables of a batch. With a landing, on its thread. */
static enum status write_chosen(void *context, int slot, struct error *error)
{
    struct watch *watch = context;
    const struct chosen *chosen = &watch->chosen[slot];
    for (int64_t w = 0; w < chosen->batch.n_windows; w++)
        TRY(write_sequence(watch, &chosen->sequences[w], error));
    for (int64_t c = 0; c < watch->plan->captures.n; c++) {
        int64_t at = 0;
        for (int64_t w = 0; w < chosen->batch.n_windows; w++)
            TRY(write_window_rows(watch, chosen, c, w, &at, error));
    }
    return STATUS_OK;
}

/* Puts copies in the place of what is the caller's. */
static void copy_batch(struct chosen *chosen)
{
    struct batch *batch = &chosen->batch;
    memcpy(chosen->ids, batch->ids, (size_t)batch->n_tokens * sizeof *chosen->ids);
    memcpy(chosen->window_start, batch->window_start,
           (size_t)(batch->n_windows + 1) * sizeof *chosen->window_start);
    memcpy(chosen->copies, chosen->sequences, (size_t)batch->n_windows * sizeof *chosen->copies);
    batch->ids = chosen->ids;
    batch->window_start = chosen->window_start;
    batch->window_position = NULL;
    chosen->sequences = chosen->copies;
}

enum status watch_begin_batch(struct watch *watch, const struct batch *batch,
                              const struct sequence *sequences, struct error *error)
{
    watch->now = watch->landing != NULL ? 1 - watch->now : 0;
    struct chosen *chosen = &watch->chosen[watch->now];
    error_clear(&watch->error);
    watch->n_windows = batch->n_windows;
    chosen->batch = *batch;
    chosen->sequences = sequences;
    for (int64_t i = 0; i < watch->n_takers; i++)
        watch->all_takers[i].written = 0;
    for (int64_t c = 0; c < watch->plan->captures.n; c++)
        select_rows(watch, c, batch, sequences);
    for (int64_t s = 0; s < watch->n_row_sets; s++)
        unite_rows(watch, &watch->row_sets[s], batch->n_tokens);
    if (watch->landing != NULL) {
        copy_batch(chosen);
        return landing_note_tables(watch->landing, watch->now, error);
    }
    return watch->writer == NULL ? STATUS_OK : write_chosen(watch, watch->now, error);
}

enum status watch_end_batch(struct watch *watch, struct error *error)
{
    if (watch->error.status != STATUS_OK)
        return error_set(error, watch->error.status, "%s", watch->error.text);
    const struct selection *selections = watch->chosen[watch->now].selections;
    for (int64_t i = 0; i < watch->n_takers; i++) {
        const struct taker *taker = &watch->all_takers[i];
        int64_t wanted = taker->per_sequence ? watch->n_windows : selections[taker->capture].n;
        if (taker->written != wanted)
            return error_set(error, STATUS_BUG, "%s: %lld rows were offered where %lld were wanted",
                             watch->plan->layout.datasets[taker->dataset].path, (long long)taker->written,
                             (long long)wanted);
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- a unit */

enum status watch_begin_unit(struct watch *watch, int64_t unit, struct error *error)
{
    int64_t first_sequence = watch->plan->unit_start[unit];
    return watch->landing != NULL ? landing_begin(watch->landing, unit, first_sequence, error)
                                  : writer_begin(watch->writer, unit, first_sequence, error);
}

enum status watch_finish_unit(struct watch *watch, int64_t n_tokens, struct error *error)
{
    return watch->landing != NULL ? landing_finish(watch->landing, n_tokens, error)
                                  : writer_finish(watch->writer, n_tokens, error);
}

void watch_abandon_unit(struct watch *watch)
{
    /* A landing that has failed leaves the writer alone. */
    if (watch->landing == NULL || landing_abandon(watch->landing, NULL) != STATUS_OK)
        writer_abandon(watch->writer);
}

enum status watch_settle(struct watch *watch, struct error *error)
{
    if (watch->connecting.status != STATUS_OK)
        return error_set(error, watch->connecting.status, "%s", watch->connecting.text);
    return watch->landing == NULL ? STATUS_OK : landing_settle(watch->landing, error);
}

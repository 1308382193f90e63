#include "pipeline/plan.h"

#include "kernels/base/memory.h"

#include <stdio.h>
#include <string.h>

/* Tokens a batch where run.batch_tokens is "auto": enough rows for a GEMM to run at its rate, few enough for
 * a layer's activations to stay in the last-level cache. A mixture's products have the rows of one expert, so
 * its batches are larger, until an expert has EXPERT_ROWS on average. `make bench` shows both sides. */
#define AUTO_BATCH_TOKENS 2048
#define AUTO_BATCH_TOKENS_MOST 8192
#define EXPERT_ROWS 512
/* Rows a chunk of the narrow tables (rows/..., sequences/...). */
#define TABLE_CHUNK_ROWS 16384

/* ---------------------------------------------------------------- units */

struct unit_list {
    int64_t *start, *tokens;
    int64_t n, capacity;
};

static enum status grow(struct unit_list *units, struct error *error)
{
    int64_t capacity = units->capacity == 0 ? 64 : 2 * units->capacity;
    void *start = NULL, *tokens = NULL;
    TRY(memory_allocate_array(&start, (size_t)capacity + 1, sizeof(int64_t), "the list of units", error));
    enum status status =
        memory_allocate_array(&tokens, (size_t)capacity + 1, sizeof(int64_t), "the list of units", error);
    if (status != STATUS_OK) {
        memory_free(start);
        return status;
    }
    if (units->n > 0) {
        memcpy(start, units->start, (size_t)units->n * sizeof(int64_t));
        memcpy(tokens, units->tokens, (size_t)units->n * sizeof(int64_t));
    }
    memory_free(units->start);
    memory_free(units->tokens);
    units->start = start;
    units->tokens = tokens;
    units->capacity = capacity;
    return STATUS_OK;
}

/* A unit ends before the sequence that would take it past unit_tokens; with carry only where a document does.
 */
static enum status cut_units(const struct job *job, struct corpus *corpus, struct unit_list *units,
                             struct plan *plan, int64_t *longest, struct error *error)
{
    TRY(grow(units, error));
    for (int64_t i = 0; i < corpus_n_sequences(corpus); i++) {
        struct sequence s;
        TRY(corpus_describe(corpus, i, &s, error));
        bool full = units->n > 0 && units->tokens[units->n - 1] + s.length > job->unit_tokens && !s.continues;
        if (units->n == 0 || full) {
            if (units->n == units->capacity)
                TRY(grow(units, error));
            units->start[units->n] = i;
            units->tokens[units->n++] = 0;
        }
        units->tokens[units->n - 1] += s.length;
        plan->n_tokens += s.length;
        if (s.length > *longest)
            *longest = s.length;
    }
    units->start[units->n] = corpus_n_sequences(corpus);
    return STATUS_OK;
}

static int64_t at_least(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t at_most(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t auto_batch_tokens(const struct model *model)
{
    int64_t tokens = model->top_k > 0 ? (int64_t)EXPERT_ROWS * model->n_experts / model->top_k : 0;
    return at_most(at_least(tokens, AUTO_BATCH_TOKENS), AUTO_BATCH_TOKENS_MOST);
}

static enum status plan_batches(struct plan *plan, struct corpus *corpus, struct error *error)
{
    const struct job *job = plan->job;
    struct unit_list units = {0};
    int64_t longest = 1;
    enum status status = cut_units(job, corpus, &units, plan, &longest, error);
    plan->unit_start = units.start;
    plan->unit_tokens = units.tokens;
    plan->n_units = units.n;
    TRY(status);
    plan->n_sequences = corpus_n_sequences(corpus);
    if (plan->n_sequences == 0)
        return error_set(
            error, STATUS_INPUT, "%s: nothing to run: no sequences (%lld documents, %lld of them empty)",
            job->corpus.path, (long long)corpus_n_documents(corpus), (long long)corpus_n_empty(corpus));
    plan->longest = longest;
    plan->largest_unit = 1;
    for (int64_t u = 0; u < plan->n_units; u++)
        plan->largest_unit = at_least(plan->largest_unit, plan->unit_tokens[u]);
    /* The key axis is the context's even where no sequence is that long, so that stores of one job agree. */
    plan->n_keys = job->corpus.carry ? corpus_longest_run(corpus) : job->corpus.context;
    plan->limits = (struct replica_limits){.max_position = plan->n_keys, .carry = job->corpus.carry};
    return plan_set_batch_tokens(
        plan, job->batch_tokens > 0 ? job->batch_tokens : auto_batch_tokens(plan->model), error);
}

enum status plan_set_batch_tokens(struct plan *plan, int64_t batch_tokens, struct error *error)
{
    int64_t max_tokens = at_most(at_least(batch_tokens, plan->longest), plan->largest_unit);
    if (max_tokens > INT32_MAX / 4)
        return error_set(error, STATUS_USAGE, "%s: a batch of %lld tokens is too large; at most %d",
                         plan->job->source, (long long)max_tokens, INT32_MAX / 4);
    plan->batch_tokens = batch_tokens;
    plan->limits.max_tokens = plan->limits.max_windows = max_tokens;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- layout */

static void add_table(struct layout *layout, int capture, enum dataset_rows rows, const char *path,
                      enum dtype dtype)
{
    struct dataset *d = &layout->datasets[layout->n_datasets++];
    *d = (struct dataset){.capture = capture,
                          .rows = rows,
                          .layer = -1,
                          .dtype = dtype,
                          .source_dtype = dtype,
                          .width = 1,
                          .row_bytes = (int64_t)dtype_size(dtype),
                          .chunk_rows = TABLE_CHUNK_ROWS};
    snprintf(d->path, sizeof d->path, "%s", path);
}

static void add_column(struct layout *layout, int capture, const char *name, const struct column *column,
                       enum dtype load_dtype)
{
    struct dataset *d = &layout->datasets[layout->n_datasets++];
    *d = (struct dataset){.capture = capture,
                          .rows = column->per == PER_SEQUENCE ? ROWS_OF_SEQUENCES : ROWS_OF_CAPTURE,
                          .is_value = true,
                          .value = column->value,
                          .layer = column->layer,
                          .dtype = column->dtype,
                          .source_dtype = column->dtype == DTYPE_F16 ? DTYPE_F32 : column->dtype,
                          .load_dtype = load_dtype,
                          .n_axes = column->shape.n_axes,
                          .width = column->shape.width,
                          .row_bytes = column->row_bytes,
                          .chunk_rows = column->chunk_rows};
    snprintf(d->path, sizeof d->path, "%s/%s", name, column->path);
    for (int i = 0; i < d->n_axes; i++) {
        d->axis_names[i] = column->shape.axis_names[i];
        d->axis_sizes[i] = column->shape.axis_sizes[i];
    }
}

static enum status plan_layout(struct plan *plan, struct error *error)
{
    const struct job *job = plan->job;
    int64_t n = DATASET_SEQUENCES_COUNT;
    for (int64_t c = 0; c < plan->captures.n; c++)
        n += 3 + plan->captures.list[c].n_columns;
    struct layout *layout = &plan->layout;
    layout->compression = job->compression;
    layout->n_captures = plan->captures.n;
    void *datasets, *names, *first;
    TRY(memory_allocate_array(&datasets, (size_t)n, sizeof(struct dataset), "the layout", error));
    layout->datasets = datasets;
    TRY(memory_allocate_array(&names, (size_t)plan->captures.n, sizeof(char *), "the layout", error));
    layout->capture_names = names;
    TRY(memory_allocate_array(&first, (size_t)plan->captures.n, sizeof(int64_t), "the layout", error));
    plan->first_dataset = first;
    add_table(layout, -1, ROWS_OF_SEQUENCES, "sequences/document", DTYPE_I64);
    add_table(layout, -1, ROWS_OF_SEQUENCES, "sequences/start", DTYPE_I64);
    add_table(layout, -1, ROWS_OF_SEQUENCES, "sequences/length", DTYPE_I64);
    add_table(layout, -1, ROWS_OF_SEQUENCES, "sequences/continues", DTYPE_I32);
    for (int64_t c = 0; c < plan->captures.n; c++) {
        const struct capture *capture = &plan->captures.list[c];
        const char *name = capture->spec->name;
        char path[224];
        layout->capture_names[c] = name;
        plan->first_dataset[c] = layout->n_datasets;
        snprintf(path, sizeof path, "%s/rows/sequence", name);
        add_table(layout, (int)c, ROWS_OF_CAPTURE, path, DTYPE_I64);
        snprintf(path, sizeof path, "%s/rows/position", name);
        add_table(layout, (int)c, ROWS_OF_CAPTURE, path, DTYPE_I32);
        snprintf(path, sizeof path, "%s/rows/input_ids", name);
        add_table(layout, (int)c, ROWS_OF_CAPTURE, path, DTYPE_I32);
        for (int64_t i = 0; i < capture->n_columns; i++)
            add_column(layout, (int)c, name, &capture->columns[i], plan->model->load_dtype);
    }
    return STATUS_OK;
}

static enum status fill(struct plan *plan, struct corpus *corpus, struct error *error)
{
    TRY(plan_batches(plan, corpus, error));
    TRY(capture_resolve(plan->job, plan->model, plan->n_keys, &plan->captures, error));
    return plan_layout(plan, error);
}

enum status plan_create(const struct job *job, const struct model *model, struct corpus *corpus,
                        struct plan **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct plan), "the plan", error));
    struct plan *plan = memory;
    plan->job = job;
    plan->model = model;
    enum status status = fill(plan, corpus, error);
    if (status != STATUS_OK) {
        plan_free(plan);
        return status;
    }
    *out = plan;
    return STATUS_OK;
}

void plan_free(struct plan *plan)
{
    if (plan == NULL)
        return;
    memory_free(plan->first_dataset);
    memory_free(plan->layout.datasets);
    memory_free(plan->layout.capture_names);
    capture_list_free(&plan->captures);
    memory_free(plan->unit_start);
    memory_free(plan->unit_tokens);
    memory_free(plan);
}

void plan_expect_converted(struct plan *plan)
{
    for (int64_t i = 0; i < plan->layout.n_datasets; i++)
        plan->layout.datasets[i].source_dtype = plan->layout.datasets[i].dtype;
}

/* ---------------------------------------------------------------- the bill */

/* Scratch for one sequence: its ids and its chosen positions. */
struct chooser {
    int32_t *ids, *positions; /* [context] each */
    bool needs_ids;
};

static enum status chooser_init(struct chooser *c, const struct plan *plan, struct error *error)
{
    void *buffer;
    size_t longest = (size_t)at_least(plan->limits.max_tokens, plan->job->corpus.context);
    TRY(memory_allocate_array(&buffer, 2 * longest, sizeof(int32_t), "counting rows", error));
    *c = (struct chooser){.ids = buffer, .positions = (int32_t *)buffer + longest};
    for (int64_t i = 0; i < plan->captures.n; i++)
        c->needs_ids |= plan->captures.list[i].spec->positions.n_skip_ids > 0;
    return STATUS_OK;
}

static void chooser_fini(struct chooser *c)
{
    memory_free(c->ids);
}

static enum status look_at(const struct chooser *c, struct corpus *corpus, int64_t index, struct sequence *s,
                           struct error *error)
{
    return c->needs_ids ? corpus_read(corpus, index, s, c->ids, error)
                        : corpus_describe(corpus, index, s, error);
}

static int64_t choose(const struct chooser *c, const struct plan *plan, int64_t capture,
                      const struct sequence *s)
{
    return capture_select(&plan->captures.list[capture].spec->positions, s->index, c->ids, s->length,
                          c->positions);
}

/* Adds the rows of sequences [first, last) to rows[n_captures]. */
static enum status count_rows(const struct plan *plan, struct corpus *corpus, int64_t first, int64_t last,
                              int64_t *rows, struct error *error)
{
    struct chooser chooser;
    TRY(chooser_init(&chooser, plan, error));
    enum status status = STATUS_OK;
    for (int64_t i = first; i < last && status == STATUS_OK; i++) {
        struct sequence s;
        status = look_at(&chooser, corpus, i, &s, error);
        for (int64_t c = 0; c < plan->captures.n && status == STATUS_OK; c++)
            rows[c] += choose(&chooser, plan, c, &s);
    }
    chooser_fini(&chooser);
    return status;
}

enum status plan_count_rows(const struct plan *plan, struct corpus *corpus, int64_t *rows,
                            struct error *error)
{
    memset(rows, 0, (size_t)plan->captures.n * sizeof *rows);
    return count_rows(plan, corpus, 0, plan->n_sequences, rows, error);
}

enum status plan_unit_bytes(const struct plan *plan, struct corpus *corpus, int64_t unit, int64_t *bytes,
                            struct error *error)
{
    void *memory;
    int64_t first = plan->unit_start[unit], last = plan->unit_start[unit + 1], total = 0;
    TRY(memory_allocate_array(&memory, (size_t)plan->captures.n, sizeof(int64_t), "counting rows", error));
    int64_t *rows = memory;
    enum status status = count_rows(plan, corpus, first, last, rows, error);
    for (int64_t i = 0; i < plan->layout.n_datasets; i++) {
        const struct dataset *d = &plan->layout.datasets[i];
        total += d->row_bytes * (d->rows == ROWS_OF_SEQUENCES ? last - first : rows[d->capture]);
    }
    memory_free(memory);
    *bytes = total;
    return status;
}

enum status plan_find_row(const struct plan *plan, struct corpus *corpus, int64_t unit, int64_t capture,
                          int64_t row, struct sequence *sequence, int64_t *position, struct error *error)
{
    struct chooser chooser;
    TRY(chooser_init(&chooser, plan, error));
    enum status status = STATUS_OK;
    *sequence = (struct sequence){.index = -1};
    for (int64_t i = plan->unit_start[unit]; i < plan->unit_start[unit + 1] && status == STATUS_OK; i++) {
        struct sequence s;
        status = look_at(&chooser, corpus, i, &s, error);
        int64_t n = status == STATUS_OK ? choose(&chooser, plan, capture, &s) : 0;
        if (row < n) {
            *sequence = s;
            *position = chooser.positions[row];
            break;
        }
        row -= n;
    }
    chooser_fini(&chooser);
    return status;
}

int64_t plan_column_bytes(const struct plan *plan, const struct column *column, int64_t capture_rows)
{
    return column->row_bytes * (column->per == PER_SEQUENCE ? plan->n_sequences : capture_rows);
}

/* A made-up store for tests: every kind of dataset, rows that follow from a formula that any language can
 * repeat.
 *
 * Element (row, column) of dataset number k, row counted over the whole store: mix(k, row, column) / 2^24 * 4
 * - 2, rounded to the stored dtype; integers: mix % 1000. Some are replaced: see made_up_value. Header only,
 * so that unit tests and tools share it. */
#ifndef ACTDUMP_TESTS_MADE_UP_H
#define ACTDUMP_TESTS_MADE_UP_H

#include "kernels/base/memory.h"
#include "pipeline/store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    MADE_UP_DATASETS = 27,
    MADE_UP_CAPTURES = 3,
    MADE_UP_LENGTH = 2,     /* index of sequences/length */
    MADE_UP_F32 = 7,        /* all/layers/0/layer_output */
    MADE_UP_F16 = 9,        /* all/layers/1/linear_attn/attention_output: some overflow */
    MADE_UP_SCORES = 13,    /* all/layers/2/self_attn/attention_scores */
    MADE_UP_NONFINITE = 20, /* some/layers/0/layer_output */
};

struct made_up {
    struct dataset datasets[MADE_UP_DATASETS];
    const char *captures[MADE_UP_CAPTURES];
    struct layout layout;
    int64_t n_rows[MADE_UP_CAPTURES]; /* written so far */
    int64_t n_sequences, n_tokens;
    bool with_nonfinite;
};

static uint32_t made_up_mix(int64_t dataset, int64_t row, int64_t column)
{
    uint64_t z = (uint64_t)(dataset + 1) * 0x9e3779b97f4a7c15u + (uint64_t)row * 0xbf58476d1ce4e5b9u +
                 (uint64_t)column * 0x94d049bb133111ebu;
    z ^= z >> 31;
    z *= 0xd6e8feb86659fd93u;
    z ^= z >> 32;
    return (uint32_t)(z >> 40);
}

static float made_up_value(const struct made_up *m, int64_t dataset, int64_t row, int64_t column)
{
    float x = (float)made_up_mix(dataset, row, column) / 16777216.0f * 4.0f - 2.0f;
    if (dataset == MADE_UP_SCORES && column % 7 > row % 7)
        return -INFINITY;
    if (dataset == MADE_UP_F16 && row % 11 == 5 && column == 3)
        return x < 0 ? -1e6f : 1e6f;
    if (dataset == MADE_UP_NONFINITE && m->with_nonfinite && row >= 7 && column == row % 5)
        return row % 2 == 0 ? NAN : INFINITY;
    return x;
}

static void made_up_add(struct made_up *m, int capture, const char *path, enum dtype dtype,
                        int64_t chunk_rows)
{
    struct dataset *d = &m->datasets[m->layout.n_datasets++];
    *d = (struct dataset){.capture = capture,
                          .rows = capture < 0 ? ROWS_OF_SEQUENCES : ROWS_OF_CAPTURE,
                          .layer = -1,
                          .dtype = dtype,
                          .source_dtype = dtype,
                          .width = 1,
                          .row_bytes = (int64_t)dtype_size(dtype),
                          .chunk_rows = chunk_rows};
    snprintf(d->path, sizeof d->path, "%s%s%s", capture < 0 ? "sequences" : m->captures[capture],
             capture < 0 ? "/" : "/rows/", path);
}

/* axes: {name, size} pairs up to a NULL name. */
struct made_up_axis {
    const char *name;
    int64_t size;
};

static void made_up_add_value(struct made_up *m, int capture, enum value_id value, int layer,
                              enum dtype dtype, int64_t chunk_rows, const struct made_up_axis *axes)
{
    struct dataset *d = &m->datasets[m->layout.n_datasets++];
    *d = (struct dataset){.capture = capture,
                          .rows =
                              catalogue_get(value)->per == PER_SEQUENCE ? ROWS_OF_SEQUENCES : ROWS_OF_CAPTURE,
                          .is_value = true,
                          .value = value,
                          .layer = layer,
                          .dtype = dtype,
                          .source_dtype = dtype == DTYPE_F16 ? DTYPE_F32 : dtype,
                          .load_dtype = DTYPE_F32,
                          .width = 1,
                          .chunk_rows = chunk_rows};
    for (; axes->name != NULL; axes++) {
        d->axis_names[d->n_axes] = axes->name;
        d->axis_sizes[d->n_axes++] = axes->size;
        d->width *= axes->size;
    }
    d->row_bytes = d->width * (int64_t)dtype_size(dtype);
    if (layer < 0)
        snprintf(d->path, sizeof d->path, "%s/%s", m->captures[capture], catalogue_path(value));
    else
        snprintf(d->path, sizeof d->path, "%s/layers/%d/%s", m->captures[capture], layer,
                 catalogue_path(value));
}

static void made_up_add_rows(struct made_up *m, int capture, int64_t chunk_rows)
{
    made_up_add(m, capture, "sequence", DTYPE_I64, chunk_rows);
    made_up_add(m, capture, "position", DTYPE_I32, chunk_rows);
    made_up_add(m, capture, "input_ids", DTYPE_I32, chunk_rows);
}

#define MADE_UP_AXES(...) ((const struct made_up_axis[]){__VA_ARGS__ __VA_OPT__(, ){NULL, 0}})

/* Points into itself: do not copy. */
static inline void made_up_init(struct made_up *m, int compression)
{
    *m = (struct made_up){.captures = {"all", "some", "none"}};
    m->layout = (struct layout){.datasets = m->datasets,
                                .capture_names = m->captures,
                                .n_captures = MADE_UP_CAPTURES,
                                .compression = compression};
    made_up_add(m, -1, "document", DTYPE_I64, 64);
    made_up_add(m, -1, "start", DTYPE_I64, 64);
    made_up_add(m, -1, "length", DTYPE_I64, 64);
    made_up_add(m, -1, "continues", DTYPE_I32, 64);
    made_up_add_rows(m, 0, 16);
    made_up_add_value(m, 0, VALUE_LAYER_OUTPUT, 0, DTYPE_F32, 8, MADE_UP_AXES({"hidden_size", 24}));
    made_up_add_value(m, 0, VALUE_LAYER_OUTPUT, 1, DTYPE_BF16, 8, MADE_UP_AXES({"hidden_size", 24}));
    made_up_add_value(m, 0, VALUE_LINEAR_OUTPUT, 1, DTYPE_F16, 7, MADE_UP_AXES({"hidden_size", 9}));
    made_up_add_value(m, 0, VALUE_LINEAR_STATES, 1, DTYPE_F32, 3,
                      MADE_UP_AXES({"channels", 5}, {"state_dim", 3}));
    made_up_add_value(m, 0, VALUE_LINEAR_STATE, 1, DTYPE_F32, 3,
                      MADE_UP_AXES({"channels", 5}, {"state_dim", 3}));
    made_up_add_value(m, 0, VALUE_LOGITS, -1, DTYPE_F32, 5, MADE_UP_AXES({"vocab_size", 1}));
    made_up_add_value(m, 0, VALUE_ATTN_SCORES, 2, DTYPE_F32, 16, MADE_UP_AXES({"num_heads", 2}, {"key", 7}));
    made_up_add_value(m, 0, VALUE_EXPERT_INDICES, 2, DTYPE_I32, 16, MADE_UP_AXES({"top_k", 2}));
    made_up_add_value(m, 0, VALUE_INPUT_IDS, -1, DTYPE_I32, 16, MADE_UP_AXES());
    made_up_add_value(m, 0, VALUE_NEXT_TOKEN_PROBS, -1, DTYPE_F32, 4, MADE_UP_AXES({"vocab_size", 9000}));
    made_up_add_rows(m, 1, 1000);
    made_up_add_value(m, 1, VALUE_LAYER_OUTPUT, 0, DTYPE_F32, 1000, MADE_UP_AXES({"hidden_size", 24}));
    made_up_add_value(m, 1, VALUE_LAYER_INPUT, 0, DTYPE_F32, 1, MADE_UP_AXES({"hidden_size", 2050}));
    made_up_add_rows(m, 2, 16);
    made_up_add_value(m, 2, VALUE_LAYER_OUTPUT, 0, DTYPE_BF16, 16, MADE_UP_AXES({"hidden_size", 24}));
    made_up_add_value(m, 2, VALUE_EXPERT_INDICES, 1, DTYPE_I32, 16, MADE_UP_AXES({"top_k", 2}));
}

/* The next unit begins the store anew; the layout stays as a writer borrows it. */
static inline void made_up_restart(struct made_up *m)
{
    memset(m->n_rows, 0, sizeof m->n_rows);
    m->n_sequences = m->n_tokens = 0;
}

static inline int64_t made_up_length(int64_t sequence)
{
    return sequence * 7 % 13 + 1;
}

/* Rows [first, first + n) of a value, in the dtype that the writer takes. */
static enum status made_up_append(struct made_up *m, struct writer *writer, int64_t dataset, int64_t first,
                                  int64_t n, struct error *error)
{
    const struct dataset *d = &m->datasets[dataset];
    void *memory;
    TRY(memory_allocate_array(&memory, (size_t)(n * d->width), dtype_size(d->source_dtype), "made-up rows",
                              error));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < d->width; c++) {
            int64_t at = r * d->width + c;
            float x = made_up_value(m, dataset, first + r, c);
            if (d->source_dtype == DTYPE_F32)
                ((float *)memory)[at] = x;
            else if (d->source_dtype == DTYPE_BF16)
                ((uint16_t *)memory)[at] = f32_to_bf16(x);
            else
                ((int32_t *)memory)[at] = (int32_t)(made_up_mix(dataset, first + r, c) % 1000);
        }
    enum status status = writer_append(writer, dataset, memory, n, error);
    memory_free(memory);
    return status;
}

static enum status made_up_append_tables(struct writer *writer, int64_t sequence, struct error *error)
{
    int64_t document = sequence / 2, start = sequence % 2 * 100, length = made_up_length(sequence);
    int32_t continues = 0;
    TRY(writer_append(writer, 0, &document, 1, error));
    TRY(writer_append(writer, 1, &start, 1, error));
    TRY(writer_append(writer, 2, &length, 1, error));
    TRY(writer_append(writer, 3, &continues, 1, error));
    for (int capture = 0; capture < 2; capture++) {
        int64_t table = capture == 0 ? 4 : 17;
        for (int32_t position = 0; position < length; position += capture == 0 ? 1 : 3) {
            int32_t id = (int32_t)((sequence * 31 + position) % 50000);
            TRY(writer_append(writer, table, &sequence, 1, error));
            TRY(writer_append(writer, table + 1, &position, 1, error));
            TRY(writer_append(writer, table + 2, &id, 1, error));
        }
    }
    return STATUS_OK;
}

/* One sequence of every dataset: capture "all" takes each token, "some" each third, "none" none. */
static enum status made_up_append_sequence(struct made_up *m, struct writer *writer, int64_t sequence,
                                           struct error *error)
{
    int64_t length = made_up_length(sequence), n[MADE_UP_CAPTURES] = {length, (length + 2) / 3, 0};
    TRY(made_up_append_tables(writer, sequence, error));
    for (int64_t i = 0; i < m->layout.n_datasets; i++) {
        const struct dataset *d = &m->datasets[i];
        if (!d->is_value)
            continue;
        if (d->rows == ROWS_OF_SEQUENCES)
            TRY(made_up_append(m, writer, i, sequence, 1, error));
        else if (n[d->capture] > 0)
            TRY(made_up_append(m, writer, i, m->n_rows[d->capture], n[d->capture], error));
    }
    for (int c = 0; c < MADE_UP_CAPTURES; c++)
        m->n_rows[c] += n[c];
    m->n_sequences++;
    m->n_tokens += length;
    return STATUS_OK;
}

/* Begins, fills and finishes a unit of n sequences that follow those so far. */
static inline enum status made_up_unit(struct made_up *m, struct writer *writer, int64_t unit, int64_t n,
                                       struct error *error)
{
    int64_t tokens = m->n_tokens;
    TRY(writer_begin(writer, unit, m->n_sequences, error));
    for (int64_t i = 0; i < n; i++)
        TRY(made_up_append_sequence(m, writer, m->n_sequences, error));
    return writer_finish(writer, m->n_tokens - tokens, error);
}

/* Sequences of each unit: one long, one short, one empty, and so on. */
static inline int64_t made_up_unit_sequences(int64_t unit)
{
    static const int64_t n[] = {9, 1, 0, 4, 16};
    return n[unit % 5];
}

static inline enum status made_up_write_units(struct made_up *m, struct writer *writer, struct store *store,
                                              struct error *error)
{
    for (int64_t unit = 0; unit < store->n_units; unit++)
        TRY(made_up_unit(m, writer, unit, made_up_unit_sequences(unit), error));
    for (;;) {
        struct segment_record record;
        bool have;
        TRY(writer_collect(writer, true, &record, &have, error));
        if (!have)
            return STATUS_OK;
        store->segments[record.unit] = record;
    }
}

static inline cJSON *made_up_json(const char *text)
{
    return cJSON_Parse(text);
}

static inline void made_up_free(struct store *store)
{
    for (int64_t u = 0; store->segments != NULL && u < store->n_units; u++)
        segment_record_fini(&store->segments[u]);
    memory_free(store->segments);
    memory_free(store->unit_start);
    cJSON_Delete(store->job);
    cJSON_Delete(store->model);
    cJSON_Delete(store->corpus);
    cJSON_Delete(store->run);
    cJSON_Delete(store->summary);
}

/* A whole store in `folder`: segments, store.json, store.h5. */
static inline enum status made_up_store(struct made_up *m, char *folder, int n_threads, int64_t n_units,
                                        struct error *error)
{
    struct store store = {.folder = folder, .complete = true, .layout = m->layout, .n_units = n_units};
    struct writer_options options = {.folder = folder, .n_threads = n_threads};
    struct writer *writer = NULL;
    void *starts = NULL, *segments = NULL;
    enum status status;
    TRY_ELSE(store_make_folders(folder, error), done);
    TRY_ELSE(memory_allocate_array(&starts, (size_t)n_units + 1, sizeof(int64_t), "units", error), done);
    store.unit_start = starts;
    TRY_ELSE(memory_allocate_array(&segments, (size_t)n_units, sizeof(struct segment_record), "units", error),
             done);
    store.segments = segments;
    for (int64_t u = 0; u < n_units; u++)
        store.unit_start[u + 1] = store.unit_start[u] + made_up_unit_sequences(u);
    store.job = made_up_json("{\"model\": {\"checkpoint\": \"made-up\"}, \"captures\": {}}");
    store.model =
        made_up_json("{\"family\": \"mamba\", \"checkpoint\": \"/made/up\", \"load_dtype\": \"float32\", "
                     "\"n_layers\": 3, \"hidden_size\": 24, \"vocab_size\": 50000, \"blocks\": []}");
    store.corpus =
        made_up_json("{\"format\": \"raw\", \"path\": \"made up\\t\\\"quoted\\\"\", \"n_tokens\": 1}");
    store.run = made_up_json("{\"actdump\": \"0\", \"backend\": \"none\", \"threads\": 1}");
    TRY_ELSE(writer_create(&m->layout, &options, &writer, error), done);
    TRY_ELSE(made_up_write_units(m, writer, &store, error), done);
    TRY_ELSE(store_write(&store, NULL, error), done);
    status = index_build(folder, error);
done:
    writer_destroy(writer);
    made_up_free(&store);
    return status;
}

#endif

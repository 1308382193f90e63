/* store.json read back: nothing in it is trusted. */
#include "engine/json.h"
#include "kernels/base/memory.h"
#include "pipeline/files.h"
#include "pipeline/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Largest chunk that HDF5 takes, and largest numbers that cannot overflow what is computed from them. */
#define MOST_CHUNK_BYTES UINT32_MAX
#define MOST_ROWS (INT64_C(1) << 48)
#define MOST_AXIS (INT64_C(1) << 32)
#define MOST_ROW_BYTES MOST_CHUNK_BYTES /* a chunk is a row at least */
#define MOST_DATASETS 65536

/* Room for a string of the file's as messages show it. */
enum { QUOTE_BYTES = 96 };

/* Where the reader is: for messages, and for what it fills. */
struct reading {
    struct store *store;
    const char *source;
    char *names; /* free end of store->axis_names */
};

static struct json_object object_at(const struct reading *in, const cJSON *item, const char *where)
{
    return (struct json_object){.object = item, .source = in->source, .where = where, .status = STATUS_INPUT};
}

static enum status get_child(const struct json_object *o, const char *key, bool (*is_wanted)(const cJSON *),
                             const char *wanted, const cJSON **out, struct error *error)
{
    char found[96];
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, key);
    if (item != NULL && is_wanted(item)) {
        *out = item;
        return STATUS_OK;
    }
    return error_set(error, STATUS_INPUT, "%s: %s%s%s is %s, expected %s", o->source, o->where,
                     o->where[0] == '\0' ? "" : ".", key,
                     item == NULL ? "missing" : json_describe(item, found, sizeof found), wanted);
}

/* A string that is not what it must be. */
static enum status refuse(const struct json_object *o, const char *key, const char *found,
                          const char *expected, struct error *error)
{
    char quoted[QUOTE_BYTES];
    return error_set(error, STATUS_INPUT, "%s: %s%s%s is %s, expected %s", o->source, o->where,
                     o->where[0] == '\0' ? "" : ".", key, json_quote(found, quoted, sizeof quoted), expected);
}

static bool is_object(const cJSON *item)
{
    return cJSON_IsObject(item);
}

static bool is_array(const cJSON *item)
{
    return cJSON_IsArray(item);
}

static bool is_string(const cJSON *item)
{
    return cJSON_IsString(item);
}

static bool is_object_or_null(const cJSON *item)
{
    return cJSON_IsObject(item) || cJSON_IsNull(item);
}

/* ---------------------------------------------------------------- the layout */

/* What paths, and what layouts, are written in. */
static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.- ";
static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-/";

/* The names that a job file may give. */
static bool is_capture_name(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n < 64 && strspn(name, allowed) == n && strchr(name, '/') == NULL &&
           strspn(name, ".") < n && strcmp(name, "sequences") != 0 && strcmp(name, "statistics") != 0;
}

static enum status read_captures(struct reading *in, const cJSON *captures, struct error *error)
{
    struct layout *layout = &in->store->layout;
    void *names;
    const cJSON *item;
    char found[96];
    TRY(memory_allocate_array(&names, (size_t)cJSON_GetArraySize(captures), sizeof(char *), "captures",
                              error));
    layout->capture_names = names;
    cJSON_ArrayForEach(item, captures)
    {
        if (!cJSON_IsString(item) || !is_capture_name(item->valuestring))
            return error_set(error, STATUS_INPUT,
                             "%s: captures[%" PRId64 "] is %s, expected the name of a group", in->source,
                             layout->n_captures, json_describe(item, found, sizeof found));
        for (int64_t i = 0; i < layout->n_captures; i++)
            if (strcmp(layout->capture_names[i], item->valuestring) == 0)
                return error_set(error, STATUS_INPUT, "%s: captures has %s twice", in->source,
                                 json_describe(item, found, sizeof found));
        layout->capture_names[layout->n_captures++] = item->valuestring;
    }
    return STATUS_OK;
}

static int64_t find_capture(const struct layout *layout, const char *name)
{
    for (int64_t i = 0; i < layout->n_captures; i++)
        if (strcmp(layout->capture_names[i], name) == 0)
            return i;
    return -1;
}

/* "row num_heads head_dim" and [4, 8]: names of the axes go into the store's pool. */
static enum status read_axes(struct reading *in, const struct json_object *o, const char *text,
                             struct dataset *d, struct error *error)
{
    const cJSON *shape = NULL, *size;
    TRY(get_child(o, "shape", is_array, "an array", &shape, error));
    char *name = in->names, *rest = NULL;
    if (strlen(text) >= LAYOUT_TEXT_BYTES || text[strspn(text, plain)] != '\0')
        return refuse(o, "layout", text, "names of axes", error);
    in->names += sprintf(name, "%s", text) + 1; /* the pool has room for all layouts */
    char *first = strtok_r(name, " ", &rest);
    if (first == NULL || (strcmp(first, "row") != 0 && strcmp(first, "sequence") != 0))
        return refuse(o, "layout", text, "row or sequence first", error);
    d->rows = strcmp(first, "row") == 0 ? ROWS_OF_CAPTURE : ROWS_OF_SEQUENCES;
    d->width = 1;
    cJSON_ArrayForEach(size, shape)
    {
        char *axis = strtok_r(NULL, " ", &rest);
        int64_t n;
        if (axis == NULL || d->n_axes == VALUE_MAX_AXES)
            return error_set(error, STATUS_INPUT, "%s: %s.shape has more sizes than the layout \"%s\" names",
                             in->source, o->where, text);
        if (!json_get_integer(size, &n) || n < 1 || n > MOST_AXIS || n > MOST_ROW_BYTES / d->width)
            return error_set(error, STATUS_INPUT, "%s: %s.shape[%d] is no size", in->source, o->where,
                             d->n_axes);
        d->axis_names[d->n_axes] = axis;
        d->axis_sizes[d->n_axes++] = n;
        d->width *= n;
    }
    if (strtok_r(NULL, " ", &rest) != NULL)
        return error_set(error, STATUS_INPUT, "%s: %s.shape has fewer sizes than the layout \"%s\" names",
                         in->source, o->where, text);
    return STATUS_OK;
}

static enum status read_dtype(const struct json_object *o, const char *key, enum dtype *out,
                              struct error *error)
{
    const char *name;
    TRY(json_get_string(o, key, true, &name, error));
    if (dtype_parse(name, out))
        return STATUS_OK;
    return refuse(o, key, name, "float32, bfloat16, float16, int32 or int64", error);
}

/* A table: /sequences/<name> or /<capture>/rows/<name>. */
static enum status read_table(const struct json_object *o, const struct layout *layout, const char *value,
                              struct dataset *d, struct error *error)
{
    char path[sizeof d->path];
    bool of_sequences = d->capture < 0;
    if (of_sequences)
        snprintf(path, sizeof path, "sequences/%s", value);
    else
        snprintf(path, sizeof path, "%s/rows/%s", layout->capture_names[d->capture], value);
    bool good = strcmp(path, d->path) == 0 && strchr(value, '/') == NULL && value[0] != '\0' &&
                d->n_axes == 0 && !dtype_is_float(d->dtype) &&
                of_sequences == (d->rows == ROWS_OF_SEQUENCES) && d->layer == -1;
    return good ? STATUS_OK
                : error_set(error, STATUS_INPUT, "%s: %s is no table of sequences or rows (path \"%.100s\")",
                            o->source, o->where, d->path);
}

/* A captured value: its path must be the one that capture, layer, host and value make. */
static enum status read_value(const struct json_object *o, const struct layout *layout, const char *host,
                              const char *value, struct dataset *d, struct error *error)
{
    char name[128], path[sizeof d->path + 32];
    snprintf(name, sizeof name, "%s%s%s", host, host[0] == '\0' ? "" : "/", value);
    if (!catalogue_find(name, &d->value))
        return refuse(o, "value", name, "a value that there is", error);
    d->is_value = true;
    if (d->layer < 0)
        snprintf(path, sizeof path, "%s/%s", layout->capture_names[d->capture], name);
    else
        snprintf(path, sizeof path, "%s/layers/%d/%s", layout->capture_names[d->capture], d->layer, name);
    if (strcmp(path, d->path) != 0 || value_is_per_layer(d->value) != (d->layer >= 0))
        return refuse(o, "path", d->path, path, error);
    return read_dtype(o, "load_dtype", &d->load_dtype, error);
}

static enum status read_identity(const struct json_object *o, const struct layout *layout, struct dataset *d,
                                 struct error *error)
{
    const char *path, *capture = NULL, *value, *host;
    int64_t layer = -1;
    TRY(json_get_string(o, "path", true, &path, error));
    if (path[strspn(path, allowed)] != '\0' || strlen(path) >= sizeof d->path)
        return refuse(o, "path", path, "groups and a name", error);
    snprintf(d->path, sizeof d->path, "%s", path);
    TRY(json_get_string(o, "capture", false, &capture, error));
    TRY(json_get_string(o, "value", true, &value, error));
    TRY(json_get_string(o, "host", true, &host, error));
    TRY(json_get_int(o, "layer", true, -1, 1 << 20, &layer, error));
    d->layer = (int)layer;
    d->capture = capture == NULL ? -1 : (int)find_capture(layout, capture);
    if (capture != NULL && d->capture < 0)
        return refuse(o, "capture", capture, "one of the captures", error);
    char rows[96];
    snprintf(rows, sizeof rows, "%s/rows/", capture == NULL ? "" : capture);
    if (capture == NULL || strncmp(path, rows, strlen(rows)) == 0)
        return read_table(o, layout, value, d, error);
    return read_value(o, layout, host, value, d, error);
}

static enum status read_dataset(struct reading *in, const cJSON *item, int64_t index, struct error *error)
{
    static const char *const keys[] = {"path",  "capture", "value",      "layer",      "host",      "layout",
                                       "shape", "dtype",   "load_dtype", "chunk_rows", "row_bytes", NULL};
    struct dataset *d = &in->store->layout.datasets[index];
    char where[48];
    const char *text;
    snprintf(where, sizeof where, "datasets[%" PRId64 "]", index);
    struct json_object o = object_at(in, item, where);
    if (!cJSON_IsObject(item))
        return error_set(error, STATUS_INPUT, "%s: %s is no object", in->source, where);
    TRY(json_check_keys(&o, keys, error));
    TRY(json_get_string(&o, "layout", true, &text, error));
    TRY(read_axes(in, &o, text, d, error));
    TRY(read_dtype(&o, "dtype", &d->dtype, error));
    d->source_dtype = d->load_dtype = d->dtype;
    d->row_bytes = d->width * (int64_t)dtype_size(d->dtype);
    TRY(json_get_int(&o, "chunk_rows", true, 1, MOST_CHUNK_BYTES / d->row_bytes, &d->chunk_rows, error));
    TRY(read_identity(&o, &in->store->layout, d, error));
    for (int64_t i = 0; i < index; i++)
        if (strcmp(in->store->layout.datasets[i].path, d->path) == 0)
            return error_set(error, STATUS_INPUT, "%s: %s repeats the path \"%.100s\"", in->source, where,
                             d->path);
    return STATUS_OK;
}

/* Bytes that the names of all axes take: their layouts end to end. */
static size_t count_layout_bytes(const cJSON *datasets)
{
    size_t bytes = 1;
    const cJSON *item;
    cJSON_ArrayForEach(item, datasets)
    {
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "layout"));
        bytes += text == NULL ? 0 : strlen(text) + 1;
    }
    return bytes;
}

/* Tables that every reader needs. */
static enum status check_tables(const struct reading *in, struct error *error)
{
    static const char *const sequences[] = {"document", "start", "length"};
    static const char *const rows[] = {"sequence", "position", "input_ids"};
    const struct layout *layout = &in->store->layout;
    char path[96];
    for (int64_t c = -1; c < layout->n_captures; c++)
        for (int i = 0; i < 3; i++) {
            if (c < 0)
                snprintf(path, sizeof path, "sequences/%s", sequences[i]);
            else
                snprintf(path, sizeof path, "%s/rows/%s", layout->capture_names[c], rows[i]);
            if (layout_find(layout, path) < 0)
                return error_set(error, STATUS_INPUT, "%s: datasets lacks %s", in->source, path);
        }
    return STATUS_OK;
}

static enum status read_layout(struct reading *in, const struct json_object *top, struct error *error)
{
    struct layout *layout = &in->store->layout;
    const cJSON *compression = NULL, *captures = NULL, *datasets = NULL, *item;
    int64_t level = 0;
    void *memory;
    TRY(get_child(top, "compression", is_object, "an object", &compression, error));
    struct json_object o = object_at(in, compression, "compression");
    TRY(json_get_int(&o, "level", true, 0, 22, &level, error));
    layout->compression = (int)level;
    TRY(get_child(top, "captures", is_array, "an array", &captures, error));
    TRY(read_captures(in, captures, error));
    TRY(get_child(top, "datasets", is_array, "an array", &datasets, error));
    if (cJSON_GetArraySize(datasets) > MOST_DATASETS)
        return error_set(error, STATUS_INPUT, "%s: datasets has %d members, expected at most %d", in->source,
                         cJSON_GetArraySize(datasets), MOST_DATASETS);
    TRY(memory_allocate(&memory, count_layout_bytes(datasets), "names of axes", error));
    in->names = in->store->axis_names = memory;
    TRY(memory_allocate_array(&memory, (size_t)cJSON_GetArraySize(datasets), sizeof(struct dataset),
                              "datasets", error));
    layout->datasets = memory;
    cJSON_ArrayForEach(item, datasets)
    {
        TRY(read_dataset(in, item, layout->n_datasets, error));
        layout->n_datasets++;
    }
    return check_tables(in, error);
}

/* ---------------------------------------------------------------- units and segments */

static enum status read_units(struct reading *in, const cJSON *starts, struct error *error)
{
    struct store *store = in->store;
    int64_t n = cJSON_GetArraySize(starts), i = 0;
    const cJSON *item;
    void *memory;
    char found[96];
    if (n < 1)
        return error_set(error, STATUS_INPUT, "%s: unit_start is empty, expected at least one number",
                         in->source);
    TRY(memory_allocate_array(&memory, (size_t)n, sizeof(int64_t), "units", error));
    store->unit_start = memory;
    TRY(memory_allocate_array(&memory, (size_t)n, sizeof(struct segment_record), "units", error));
    store->segments = memory;
    store->n_units = n - 1;
    cJSON_ArrayForEach(item, starts)
    {
        int64_t least = i == 0 ? 0 : store->unit_start[i - 1];
        if (!json_get_integer(item, &store->unit_start[i]) || store->unit_start[i] < least ||
            store->unit_start[i] > (i == 0 ? 0 : MOST_ROWS))
            return error_set(error, STATUS_INPUT, "%s: unit_start[%" PRId64 "] is %s, expected %s%" PRId64,
                             in->source, i, json_describe(item, found, sizeof found),
                             i == 0 ? "" : "at least ", least);
        i++;
    }
    for (i = 0; i < store->n_units; i++)
        store->segments[i].unit = i;
    return STATUS_OK;
}

static enum status read_rows(struct reading *in, const struct json_object *o, struct segment_record *r,
                             struct error *error)
{
    const struct layout *layout = &in->store->layout;
    const cJSON *rows = NULL;
    char where[64];
    TRY(get_child(o, "rows", is_object, "an object", &rows, error));
    snprintf(where, sizeof where, "%s.rows", o->where);
    struct json_object counts = object_at(in, rows, where);
    for (int64_t i = 0; i < layout->n_captures; i++)
        TRY(json_get_int(&counts, layout->capture_names[i], true, 0, MOST_ROWS, &r->n_rows[i], error));
    if (cJSON_GetArraySize(rows) != layout->n_captures)
        return error_set(error, STATUS_INPUT, "%s: %s has %d captures, expected %" PRId64, in->source, where,
                         cJSON_GetArraySize(rows), layout->n_captures);
    return STATUS_OK;
}

static enum status read_checksum(const struct json_object *o, uint64_t *out, struct error *error)
{
    const char *text;
    TRY(json_get_string(o, "checksum", true, &text, error));
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16)
        return refuse(o, "checksum", text, "16 hexadecimal digits", error);
    *out = strtoull(text, NULL, 16);
    return STATUS_OK;
}

static enum status read_segment(struct reading *in, const cJSON *item, int64_t index, struct error *error)
{
    static const char *const keys[] = {"unit", "file",  "first_sequence", "n_sequences", "n_tokens",
                                       "rows", "bytes", "raw_bytes",      "checksum",    NULL};
    struct store *store = in->store;
    char where[48], name[64];
    const char *file;
    int64_t unit;
    void *memory;
    snprintf(where, sizeof where, "segments[%" PRId64 "]", index);
    struct json_object o = object_at(in, item, where);
    if (!cJSON_IsObject(item))
        return error_set(error, STATUS_INPUT, "%s: %s is no object", in->source, where);
    TRY(json_check_keys(&o, keys, error));
    TRY(json_get_int(&o, "unit", true, 0, store->n_units - 1, &unit, error));
    struct segment_record *r = &store->segments[unit];
    if (r->n_rows != NULL)
        return error_set(error, STATUS_INPUT, "%s: %s repeats unit %" PRId64, in->source, where, unit);
    TRY(json_get_string(&o, "file", true, &file, error));
    store_segment_name(unit, name);
    if (strcmp(file, name) != 0)
        return refuse(&o, "file", file, name, error);
    TRY(memory_allocate_array(&memory, (size_t)store->layout.n_captures, sizeof(int64_t), "a segment's rows",
                              error));
    r->n_rows = memory;
    TRY(json_get_int(&o, "first_sequence", true, 0, MOST_ROWS, &r->first_sequence, error));
    TRY(json_get_int(&o, "n_sequences", true, 0, MOST_ROWS, &r->n_sequences, error));
    TRY(json_get_int(&o, "n_tokens", true, 0, MOST_ROWS, &r->n_tokens, error));
    TRY(json_get_int(&o, "bytes", true, 1, INT64_C(1) << 50, &r->bytes, error));
    TRY(json_get_int(&o, "raw_bytes", true, 0, INT64_C(1) << 53, &r->raw_bytes, error));
    TRY(read_checksum(&o, &r->checksum, error));
    return read_rows(in, &o, r, error);
}

/* Rows of all segments together must not overflow, nor the bytes of a dataset of them. */
static enum status check_totals(const struct reading *in, struct error *error)
{
    const struct store *store = in->store;
    for (int64_t i = 0; i < store->layout.n_datasets; i++) {
        const struct dataset *d = &store->layout.datasets[i];
        int64_t total = 0, bytes;
        for (int64_t u = 0; u < store->n_units; u++) {
            const struct segment_record *r = &store->segments[u];
            int64_t n = r->n_rows == NULL ? 0 : layout_count_rows(d, r->n_sequences, r->n_rows);
            if (__builtin_add_overflow(total, n, &total) ||
                __builtin_mul_overflow(total, d->row_bytes, &bytes))
                return error_set(error, STATUS_INPUT, "%s: the segments' rows of %s are more than can be",
                                 in->source, d->path);
        }
    }
    return STATUS_OK;
}

static enum status read_index(struct reading *in, const struct json_object *top, struct error *error)
{
    static const char *const keys[] = {"file", "bytes", "checksum", NULL};
    const cJSON *index = NULL, *file = NULL;
    TRY(get_child(top, "index", is_object_or_null, "an object or null", &index, error));
    if (cJSON_IsNull(index))
        return STATUS_OK;
    struct json_object o = object_at(in, index, "index");
    TRY(json_check_keys(&o, keys, error));
    TRY(get_child(&o, "file", is_string, "a string", &file, error));
    if (strcmp(file->valuestring, "store.h5") != 0)
        return refuse(&o, "file", file->valuestring, "store.h5", error);
    TRY(json_get_int(&o, "bytes", true, 1, INT64_C(1) << 50, &in->store->index_bytes, error));
    return read_checksum(&o, &in->store->index_checksum, error);
}

/* ---------------------------------------------------------------- the whole */

static enum status check_version(const struct reading *in, const struct json_object *top, struct error *error)
{
    int64_t version;
    const char *kind = NULL;
    TRY(json_get_int(top, "version", true, 1, INT32_MAX, &version, error));
    if (version != STORE_VERSION)
        return error_set(error, STATUS_INPUT, "%s: it is of version %" PRId64 ", this actdump reads %d",
                         in->source, version, STORE_VERSION);
    TRY(json_get_string(top, "kind", true, &kind, error));
    if (strcmp(kind, "actdump store") != 0)
        return refuse(top, "kind", kind, "\"actdump store\"", error);
    return STATUS_OK;
}

/* Objects that are kept as they are. */
static enum status read_parts(struct store *store, const struct json_object *top, struct error *error)
{
    const cJSON *ignored;
    TRY(get_child(top, "job", is_object, "an object", &ignored, error));
    TRY(get_child(top, "model", is_object, "an object", &ignored, error));
    TRY(get_child(top, "corpus", is_object, "an object", &ignored, error));
    TRY(get_child(top, "run", is_object, "an object", &ignored, error));
    TRY(get_child(top, "summary", is_object_or_null, "an object or null", &ignored, error));
    TRY(get_child(top, "statistics", is_object_or_null, "an object or null", &ignored, error));
    TRY(get_child(top, "totals", is_object, "an object", &ignored, error));
    store->job = cJSON_GetObjectItemCaseSensitive(store->tree, "job");
    store->model = cJSON_GetObjectItemCaseSensitive(store->tree, "model");
    store->corpus = cJSON_GetObjectItemCaseSensitive(store->tree, "corpus");
    store->run = cJSON_GetObjectItemCaseSensitive(store->tree, "run");
    cJSON *summary = cJSON_GetObjectItemCaseSensitive(store->tree, "summary");
    store->summary = cJSON_IsObject(summary) ? summary : NULL;
    return json_get_bool(top, "complete", true, &store->complete, error);
}

static enum status read_tree(struct reading *in, struct error *error)
{
    static const char *const keys[] = {"version",    "kind",     "complete",   "totals",   "job",
                                       "model",      "corpus",   "run",        "summary",  "compression",
                                       "captures",   "datasets", "unit_start", "segments", "index",
                                       "statistics", NULL};
    struct json_object top = object_at(in, in->store->tree, "");
    const cJSON *starts = NULL, *segments = NULL, *item;
    int64_t i = 0;
    if (!cJSON_IsObject(in->store->tree))
        return error_set(error, STATUS_INPUT, "%s: it holds no object", in->source);
    TRY(check_version(in, &top, error));
    TRY(json_check_keys(&top, keys, error));
    TRY(read_parts(in->store, &top, error));
    TRY(read_layout(in, &top, error));
    TRY(get_child(&top, "unit_start", is_array, "an array", &starts, error));
    TRY(read_units(in, starts, error));
    TRY(get_child(&top, "segments", is_array, "an array", &segments, error));
    cJSON_ArrayForEach(item, segments) TRY(read_segment(in, item, i++, error));
    TRY(read_index(in, &top, error));
    return check_totals(in, error);
}

enum status store_open(const char *folder, struct store **out, struct error *error)
{
    char source[FILES_PATH_BYTES];
    void *memory;
    if ((size_t)snprintf(source, sizeof source, "%s/store.json", folder) >= sizeof source)
        return error_set(error, STATUS_USAGE, "the store's path %.64s... is too long", folder);
    TRY(memory_allocate(&memory, sizeof(struct store), "the store", error));
    struct store *store = memory;
    struct reading in = {.store = store, .source = source};
    enum status status;
    store->folder = strdup(folder);
    if (store->folder == NULL) {
        status = error_set(error, STATUS_RESOURCE, "out of memory: the store's path");
        goto failed;
    }
    TRY_ELSE(json_read_file(source, STATUS_INPUT, &store->tree, error), failed);
    TRY_ELSE(read_tree(&in, error), failed);
    *out = store;
    return STATUS_OK;
failed:
    store_close(store);
    return status;
}

void store_close(struct store *store)
{
    if (store == NULL)
        return;
    for (int64_t u = 0; store->segments != NULL && u < store->n_units; u++)
        segment_record_fini(&store->segments[u]);
    memory_free(store->segments);
    memory_free(store->unit_start);
    memory_free(store->layout.datasets);
    memory_free(store->layout.capture_names);
    memory_free(store->axis_names);
    cJSON_Delete(store->tree);
    free(store->folder);
    memory_free(store);
}

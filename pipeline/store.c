#include "pipeline/store.h"

#include "kernels/base/memory.h"
#include "pipeline/files.h"
#include "pipeline/segment.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- folders */

static enum status make_folder(const char *path, struct error *error)
{
    if (mkdir(path, 0777) == 0)
        return STATUS_OK;
    int errnum = errno;
    struct stat info;
    if (errnum == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return STATUS_OK;
    return error_set_errno(error, STATUS_RESOURCE, errnum, "the folder %s cannot be made", path);
}

enum status store_make_folders(const char *folder, struct error *error)
{
    char path[FILES_PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/segments", folder);
    if (n < 0 || n >= (int)sizeof path || folder[0] == '\0')
        return error_set(error, STATUS_USAGE, "\"%.64s\" is no path for a store", folder);
    for (size_t i = 1; path[i] != '\0'; i++) {
        if (path[i] != '/' || path[i - 1] == '/')
            continue;
        path[i] = '\0';
        enum status status = make_folder(path, error);
        path[i] = '/';
        TRY(status);
    }
    return make_folder(path, error);
}

bool store_exists(const char *folder)
{
    char path[FILES_PATH_BYTES];
    snprintf(path, sizeof path, "%s/store.json", folder);
    return access(path, F_OK) == 0;
}

void store_segment_name(int64_t unit, char name[64])
{
    snprintf(name, 64, "segments/%06" PRId64 ".h5", unit);
}

/* ---------------------------------------------------------------- writing store.json */

/* A JSON string: cJSON knows how to escape. */
static void put_string(FILE *out, const char *text)
{
    cJSON *item = cJSON_CreateStringReference(text);
    char *printed = item == NULL ? NULL : cJSON_PrintUnformatted(item);
    fputs(printed == NULL ? "null" : printed, out);
    cJSON_free(printed);
    cJSON_Delete(item);
}

/* An object, indented as a member of the top. */
static void put_tree(FILE *out, const char *key, const cJSON *tree)
{
    char *printed = tree == NULL ? NULL : cJSON_Print(tree);
    fprintf(out, "  \"%s\": ", key);
    for (const char *c = printed == NULL ? "null" : printed; *c != '\0'; c++) {
        /* cJSON's tabs: never inside a string, where they are escaped */
        if (*c == '\t')
            fputs(c[-1] == ':' ? " " : "  ", out);
        else
            fputc(*c, out);
        if (*c == '\n')
            fputs("  ", out);
    }
    fputs(",\n", out);
    cJSON_free(printed);
}

static void put_dataset(FILE *out, const struct layout *layout, const struct dataset *d)
{
    char text[LAYOUT_TEXT_BYTES];
    layout_describe(d, text);
    fputs("{\"path\": ", out);
    put_string(out, d->path);
    fputs(", \"capture\": ", out);
    if (d->capture >= 0)
        put_string(out, layout->capture_names[d->capture]);
    else
        fputs("null", out);
    fprintf(out, ", \"value\": \"%s\", \"layer\": %d, \"host\": \"%s\", \"layout\": ", layout_get_value(d),
            d->layer, layout_get_host(d));
    put_string(out, text);
    fputs(", \"shape\": [", out);
    for (int i = 0; i < d->n_axes; i++)
        fprintf(out, "%s%" PRId64, i == 0 ? "" : ", ", d->axis_sizes[i]);
    fprintf(out, "], \"dtype\": \"%s\", \"load_dtype\": ", dtype_name(d->dtype));
    if (d->is_value)
        fprintf(out, "\"%s\"", dtype_name(d->load_dtype));
    else
        fputs("null", out);
    fprintf(out, ", \"chunk_rows\": %" PRId64 ", \"row_bytes\": %" PRId64 "}", d->chunk_rows, d->row_bytes);
}

static void put_layout(FILE *out, const struct layout *layout)
{
    fprintf(out, "  \"compression\": {\"level\": %d, \"filters\": [%s]},\n  \"captures\": [",
            layout->compression, layout->compression > 0 ? "2, 32015" : "");
    for (int64_t i = 0; i < layout->n_captures; i++) {
        fputs(i == 0 ? "" : ", ", out);
        put_string(out, layout->capture_names[i]);
    }
    fputs("],\n  \"datasets\": [\n", out);
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        fputs("    ", out);
        put_dataset(out, layout, &layout->datasets[i]);
        fputs(i + 1 < layout->n_datasets ? ",\n" : "\n", out);
    }
    fputs("  ],\n", out);
}

static void put_segment(FILE *out, const struct layout *layout, const struct segment_record *r)
{
    char name[64];
    store_segment_name(r->unit, name);
    fprintf(out,
            "{\"unit\": %" PRId64 ", \"file\": \"%s\", \"first_sequence\": %" PRId64
            ", \"n_sequences\": %" PRId64 ", \"n_tokens\": %" PRId64 ", \"rows\": {",
            r->unit, name, r->first_sequence, r->n_sequences, r->n_tokens);
    for (int64_t i = 0; i < layout->n_captures; i++) {
        fputs(i == 0 ? "" : ", ", out);
        put_string(out, layout->capture_names[i]);
        fprintf(out, ": %" PRId64, r->n_rows[i]);
    }
    fprintf(out, "}, \"bytes\": %" PRId64 ", \"raw_bytes\": %" PRId64 ", \"checksum\": \"%016" PRIx64 "\"}",
            r->bytes, r->raw_bytes, r->checksum);
}

static void put_units(FILE *out, const struct store *store)
{
    fputs("  \"unit_start\": [", out);
    for (int64_t i = 0; i <= store->n_units; i++)
        fprintf(out, "%s%" PRId64, i == 0 ? "" : (i % 16 == 0 ? ",\n    " : ", "), store->unit_start[i]);
    fputs("],\n  \"segments\": [", out);
    bool any = false;
    for (int64_t i = 0; i < store->n_units; i++) {
        if (store->segments[i].bytes == 0)
            continue;
        fputs(any ? ",\n    " : "\n    ", out);
        put_segment(out, &store->layout, &store->segments[i]);
        any = true;
    }
    fputs(any ? "\n  ],\n" : "],\n", out);
}

static void put_totals(FILE *out, const struct store *store)
{
    int64_t n_segments = 0, n_sequences = 0, n_tokens = 0, bytes = 0, raw_bytes = 0;
    for (int64_t i = 0; i < store->n_units; i++) {
        const struct segment_record *r = &store->segments[i];
        if (r->bytes == 0)
            continue;
        n_segments++;
        n_sequences += r->n_sequences;
        n_tokens += r->n_tokens;
        bytes += r->bytes;
        raw_bytes += r->raw_bytes;
    }
    fprintf(out,
            "  \"totals\": {\"n_segments\": %" PRId64 ", \"n_sequences\": %" PRId64 ", \"n_tokens\": %" PRId64
            ", \"bytes\": %" PRId64 ", \"raw_bytes\": %" PRId64 "},\n",
            n_segments, n_sequences, n_tokens, bytes, raw_bytes);
}

static void put_index(FILE *out, const struct store *store)
{
    if (store->index_bytes == 0)
        fputs("  \"index\": null,\n", out);
    else
        fprintf(out,
                "  \"index\": {\"file\": \"store.h5\", \"bytes\": %" PRId64 ", \"checksum\": \"%016" PRIx64
                "\"},\n",
                store->index_bytes, store->index_checksum);
}

/* One dataset a line. */
static void put_statistics(FILE *out, const cJSON *statistics)
{
    fputs("  \"statistics\": ", out);
    if (statistics == NULL || statistics->child == NULL) {
        fputs(statistics == NULL ? "null\n" : "{}\n", out);
        return;
    }
    const cJSON *item;
    fputs("{\n", out);
    cJSON_ArrayForEach(item, statistics)
    {
        char *printed = cJSON_PrintUnformatted(item);
        fputs("    ", out);
        put_string(out, item->string);
        fprintf(out, ": %s%s\n", printed == NULL ? "null" : printed, item->next != NULL ? "," : "");
        cJSON_free(printed);
    }
    fputs("  }\n", out);
}

static void put_store(FILE *out, const struct store *store, const cJSON *statistics)
{
    fprintf(out, "{\n  \"version\": %d,\n  \"kind\": \"actdump store\",\n  \"complete\": %s,\n",
            STORE_VERSION, store->complete ? "true" : "false");
    put_totals(out, store);
    put_tree(out, "job", store->job);
    put_tree(out, "model", store->model);
    put_tree(out, "corpus", store->corpus);
    put_tree(out, "run", store->run);
    put_tree(out, "summary", store->summary);
    put_layout(out, &store->layout);
    put_units(out, store);
    put_index(out, store);
    put_statistics(out, statistics);
    fputs("}\n", out);
}

enum status store_write(const struct store *store, const cJSON *statistics, struct error *error)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (out == NULL)
        return error_set_errno(error, STATUS_RESOURCE, errno, "store.json cannot be composed");
    put_store(out, store, statistics);
    bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed) {
        free(text);
        return error_set(error, STATUS_RESOURCE, "out of memory: store.json of %zu bytes", length);
    }
    enum status status = files_write(store->folder, "store.json", text, length, error);
    free(text);
    return status;
}

/* ---------------------------------------------------------------- a segment's own record */

/* Rows of all datasets, held against each other: those of a capture, and those of all sequences, are equal.
 */
static enum status read_rows(hid_t file, const struct layout *layout, struct segment_record *r,
                             struct error *error)
{
    const struct dataset *first_of_sequences = NULL;
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        hid_t id;
        int64_t n;
        TRY(segment_open_dataset(file, d, &id, &n, error));
        enum status status = segment_check_attributes(id, d, error);
        H5Dclose(id);
        TRY(status);
        int64_t *known = d->rows == ROWS_OF_CAPTURE ? &r->n_rows[d->capture] : &r->n_sequences;
        bool is_first = d->rows == ROWS_OF_CAPTURE ? i == 0 || layout->datasets[i - 1].capture != d->capture
                                                   : first_of_sequences == NULL;
        if (d->rows == ROWS_OF_SEQUENCES && is_first)
            first_of_sequences = d;
        if (is_first)
            *known = n;
        if (n != *known)
            return error_set(error, STATUS_INPUT,
                             "dataset %s has %" PRId64 " rows where the others have %" PRId64, d->path, n,
                             *known);
        r->raw_bytes += n * d->row_bytes;
    }
    return STATUS_OK;
}

static enum status read_record(hid_t file, const struct store *store, struct segment_record *r,
                               struct error *error)
{
    int64_t version, unit;
    TRY(hdf5_get_int(file, "store_version", &version, error));
    if (version != STORE_VERSION)
        return error_set(error, STATUS_INPUT, "it is of store version %" PRId64 ", expected %d", version,
                         STORE_VERSION);
    TRY(hdf5_get_int(file, "unit", &unit, error));
    if (unit != r->unit)
        return error_set(error, STATUS_INPUT, "it is of unit %" PRId64 ", expected %" PRId64, unit, r->unit);
    TRY(hdf5_get_int(file, "first_sequence", &r->first_sequence, error));
    TRY(hdf5_get_int(file, "n_tokens", &r->n_tokens, error));
    TRY(read_rows(file, &store->layout, r, error));
    int64_t first = store->unit_start[unit], n = store->unit_start[unit + 1] - first;
    if (r->first_sequence != first || r->n_sequences != n)
        return error_set(error, STATUS_INPUT,
                         "it holds %" PRId64 " sequences from %" PRId64 ", expected %" PRId64
                         " from %" PRId64,
                         r->n_sequences, r->first_sequence, n, first);
    return STATUS_OK;
}

static enum status hash_segment(const char *path, struct segment_record *r, struct error *error)
{
    void *buffer;
    TRY(memory_allocate(&buffer, FILES_HASH_BYTES, "reading a segment", error));
    int errnum = files_hash(path, buffer, &r->bytes, &r->checksum);
    memory_free(buffer);
    return errnum == 0 ? STATUS_OK : error_set_errno(error, STATUS_INPUT, errnum, "%s cannot be read", path);
}

enum status store_read_segment(const struct store *store, int64_t unit, struct segment_record *out,
                               struct error *error)
{
    char name[64], path[FILES_PATH_BYTES];
    void *rows;
    hid_t file = H5I_INVALID_HID;
    enum status status;
    store_segment_name(unit, name);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", store->folder, name) >= sizeof path)
        return error_set(error, STATUS_USAGE, "the store's path %.64s... is too long", store->folder);
    struct segment_record r = {.unit = unit};
    TRY(memory_allocate_array(&rows, (size_t)store->layout.n_captures, sizeof(int64_t), "a segment's record",
                              error));
    r.n_rows = rows;
    hdf5_start();
    TRY_ELSE(hash_segment(path, &r, error), failed);
    TRY_ELSE(hdf5_open(path, &file, error), failed);
    status = read_record(file, store, &r, error);
    H5Fclose(file);
    if (status != STATUS_OK) {
        error_prefix(error, "%s", path);
        goto failed;
    }
    segment_record_fini(out);
    *out = r;
    return STATUS_OK;
failed:
    segment_record_fini(&r);
    return status;
}

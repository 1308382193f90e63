/* verify_store: the folder, store.json against itself, and the order of things. */
#include "pipeline/verify.h"

#include "engine/json.h"
#include "kernels/base/memory.h"
#include "pipeline/chunk.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- saying */

static void say(struct verify *v, const char *prefix, const char *where, const char *text)
{
    char sentence[2304];
    snprintf(sentence, sizeof sentence, "%s%s: %s", prefix, where, text);
    for (char *c = sentence; *c != '\0'; c++) /* names and attributes of files are not ours */
        if ((unsigned char)*c < ' ' || *c == 127)
            *c = '?';
    v->report(v->context, sentence);
}

static void say_fault(struct verify *v, const char *where, const char *text)
{
    v->n_faults += !v->only_notes;
    say(v, v->only_notes ? "note: " : "", where, text);
}

void verify_fault(struct verify *v, const char *where, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say_fault(v, where, text);
}

void verify_error(struct verify *v, const char *where, struct error *error)
{
    say_fault(v, where, error->text);
    error_clear(error);
}

void verify_note(struct verify *v, const char *where, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say(v, "note: ", where, text);
}

bool verify_is_close(double a, double b)
{
    return a == b || fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b)) || (isnan(a) && isnan(b));
}

/* ---------------------------------------------------------------- store.json against itself */

static void check_total(struct verify *v, const char *key, int64_t wanted)
{
    const cJSON *totals = cJSON_GetObjectItemCaseSensitive(v->store->tree, "totals");
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(totals, key);
    int64_t found;
    char text[96];
    if (!json_get_integer(item, &found))
        verify_fault(v, "store.json", "totals.%s is %s, expected %" PRId64, key,
                     item == NULL ? "missing" : json_describe(item, text, sizeof text), wanted);
    else if (found != wanted)
        verify_fault(v, "store.json", "totals.%s is %" PRId64 ", expected %" PRId64, key, found, wanted);
}

static void check_record(struct verify *v, const struct segment_record *r)
{
    const struct store *store = v->store;
    char name[64];
    int64_t raw = 0, first = store->unit_start[r->unit], n = store->unit_start[r->unit + 1] - first;
    store_segment_name(r->unit, name);
    for (int64_t i = 0; i < store->layout.n_datasets; i++) {
        const struct dataset *d = &store->layout.datasets[i];
        raw += layout_count_rows(d, r->n_sequences, r->n_rows) * d->row_bytes;
    }
    if (r->raw_bytes != raw)
        verify_fault(v, name, "store.json says %" PRId64 " raw bytes; its rows make %" PRId64, r->raw_bytes,
                     raw);
    if (r->first_sequence != first || r->n_sequences != n)
        verify_fault(v, name,
                     "store.json says %" PRId64 " sequences from %" PRId64 "; unit_start says %" PRId64
                     " from %" PRId64,
                     r->n_sequences, r->first_sequence, n, first);
}

static void check_records(struct verify *v)
{
    const struct store *store = v->store;
    int64_t n_segments = 0, n_sequences = 0, n_tokens = 0, bytes = 0, raw_bytes = 0;
    for (int64_t u = 0; u < store->n_units; u++) {
        const struct segment_record *r = &store->segments[u];
        if (r->bytes == 0)
            continue;
        check_record(v, r);
        n_segments++;
        n_sequences += r->n_sequences;
        n_tokens += r->n_tokens;
        bytes += r->bytes;
        raw_bytes += r->raw_bytes;
    }
    check_total(v, "n_segments", n_segments);
    check_total(v, "n_sequences", n_sequences);
    check_total(v, "n_tokens", n_tokens);
    check_total(v, "bytes", bytes);
    check_total(v, "raw_bytes", raw_bytes);
    if (store->complete && n_segments < store->n_units)
        verify_fault(v, "store.json",
                     "it says that the store is complete, but lists %" PRId64 " of %" PRId64 " segments",
                     n_segments, store->n_units);
    else if (!store->complete && n_segments == store->n_units && store->index_bytes > 0)
        verify_fault(v, "store.json",
                     "it says that the store is not complete, but lists all %" PRId64
                     " segments and an index",
                     n_segments);
    else if (!store->complete && n_segments == store->n_units)
        verify_note(v, "store.json", "all segments are there, but not their index: `actdump index` makes it");
    else if (!store->complete)
        verify_note(v, "store.json", "the store is not complete: %" PRId64 " of %" PRId64 " units are done",
                    n_segments, store->n_units);
}

/* Fields of the datasets that follow from others, and the filters. */
static void check_derived(struct verify *v)
{
    const cJSON *datasets = cJSON_GetObjectItemCaseSensitive(v->store->tree, "datasets"), *item;
    const cJSON *compression = cJSON_GetObjectItemCaseSensitive(v->store->tree, "compression");
    const cJSON *filters = cJSON_GetObjectItemCaseSensitive(compression, "filters");
    const struct dataset *d = v->store->layout.datasets;
    cJSON_ArrayForEach(item, datasets)
    {
        int64_t found;
        if (!json_get_integer(cJSON_GetObjectItemCaseSensitive(item, "row_bytes"), &found) ||
            found != d->row_bytes)
            verify_fault(v, "store.json", "row_bytes of %s is not %" PRId64 ", as its shape and dtype say",
                         d->path, d->row_bytes);
        d++;
    }
    static const int wanted[] = {H5Z_FILTER_SHUFFLE, STORE_FILTER_ZSTD};
    cJSON *expected = cJSON_CreateIntArray(wanted, v->store->layout.compression > 0 ? 2 : 0);
    if (!cJSON_Compare(filters, expected, true))
        verify_fault(v, "store.json", "compression.filters is not %s, as its level says",
                     v->store->layout.compression > 0 ? "[2, 32015]" : "[]");
    cJSON_Delete(expected);
}

/* ---------------------------------------------------------------- the folder */

/* The unit of a name such as 000012.h5; false where it is none. */
static bool parse_name(const char *name, int64_t *unit)
{
    char wanted[64], *end;
    *unit = strtoll(name, &end, 10);
    if (end == name || *unit < 0)
        return false;
    store_segment_name(*unit, wanted);
    return strcmp(strchr(wanted, '/') + 1, name) == 0;
}

static void check_entry(struct verify *v, const char *folder, const char *name)
{
    char where[512];
    int64_t unit;
    snprintf(where, sizeof where, "%s%.255s", folder, name);
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return;
    if (files_is_temporary(name)) {
        verify_note(v, where, "a temporary file, left by a job that ended early or written just now");
        return;
    }
    if (folder[0] == '\0')
        return; /* what else lies beside store.json is its owner's */
    if (parse_name(name, &unit) && unit < v->store->n_units && v->store->segments[unit].bytes > 0)
        return;
    verify_fault(v, where, "store.json does not list it");
}

static void check_folder(struct verify *v, const char *folder)
{
    char path[FILES_PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", v->store->folder, folder);
    DIR *dir = opendir(path);
    if (dir == NULL) {
        verify_fault(v, folder, "it cannot be listed: %s", strerror(errno));
        return;
    }
    for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir))
        check_entry(v, folder, entry->d_name);
    closedir(dir);
}

/* ---------------------------------------------------------------- the whole */

static void find_sizes(const struct store *store, size_t *chunk_bytes, int64_t *width)
{
    for (int64_t i = 0; i < store->layout.n_datasets; i++) {
        const struct dataset *d = &store->layout.datasets[i];
        int64_t most = 0;
        for (int64_t u = 0; u < store->n_units; u++) {
            const struct segment_record *r = &store->segments[u];
            int64_t n = r->bytes > 0 ? layout_count_rows(d, r->n_sequences, r->n_rows) : 0;
            most = n > most ? n : most;
        }
        size_t bytes = (size_t)(layout_chunk_rows(d, most) * d->row_bytes);
        *chunk_bytes = bytes > *chunk_bytes ? bytes : *chunk_bytes;
        if (layout_has_statistics(d) && d->width > *width)
            *width = d->width;
    }
}

static enum status prepare(struct verify *v, struct error *error)
{
    int64_t width = 0;
    void *memory;
    find_sizes(v->store, &v->plain_bytes, &width);
    v->packed_bytes = chunk_bound(v->plain_bytes);
    TRY(memory_allocate(&memory, v->packed_bytes, "a chunk", error));
    v->packed = memory;
    TRY(memory_allocate(&memory, v->plain_bytes, "a chunk", error));
    v->shuffled = memory;
    TRY(memory_allocate(&memory, v->plain_bytes, "a chunk", error));
    v->plain = memory;
    TRY(memory_allocate(&v->hash_buffer, FILES_HASH_BYTES, "reading a segment", error));
    TRY(memory_allocate(&v->chunk_memory, statistics_bytes(width), "statistics", error));
    TRY(memory_allocate(&v->total_memory, statistics_bytes(width), "statistics", error));
    v->is_merged = true;
    return index_merge_create(&v->store->layout, &v->merge, error);
}

static void clean_up(struct verify *v)
{
    index_merge_destroy(&v->merge);
    memory_free(v->total_memory);
    memory_free(v->chunk_memory);
    memory_free(v->hash_buffer);
    memory_free(v->plain);
    memory_free(v->shuffled);
    memory_free(v->packed);
}

static enum status check_all(struct verify *v, struct error *error)
{
    TRY(prepare(v, error));
    check_records(v);
    check_derived(v);
    for (int64_t u = 0; u < v->store->n_units; u++)
        if (v->store->segments[u].bytes > 0)
            TRY(verify_segment(v, u, error));
    check_folder(v, "segments/");
    check_folder(v, "");
    verify_index(v);
    return STATUS_OK;
}

enum status verify_store(const char *folder, verify_report *report, void *context, int64_t *n_faults,
                         struct error *error)
{
    struct store *store = NULL;
    struct verify v = {.report = report, .context = context};
    hdf5_start();
    TRY(store_open(folder, &store, error));
    v.store = store;
    enum status status = check_all(&v, error);
    clean_up(&v);
    store_close(store);
    if (status == STATUS_OK)
        *n_faults = v.n_faults;
    return status;
}

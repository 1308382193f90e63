/* One segment's file: checksum, datasets, every chunk unpacked without HDF5's filters, tables, statistics. */
#include "kernels/base/memory.h"
#include "pipeline/chunk.h"
#include "pipeline/verify.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

/* The segment at hand. */
struct checking {
    struct verify *v;
    const struct segment_record *record;
    char name[64], path[FILES_PATH_BYTES];
    hid_t file;
    int64_t file_bytes;
    bool is_sound;    /* size and checksum are right */
    int64_t **tables; /* [n_datasets] the table's values; NULL: a value, or not readable */
    int64_t *n_rows;  /* [n_datasets] rows read; -1: not readable */
};

/* A dataset being read. */
struct reading {
    hid_t id;
    const struct dataset *d;
    int64_t index, n_rows, chunk_rows;
    size_t chunk_bytes;
};

/* ---------------------------------------------------------------- the file */

static bool check_file(struct checking *c)
{
    struct stat info;
    int64_t bytes;
    uint64_t checksum;
    if (stat(c->path, &info) != 0) {
        verify_fault(c->v, c->name, "it is missing (%s); it should have %" PRId64 " bytes", strerror(errno),
                     c->record->bytes);
        return false;
    }
    c->file_bytes = (int64_t)info.st_size;
    if (c->file_bytes != c->record->bytes)
        verify_fault(c->v, c->name, "it has %" PRId64 " bytes, store.json says %" PRId64, c->file_bytes,
                     c->record->bytes);
    int errnum = files_hash(c->path, c->v->hash_buffer, &bytes, &checksum);
    if (errnum != 0) {
        verify_fault(c->v, c->name, "it cannot be read: %s", strerror(errnum));
        return false;
    }
    c->is_sound = checksum == c->record->checksum && c->file_bytes == c->record->bytes;
    if (checksum != c->record->checksum && c->file_bytes == c->record->bytes)
        verify_fault(c->v, c->name, "its checksum is %016" PRIx64 ", store.json says %016" PRIx64, checksum,
                     c->record->checksum);
    return true;
}

static void check_attribute(struct checking *c, const char *name, int64_t wanted)
{
    struct error error = {0};
    int64_t found;
    if (hdf5_get_int(c->file, name, &found, &error) != STATUS_OK)
        verify_error(c->v, c->name, &error);
    else if (found != wanted)
        verify_fault(c->v, c->name, "attribute %s is %" PRId64 ", expected %" PRId64, name, found, wanted);
}

/* ---------------------------------------------------------------- chunks */

/* Reads chunk number `chunk` into v->packed. */
static enum status read_chunk(struct checking *c, const struct reading *in, int64_t chunk, size_t *bytes,
                              struct error *error)
{
    hsize_t offset[VALUE_MAX_AXES + 1] = {(hsize_t)(chunk * in->chunk_rows)}, size = 0;
    haddr_t address = HADDR_UNDEF;
    unsigned mask = 0;
    uint32_t read_mask = 0;
    size_t most = c->v->store->layout.compression > 0 ? chunk_bound(in->chunk_bytes) : in->chunk_bytes;
    if (H5Dget_chunk_info_by_coord(in->id, offset, &mask, &address, &size) < 0)
        return hdf5_error(error, STATUS_INPUT, "it cannot be found");
    if (address == HADDR_UNDEF || size == 0)
        return error_set(error, STATUS_INPUT, "it is missing");
    if (mask != 0)
        return error_set(error, STATUS_INPUT, "it skips filters (mask %u), expected none skipped", mask);
    if (size > most)
        return error_set(error, STATUS_INPUT, "it takes %llu bytes, more than its %zu bytes can need",
                         (unsigned long long)size, in->chunk_bytes);
    if (H5Dread_chunk(in->id, H5P_DEFAULT, offset, &read_mask, c->v->packed) < 0)
        return hdf5_error(error, STATUS_INPUT, "it cannot be read");
    *bytes = (size_t)size;
    return STATUS_OK;
}

/* Leaves the chunk's rows in v->plain. */
static enum status unpack_chunk(struct checking *c, const struct reading *in, int64_t chunk,
                                struct error *error)
{
    size_t bytes = 0;
    TRY(read_chunk(c, in, chunk, &bytes, error));
    if (c->v->store->layout.compression == 0) {
        if (bytes != in->chunk_bytes)
            return error_set(error, STATUS_INPUT, "it takes %zu bytes, expected %zu", bytes, in->chunk_bytes);
        memcpy(c->v->plain, c->v->packed, bytes);
        return STATUS_OK;
    }
    TRY(chunk_decompress(c->v->shuffled, in->chunk_bytes, c->v->packed, bytes, error));
    chunk_unshuffle(c->v->plain, c->v->shuffled, dtype_size(in->d->dtype), in->chunk_bytes);
    return STATUS_OK;
}

static int64_t count_rows(const struct reading *in, int64_t chunk)
{
    int64_t left = in->n_rows - chunk * in->chunk_rows;
    return left < in->chunk_rows ? left : in->chunk_rows;
}

/* Unpacks all chunks; a bad one is said and the next one taken. Returns whether all were good. */
static bool check_chunks(struct checking *c, const struct reading *in, struct statistics *total)
{
    struct statistics part;
    bool all_good = true;
    for (int64_t k = 0; k * in->chunk_rows < in->n_rows; k++) {
        struct error error = {0};
        if (unpack_chunk(c, in, k, &error) != STATUS_OK) {
            error_prefix(&error, "dataset %s: chunk %" PRId64, in->d->path, k);
            verify_error(c->v, c->name, &error);
            all_good = false;
            continue;
        }
        int64_t n = count_rows(in, k);
        if (total != NULL) {
            statistics_place(&part, c->v->chunk_memory, in->d->width, layout_is_masked(in->d));
            statistics_of(&part, c->v->plain, in->d->dtype, n, k * in->chunk_rows);
            statistics_merge(total, &part);
        }
        if (c->tables[in->index] != NULL)
            dtype_convert(c->tables[in->index] + k * in->chunk_rows, DTYPE_I64, c->v->plain, in->d->dtype,
                          (size_t)n);
    }
    return all_good;
}

/* ---------------------------------------------------------------- datasets */

static enum status check_filters(const struct reading *in, hid_t creation, int level, struct error *error)
{
    static const H5Z_filter_t wanted[] = {H5Z_FILTER_SHUFFLE, STORE_FILTER_ZSTD};
    int n_wanted = level > 0 ? 2 : 0, n = H5Pget_nfilters(creation);
    bool good = n == n_wanted;
    for (int i = 0; good && i < n; i++) {
        unsigned flags, values[8], config;
        size_t n_values = 8;
        good =
            H5Pget_filter2(creation, (unsigned)i, &flags, &n_values, values, 0, NULL, &config) == wanted[i];
    }
    return good ? STATUS_OK
                : error_set(error, STATUS_INPUT, "dataset %s has other filters than %s", in->d->path,
                            level > 0 ? "shuffle and zstd" : "none");
}

static enum status check_storage(const struct checking *c, struct reading *in, struct error *error)
{
    hsize_t chunk[H5S_MAX_RANK] = {0}, wanted[VALUE_MAX_AXES + 1];
    hid_t creation = H5Dget_create_plist(in->id);
    in->chunk_rows = layout_chunk_rows(in->d, in->n_rows);
    in->chunk_bytes = (size_t)(in->chunk_rows * in->d->row_bytes);
    int rank = segment_get_shape(in->d, in->chunk_rows, wanted);
    bool good = H5Pget_layout(creation) == H5D_CHUNKED && H5Pget_chunk(creation, H5S_MAX_RANK, chunk) == rank;
    for (int i = 0; good && i < rank; i++)
        good = chunk[i] == wanted[i];
    enum status status =
        good ? check_filters(in, creation, c->v->store->layout.compression, error)
             : error_set(error, STATUS_INPUT,
                         "dataset %s has chunks of %llu rows, expected %" PRId64 " whole ones", in->d->path,
                         (unsigned long long)chunk[0], in->chunk_rows);
    H5Pclose(creation);
    TRY(status);
    /* a chunk takes at least 8 bytes of the file, so that no extent can make us loop or allocate for ever */
    if (in->n_rows / in->chunk_rows > c->file_bytes / 8)
        return error_set(error, STATUS_INPUT, "dataset %s has %" PRId64 " rows, more than the file can hold",
                         in->d->path, in->n_rows);
    return STATUS_OK;
}

static bool is_table(const struct dataset *d)
{
    return !d->is_value;
}

static void compare_statistics(struct checking *c, const struct dataset *d, const struct statistics *found,
                               const struct statistics *wanted)
{
    const char *what = NULL;
    if (found->n_rows != wanted->n_rows || found->n_norms != wanted->n_norms ||
        found->n_nonfinite != wanted->n_nonfinite ||
        found->first_nonfinite_row != wanted->first_nonfinite_row)
        what = "counts";
    else if (!verify_is_close(found->mean_norm, wanted->mean_norm) || found->max_abs != wanted->max_abs)
        what = "mean norm or largest magnitude";
    for (int64_t i = 0; what == NULL && i < d->width; i++) {
        double n = (double)wanted->count[i], scale = n > 0 ? sqrt(wanted->m2[i] / n) : 0;
        if (found->count[i] != wanted->count[i])
            what = "counts by column";
        else if (!(fabs(found->mean[i] - wanted->mean[i]) <= 1e-9 * (scale + fabs(wanted->mean[i]))))
            what = "means";
        else if (!verify_is_close(found->m2[i], wanted->m2[i]))
            what = "variances";
    }
    if (what != NULL)
        verify_fault(c->v, c->name, "statistics/%s: the %s are not those of the rows", d->path, what);
}

/* Rows as read against the statistics that the segment carries. */
static void check_statistics(struct checking *c, const struct dataset *d, const struct statistics *wanted)
{
    struct statistics found;
    struct error error = {0};
    statistics_place(&found, c->v->chunk_memory, d->width, layout_is_masked(d));
    if (segment_read_statistics(c->file, d, "m2", &found, &error) != STATUS_OK)
        verify_error(c->v, c->name, &error);
    else
        compare_statistics(c, d, &found, wanted);
}

static enum status allocate_table(struct checking *c, const struct reading *in, struct error *error)
{
    void *memory;
    if (!is_table(in->d))
        return STATUS_OK;
    TRY(memory_allocate_array(&memory, (size_t)in->n_rows + 1, sizeof(int64_t), "a table", error));
    c->tables[in->index] = memory;
    return STATUS_OK;
}

static enum status read_dataset(struct checking *c, struct reading *in, struct error *error)
{
    struct error fault = {0};
    struct statistics total;
    bool counts = layout_has_statistics(in->d);
    int64_t wanted = layout_count_rows(in->d, c->record->n_sequences, c->record->n_rows);
    if (in->n_rows != wanted)
        verify_fault(c->v, c->name, "dataset %s has %" PRId64 " rows, store.json says %" PRId64, in->d->path,
                     in->n_rows, wanted);
    if (check_storage(c, in, &fault) != STATUS_OK) {
        verify_error(c->v, c->name, &fault);
        return STATUS_OK;
    }
    if (in->chunk_bytes > c->v->plain_bytes) { /* only where the rows are not those of store.json */
        verify_note(c->v, c->name, "dataset %s: its chunks are not read", in->d->path);
        return STATUS_OK;
    }
    TRY(allocate_table(c, in, error));
    if (counts) {
        statistics_place(&total, c->v->total_memory, in->d->width, layout_is_masked(in->d));
        statistics_reset(&total);
    }
    bool good = check_chunks(c, in, counts ? &total : NULL);
    if (good)
        c->n_rows[in->index] = in->n_rows;
    if (good && counts)
        check_statistics(c, in->d, &total);
    return STATUS_OK;
}

static enum status check_dataset(struct checking *c, int64_t index, struct error *error)
{
    struct reading in = {.d = &c->v->store->layout.datasets[index], .index = index};
    struct error fault = {0};
    if (segment_open_dataset(c->file, in.d, &in.id, &in.n_rows, &fault) != STATUS_OK) {
        verify_error(c->v, c->name, &fault);
        return STATUS_OK;
    }
    if (c->is_sound && segment_check_attributes(in.id, in.d, &fault) != STATUS_OK)
        verify_error(c->v, c->name, &fault);
    enum status status = read_dataset(c, &in, error);
    H5Dclose(in.id);
    return status;
}

/* ---------------------------------------------------------------- tables against each other */

/* The table of that path where it was read whole, else NULL. */
static const int64_t *get_table(const struct checking *c, const char *path, int64_t *n_rows)
{
    int64_t i = layout_find(&c->v->store->layout, path);
    if (i < 0 || c->n_rows[i] < 0)
        return NULL;
    *n_rows = c->n_rows[i];
    return c->tables[i];
}

static void check_sequences(struct checking *c)
{
    static const char *const names[] = {"sequences/document", "sequences/start"};
    int64_t n = 0, n_tokens = 0;
    const int64_t *length = get_table(c, "sequences/length", &n);
    for (int64_t i = 0; length != NULL && i < n; i++) {
        if (length[i] < 1 || length[i] > (INT64_C(1) << 48)) {
            verify_fault(c->v, c->name, "sequences/length[%" PRId64 "] is %" PRId64, i, length[i]);
            return;
        }
        n_tokens += length[i];
    }
    if (length != NULL && n_tokens != c->record->n_tokens)
        verify_fault(c->v, c->name, "its sequences have %" PRId64 " tokens, store.json says %" PRId64,
                     n_tokens, c->record->n_tokens);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        const int64_t *table = get_table(c, names[k], &n);
        for (int64_t i = 0; table != NULL && i < n; i++)
            if (table[i] < 0) {
                verify_fault(c->v, c->name, "%s[%" PRId64 "] is %" PRId64, names[k], i, table[i]);
                break;
            }
    }
}

/* Rows go up by sequence and, in it, by position; both exist. */
static void check_rows(struct checking *c, const char *capture)
{
    char path[128];
    int64_t n = 0, n_positions = 0, n_ids = 0, n_sequences = 0;
    snprintf(path, sizeof path, "%s/rows/input_ids", capture);
    const int64_t *ids = get_table(c, path, &n_ids), *length = get_table(c, "sequences/length", &n_sequences);
    for (int64_t i = 0; ids != NULL && i < n_ids; i++)
        if (ids[i] < 0) {
            verify_fault(c->v, c->name, "%s[%" PRId64 "] is %" PRId64, path, i, ids[i]);
            break;
        }
    snprintf(path, sizeof path, "%s/rows/position", capture);
    const int64_t *position = get_table(c, path, &n_positions);
    snprintf(path, sizeof path, "%s/rows/sequence", capture);
    const int64_t *sequence = get_table(c, path, &n);
    if (sequence == NULL || position == NULL || length == NULL || n != n_positions)
        return;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = sequence[i] - c->record->first_sequence;
        bool good = sequence[i] >= c->record->first_sequence && at < n_sequences && position[i] >= 0 &&
                    position[i] < length[at];
        if (i > 0 && good)
            good = sequence[i] > sequence[i - 1] ||
                   (sequence[i] == sequence[i - 1] && position[i] > position[i - 1]);
        if (!good) {
            verify_fault(c->v, c->name,
                         "%s[%" PRId64 "] is %" PRId64 " and its position %" PRId64
                         ", which is no next token of this unit's sequences",
                         path, i, sequence[i], position[i]);
            return;
        }
    }
}

/* ---------------------------------------------------------------- what else is in the file */

static herr_t look_at_object(hid_t file, const char *name, const H5O_info_t *info, void *context)
{
    struct checking *c = context;
    (void)file;
    if (info->type == H5O_TYPE_DATASET && strncmp(name, "statistics/", 11) != 0 &&
        layout_find(&c->v->store->layout, name) < 0)
        verify_fault(c->v, c->name, "dataset %s is not in store.json", name);
    return 0;
}

static void check_merge(struct checking *c)
{
    const struct layout *layout = &c->v->store->layout;
    struct error error = {0};
    for (int64_t i = 0; i < layout->n_datasets && c->v->is_merged; i++)
        if (layout_has_statistics(&layout->datasets[i]) &&
            index_merge_dataset(&c->v->merge, c->file, i, c->record, &error) != STATUS_OK) {
            verify_error(c->v, c->name, &error);
            c->v->is_merged = false;
        }
}

static enum status check_contents(struct checking *c, struct error *error)
{
    const struct layout *layout = &c->v->store->layout;
    check_attribute(c, "store_version", STORE_VERSION);
    check_attribute(c, "unit", c->record->unit);
    check_attribute(c, "first_sequence", c->record->first_sequence);
    check_attribute(c, "n_tokens", c->record->n_tokens);
    for (int64_t i = 0; i < layout->n_datasets; i++)
        TRY(check_dataset(c, i, error));
    H5Ovisit2(c->file, H5_INDEX_NAME, H5_ITER_NATIVE, look_at_object, c, H5O_INFO_BASIC);
    check_sequences(c);
    for (int64_t i = 0; i < layout->n_captures; i++)
        check_rows(c, layout->capture_names[i]);
    return STATUS_OK;
}

static enum status prepare(struct checking *c, struct error *error)
{
    size_t n = (size_t)c->v->store->layout.n_datasets;
    void *memory;
    TRY(memory_allocate_array(&memory, n, sizeof(int64_t *), "tables", error));
    c->tables = memory;
    TRY(memory_allocate_array(&memory, n, sizeof(int64_t), "tables", error));
    c->n_rows = memory;
    for (size_t i = 0; i < n; i++)
        c->n_rows[i] = -1;
    return STATUS_OK;
}

enum status verify_segment(struct verify *v, int64_t unit, struct error *error)
{
    struct checking c = {.v = v, .record = &v->store->segments[unit], .file = H5I_INVALID_HID};
    struct error fault = {0};
    enum status status;
    int64_t n_before = v->n_faults;
    store_segment_name(unit, c.name);
    snprintf(c.path, sizeof c.path, "%s/%s", v->store->folder, c.name);
    TRY_ELSE(prepare(&c, error), done);
    bool is_there = check_file(&c);
    if (is_there && hdf5_open(c.path, &c.file, &fault) != STATUS_OK)
        verify_error(v, c.name, &fault);
    if (c.file >= 0) {
        status = check_contents(&c, error);
        if (v->n_faults == n_before)
            check_merge(&c);
        H5Fclose(c.file);
    }
    v->is_merged = v->is_merged && v->n_faults == n_before;
done:
    for (int64_t i = 0; c.tables != NULL && i < v->store->layout.n_datasets; i++)
        memory_free(c.tables[i]);
    memory_free(c.tables);
    memory_free(c.n_rows);
    return status;
}

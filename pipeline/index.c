/* store.h5: every dataset whole, as HDF5 virtual datasets over the segments. */
#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/files.h"
#include "pipeline/index.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

/* ---------------------------------------------------------------- merging statistics */

static int64_t widest(const struct layout *layout)
{
    int64_t most = 0;
    for (int64_t i = 0; i < layout->n_datasets; i++)
        if (layout_has_statistics(&layout->datasets[i]) && layout->datasets[i].width > most)
            most = layout->datasets[i].width;
    return most;
}

enum status index_merge_create(const struct layout *layout, struct index_merge *out, struct error *error)
{
    void *memory;
    enum status status;
    *out = (struct index_merge){.layout = layout};
    TRY(memory_allocate_array(&memory, (size_t)layout->n_datasets, sizeof(struct index_entry),
                              "merged statistics", error));
    out->entries = memory;
    TRY_ELSE(memory_allocate(&out->scratch, statistics_bytes(widest(layout)), "merged statistics", error),
             failed);
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        out->entries[i].sequence = out->entries[i].document = out->entries[i].position = -1;
        if (layout_has_statistics(d))
            TRY_ELSE(statistics_init(&out->entries[i].statistics, d->width, layout_is_masked(d), error),
                     failed);
    }
    return STATUS_OK;
failed:
    index_merge_destroy(out);
    return status;
}

void index_merge_destroy(struct index_merge *merge)
{
    for (int64_t i = 0; merge->entries != NULL && i < merge->layout->n_datasets; i++)
        statistics_fini(&merge->entries[i].statistics);
    memory_free(merge->entries);
    memory_free(merge->scratch);
    *merge = (struct index_merge){0};
}

/* One integer of a table, through HDF5's own pipeline. */
static enum status read_one(hid_t file, const char *path, int64_t row, int64_t *out, struct error *error)
{
    hsize_t start = (hsize_t)row, one = 1;
    hid_t id = H5Dopen2(file, path, H5P_DEFAULT), space = id < 0 ? id : H5Dget_space(id);
    hid_t memory = H5Screate(H5S_SCALAR);
    bool good = space >= 0 && H5Sget_simple_extent_ndims(space) == 1 &&
                H5Sselect_hyperslab(space, H5S_SELECT_SET, &start, NULL, &one, NULL) >= 0 &&
                H5Dread(id, H5T_NATIVE_INT64, memory, space, H5P_DEFAULT, out) >= 0;
    H5Sclose(memory);
    if (space >= 0)
        H5Sclose(space);
    if (id >= 0)
        H5Dclose(id);
    return good ? STATUS_OK : hdf5_error(error, STATUS_INPUT, "%s[%" PRId64 "] cannot be read", path, row);
}

/* Where in the corpus a row of a segment comes from. */
static enum status find_place(hid_t file, const struct layout *layout, const struct dataset *d,
                              const struct segment_record *r, int64_t row, struct index_entry *entry,
                              struct error *error)
{
    char path[128];
    int64_t sequence = r->first_sequence + row, position = -1, document = -1;
    if (d->rows == ROWS_OF_CAPTURE) {
        snprintf(path, sizeof path, "%s/rows/sequence", layout->capture_names[d->capture]);
        TRY(read_one(file, path, row, &sequence, error));
        snprintf(path, sizeof path, "%s/rows/position", layout->capture_names[d->capture]);
        TRY(read_one(file, path, row, &position, error));
    }
    if (sequence < r->first_sequence || sequence - r->first_sequence >= r->n_sequences)
        return error_set(error, STATUS_INPUT,
                         "%s: row %" PRId64 " is of sequence %" PRId64 ", which is not here", path, row,
                         sequence);
    TRY(read_one(file, "sequences/document", sequence - r->first_sequence, &document, error));
    entry->sequence = sequence;
    entry->position = position;
    entry->document = document;
    return STATUS_OK;
}

enum status index_merge_dataset(struct index_merge *merge, hid_t file, int64_t dataset,
                                const struct segment_record *r, struct error *error)
{
    const struct dataset *d = &merge->layout->datasets[dataset];
    struct index_entry *entry = &merge->entries[dataset];
    struct statistics *into = &entry->statistics, s;
    int64_t n_rows = layout_count_rows(d, r->n_sequences, r->n_rows);
    if (n_rows == 0)
        return STATUS_OK;
    statistics_place(&s, merge->scratch, d->width, layout_is_masked(d));
    TRY(segment_read_statistics(file, d, "m2", &s, error));
    if (s.n_rows != n_rows)
        return error_set(error, STATUS_INPUT,
                         "statistics/%s are of %" PRId64 " rows where store.json has %" PRId64, d->path,
                         s.n_rows, n_rows);
    if (into->first_nonfinite_row < 0 && s.first_nonfinite_row >= 0)
        TRY(find_place(file, merge->layout, d, r, s.first_nonfinite_row, entry, error));
    if (s.first_nonfinite_row >= 0)
        s.first_nonfinite_row += into->n_rows;
    statistics_merge(into, &s);
    return STATUS_OK;
}

static enum status merge_segment(struct index_merge *merge, const struct store *store, int64_t unit,
                                 struct error *error)
{
    char path[FILES_PATH_BYTES], name[64];
    hid_t file;
    store_segment_name(unit, name);
    snprintf(path, sizeof path, "%s/%s", store->folder, name);
    if (access(path, F_OK) != 0) {
        log_warning("%s is missing: its rows read as NaN, and the statistics are without it", path);
        return STATUS_OK;
    }
    TRY(hdf5_open(path, &file, error));
    enum status status = STATUS_OK;
    for (int64_t i = 0; i < store->layout.n_datasets && status == STATUS_OK; i++)
        if (layout_has_statistics(&store->layout.datasets[i]))
            status = index_merge_dataset(merge, file, i, &store->segments[unit], error);
    H5Fclose(file);
    return status == STATUS_OK ? status : error_prefix(error, "%s", path);
}

/* ---------------------------------------------------------------- statistics in JSON */

/* JSON has no NaN: null where there is no number. */
static void add_double(cJSON *json, const char *key, double value)
{
    if (isfinite(value))
        cJSON_AddNumberToObject(json, key, value);
    else
        cJSON_AddNullToObject(json, key);
}

/* Counts from 0; negative: null. */
static void add_place(cJSON *json, const char *key, int64_t value)
{
    if (value >= 0)
        cJSON_AddNumberToObject(json, key, (double)value);
    else
        cJSON_AddNullToObject(json, key);
}

cJSON *index_statistics_json(const struct index_merge *merge)
{
    cJSON *json = cJSON_CreateObject();
    for (int64_t i = 0; i < merge->layout->n_datasets; i++) {
        if (!layout_has_statistics(&merge->layout->datasets[i]))
            continue;
        const struct index_entry *e = &merge->entries[i];
        cJSON *one = cJSON_AddObjectToObject(json, merge->layout->datasets[i].path);
        cJSON_AddNumberToObject(one, "n_rows", (double)e->statistics.n_rows);
        add_double(one, "mean", statistics_overall_mean(&e->statistics));
        add_double(one, "variance", statistics_overall_variance(&e->statistics));
        add_double(one, "mean_norm", e->statistics.n_norms > 0 ? e->statistics.mean_norm : NAN);
        add_double(one, "max_abs", e->statistics.max_abs);
        cJSON_AddNumberToObject(one, "n_nonfinite", (double)e->statistics.n_nonfinite);
        cJSON_AddNumberToObject(one, "n_overflow", (double)e->statistics.n_overflow);
        add_place(one, "first_nonfinite_row", e->statistics.first_nonfinite_row);
        add_place(one, "first_nonfinite_sequence", e->sequence);
        add_place(one, "first_nonfinite_document", e->document);
        add_place(one, "first_nonfinite_position", e->position);
    }
    return json;
}

/* ---------------------------------------------------------------- virtual datasets */

/* NaN, or -1: what a missing segment reads as. */
static void set_fill(hid_t creation, enum dtype dtype)
{
    static const float nan_f32 = NAN;
    static const uint16_t nan_bf16 = 0x7fc0, nan_f16 = 0x7e00;
    static const int32_t minus_i32 = -1;
    static const int64_t minus_i64 = -1;
    const void *const values[DTYPE_COUNT] = {
        [DTYPE_F32] = &nan_f32,   [DTYPE_BF16] = &nan_bf16, [DTYPE_F16] = &nan_f16,
        [DTYPE_I32] = &minus_i32, [DTYPE_I64] = &minus_i64,
    };
    hid_t type = hdf5_type_create(dtype);
    H5Pset_fill_value(creation, type, values[dtype]);
    H5Tclose(type);
}

static int64_t total_rows(const struct store *store, const struct dataset *d)
{
    int64_t n = 0;
    for (int64_t u = 0; u < store->n_units; u++)
        if (store->segments[u].bytes > 0)
            n += layout_count_rows(d, store->segments[u].n_sequences, store->segments[u].n_rows);
    return n;
}

/* Maps rows [first, first + n) of the whole onto a segment's dataset. */
static bool map_segment(hid_t creation, hid_t whole, const struct dataset *d, int64_t unit, int64_t first,
                        int64_t n)
{
    char name[64];
    hsize_t start[VALUE_MAX_AXES + 1] = {(hsize_t)first}, count[VALUE_MAX_AXES + 1];
    int rank = segment_get_shape(d, n, count);
    store_segment_name(unit, name);
    hid_t source = H5Screate_simple(rank, count, NULL);
    bool good = H5Sselect_hyperslab(whole, H5S_SELECT_SET, start, NULL, count, NULL) >= 0 &&
                H5Pset_virtual(creation, whole, name, d->path, source) >= 0;
    H5Sclose(source);
    return good;
}

static enum status create_virtual(hid_t file, const struct store *store, const struct dataset *d,
                                  struct error *error)
{
    hsize_t shape[VALUE_MAX_AXES + 1];
    int64_t total = total_rows(store, d), first = 0;
    int rank = segment_get_shape(d, total, shape);
    hid_t whole = H5Screate_simple(rank, shape, NULL), creation = H5Pcreate(H5P_DATASET_CREATE), id;
    bool good = true;
    set_fill(creation, d->dtype);
    for (int64_t u = 0; u < store->n_units && good; u++) {
        const struct segment_record *r = &store->segments[u];
        int64_t n = r->bytes > 0 ? layout_count_rows(d, r->n_sequences, r->n_rows) : 0;
        if (n > 0)
            good = map_segment(creation, whole, d, u, first, n);
        first += n;
    }
    H5Sselect_all(whole);
    enum status status = good ? segment_create_dataset(file, d, whole, creation, &id, error)
                              : hdf5_error(error, STATUS_RESOURCE, "dataset %s cannot be mapped", d->path);
    if (status == STATUS_OK && H5Dclose(id) < 0)
        status = hdf5_error(error, STATUS_RESOURCE, "dataset %s cannot be written", d->path);
    H5Pclose(creation);
    H5Sclose(whole);
    return status;
}

static enum status write_statistics(hid_t file, const struct dataset *d, const struct index_entry *entry,
                                    int level, struct error *error)
{
    struct statistics s = entry->statistics;
    double mean = statistics_overall_mean(&s), variance = statistics_overall_variance(&s);
    hid_t group;
    /* from here on the array holds variances: nothing is merged any more */
    for (int64_t i = 0; i < s.width; i++)
        s.m2[i] = s.count[i] > 0 ? s.m2[i] / (double)s.count[i] : NAN;
    TRY(segment_write_statistics(file, d, &s, "variance", level, &group, error));
    enum status status;
    TRY_ELSE(hdf5_set_double(group, "mean", mean, error), done);
    TRY_ELSE(hdf5_set_double(group, "variance", variance, error), done);
    TRY_ELSE(hdf5_set_int(group, "first_nonfinite_sequence", entry->sequence, error), done);
    TRY_ELSE(hdf5_set_int(group, "first_nonfinite_document", entry->document, error), done);
    TRY_ELSE(hdf5_set_int(group, "first_nonfinite_position", entry->position, error), done);
done:
    H5Gclose(group);
    return status;
}

static enum status write_index(hid_t file, const struct store *store, const struct index_merge *merge,
                               struct error *error)
{
    for (int64_t i = 0; i < store->layout.n_datasets; i++) {
        const struct dataset *d = &store->layout.datasets[i];
        TRY(create_virtual(file, store, d, error));
        if (layout_has_statistics(d))
            TRY(write_statistics(file, d, &merge->entries[i], store->layout.compression, error));
    }
    TRY(hdf5_set_string(file, "actdump", ACTDUMP_VERSION, error));
    return hdf5_set_int(file, "store_version", STORE_VERSION, error);
}

/* Size and checksum of the new store.h5, for store.json. */
static enum status hash_index(struct store *store, struct error *error)
{
    char path[FILES_PATH_BYTES];
    void *buffer;
    snprintf(path, sizeof path, "%s/store.h5", store->folder);
    TRY(memory_allocate(&buffer, FILES_HASH_BYTES, "reading the index", error));
    int errnum = files_hash(path, buffer, &store->index_bytes, &store->index_checksum);
    memory_free(buffer);
    return errnum == 0 ? STATUS_OK : error_set_errno(error, STATUS_INPUT, errnum, "%s cannot be read", path);
}

static enum status write_file(const struct store *store, const struct index_merge *merge, struct error *error)
{
    char temporary[FILES_PATH_BYTES];
    hid_t file;
    TRY(files_name_temporary(store->folder, "store.h5", temporary, error));
    TRY(hdf5_create(temporary, &file, error));
    enum status status = write_index(file, store, merge, error);
    if (status == STATUS_OK && H5Fflush(file, H5F_SCOPE_LOCAL) < 0)
        status = hdf5_error(error, STATUS_RESOURCE, "%s cannot be written", temporary);
    if (H5Fclose(file) < 0 && status == STATUS_OK)
        status = hdf5_error(error, STATUS_RESOURCE, "%s cannot be written", temporary);
    hdf5_forget();
    if (status != STATUS_OK) {
        unlink(temporary);
        return error_prefix(error, "%s/store.h5", store->folder);
    }
    return files_publish(temporary, store->folder, "store.h5", error);
}

enum status index_build(const char *folder, struct error *error)
{
    struct store *store = NULL;
    struct index_merge merge = {0};
    cJSON *statistics = NULL;
    enum status status;
    int64_t n_committed = 0;
    hdf5_start();
    TRY_ELSE(store_open(folder, &store, error), done);
    TRY_ELSE(index_merge_create(&store->layout, &merge, error), done);
    for (int64_t u = 0; u < store->n_units; u++) {
        if (store->segments[u].bytes == 0)
            continue;
        n_committed++;
        TRY_ELSE(merge_segment(&merge, store, u, error), done);
    }
    statistics = index_statistics_json(&merge); /* before the merged arrays turn into variances */
    TRY_ELSE(write_file(store, &merge, error), done);
    TRY_ELSE(hash_index(store, error), done);
    /* Only now, with store.h5 in place, may the store call itself complete. */
    store->complete = n_committed == store->n_units;
    status = store_write(store, statistics, error);
done:
    cJSON_Delete(statistics);
    index_merge_destroy(&merge);
    store_close(store);
    return status;
}

/* store.h5 and store.json's statistics against what the segments make. */
#include "pipeline/verify.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static const char where_index[] = "store.h5";
static const char advice[] = "`actdump index` makes it anew";

/* Rows of a dataset in a unit; 0 where it is not committed. */
static int64_t rows_of_unit(const struct store *store, const struct dataset *d, int64_t unit)
{
    const struct segment_record *r = &store->segments[unit];
    return r->bytes > 0 ? layout_count_rows(d, r->n_sequences, r->n_rows) : 0;
}

/* One mapping: the file, the dataset and the rows. */
static bool is_mapping(hid_t creation, size_t index, const struct dataset *d, int64_t unit, int64_t first,
                       int64_t n)
{
    char wanted[64], file[128] = "", path[sizeof d->path + 8] = "";
    hsize_t start[H5S_MAX_RANK], end[H5S_MAX_RANK];
    store_segment_name(unit, wanted);
    H5Pget_virtual_filename(creation, index, file, sizeof file);
    H5Pget_virtual_dsetname(creation, index, path, sizeof path);
    hid_t space = H5Pget_virtual_vspace(creation, index);
    bool good = space >= 0 && H5Sget_select_bounds(space, start, end) >= 0 && start[0] == (hsize_t)first &&
                end[0] == (hsize_t)(first + n - 1) && H5Sget_select_npoints(space) == n * d->width;
    if (space >= 0)
        H5Sclose(space);
    return good && strcmp(file, wanted) == 0 && strcmp(path, d->path) == 0;
}

static void check_mappings(struct verify *v, hid_t id, const struct dataset *d, int64_t total)
{
    hid_t creation = H5Dget_create_plist(id);
    size_t count = 0, index = 0;
    bool good = true;
    int64_t first = 0;
    if (total > 0)
        good = H5Pget_layout(creation) == H5D_VIRTUAL && H5Pget_virtual_count(creation, &count) >= 0;
    for (int64_t u = 0; u < v->store->n_units && good; u++) {
        int64_t n = rows_of_unit(v->store, d, u);
        if (n == 0)
            continue;
        good = index < count && is_mapping(creation, index, d, u, first, n);
        index++;
        first += n;
    }
    H5Pclose(creation);
    if (!good || index != count)
        verify_fault(v, where_index, "dataset %s does not show the segments' rows where they belong; %s",
                     d->path, advice);
}

/* Merged statistics: entry->m2 is a sum of squares, the file's array a variance. */
static void check_statistics(struct verify *v, hid_t file, int64_t index)
{
    const struct dataset *d = &v->store->layout.datasets[index];
    const struct statistics *wanted = &v->merge.entries[index].statistics;
    struct statistics found;
    struct error error = {0};
    statistics_place(&found, v->chunk_memory, d->width, layout_is_masked(d));
    if (segment_read_statistics(file, d, "variance", &found, &error) != STATUS_OK) {
        verify_error(v, where_index, &error);
        return;
    }
    bool good = found.n_rows == wanted->n_rows && found.n_norms == wanted->n_norms &&
                found.n_nonfinite == wanted->n_nonfinite && found.n_overflow == wanted->n_overflow &&
                found.first_nonfinite_row == wanted->first_nonfinite_row &&
                found.max_abs == wanted->max_abs && verify_is_close(found.mean_norm, wanted->mean_norm);
    for (int64_t i = 0; good && i < d->width; i++) {
        double variance = wanted->count[i] > 0 ? wanted->m2[i] / (double)wanted->count[i] : NAN;
        good = found.count[i] == wanted->count[i] && verify_is_close(found.m2[i], variance) &&
               fabs(found.mean[i] - wanted->mean[i]) <=
                   1e-9 * (fabs(wanted->mean[i]) + sqrt(fmax(variance, 0)) + 1e-300);
        if (wanted->count[i] == 0)
            good = found.count[i] == 0;
    }
    if (!good)
        verify_fault(v, where_index, "statistics/%s are not those of the segments; %s", d->path, advice);
}

static void check_datasets(struct verify *v, hid_t file)
{
    for (int64_t i = 0; i < v->store->layout.n_datasets; i++) {
        const struct dataset *d = &v->store->layout.datasets[i];
        struct error error = {0};
        int64_t n, total = 0;
        hid_t id;
        for (int64_t u = 0; u < v->store->n_units; u++)
            total += rows_of_unit(v->store, d, u);
        if (segment_open_dataset(file, d, &id, &n, &error) != STATUS_OK) {
            verify_error(v, where_index, &error);
            continue;
        }
        if (segment_check_attributes(id, d, &error) != STATUS_OK)
            verify_error(v, where_index, &error);
        if (n != total)
            verify_fault(v, where_index, "dataset %s has %" PRId64 " rows, the segments have %" PRId64 "; %s",
                         d->path, n, total, advice);
        else
            check_mappings(v, id, d, total);
        H5Dclose(id);
        if (v->is_merged && layout_has_statistics(d))
            check_statistics(v, file, i);
    }
}

static void check_json(struct verify *v)
{
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(v->store->tree, "statistics");
    if (cJSON_IsNull(found)) {
        verify_fault(v, "store.json", "it has no statistics; %s", advice);
        return;
    }
    if (!v->is_merged)
        return;
    cJSON *wanted = index_statistics_json(&v->merge);
    const cJSON *item;
    cJSON_ArrayForEach(item, wanted)
    {
        if (!cJSON_Compare(item, cJSON_GetObjectItemCaseSensitive(found, item->string), true))
            verify_fault(v, "store.json", "statistics.%s are not those of the segments; %s", item->string,
                         advice);
    }
    if (cJSON_GetArraySize(found) != cJSON_GetArraySize(wanted))
        verify_fault(v, "store.json", "statistics has %d datasets, expected %d", cJSON_GetArraySize(found),
                     cJSON_GetArraySize(wanted));
    cJSON_Delete(wanted);
}

/* Whether store.h5 is, byte for byte, the one that was made for these segments. */
static bool check_file(struct verify *v, const char *path)
{
    int64_t bytes;
    uint64_t checksum;
    int errnum = files_hash(path, v->hash_buffer, &bytes, &checksum);
    if (errnum != 0)
        verify_fault(v, where_index, "it cannot be read (%s); %s", strerror(errnum), advice);
    else if (v->store->index_bytes == 0)
        verify_fault(v, where_index, "store.json knows of no index over these segments; %s", advice);
    else if (bytes != v->store->index_bytes || checksum != v->store->index_checksum)
        verify_fault(v, where_index,
                     "it has %" PRId64 " bytes and checksum %016" PRIx64 ", store.json says %" PRId64
                     " and %016" PRIx64 "; %s",
                     bytes, checksum, v->store->index_bytes, v->store->index_checksum, advice);
    else
        return true;
    return false;
}

void verify_index(struct verify *v)
{
    char path[FILES_PATH_BYTES];
    struct error error = {0};
    hid_t file;
    snprintf(path, sizeof path, "%s/store.h5", v->store->folder);
    /* while a store grows, its index and statistics are those of the last run that ended */
    v->only_notes = !v->store->complete;
    check_json(v);
    if (!check_file(v, path)) {
        v->only_notes = false;
        return;
    }
    if (hdf5_open(path, &file, &error) != STATUS_OK) {
        verify_error(v, where_index, &error);
    } else {
        check_datasets(v, file);
        H5Fclose(file);
    }
    v->only_notes = false;
}

#include "pipeline/segment.h"

#include <stdio.h>

/* Statistics arrays of fewer elements are stored as they are: packing them would gain less than the index
 * costs. */
enum { PLAIN_ELEMENTS = 8192 };

int segment_get_shape(const struct dataset *dataset, int64_t n_rows, hsize_t shape[VALUE_MAX_AXES + 1])
{
    shape[0] = (hsize_t)n_rows;
    for (int i = 0; i < dataset->n_axes; i++)
        shape[i + 1] = (hsize_t)dataset->axis_sizes[i];
    return dataset->n_axes + 1;
}

/* ---------------------------------------------------------------- creating */

static enum status set_attributes(hid_t id, const struct dataset *dataset, struct error *error)
{
    char text[LAYOUT_TEXT_BYTES];
    const char *axes[VALUE_MAX_AXES + 1];
    layout_describe(dataset, text);
    TRY(hdf5_set_string(id, "layout", text, error));
    TRY(hdf5_set_string(id, "value", layout_get_value(dataset), error));
    TRY(hdf5_set_int(id, "layer", dataset->layer, error));
    TRY(hdf5_set_string(id, "host", layout_get_host(dataset), error));
    TRY(hdf5_set_string(id, "description", layout_get_description(dataset), error));
    TRY(hdf5_set_string(id, "dtype", dtype_name(dataset->dtype), error));
    TRY(hdf5_set_string(id, "load_dtype", dataset->is_value ? dtype_name(dataset->load_dtype) : "", error));
    return hdf5_set_labels(id, axes, layout_get_axes(dataset, axes), error);
}

static enum status make_parent(hid_t file, const char *path, struct error *error)
{
    char parent[sizeof((struct dataset *)NULL)->path];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash == NULL)
        return STATUS_OK;
    *slash = '\0';
    return hdf5_make_group(file, parent, error);
}

enum status segment_create_dataset(hid_t file, const struct dataset *dataset, hid_t space, hid_t creation,
                                   hid_t *out, struct error *error)
{
    TRY(make_parent(file, dataset->path, error));
    hid_t type = hdf5_type_create(dataset->dtype), access = H5Pcreate(H5P_DATASET_ACCESS);
    H5Pset_chunk_cache(access, 1, 0, 1); /* chunks go past the cache */
    H5Pset_obj_track_times(creation, 0);
    hid_t id = H5Dcreate2(file, dataset->path, type, space, H5P_DEFAULT, creation, access);
    H5Pclose(access);
    H5Tclose(type);
    if (id < 0)
        return hdf5_error(error, STATUS_RESOURCE, "dataset %s cannot be created", dataset->path);
    enum status status = set_attributes(id, dataset, error);
    if (status != STATUS_OK) {
        H5Dclose(id);
        return error_prefix(error, "dataset %s", dataset->path);
    }
    *out = id;
    return STATUS_OK;
}

static void set_filters(hid_t creation, int level)
{
    unsigned value = (unsigned)level;
    if (level == 0)
        return;
    H5Pset_shuffle(creation);
    H5Pset_filter(creation, STORE_FILTER_ZSTD, H5Z_FLAG_MANDATORY, 1, &value);
}

enum status segment_create_chunked(hid_t file, const struct dataset *dataset, int64_t chunk_rows, int level,
                                   hid_t *out, struct error *error)
{
    hsize_t size[VALUE_MAX_AXES + 1], most[VALUE_MAX_AXES + 1], chunk[VALUE_MAX_AXES + 1];
    int rank = segment_get_shape(dataset, 0, size);
    segment_get_shape(dataset, 0, most);
    most[0] = H5S_UNLIMITED;
    segment_get_shape(dataset, chunk_rows, chunk);
    hid_t space = H5Screate_simple(rank, size, most), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(creation, rank, chunk);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
    set_filters(creation, level);
    enum status status = segment_create_dataset(file, dataset, space, creation, out, error);
    H5Pclose(creation);
    H5Sclose(space);
    return status;
}

/* ---------------------------------------------------------------- opening */

static enum status check_type(hid_t id, const struct dataset *dataset, struct error *error)
{
    enum dtype found;
    hid_t type = H5Dget_type(id);
    bool known = hdf5_type_match(type, &found);
    H5Tclose(type);
    if (known && found == dataset->dtype)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT, "dataset %s has elements of %s instead of %s", dataset->path,
                     known ? dtype_name(found) : "an unknown type", dtype_name(dataset->dtype));
}

static void describe_shape(int rank, const hsize_t *shape, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < rank && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%llu", i == 0 ? "" : " ",
                                 (unsigned long long)shape[i]);
}

static enum status check_shape(hid_t id, const struct dataset *dataset, int64_t *n_rows, struct error *error)
{
    hsize_t found[H5S_MAX_RANK], wanted[VALUE_MAX_AXES + 1];
    hid_t space = H5Dget_space(id);
    int rank = H5Sget_simple_extent_dims(space, found, NULL);
    H5Sclose(space);
    if (rank < 1)
        return error_set(error, STATUS_INPUT, "dataset %s has no rows", dataset->path);
    bool good = segment_get_shape(dataset, 0, wanted) == rank && found[0] <= INT64_MAX;
    for (int i = 1; good && i < rank; i++)
        good = found[i] == wanted[i];
    if (good) {
        *n_rows = (int64_t)found[0];
        return STATUS_OK;
    }
    char one[128], other[128];
    describe_shape(rank - 1, found + 1, one, sizeof one);
    describe_shape(dataset->n_axes, wanted + 1, other, sizeof other);
    return error_set(error, STATUS_INPUT, "dataset %s has rows of shape [%s] instead of [%s]", dataset->path,
                     one, other);
}

static enum status check_string(hid_t id, const struct dataset *dataset, const char *name, const char *wanted,
                                struct error *error)
{
    char found[512];
    if (hdf5_get_string(id, name, found, sizeof found, error) != STATUS_OK)
        return error_prefix(error, "dataset %s", dataset->path);
    if (strncmp(found, wanted, sizeof found - 1) == 0)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT, "dataset %s has attribute %s \"%.100s\" instead of \"%.100s\"",
                     dataset->path, name, found, wanted);
}

enum status segment_check_attributes(hid_t id, const struct dataset *dataset, struct error *error)
{
    char text[LAYOUT_TEXT_BYTES];
    int64_t layer;
    layout_describe(dataset, text);
    TRY(check_string(id, dataset, "layout", text, error));
    TRY(check_string(id, dataset, "value", layout_get_value(dataset), error));
    TRY(check_string(id, dataset, "host", layout_get_host(dataset), error));
    TRY(check_string(id, dataset, "dtype", dtype_name(dataset->dtype), error));
    TRY(check_string(id, dataset, "load_dtype", dataset->is_value ? dtype_name(dataset->load_dtype) : "",
                     error));
    if (hdf5_get_int(id, "layer", &layer, error) != STATUS_OK)
        return error_prefix(error, "dataset %s", dataset->path);
    if (layer != dataset->layer)
        return error_set(error, STATUS_INPUT, "dataset %s has attribute layer %lld instead of %d",
                         dataset->path, (long long)layer, dataset->layer);
    return STATUS_OK;
}

enum status segment_open_dataset(hid_t file, const struct dataset *dataset, hid_t *out, int64_t *n_rows,
                                 struct error *error)
{
    enum status status;
    hid_t id = H5Dopen2(file, dataset->path, H5P_DEFAULT);
    if (id < 0)
        return hdf5_error(error, STATUS_INPUT, "dataset %s is missing", dataset->path);
    TRY_ELSE(check_type(id, dataset, error), failed);
    TRY_ELSE(check_shape(id, dataset, n_rows, error), failed);
    *out = id;
    return STATUS_OK;
failed:
    H5Dclose(id);
    return status;
}

/* ---------------------------------------------------------------- statistics */

static enum status write_array(hid_t group, const char *name, hid_t type, const void *values, int64_t n,
                               int level, struct error *error)
{
    hsize_t size = (hsize_t)n, chunk = size < 512 * 1024 ? size : 512 * 1024;
    hid_t space = H5Screate_simple(1, &size, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_obj_track_times(creation, 0);
    if (level > 0 && n >= PLAIN_ELEMENTS) {
        H5Pset_chunk(creation, 1, &chunk);
        set_filters(creation, level);
    }
    hid_t id = H5Dcreate2(group, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    bool good = id >= 0 && H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0;
    good = (id < 0 || H5Dclose(id) >= 0) && good;
    H5Pclose(creation);
    H5Sclose(space);
    return good ? STATUS_OK
                : hdf5_error(error, STATUS_RESOURCE, "statistics array %s cannot be written", name);
}

static enum status write_scalars(hid_t group, const struct statistics *s, struct error *error)
{
    TRY(hdf5_set_int(group, "n_rows", s->n_rows, error));
    TRY(hdf5_set_int(group, "n_norms", s->n_norms, error));
    TRY(hdf5_set_double(group, "mean_norm", s->mean_norm, error));
    TRY(hdf5_set_double(group, "max_abs", s->max_abs, error));
    TRY(hdf5_set_int(group, "n_nonfinite", s->n_nonfinite, error));
    TRY(hdf5_set_int(group, "n_overflow", s->n_overflow, error));
    return hdf5_set_int(group, "first_nonfinite_row", s->first_nonfinite_row, error);
}

static void name_group(const struct dataset *dataset, char name[256])
{
    snprintf(name, 256, "statistics/%s", dataset->path);
}

enum status segment_write_statistics(hid_t file, const struct dataset *dataset, const struct statistics *s,
                                     const char *spread_name, int level, hid_t *group, struct error *error)
{
    char name[256];
    enum status status;
    name_group(dataset, name);
    TRY(hdf5_make_group(file, name, error));
    hid_t id = H5Gopen2(file, name, H5P_DEFAULT);
    if (id < 0)
        return hdf5_error(error, STATUS_RESOURCE, "group %s cannot be opened", name);
    TRY_ELSE(write_scalars(id, s, error), failed);
    TRY_ELSE(write_array(id, "mean", H5T_IEEE_F64LE, s->mean, s->width, level, error), failed);
    TRY_ELSE(write_array(id, spread_name, H5T_IEEE_F64LE, s->m2, s->width, level, error), failed);
    TRY_ELSE(write_array(id, "count", H5T_STD_I64LE, s->count, s->width, level, error), failed);
    if (group != NULL)
        *group = id;
    else
        H5Gclose(id);
    return STATUS_OK;
failed:
    H5Gclose(id);
    return error_prefix(error, "%s", name);
}

static enum status read_array(hid_t group, const char *name, hid_t type, void *values, int64_t n,
                              struct error *error)
{
    hid_t id = H5Dopen2(group, name, H5P_DEFAULT);
    if (id < 0)
        return hdf5_error(error, STATUS_INPUT, "array %s is missing", name);
    hid_t space = H5Dget_space(id), stored = H5Dget_type(id);
    bool fits = H5Sget_simple_extent_npoints(space) == n && H5Tequal(stored, type) > 0;
    H5Sclose(space);
    H5Tclose(stored);
    herr_t code = fits ? H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) : -1;
    H5Dclose(id);
    if (!fits)
        return error_set(error, STATUS_INPUT, "array %s does not have %lld elements of 64 bits", name,
                         (long long)n);
    return code < 0 ? hdf5_error(error, STATUS_INPUT, "array %s cannot be read", name) : STATUS_OK;
}

static enum status read_scalars(hid_t group, struct statistics *s, struct error *error)
{
    TRY(hdf5_get_int(group, "n_rows", &s->n_rows, error));
    TRY(hdf5_get_int(group, "n_norms", &s->n_norms, error));
    TRY(hdf5_get_double(group, "mean_norm", &s->mean_norm, error));
    TRY(hdf5_get_double(group, "max_abs", &s->max_abs, error));
    TRY(hdf5_get_int(group, "n_nonfinite", &s->n_nonfinite, error));
    TRY(hdf5_get_int(group, "n_overflow", &s->n_overflow, error));
    TRY(hdf5_get_int(group, "first_nonfinite_row", &s->first_nonfinite_row, error));
    if (s->n_rows < 0 || s->n_norms < 0 || s->n_norms > s->n_rows || s->n_nonfinite < 0 ||
        s->n_overflow < 0 || s->first_nonfinite_row < -1 || s->first_nonfinite_row >= s->n_rows)
        return error_set(error, STATUS_INPUT, "its counts contradict each other");
    return STATUS_OK;
}

/* Sums and counts of rows must fit; a merge adds them without looking again. */
static enum status check_counts(const struct statistics *s, struct error *error)
{
    for (int64_t i = 0; i < s->width; i++)
        if (s->count[i] < 0 || s->count[i] > s->n_rows)
            return error_set(error, STATUS_INPUT, "count[%lld] is %lld for %lld rows", (long long)i,
                             (long long)s->count[i], (long long)s->n_rows);
    return STATUS_OK;
}

enum status segment_read_statistics(hid_t file, const struct dataset *dataset, const char *spread_name,
                                    struct statistics *s, struct error *error)
{
    char name[256];
    enum status status;
    name_group(dataset, name);
    hid_t id = H5Gopen2(file, name, H5P_DEFAULT);
    if (id < 0)
        return hdf5_error(error, STATUS_INPUT, "group %s is missing", name);
    TRY_ELSE(read_scalars(id, s, error), done);
    TRY_ELSE(read_array(id, "mean", H5T_IEEE_F64LE, s->mean, s->width, error), done);
    TRY_ELSE(read_array(id, spread_name, H5T_IEEE_F64LE, s->m2, s->width, error), done);
    TRY_ELSE(read_array(id, "count", H5T_STD_I64LE, s->count, s->width, error), done);
    TRY_ELSE(check_counts(s, error), done);
done:
    H5Gclose(id);
    return status == STATUS_OK ? status : error_prefix(error, "%s", name);
}

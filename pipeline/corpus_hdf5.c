/* A dataset of ids in an HDF5 file, read piece by piece. */
#include "pipeline/corpus_source.h"

#include "kernels/base/memory.h"
#include "pipeline/hdf5_util.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define BUFFER_TOKENS 4096
#define LEAST_CACHE_BYTES (INT64_C(1) << 20)
#define MOST_CACHE_BYTES (INT64_C(64) << 20)
#define CACHE_SLOTS 10007 /* HDF5 wants a prime, well above the number of chunks it holds */

struct hdf5_source {
    struct corpus_source source;
    char *name; /* "file:dataset" */
    hid_t file, dataset, space;
    int rank;
    hid_t memory_type;
    int64_t *buffer; /* ids [held_at, held_at + held) of a document, for the short reads */
    int64_t held_document, held_at, held;
};

/* ---- tokens ---- */

static enum status read_slab(struct hdf5_source *h, int64_t document, int64_t offset, int64_t n, int64_t *ids,
                             struct error *error)
{
    hsize_t start[2] = {(hsize_t)document, (hsize_t)offset}, count[2] = {1, (hsize_t)n};
    int skipped = h->rank == 1; /* no axis of rows */
    hid_t memory = H5Screate_simple(1, &count[1], NULL);
    bool is_good =
        memory >= 0 &&
        H5Sselect_hyperslab(h->space, H5S_SELECT_SET, start + skipped, NULL, count + skipped, NULL) >= 0 &&
        H5Dread(h->dataset, h->memory_type, memory, h->space, H5P_DEFAULT, ids) >= 0;
    enum status status =
        is_good ? STATUS_OK
                : hdf5_error(error, STATUS_INPUT,
                             "%s: tokens %" PRId64 " to %" PRId64 " of document %" PRId64 " cannot be read",
                             h->name, offset, offset + n - 1, document);
    if (memory >= 0)
        H5Sclose(memory);
    return status;
}

static enum status hdf5_source_read(struct corpus_source *source, int64_t document, int64_t offset, int64_t n,
                                    int64_t *ids, struct error *error)
{
    struct hdf5_source *h = (struct hdf5_source *)source;
    if (n == 0)
        return STATUS_OK;
    hdf5_start();
    if (n > BUFFER_TOKENS)
        return read_slab(h, document, offset, n, ids, error);
    if (document != h->held_document || offset < h->held_at || offset + n > h->held_at + h->held) {
        int64_t left = source->width - offset, count = left < BUFFER_TOKENS ? left : BUFFER_TOKENS;
        h->held = 0;
        TRY(read_slab(h, document, offset, count, h->buffer, error));
        h->held_document = document;
        h->held_at = offset;
        h->held = count;
    }
    memcpy(ids, h->buffer + (offset - h->held_at), (size_t)n * sizeof *ids);
    return STATUS_OK;
}

static void hdf5_source_close(struct corpus_source *source)
{
    struct hdf5_source *h = (struct hdf5_source *)source;
    hdf5_start();
    if (h->space >= 0)
        H5Sclose(h->space);
    if (h->dataset >= 0)
        H5Dclose(h->dataset);
    if (h->file >= 0)
        H5Fclose(h->file);
    memory_free(h->buffer);
    memory_free(h->name);
    memory_free(h);
}

static const struct corpus_source_functions hdf5_functions = {.read = hdf5_source_read,
                                                              .close = hdf5_source_close};

/* ---- opening ---- */

static enum status check_type(struct hdf5_source *h, struct error *error)
{
    hid_t type = H5Dget_type(h->dataset);
    bool is_integer = type >= 0 && H5Tget_class(type) == H5T_INTEGER;
    size_t bytes = type >= 0 ? H5Tget_size(type) : 0;
    h->source.is_unsigned = is_integer && H5Tget_sign(type) == H5T_SGN_NONE;
    if (type >= 0)
        H5Tclose(type);
    if (!is_integer || bytes > 8)
        return error_set(error, STATUS_INPUT, "%s is no dataset of integers of at most 8 bytes", h->name);
    h->memory_type = h->source.is_unsigned ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64;
    return STATUS_OK;
}

static enum status check_shape(struct hdf5_source *h, struct error *error)
{
    hsize_t sizes[2] = {1, 1};
    h->space = H5Dget_space(h->dataset);
    h->rank = h->space < 0 ? 0 : H5Sget_simple_extent_ndims(h->space);
    if (h->rank != 1 && h->rank != 2)
        return error_set(error, STATUS_INPUT, "%s has %d axes, expected 1 or 2 (sequence, context)", h->name,
                         h->rank);
    H5Sget_simple_extent_dims(h->space, h->rank == 1 ? sizes + 1 : sizes, NULL);
    int64_t bytes;
    if (sizes[0] > INT64_MAX || sizes[1] > INT64_MAX ||
        __builtin_mul_overflow((int64_t)sizes[0], (int64_t)sizes[1], &bytes) ||
        __builtin_mul_overflow(bytes, 8, &bytes))
        return error_set(error, STATUS_INPUT, "%s has more than 2^60 tokens", h->name);
    h->source.n_documents = (int64_t)sizes[0];
    h->source.width = (int64_t)sizes[1];
    h->source.is_bounded = h->rank == 2;
    return STATUS_OK;
}

static enum status check_filters(const struct hdf5_source *h, hid_t creation, struct error *error)
{
    int n = H5Pget_nfilters(creation);
    for (unsigned i = 0; i < (unsigned)(n > 0 ? n : 0); i++) {
        char name[64] = "";
        unsigned flags, config;
        size_t n_values = 0;
        H5Z_filter_t id = H5Pget_filter2(creation, i, &flags, &n_values, NULL, sizeof name, name, &config);
        if (H5Zfilter_avail(id) > 0)
            continue;
        H5Eclear2(H5E_DEFAULT);
        return error_set(
            error, STATUS_INPUT,
            "%s is compressed with the HDF5 filter %d (%s), which is not installed: put its plugin into"
            " HDF5_PLUGIN_PATH, or rewrite the dataset with gzip, zstd or no filter",
            h->name, (int)id, name);
    }
    return STATUS_OK;
}

/* What was never written would read as zeros, which are ids too. */
static enum status check_written(const struct hdf5_source *h, hid_t creation, const hsize_t chunk[2],
                                 struct error *error)
{
    const struct corpus_source *s = &h->source;
    H5D_layout_t layout = H5Pget_layout(creation);
    if (layout == H5D_VIRTUAL)
        return error_set(
            error, STATUS_INPUT,
            "%s is a virtual dataset, whose missing parts would read as zeros: give a file that holds the"
            " tokens",
            h->name);
    if (s->n_documents == 0 || s->width == 0)
        return STATUS_OK;
    hsize_t found = 1, expected = 1;
    if (layout == H5D_CONTIGUOUS) {
        found = H5Dget_storage_size(h->dataset) > 0;
    } else if (layout == H5D_CHUNKED) {
        expected = (((hsize_t)s->n_documents - 1) / chunk[0] + 1) * (((hsize_t)s->width - 1) / chunk[1] + 1);
        if (H5Dget_num_chunks(h->dataset, h->space, &found) < 0)
            return hdf5_error(error, STATUS_INPUT, "%s: its chunks cannot be counted", h->name);
    }
    if (found >= expected)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT, "%s is not wholly written: %llu of its %llu chunks are there",
                     h->name, (unsigned long long)found, (unsigned long long)expected);
}

/* Opens the dataset again with a cache that holds all chunks that a row touches, so that each is decompressed
 * once. */
static enum status enlarge_cache(struct hdf5_source *h, const char *dataset, const hsize_t chunk[2],
                                 struct error *error)
{
    int64_t bytes, width = h->source.width, per_row = width == 0 ? 1 : (width - 1) / (int64_t)chunk[1] + 1;
    if (h->rank == 1)
        per_row = 1;
    if (__builtin_mul_overflow(per_row, (int64_t)(chunk[0] * chunk[1]), &bytes) ||
        __builtin_mul_overflow(bytes, 8, &bytes) || bytes > MOST_CACHE_BYTES)
        bytes = MOST_CACHE_BYTES;
    if (bytes <= LEAST_CACHE_BYTES)
        return STATUS_OK;
    hid_t access = H5Pcreate(H5P_DATASET_ACCESS);
    H5Pset_chunk_cache(access, CACHE_SLOTS, (size_t)bytes, 1.0);
    H5Dclose(h->dataset);
    h->dataset = H5Dopen2(h->file, dataset, access);
    H5Pclose(access);
    return h->dataset >= 0 ? STATUS_OK : hdf5_error(error, STATUS_INPUT, "%s cannot be opened", h->name);
}

static enum status check_storage(struct hdf5_source *h, const char *dataset, struct error *error)
{
    hid_t creation = H5Dget_create_plist(h->dataset);
    if (creation < 0)
        return hdf5_error(error, STATUS_INPUT, "%s: how it is stored cannot be read", h->name);
    hsize_t chunk[2] = {1, 1};
    bool is_chunked = H5Pget_layout(creation) == H5D_CHUNKED;
    if (is_chunked)
        H5Pget_chunk(creation, h->rank, h->rank == 1 ? chunk + 1 : chunk);
    enum status status = check_filters(h, creation, error);
    if (status == STATUS_OK)
        status = check_written(h, creation, chunk, error);
    if (status == STATUS_OK && is_chunked)
        status = enlarge_cache(h, dataset, chunk, error);
    H5Pclose(creation);
    return status;
}

static enum status open_dataset(struct hdf5_source *h, const char *path, const char *dataset,
                                struct error *error)
{
    /* The plain open first: it says better what is wrong with a path. */
    struct corpus_file file;
    TRY(corpus_file_open(path, &file, error));
    corpus_file_close(&file);
    void *memory;
    size_t size = strlen(path) + strlen(dataset) + 2;
    TRY(memory_allocate(&memory, size, "a path", error));
    h->name = memory;
    snprintf(h->name, size, "%s:%s", path, dataset);
    h->source.path = h->name;
    TRY(memory_allocate_array(&memory, BUFFER_TOKENS, sizeof *h->buffer, "a read buffer", error));
    h->buffer = memory;
    hdf5_start();
    TRY(hdf5_open(path, &h->file, error));
    h->dataset = H5Dopen2(h->file, dataset, H5P_DEFAULT);
    if (h->dataset < 0)
        return hdf5_error(error, STATUS_INPUT, "%s: there is no dataset %s", path, dataset);
    TRY(check_type(h, error));
    TRY(check_shape(h, error));
    return check_storage(h, dataset, error);
}

enum status corpus_open_hdf5(const char *path, const char *dataset, struct corpus_source **out,
                             struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct hdf5_source), "the corpus", error));
    struct hdf5_source *h = memory;
    *h = (struct hdf5_source){.source = {.functions = &hdf5_functions},
                              .file = H5I_INVALID_HID,
                              .dataset = H5I_INVALID_HID,
                              .space = H5I_INVALID_HID,
                              .held_document = -1};
    enum status status = open_dataset(h, path, dataset, error);
    if (status != STATUS_OK)
        hdf5_source_close(&h->source);
    else
        *out = &h->source;
    return status;
}

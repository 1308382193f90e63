/* What the tests of the replica share: a checkpoint run over given documents with everything that is asked
 * for kept in memory as float32, and the golden files that it is held against.
 *
 * Include after cmocka.h. */
#ifndef ACTDUMP_TESTS_REPLICA_CHECK_H
#define ACTDUMP_TESTS_REPLICA_CHECK_H

#include "engine/replica.h"
#include "kernels/base/memory.h"

#include <hdf5.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* One site's rows, of all batches of a document list end to end. */
struct kept {
    float *data; /* [n_rows, width]; NULL where it was not wanted */
    int64_t n_rows, width;
    enum dtype dtype;  /* as described */
    int64_t n_offered; /* rows of the batch at hand that came */
};

/* A replica that keeps what it is told to want. */
struct keeper {
    struct model *model;
    struct backend *backend;
    struct replica *replica;
    struct observer observer;
    struct replica_limits limits;
    bool (*wants)(enum value_id value, int layer);
    struct kept *sites;          /* [(n_layers + 1) * VALUE_COUNT] */
    int64_t row, window;         /* where the batch at hand starts among all kept rows and windows */
    int64_t n_tokens, n_windows; /* of the batch at hand */
    int32_t *identity;
};

static inline struct kept *keeper_get(const struct keeper *k, enum value_id value, int layer)
{
    return &k->sites[(layer + 1) * VALUE_COUNT + (int)value];
}

static inline bool keeper_wants(void *context, enum value_id value, int layer)
{
    const struct keeper *k = context;
    return keeper_get(k, value, layer)->data != NULL;
}

static inline struct row_list keeper_rows(void *context, enum value_id value, int layer)
{
    const struct keeper *k = context;
    (void)layer;
    return (struct row_list){k->identity,
                             catalogue_get(value)->per == PER_SEQUENCE ? k->n_windows : k->n_tokens};
}

static inline void keeper_collect(const struct keeper *k, const struct kept *site, struct tensor data,
                                  float *to)
{
    if (site->dtype != DTYPE_I32) {
        k->backend->ops->collect(k->backend, data, NULL, data.rows, DTYPE_F32, to);
        return;
    }
    int32_t *whole = malloc((size_t)(data.rows * data.cols) * sizeof *whole);
    k->backend->ops->collect(k->backend, data, NULL, data.rows, DTYPE_I32, whole);
    struct error error = {0};
    if (k->backend->ops->synchronize(k->backend, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    for (int64_t i = 0; i < data.rows * data.cols; i++)
        to[i] = (float)whole[i];
    free(whole);
}

static inline void keeper_offer(void *context, enum value_id value, int layer, const struct piece *piece)
{
    struct keeper *k = context;
    struct kept *site = keeper_get(k, value, layer);
    bool by_window = catalogue_get(value)->per == PER_SEQUENCE;
    int64_t base = by_window ? k->window : k->row;
    assert_non_null(site->data);
    assert_int_equal(piece->data.cols, site->width);
    assert_int_equal(piece->data.rows, piece->n);
    if (piece->rows == NULL) {
        assert_int_equal(piece->n, by_window ? k->n_windows : k->n_tokens);
        keeper_collect(k, site, piece->data, site->data + base * site->width);
        site->n_offered += piece->n;
        return;
    }
    for (int64_t i = 0; i < piece->n; i++) {
        assert_int_equal(piece->rows[i],
                         site->n_offered); /* all rows are wanted, so they come without gaps */
        keeper_collect(k, site, tensor_rows(piece->data, i, 1),
                       site->data + (base + piece->rows[i]) * site->width);
        site->n_offered++;
    }
}

static inline void keeper_take_sites(struct keeper *k, int64_t n_rows, int64_t n_windows)
{
    k->sites = calloc((size_t)(k->model->n_layers + 1) * VALUE_COUNT, sizeof *k->sites);
    for (int layer = -1; layer < k->model->n_layers; layer++) {
        for (int v = 0; v < VALUE_COUNT; v++) {
            struct value_description d;
            enum value_id value = (enum value_id)v;
            if (value_is_per_layer(value) != (layer >= 0))
                continue;
            model_describe_value(k->model, value, layer, k->limits.max_position, &d);
            if (!d.available || !k->wants(value, layer))
                continue;
            struct kept *site = keeper_get(k, value, layer);
            site->n_rows = catalogue_get(value)->per == PER_SEQUENCE ? n_windows : n_rows;
            site->width = d.width;
            site->dtype = d.dtype;
            site->data = malloc((size_t)(site->n_rows * site->width) * sizeof(float));
            for (int64_t i = 0; i < site->n_rows * site->width; i++)
                site->data[i] = NAN; /* what is never written shows */
        }
    }
}

/* Room for n_rows tokens in n_windows windows over all batches. */
static inline void keeper_open(struct keeper *k, const char *folder, int load_dtype, int64_t n_rows,
                               int64_t n_windows)
{
    struct error error = {0};
    if (model_open(folder, load_dtype, &k->model, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    if (backend_create_cpu(1, &k->backend, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    keeper_take_sites(k, n_rows, n_windows);
    k->identity = malloc((size_t)k->limits.max_tokens * sizeof *k->identity);
    for (int64_t i = 0; i < k->limits.max_tokens; i++)
        k->identity[i] = (int32_t)i;
    k->observer = (struct observer){k, keeper_wants, keeper_rows, keeper_offer};
    if (replica_create(k->model, k->backend, &k->observer, &k->limits, &k->replica, &error) != STATUS_OK)
        fail_msg("%s", error.text);
}

static inline void keeper_close(struct keeper *k)
{
    for (int i = 0; i < (k->model->n_layers + 1) * VALUE_COUNT; i++)
        free(k->sites[i].data);
    free(k->sites);
    free(k->identity);
    replica_destroy(k->replica);
    backend_destroy(k->backend);
    model_close(k->model);
    memset(k, 0, sizeof *k);
}

/* One batch; fails the test where a wanted row did not come. */
static inline void keeper_run(struct keeper *k, const struct batch *batch)
{
    struct error error = {0};
    k->n_tokens = batch->n_tokens;
    k->n_windows = batch->n_windows;
    for (int i = 0; i < (k->model->n_layers + 1) * VALUE_COUNT; i++)
        k->sites[i].n_offered = 0;
    if (replica_forward(k->replica, batch, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    for (int i = 0; i < (k->model->n_layers + 1) * VALUE_COUNT; i++) {
        bool by_window = catalogue_get((enum value_id)(i % VALUE_COUNT))->per == PER_SEQUENCE;
        if (k->sites[i].data != NULL && k->sites[i].n_offered != (by_window ? k->n_windows : k->n_tokens))
            fail_msg("%s of layer %d: %lld rows came", catalogue_path((enum value_id)(i % VALUE_COUNT)),
                     i / VALUE_COUNT - 1, (long long)k->sites[i].n_offered);
    }
    k->row += batch->n_tokens;
    k->window += batch->n_windows;
}

/* Documents end to end, each a window of its own, as one batch. */
static inline void keeper_run_packed(struct keeper *k, const int32_t *ids, const int32_t *lengths,
                                     int n_documents)
{
    int32_t starts[17] = {0}, positions[16] = {0};
    assert_in_range(n_documents, 1, 16);
    for (int i = 0; i < n_documents; i++)
        starts[i + 1] = starts[i] + lengths[i];
    struct batch batch = {.n_tokens = starts[n_documents],
                          .ids = ids,
                          .n_windows = n_documents,
                          .window_start = starts,
                          .window_position = positions};
    keeper_run(k, &batch);
}

static inline bool want_everything(enum value_id value, int layer)
{
    (void)value;
    (void)layer;
    return true;
}

/* ---- golden files ---- */

/* A dataset as float32, with its axes; NULL where there is none. The caller frees it. */
static inline float *golden_read(hid_t file, const char *path, hsize_t dims[4], int *n_dims)
{
    H5E_BEGIN_TRY
    {
        if (H5Lexists(file, path, H5P_DEFAULT) <= 0)
            return NULL;
    }
    H5E_END_TRY
    hid_t set = H5Dopen2(file, path, H5P_DEFAULT), space = H5Dget_space(set);
    *n_dims = H5Sget_simple_extent_dims(space, dims, NULL);
    float *data = malloc((size_t)H5Sget_simple_extent_npoints(space) * sizeof *data);
    assert_true(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    H5Sclose(space);
    H5Dclose(set);
    return data;
}

#endif

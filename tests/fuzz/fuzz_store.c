/* A store's store.json. */
#include "fuzz.h"
#include "kernels/base/memory.h"
#include "pipeline/store.h"

/* What index, verify, info and run take for granted of a store that was opened. */
static void check_dataset(const struct layout *layout, const struct dataset *d)
{
    int64_t width = 1;
    CHECK(d->path[0] != '\0' && d->path[0] != '/' && strstr(d->path, "/../") == NULL);
    CHECK(d->capture >= -1 && d->capture < layout->n_captures);
    CHECK(d->rows != ROWS_OF_CAPTURE || d->capture >= 0);
    CHECK(d->n_axes >= 0 && d->n_axes <= VALUE_MAX_AXES);
    for (int i = 0; i < d->n_axes; i++) {
        CHECK(d->axis_names[i] != NULL && d->axis_names[i][0] != '\0' && d->axis_sizes[i] > 0);
        width *= d->axis_sizes[i];
    }
    CHECK(width == d->width && d->row_bytes == width * (int64_t)dtype_size(d->dtype));
    CHECK(d->chunk_rows >= 1 && d->chunk_rows * d->row_bytes <= UINT32_MAX);
}

static void check_store(const struct store *store)
{
    const struct layout *layout = &store->layout;
    CHECK(store->job != NULL && store->model != NULL && store->corpus != NULL && store->run != NULL);
    CHECK(layout->compression >= 0 && layout->compression <= 22);
    for (int64_t i = 0; i < layout->n_datasets; i++)
        check_dataset(layout, &layout->datasets[i]);
    CHECK(layout_find(layout, "sequences/length") >= 0);
    CHECK(store->n_units >= 0 && store->unit_start[0] == 0);
    for (int64_t u = 0; u < store->n_units; u++) {
        const struct segment_record *r = &store->segments[u];
        CHECK(store->unit_start[u] <= store->unit_start[u + 1]);
        CHECK(r->unit == u && r->bytes >= 0 && (r->bytes == 0) == (r->n_rows == NULL));
        for (int64_t c = 0; r->n_rows != NULL && c < layout->n_captures; c++)
            CHECK(r->n_rows[c] >= 0);
    }
}

/* What was read, written and read again is the same. */
static void check_rewrite(struct store *store)
{
    struct store *again = NULL;
    CHECK(store_write(store, cJSON_GetObjectItemCaseSensitive(store->tree, "statistics"), NULL) == STATUS_OK);
    CHECK(store_open(fuzz_folder(), &again, NULL) == STATUS_OK);
    CHECK(again->n_units == store->n_units && again->layout.n_datasets == store->layout.n_datasets);
    CHECK(again->complete == store->complete && again->index_bytes == store->index_bytes);
    store_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t before = memory_in_use();
    struct store *store = NULL;
    struct error error = {0};
    fuzz_write_file("store.json", data, size);
    enum status status = store_open(fuzz_folder(), &store, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    for (const char *c = error.text; *c != '\0'; c++)
        CHECK((unsigned char)*c >= ' ');
    CHECK((store != NULL) == (status == STATUS_OK));
    if (store != NULL) {
        check_store(store);
        check_rewrite(store);
    }
    store_close(store);
    CHECK(memory_in_use() == before);
    return 0;
}

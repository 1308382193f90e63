/* info_print: what a store holds, on one screen, and how to read it. */
#include "engine/json.h"
#include "kernels/base/memory.h"
#include "pipeline/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { TEXT_BYTES = 256 };

/* ---------------------------------------------------------------- numbers and names */

/* 1234567 as "1,234,567". */
static const char *group_digits(int64_t value, char text[32])
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%" PRId64, value), used = 0;
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0 && digits[i - 1] != '-')
            text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = '\0';
    return text;
}

static const char *scale_bytes(int64_t bytes, char text[32])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 1024 && unit < 5) {
        value /= 1024;
        unit++;
    }
    snprintf(text, 32, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}

/* What a file says is shown without its control characters. */
static const char *quote(const cJSON *object, const char *key, char text[TEXT_BYTES])
{
    const char *found = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    return json_quote(found == NULL ? "unknown" : found, text, TEXT_BYTES);
}

static int64_t get_count(const cJSON *object, const char *key)
{
    int64_t n;
    return json_get_integer(cJSON_GetObjectItemCaseSensitive(object, key), &n) ? n : 0;
}

/* ---------------------------------------------------------------- the head */

static void print_head(const struct store *store)
{
    const cJSON *totals = cJSON_GetObjectItemCaseSensitive(store->tree, "totals");
    int64_t bytes = get_count(totals, "bytes"), raw = get_count(totals, "raw_bytes"),
            n = get_count(totals, "n_segments");
    char a[32], b[32], text[TEXT_BYTES], more[TEXT_BYTES];
    printf("%s: activations, store version %d, %s\n\n", store->folder, STORE_VERSION,
           store->complete ? "complete" : "not complete");
    printf("  model     %s, %" PRId64 " layers, loaded as %s,", quote(store->model, "family", text),
           get_count(store->model, "n_layers"), quote(store->model, "load_dtype", more));
    printf(" from %s\n", quote(store->model, "checkpoint", text));
    printf("  corpus    %s of format %s:", quote(store->corpus, "path", text),
           quote(store->corpus, "format", more));
    printf(" %s sequences, %s tokens captured\n", group_digits(get_count(totals, "n_sequences"), a),
           group_digits(get_count(totals, "n_tokens"), b));
    printf("  segments  %" PRId64 " of %" PRId64 ", %s on disk", n, store->n_units, scale_bytes(bytes, a));
    printf(" for %s of values", scale_bytes(raw, b));
    if (bytes > 0)
        printf(" (ratio %.2f)", (double)raw / (double)bytes);
    printf("\n");
}

/* ---------------------------------------------------------------- captures */

static bool is_alike(const struct dataset *a, const struct dataset *b)
{
    if (a->capture != b->capture || a->value != b->value || a->dtype != b->dtype || a->rows != b->rows ||
        a->n_axes != b->n_axes || (a->layer < 0) != (b->layer < 0))
        return false;
    for (int i = 0; i < a->n_axes; i++)
        if (a->axis_sizes[i] != b->axis_sizes[i])
            return false;
    return true;
}

/* Adds "0-23", "0-20:4" or "7" to the list. */
static size_t put_run(char *text, size_t used, int first, int last, int step)
{
    const char *comma = used == 0 ? "" : ",";
    size_t room = used < TEXT_BYTES ? TEXT_BYTES - used : 0;
    if (first == last)
        return used + (size_t)snprintf(text + used, room, "%s%d", comma, first);
    if (step == 1)
        return used + (size_t)snprintf(text + used, room, "%s%d-%d", comma, first, last);
    return used + (size_t)snprintf(text + used, room, "%s%d-%d:%d", comma, first, last, step);
}

/* The layers of all datasets like `index`, as ranges; what does not fit is cut. */
static void describe_layers(const struct layout *layout, int64_t index, char text[TEXT_BYTES], int64_t *n)
{
    const struct dataset *like = &layout->datasets[index];
    int first = like->layer, last = like->layer, step = 0;
    size_t used = 0;
    *n = 1;
    for (int64_t i = index + 1; i < layout->n_datasets && used < TEXT_BYTES; i++) {
        const struct dataset *d = &layout->datasets[i];
        if (!d->is_value || !is_alike(like, d))
            continue;
        ++*n;
        if (step == 0 || d->layer - last == step) {
            step = d->layer - last;
            last = d->layer;
        } else if (last - first == step && step > 1) { /* two do not make a pattern */
            used = put_run(text, used, first, first, 0);
            first = last;
            step = d->layer - last;
            last = d->layer;
        } else {
            used = put_run(text, used, first, last, step);
            first = last = d->layer;
            step = 0;
        }
    }
    if (last - first == step && step > 1) {
        used = put_run(text, used, first, first, 0);
        first = last;
    }
    put_run(text, used, first, last, step);
    if (like->layer < 0)
        snprintf(text, TEXT_BYTES, "model");
}

static bool is_first_of_kind(const struct layout *layout, int64_t index)
{
    for (int64_t i = 0; i < index; i++)
        if (layout->datasets[i].is_value && is_alike(&layout->datasets[i], &layout->datasets[index]))
            return false;
    return true;
}

static int64_t total_rows(const struct store *store, const struct dataset *d)
{
    int64_t n = 0;
    for (int64_t u = 0; u < store->n_units; u++)
        if (store->segments[u].bytes > 0)
            n += layout_count_rows(d, store->segments[u].n_sequences, store->segments[u].n_rows);
    return n;
}

static void print_value(const struct store *store, int64_t index)
{
    const struct dataset *d = &store->layout.datasets[index];
    char layers[TEXT_BYTES], axes[LAYOUT_TEXT_BYTES], shape[64], a[32], b[32];
    int64_t n_layers, rows = total_rows(store, d);
    size_t used = 0;
    describe_layers(&store->layout, index, layers, &n_layers);
    layout_describe(d, axes);
    shape[0] = '\0';
    for (int i = 0; i < d->n_axes && used < sizeof shape; i++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRId64, i == 0 ? "" : " ",
                                 d->axis_sizes[i]);
    printf("  %-12.60s %-38s %13s [%s] of [%s] %s, %s\n", layers, catalogue_path(d->value),
           group_digits(rows, a), axes, shape, dtype_name(d->dtype),
           scale_bytes(rows * d->row_bytes * n_layers, b));
}

static void print_captures(const struct store *store)
{
    const struct layout *layout = &store->layout;
    for (int64_t c = 0; c < layout->n_captures; c++) {
        struct dataset rows = {.capture = (int)c, .rows = ROWS_OF_CAPTURE};
        char a[32];
        printf("\n%s: %s rows\n", layout->capture_names[c], group_digits(total_rows(store, &rows), a));
        printf("  %-12s %-38s %13s %s\n", "layers", "value", "rows",
               "layout, shape, dtype, bytes before compression");
        for (int64_t i = 0; i < layout->n_datasets; i++)
            if (layout->datasets[i].is_value && layout->datasets[i].capture == c &&
                is_first_of_kind(layout, i))
                print_value(store, i);
    }
}

/* ---------------------------------------------------------------- what is odd */

static bool print_oddity(const cJSON *item)
{
    int64_t nonfinite = get_count(item, "n_nonfinite"), overflow = get_count(item, "n_overflow"), position;
    char a[32];
    if (nonfinite == 0 && overflow == 0)
        return false;
    printf("  %s:", item->string);
    if (overflow > 0)
        printf(" %s elements overflowed when stored%s", group_digits(overflow, a), nonfinite > 0 ? ";" : "");
    if (nonfinite > 0) {
        printf(" %s elements are not finite, the first at document %" PRId64, group_digits(nonfinite, a),
               get_count(item, "first_nonfinite_document"));
        if (json_get_integer(cJSON_GetObjectItemCaseSensitive(item, "first_nonfinite_position"), &position))
            printf(", position %" PRId64, position);
        printf(" (sequence %" PRId64 ")", get_count(item, "first_nonfinite_sequence"));
    }
    printf("\n");
    return true;
}

static void print_oddities(const struct store *store)
{
    const cJSON *statistics = cJSON_GetObjectItemCaseSensitive(store->tree, "statistics"), *item;
    bool any = false;
    printf("\nNumbers: ");
    if (!cJSON_IsObject(statistics)) {
        printf("no statistics yet; `actdump index` makes them\n");
        return;
    }
    printf("mean, variance, mean norm and largest magnitude of each dataset are under /statistics\n");
    cJSON_ArrayForEach(item, statistics) any |= print_oddity(item);
    if (!any)
        printf("  every element is finite\n");
}

/* ---------------------------------------------------------------- how to read it */

static void print_reading(const struct store *store)
{
    const struct dataset *d = NULL;
    for (int64_t i = 0; i < store->layout.n_datasets && d == NULL; i++)
        if (store->layout.datasets[i].is_value && store->layout.datasets[i].rows == ROWS_OF_CAPTURE)
            d = &store->layout.datasets[i];
    printf("\nTo read it in Python (pip install h5py hdf5plugin):\n"
           "  import h5py, hdf5plugin\n"
           "  store = h5py.File(\"%s/store.h5\")\n",
           store->folder);
    if (d == NULL)
        return;
    char axes[LAYOUT_TEXT_BYTES];
    layout_describe(d, axes);
    printf("  values = store[\"%s\"][:1000]  # [%s]\n"
           "  tokens = store[\"%s/rows/input_ids\"][:1000]  # of the same rows; rows/sequence and "
           "rows/position too\n",
           d->path, axes, store->layout.capture_names[d->capture]);
}

enum status info_print(const char *folder, struct error *error)
{
    struct store *store = NULL;
    TRY(store_open(folder, &store, error));
    print_head(store);
    print_captures(store);
    print_oddities(store);
    print_reading(store);
    store_close(store);
    return STATUS_OK;
}

#include "pipeline/manifest.h"

#include "engine/json.h"
#include "kernels/base/log.h"
#include "kernels/base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- making one */

static const char *mixer_name(const struct block *block)
{
    switch (block->mixer) {
    case MIXER_MAMBA1:
    case MIXER_MAMBA2:
        return "mamba";
    case MIXER_ATTENTION:
        return block->sliding ? "sliding" : "full";
    }
    return "unknown";
}

static const char *feed_forward_name(const struct block *block)
{
    switch (block->feed_forward) {
    case FEED_FORWARD_NONE:
        return "none";
    case FEED_FORWARD_DENSE:
        return "dense";
    case FEED_FORWARD_MIXTURE:
        return "moe";
    }
    return "unknown";
}

static cJSON *describe_model(const struct model *model, const struct manifest_facts *facts)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "family", model->name);
    cJSON_AddStringToObject(json, "checkpoint", model->checkpoint);
    cJSON_AddStringToObject(json, "digest", facts->checkpoint_digest);
    cJSON_AddNumberToObject(json, "bytes", (double)facts->checkpoint_bytes);
    cJSON_AddStringToObject(json, "load_dtype", dtype_name(model->load_dtype));
    cJSON_AddNumberToObject(json, "n_layers", model->n_layers);
    cJSON_AddNumberToObject(json, "hidden_size", (double)model->hidden_size);
    cJSON_AddNumberToObject(json, "vocab_size", (double)model->vocab_size);
    cJSON *blocks = cJSON_AddArrayToObject(json, "blocks");
    for (int i = 0; i < model->n_layers; i++) {
        cJSON *block = cJSON_CreateObject();
        cJSON_AddStringToObject(block, "mixer", mixer_name(&model->blocks[i]));
        cJSON_AddStringToObject(block, "feed_forward", feed_forward_name(&model->blocks[i]));
        if (model->blocks[i].mixer == MIXER_ATTENTION)
            cJSON_AddNumberToObject(block, "num_heads", model->blocks[i].n_heads);
        cJSON_AddItemToArray(blocks, block);
    }
    return json;
}

static const char *format_name(enum corpus_format format)
{
    static const char *const names[] = {
        [CORPUS_MEGATRON] = "megatron", [CORPUS_NPY] = "npy", [CORPUS_RAW] = "raw", [CORPUS_HDF5] = "hdf5"};
    return names[format];
}

/* Sequences of all units but the last: what a corpus that grows at its end must leave alone. */
static int64_t n_settled(const struct store *store)
{
    return store->n_units > 0 ? store->unit_start[store->n_units - 1] : 0;
}

static enum status describe_corpus(const struct plan *plan, struct corpus *corpus, const struct store *store,
                                   cJSON *json, struct error *error)
{
    const struct corpus_options *o = &plan->job->corpus;
    char digest[33], settled[33];
    TRY(corpus_digest(corpus, plan->n_sequences, digest, error));
    TRY(corpus_digest(corpus, n_settled(store), settled, error));
    cJSON_AddStringToObject(json, "format", format_name(o->format));
    cJSON_AddStringToObject(json, "path", o->path);
    cJSON_AddStringToObject(json, "digest", digest);
    cJSON_AddStringToObject(json, "digest_but_last_unit", settled);
    cJSON_AddNumberToObject(json, "n_documents", (double)corpus_n_documents(corpus));
    cJSON_AddNumberToObject(json, "n_empty_documents", (double)corpus_n_empty(corpus));
    cJSON_AddNumberToObject(json, "n_sequences", (double)plan->n_sequences);
    cJSON_AddNumberToObject(json, "n_tokens", (double)plan->n_tokens);
    cJSON_AddNumberToObject(json, "context", (double)o->context);
    cJSON *prepend = cJSON_AddArrayToObject(json, "prepend");
    for (int64_t i = 0; i < o->n_prepend; i++)
        cJSON_AddItemToArray(prepend, cJSON_CreateNumber(o->prepend[i]));
    cJSON_AddNumberToObject(json, "start", (double)o->start);
    if (o->limit >= 0)
        cJSON_AddNumberToObject(json, "limit", (double)o->limit);
    if (o->has_pad)
        cJSON_AddNumberToObject(json, "pad", (double)o->pad);
    if (o->has_shuffle)
        cJSON_AddNumberToObject(json, "shuffle_seed", (double)o->shuffle_seed);
    cJSON_AddBoolToObject(json, "carry", o->carry);
    cJSON_AddStringToObject(
        json, "isolation",
        o->carry ? "documents: a document's windows go on from one another; no token sees another "
                   "document's"
                 : "sequences: convolution, scan, attention and positions start anew at each");
    return STATUS_OK;
}

static cJSON *describe_run(const struct plan *plan, const struct manifest_facts *facts)
{
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "actdump", ACTDUMP_VERSION);
    cJSON_AddStringToObject(json, "backend", facts->backend);
    cJSON_AddNumberToObject(json, "threads", facts->n_threads);
    cJSON_AddBoolToObject(json, "tf32", plan->job->tf32);
    cJSON_AddNumberToObject(json, "batch_tokens", (double)plan->batch_tokens);
    cJSON_AddNumberToObject(json, "unit_tokens", (double)plan->job->unit_tokens);
    return json;
}

enum status manifest_create(const struct plan *plan, struct corpus *corpus,
                            const struct manifest_facts *facts, struct store **out, struct error *error)
{
    void *memory, *segments;
    TRY(memory_allocate(&memory, sizeof(struct store), "the manifest", error));
    struct store *store = memory;
    store->layout = plan->layout;
    store->n_units = plan->n_units;
    store->unit_start = plan->unit_start;
    enum status status;
    TRY_ELSE(memory_allocate_array(&segments, (size_t)plan->n_units, sizeof(struct segment_record),
                                   "the manifest", error),
             failed);
    store->segments = segments;
    for (int64_t u = 0; u < plan->n_units; u++)
        store->segments[u].unit = u;
    store->folder = strdup(plan->job->store_path);
    store->job = cJSON_Duplicate(plan->job->tree, true);
    store->model = describe_model(plan->model, facts);
    store->corpus = cJSON_CreateObject();
    store->run = describe_run(plan, facts);
    TRY_ELSE(describe_corpus(plan, corpus, store, store->corpus, error), failed);
    *out = store;
    return STATUS_OK;
failed:
    manifest_free(store);
    return status;
}

void manifest_free(struct store *store)
{
    if (store == NULL)
        return;
    for (int64_t u = 0; store->segments != NULL && u < store->n_units; u++)
        segment_record_fini(&store->segments[u]);
    memory_free(store->segments);
    free(store->folder);
    cJSON_Delete(store->job);
    cJSON_Delete(store->model);
    cJSON_Delete(store->corpus);
    cJSON_Delete(store->run);
    cJSON_Delete(store->summary);
    memory_free(store);
}

/* ---------------------------------------------------------------- comparing two */

/* Differences as they are found, for one sentence. */
struct differences {
    char text[1600];
    size_t used;
    int n;
};

static void differ(struct differences *d, const char *what, const char *then, const char *now)
{
    d->n++;
    if (d->used < sizeof d->text)
        d->used += (size_t)snprintf(d->text + d->used, sizeof d->text - d->used,
                                    "%s%s was %.200s and is %.200s", d->n > 1 ? "; " : "", what, then, now);
}

static void print_item(const cJSON *item, char *buffer, size_t size)
{
    char *text = item == NULL ? NULL : cJSON_PrintUnformatted(item);
    snprintf(buffer, size, "%s", text == NULL ? "absent" : text);
    cJSON_free(text);
}

static bool is_listed(const char *key, const char *const *keys)
{
    for (; *keys != NULL; keys++) {
        if (strcmp(key, *keys) == 0)
            return true;
    }
    return false;
}

static void compare_item(struct differences *d, const char *where, const char *key, const cJSON *then,
                         const cJSON *now)
{
    char path[128], before[256], after[256];
    if (then != NULL && now != NULL && cJSON_Compare(then, now, true))
        return;
    snprintf(path, sizeof path, "%s.%s", where, key);
    print_item(then, before, sizeof before);
    print_item(now, after, sizeof after);
    differ(d, path, before, after);
}

/* Every key of either object, but those in `ignored`. */
static void compare_objects(struct differences *d, const char *where, const cJSON *then, const cJSON *now,
                            const char *const *ignored)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, then)
    {
        if (!is_listed(item->string, ignored))
            compare_item(d, where, item->string, item, cJSON_GetObjectItemCaseSensitive(now, item->string));
    }
    cJSON_ArrayForEach(item, now)
    {
        if (!is_listed(item->string, ignored) && cJSON_GetObjectItemCaseSensitive(then, item->string) == NULL)
            compare_item(d, where, item->string, NULL, item);
    }
}

static void compare_dataset(struct differences *d, const struct dataset *then, const struct dataset *now)
{
    char before[128], after[128];
    if (strcmp(then->path, now->path) != 0) {
        differ(d, "a dataset", then->path, now->path);
        return;
    }
    if (then->dtype == now->dtype && then->width == now->width && then->chunk_rows == now->chunk_rows)
        return;
    snprintf(before, sizeof before, "%s x %lld in chunks of %lld", dtype_name(then->dtype),
             (long long)then->width, (long long)then->chunk_rows);
    snprintf(after, sizeof after, "%s x %lld in chunks of %lld", dtype_name(now->dtype),
             (long long)now->width, (long long)now->chunk_rows);
    differ(d, now->path, before, after);
}

static void compare_layouts(struct differences *d, const struct layout *then, const struct layout *now)
{
    char before[32], after[32];
    if (then->compression != now->compression) {
        snprintf(before, sizeof before, "%d", then->compression);
        snprintf(after, sizeof after, "%d", now->compression);
        differ(d, "store.compression", before, after);
    }
    if (then->n_datasets != now->n_datasets) {
        snprintf(before, sizeof before, "%lld", (long long)then->n_datasets);
        snprintf(after, sizeof after, "%lld", (long long)now->n_datasets);
        differ(d, "the number of datasets", before, after);
        return;
    }
    for (int64_t i = 0; i < now->n_datasets; i++)
        compare_dataset(d, &then->datasets[i], &now->datasets[i]);
}

static const char *string_of(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    return text == NULL ? "" : text;
}

/* Units of `then` that are the same units of `now`. The last one of `then` only where its sequences are
 * unchanged. */
static enum status compare_corpora(const struct store *then, const struct store *now, struct corpus *corpus,
                                   bool *keep, struct differences *d, struct error *error)
{
    static const char *const ignored[] = {
        "path",     "digest", "digest_but_last_unit", "n_documents", "n_empty_documents", "n_sequences",
        "n_tokens", NULL};
    int64_t settled = n_settled(then), had = then->n_units > 0 ? then->unit_start[then->n_units] : 0;
    int64_t has = now->unit_start[now->n_units];
    char digest[33] = "";
    compare_objects(d, "corpus", then->corpus, now->corpus, ignored);
    if (settled > has) {
        char before[32], after[32];
        snprintf(before, sizeof before, "%lld sequences", (long long)had);
        snprintf(after, sizeof after, "%lld", (long long)has);
        differ(d, "the corpus", before, after);
        return STATUS_OK;
    }
    TRY(corpus_digest(corpus, settled, digest, error));
    if (strcmp(digest, string_of(then->corpus, "digest_but_last_unit")) != 0)
        differ(d, "the corpus (bounds or tokens; it may only grow at its end)",
               string_of(then->corpus, "digest_but_last_unit"), digest);
    bool last_is_same = false;
    if (had <= has) {
        TRY(corpus_digest(corpus, had, digest, error));
        last_is_same = strcmp(digest, string_of(then->corpus, "digest")) == 0;
    }
    for (int64_t u = 0; u < now->n_units; u++)
        keep[u] = u < then->n_units && then->unit_start[u] == now->unit_start[u] &&
                  then->unit_start[u + 1] == now->unit_start[u + 1] &&
                  (u < then->n_units - 1 || last_is_same);
    return STATUS_OK;
}

/* What may change only the last bits of a number is said, not refused. */
static void mention_run(const struct store *then, const struct store *now)
{
    static const char *const keys[] = {"actdump", "backend", "threads", NULL};
    for (const char *const *key = keys; *key != NULL; key++) {
        char before[256], after[256];
        const cJSON *a = cJSON_GetObjectItemCaseSensitive(then->run, *key);
        const cJSON *b = cJSON_GetObjectItemCaseSensitive(now->run, *key);
        print_item(a, before, sizeof before);
        print_item(b, after, sizeof after);
        if (strcmp(before, after) != 0)
            log_warning("run.%s was %s and is %s: rows from now on may differ in rounding", *key, before,
                        after);
    }
}

enum status manifest_compare(const struct store *then, const struct store *now, struct corpus *corpus,
                             bool *keep, struct error *error)
{
    static const char *const not_model[] = {"checkpoint", NULL};
    static const char *const not_run[] = {"actdump", "backend", "threads", "libraries", NULL};
    static const char *const none[] = {NULL};
    struct differences d = {0};
    compare_objects(&d, "model", then->model, now->model, not_model);
    compare_objects(&d, "run", then->run, now->run, not_run);
    compare_objects(&d, "captures", cJSON_GetObjectItemCaseSensitive(then->job, "captures"),
                    cJSON_GetObjectItemCaseSensitive(now->job, "captures"), none);
    if (d.n == 0)
        compare_layouts(&d, &then->layout, &now->layout);
    TRY(compare_corpora(then, now, corpus, keep, &d, error));
    if (d.n > 0)
        return error_set(
            error, STATUS_USAGE,
            "%s: the store was begun by another job: %s; give the job another store.path, or remove the "
            "store",
            then->folder, d.text);
    mention_run(then, now);
    return STATUS_OK;
}

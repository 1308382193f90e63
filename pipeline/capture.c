#include "pipeline/capture.h"

#include "kernels/base/memory.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A chunk beyond this is slow to read at random and large to hold one of for each dataset. */
#define CHUNK_MAX_BYTES (4 << 20)

int64_t capture_chunk_rows(int64_t wanted, int64_t row_bytes)
{
    int64_t fits = row_bytes > 0 ? CHUNK_MAX_BYTES / row_bytes : wanted;
    int64_t rows = wanted < fits ? wanted : fits;
    return rows > 0 ? rows : 1;
}

/* ---------------------------------------------------------------- layers */

static enum status add_range(const struct job *job, const struct job_capture *spec, const struct model *model,
                             const struct layer_range *range, bool *chosen, struct error *error)
{
    int64_t n = model->n_layers;
    int64_t first = range->first < 0 ? range->first + n : range->first;
    int64_t last = range->last < 0 ? range->last + n : range->last;
    if (first < 0 || first >= n || last < 0 || last >= n)
        return error_set(error, STATUS_USAGE,
                         "%s: captures.%s.layers: there is no layer %lld; the model has layers 0 to %lld",
                         job->source, spec->name,
                         (long long)(first < 0 || first >= n ? range->first : range->last),
                         (long long)(n - 1));
    if (first > last)
        return error_set(error, STATUS_USAGE, "%s: captures.%s.layers: the range from %lld to %lld is empty",
                         job->source, spec->name, (long long)range->first, (long long)range->last);
    for (int64_t i = first; i <= last; i += range->step)
        chosen[i] = true;
    return STATUS_OK;
}

static enum status add_kind(const struct job *job, const struct job_capture *spec, const struct model *model,
                            const char *kind, bool *chosen, struct error *error)
{
    bool known = true, any = false;
    for (int i = 0; i < model->n_layers; i++) {
        if (model_layer_is_kind(model, i, kind, &known))
            chosen[i] = any = true;
    }
    if (!known)
        return error_set(
            error, STATUS_USAGE,
            "%s: captures.%s.layers: no kind of layer is called \"%s\"; there are mamba, attention, moe, "
            "dense, sliding and full",
            job->source, spec->name, kind);
    if (!any)
        return error_set(error, STATUS_USAGE, "%s: captures.%s.layers: this %s model has no \"%s\" layer",
                         job->source, spec->name, model->name, kind);
    return STATUS_OK;
}

static enum status choose_layers(const struct job *job, const struct job_capture *spec,
                                 const struct model *model, bool *chosen, struct error *error)
{
    for (int i = 0; i < model->n_layers; i++)
        chosen[i] = spec->layers.all;
    for (int64_t i = 0; i < spec->layers.n_ranges; i++)
        TRY(add_range(job, spec, model, &spec->layers.ranges[i], chosen, error));
    for (int64_t i = 0; i < spec->layers.n_kinds; i++)
        TRY(add_kind(job, spec, model, spec->layers.kinds[i], chosen, error));
    return STATUS_OK;
}

/* ---------------------------------------------------------------- values */

static bool is_glob(const char *pattern)
{
    return strpbrk(pattern, "*?[") != NULL;
}

static bool is_available(const struct model *model, enum value_id value, int layer, int64_t n_keys)
{
    struct value_description d;
    model_describe_value(model, value, layer, n_keys, &d);
    return d.available;
}

#define REASONS_SIZE 800

/* Adds a reason that is not among them yet: blocks of several kinds lack a value for several reasons. */
static void add_reason(char reasons[REASONS_SIZE], const char *reason)
{
    size_t used = strlen(reasons);
    if (strstr(reasons, reason) == NULL)
        snprintf(reasons + used, REASONS_SIZE - used, "%s%s", used > 0 ? "; " : "", reason);
}

/* Whether any chosen layer (or the model itself) has the value; if not, `reasons` says why they lack it. */
static bool any_has(const struct model *model, enum value_id value, const bool *chosen, int64_t n_keys,
                    char reasons[REASONS_SIZE])
{
    struct value_description d;
    reasons[0] = '\0';
    if (!value_is_per_layer(value)) {
        model_describe_value(model, value, -1, n_keys, &d);
        add_reason(reasons, d.reason);
        return d.available;
    }
    for (int i = 0; i < model->n_layers; i++) {
        if (!chosen[i])
            continue;
        model_describe_value(model, value, i, n_keys, &d);
        if (d.available)
            return true;
        add_reason(reasons, d.reason);
    }
    return false;
}

/* Marks the values that a pattern takes. Globs take what there is; a name that nothing has is refused with
 * the reason. */
static enum status take_pattern(const struct job *job, const struct job_capture *spec,
                                const struct model *model, const char *pattern, const bool *chosen,
                                int64_t n_keys, bool *taken, struct error *error)
{
    enum value_id value;
    char reason[REASONS_SIZE];
    if (!is_glob(pattern)) {
        if (!catalogue_find(pattern, &value))
            return error_set(error, STATUS_USAGE,
                             "%s: captures.%s.values: there is no value \"%s\"; did you mean \"%s\"?",
                             job->source, spec->name, pattern, catalogue_nearest(pattern));
        if (!any_has(model, value, chosen, n_keys, reason))
            return error_set(error, STATUS_USAGE, "%s: captures.%s.values: \"%s\" is not to be had here: %s",
                             job->source, spec->name, pattern, reason);
        taken[value] = true;
        return STATUS_OK;
    }
    bool matched = false, available = false;
    for (int v = 0; v < VALUE_COUNT; v++) {
        if (fnmatch(pattern, catalogue_path((enum value_id)v), 0) != 0)
            continue;
        matched = true;
        if (any_has(model, (enum value_id)v, chosen, n_keys, reason))
            taken[v] = available = true;
    }
    if (!matched)
        return error_set(error, STATUS_USAGE,
                         "%s: captures.%s.values: no value matches \"%s\"; did you mean \"%s\"?", job->source,
                         spec->name, pattern, catalogue_nearest(pattern));
    if (!available)
        return error_set(error, STATUS_USAGE,
                         "%s: captures.%s.values: nothing that \"%s\" matches is to be had here: %s",
                         job->source, spec->name, pattern, reason);
    return STATUS_OK;
}

static void describe_column(const struct job *job, const struct job_capture *spec, const struct model *model,
                            enum value_id value, int layer, int64_t n_keys, struct column *out)
{
    *out = (struct column){.value = value, .layer = layer, .per = catalogue_get(value)->per};
    model_describe_value(model, value, layer, n_keys, &out->shape);
    if (layer < 0)
        snprintf(out->path, sizeof out->path, "%s", catalogue_path(value));
    else
        snprintf(out->path, sizeof out->path, "layers/%d/%s", layer, catalogue_path(value));
    /* Integers (ids, expert indices) stay what they are whatever dtype the capture asks for. */
    bool converts = spec->dtype >= 0 && dtype_is_float(out->shape.dtype);
    out->dtype = converts ? (enum dtype)spec->dtype : out->shape.dtype;
    out->row_bytes = out->shape.width * (int64_t)dtype_size(out->dtype);
    out->chunk_rows = capture_chunk_rows(job->chunk_rows, out->row_bytes);
}

static enum status resolve_one(const struct job *job, const struct job_capture *spec,
                               const struct model *model, int64_t n_keys, struct capture *out,
                               struct error *error)
{
    enum status status = STATUS_OK;
    void *chosen = NULL, *columns = NULL;
    bool taken[VALUE_COUNT] = {false};
    int64_t n = 0;
    TRY_ELSE(
        memory_allocate_array(&chosen, (size_t)model->n_layers, sizeof(bool), "the choice of layers", error),
        done);
    TRY_ELSE(choose_layers(job, spec, model, chosen, error), done);
    for (int64_t i = 0; i < spec->n_values; i++)
        TRY_ELSE(take_pattern(job, spec, model, spec->values[i], chosen, n_keys, taken, error), done);
    TRY_ELSE(memory_allocate_array(&columns, (size_t)VALUE_COUNT * (size_t)(model->n_layers + 1),
                                   sizeof(struct column), "a capture's columns", error),
             done);
    for (int layer = -1; layer < model->n_layers; layer++) {
        if (layer >= 0 && !((bool *)chosen)[layer])
            continue;
        for (int v = 0; v < VALUE_COUNT; v++) {
            if (!taken[v] || value_is_per_layer((enum value_id)v) != (layer >= 0) ||
                !is_available(model, (enum value_id)v, layer, n_keys))
                continue;
            describe_column(job, spec, model, (enum value_id)v, layer, n_keys,
                            (struct column *)columns + n++);
        }
    }
    *out = (struct capture){.spec = spec, .columns = columns, .n_columns = n};
    for (int64_t i = 0; i < n; i++) {
        out->has_token_columns |= out->columns[i].per == PER_TOKEN;
        out->has_sequence_columns |= out->columns[i].per == PER_SEQUENCE;
    }
    columns = NULL;
done:
    memory_free(columns);
    memory_free(chosen);
    return status;
}

enum status capture_resolve(const struct job *job, const struct model *model, int64_t n_keys,
                            struct capture_list *out, struct error *error)
{
    struct capture_list captures = {.n = job->n_captures};
    void *list;
    TRY(memory_allocate_array(&list, (size_t)job->n_captures, sizeof(struct capture), "the captures", error));
    captures.list = list;
    for (int64_t i = 0; i < job->n_captures; i++) {
        enum status status = resolve_one(job, &job->captures[i], model, n_keys, &captures.list[i], error);
        if (status != STATUS_OK) {
            capture_list_free(&captures);
            return status;
        }
    }
    *out = captures;
    return STATUS_OK;
}

void capture_list_free(struct capture_list *captures)
{
    if (captures->list != NULL) {
        for (int64_t i = 0; i < captures->n; i++)
            memory_free(captures->list[i].columns);
    }
    memory_free(captures->list);
    *captures = (struct capture_list){0};
}

/* ---------------------------------------------------------------- rows */

/* A uniform number in [0, 1) for one position, the same on every machine and rank: SplitMix64's finalizer
 * (Steele, Lea and Flood 2014) over the three numbers in turn. */
static double uniform_at(uint64_t seed, uint64_t sequence, uint64_t position)
{
    uint64_t words[3] = {seed, sequence, position}, z = 0;
    for (int i = 0; i < 3; i++) {
        z = (z ^ words[i]) + 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

static int compare_positions(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static bool is_listed(const struct positions *p, int64_t position)
{
    return bsearch(&position, p->list, (size_t)p->n_list, sizeof *p->list, compare_positions) != NULL;
}

/* Asks of each position whether the list names it, from the front or from the end: so none comes twice. */
static int64_t select_list(const struct positions *p, int64_t length, int32_t *positions)
{
    int64_t n = 0;
    for (int64_t t = 0; t < length; t++) {
        if (is_listed(p, t) || is_listed(p, t - length))
            positions[n++] = (int32_t)t;
    }
    return n;
}

static int64_t select_stride(int64_t first, int64_t stop, int64_t stride, int32_t *positions)
{
    int64_t n = 0;
    for (int64_t t = first; t < stop; t += stride)
        positions[n++] = (int32_t)t;
    return n;
}

static int64_t select_kind(const struct positions *p, int64_t sequence, int64_t length, int32_t *positions)
{
    int64_t n = 0;
    switch (p->kind) {
    case POSITIONS_ALL:
        return select_stride(0, length, 1, positions);
    case POSITIONS_LAST:
        return select_stride(length - 1, length, 1, positions);
    case POSITIONS_FIRST:
        return select_stride(0, p->n < length ? p->n : length, 1, positions);
    case POSITIONS_EVERY:
        return select_stride(p->offset, length, p->n, positions);
    case POSITIONS_LIST:
        return select_list(p, length, positions);
    case POSITIONS_SAMPLE:
        for (int64_t t = 0; t < length; t++) {
            if (uniform_at(p->seed, (uint64_t)sequence, (uint64_t)t) < p->fraction)
                positions[n++] = (int32_t)t;
        }
        return n;
    }
    return 0;
}

static bool is_skipped(const struct positions *p, int32_t position, const int32_t *ids)
{
    if (position < p->skip_first)
        return true;
    for (int64_t i = 0; i < p->n_skip_ids; i++) {
        if (ids[position] == p->skip_ids[i])
            return true;
    }
    return false;
}

int64_t capture_select(const struct positions *p, int64_t sequence, const int32_t *ids, int64_t length,
                       int32_t *positions)
{
    int64_t n = select_kind(p, sequence, length, positions), kept = 0;
    if (p->skip_first == 0 && p->n_skip_ids == 0)
        return n;
    for (int64_t i = 0; i < n; i++) {
        if (!is_skipped(p, positions[i], ids))
            positions[kept++] = positions[i];
    }
    return kept;
}

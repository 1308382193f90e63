#include "pipeline/job.h"

#include "engine/model.h"
#include "kernels/base/memory.h"
#include "pipeline/job_parts.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#define MAX_SECONDS 1e9
#define MAX_COMPRESSION 22 /* zstd's highest level */
#define MAX_CHUNK_ROWS (1 << 24)
#define MAX_UNIT_TOKENS (INT64_C(1) << 40)
#define MAX_THREADS 4096
#define MAX_FILE_BYTES (64 << 20)
/* With the longest path of a value it makes the longest path of a dataset (layout.h). */
#define MAX_CAPTURE_NAME 63

/* ---- what the sections share ---- */

enum status job_fault(const struct json_object *o, const char *key, const cJSON *item, const char *expected,
                      struct error *error)
{
    char found[160];
    return error_set(error, o->status, "%s: %s%s%s is %s, expected %s", o->source, o->where,
                     o->where[0] == '\0' ? "" : ".", key, json_describe(item, found, sizeof found), expected);
}

enum status job_read_integers(const struct json_object *o, const char *key, int64_t min, int64_t max,
                              const char *noun, int64_t **out, int64_t *n, struct error *error)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(o->object, key), *item;
    if (list == NULL)
        return STATUS_OK;
    char one[128], many[160];
    snprintf(one, sizeof one, "%s from %lld to %lld", noun, (long long)min, (long long)max);
    snprintf(many, sizeof many, "a list of numbers, each %s", one);
    if (!cJSON_IsArray(list))
        return job_fault(o, key, list, many, error);
    void *values;
    TRY(memory_allocate_array(&values, (size_t)cJSON_GetArraySize(list), sizeof **out,
                              "a list of the job file", error));
    int64_t count = 0, value;
    cJSON_ArrayForEach(item, list)
    {
        if (!json_get_integer(item, &value) || value < min || value > max) {
            char place[128];
            snprintf(place, sizeof place, "%s[%lld]", key, (long long)count);
            memory_free(values);
            return job_fault(o, place, item, one, error);
        }
        ((int64_t *)values)[count++] = value;
    }
    *out = values;
    *n = count;
    return STATUS_OK;
}

enum status job_read_ids(const struct json_object *o, const char *key, int32_t **out, int64_t *n,
                         struct error *error)
{
    int64_t *wide = NULL, count = 0;
    if (cJSON_GetObjectItemCaseSensitive(o->object, key) == NULL)
        return STATUS_OK;
    TRY(job_read_integers(o, key, 0, JOB_MAX_ID, "a token id", &wide, &count, error));
    void *ids = NULL;
    enum status status = STATUS_OK;
    if (count > 0)
        TRY_ELSE(memory_allocate_array(&ids, (size_t)count, sizeof **out, "token ids of the job file", error),
                 done);
    for (int64_t i = 0; i < count; i++)
        ((int32_t *)ids)[i] = (int32_t)wide[i];
    *out = ids;
    *n = count;
done:
    memory_free(wide);
    return status;
}

/* One word out of a NULL-terminated list; *index is left alone where the key is absent. */
static enum status read_choice(const struct json_object *o, const char *key, bool required,
                               const char *const *choices, int *index, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, key);
    if (item == NULL && !required)
        return STATUS_OK;
    char expected[160] = "";
    size_t used = 0;
    for (int i = 0; choices[i] != NULL; i++) {
        if (cJSON_IsString(item) && strcmp(item->valuestring, choices[i]) == 0) {
            *index = i;
            return STATUS_OK;
        }
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s\"%s\"",
                                 i == 0                   ? ""
                                 : choices[i + 1] == NULL ? " or "
                                                          : ", ",
                                 choices[i]);
    }
    return job_fault(o, key, item, expected, error);
}

static enum status read_dtype(const struct json_object *o, const char *const *choices, int *dtype,
                              struct error *error)
{
    int index = -1;
    TRY(read_choice(o, "dtype", false, choices, &index, error));
    enum dtype found;
    if (index >= 0 && dtype_parse(choices[index], &found))
        *dtype = (int)found;
    return STATUS_OK;
}

/* A whole number, or "auto", which is 0. */
static enum status read_count_or_auto(const struct json_object *o, const char *key, int64_t max, int64_t *out,
                                      struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, key);
    if (item == NULL || (cJSON_IsString(item) && strcmp(item->valuestring, "auto") == 0))
        return STATUS_OK;
    int64_t value;
    if (json_get_integer(item, &value) && value >= 1 && value <= max) {
        *out = value;
        return STATUS_OK;
    }
    char expected[96];
    snprintf(expected, sizeof expected, "\"auto\" or a whole number from 1 to %lld", (long long)max);
    return job_fault(o, key, item, expected, error);
}

static enum status read_text(const struct json_object *o, const char *key, const char **out,
                             struct error *error)
{
    const char *text = NULL;
    TRY(json_get_string(o, key, true, &text, error));
    if (text[0] == '\0')
        return error_set(error, o->status, "%s: %s.%s is empty, expected a path", o->source, o->where, key);
    *out = text;
    return STATUS_OK;
}

static enum status join_path(const char *folder, const char *name, char **out, struct error *error)
{
    bool is_alone = name[0] == '/' || folder[0] == '\0';
    size_t size = (is_alone ? 0 : strlen(folder) + 1) + strlen(name) + 1;
    void *path;
    TRY(memory_allocate(&path, size, "a path", error));
    snprintf(path, size, "%s%s%s", is_alone ? "" : folder, is_alone ? "" : "/", name);
    *out = path;
    return STATUS_OK;
}

/* A path, made relative to the job file's folder. */
static enum status read_path(const struct json_object *o, const char *key, const char *folder, char **out,
                             struct error *error)
{
    const char *name = NULL;
    TRY(read_text(o, key, &name, error));
    return join_path(folder, name, out, error);
}

/* The section `key` of the file, as an object to read. An absent one that is not required has no keys. */
static enum status get_section(const struct job *job, const char *key, bool required, struct json_object *out,
                               struct error *error)
{
    *out = (struct json_object){.object = cJSON_GetObjectItemCaseSensitive(job->tree, key),
                                .source = job->source,
                                .where = key,
                                .status = STATUS_USAGE};
    if (cJSON_IsObject(out->object) || (out->object == NULL && !required))
        return STATUS_OK;
    struct json_object top = {
        .object = job->tree, .source = job->source, .where = "", .status = STATUS_USAGE};
    return job_fault(&top, key, out->object, "an object", error);
}

/* ---- the sections ---- */

static enum status read_model(struct job *job, const char *folder, struct error *error)
{
    static const char *const keys[] = {"checkpoint", "dtype", "device", "tf32", NULL};
    static const char *const dtypes[] = {"float32", "bfloat16", NULL};
    static const char *const devices[] = {"auto", "cpu", "cuda", NULL}; /* in the order of enum job_device */
    struct json_object o;
    TRY(get_section(job, "model", true, &o, error));
    TRY(json_check_keys(&o, keys, error));
    TRY(read_path(&o, "checkpoint", folder, &job->checkpoint, error));
    TRY(read_dtype(&o, dtypes, &job->load_dtype, error));
    int device = DEVICE_AUTO;
    TRY(read_choice(&o, "device", false, devices, &device, error));
    job->device = (enum job_device)device;
    return json_get_bool(&o, "tf32", false, &job->tf32, error);
}

/* Keys that only some formats have. */
static enum status read_corpus_source(const struct json_object *o, struct corpus_options *c,
                                      struct error *error)
{
    static const char *const formats[] = {"megatron", "npy", "raw", "hdf5", NULL}; /* as enum corpus_format */
    static const char *const dtypes[] = {"uint16", "uint32", NULL};
    int format = 0, dtype = 0;
    TRY(read_choice(o, "format", true, formats, &format, error));
    c->format = (enum corpus_format)format;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, "dtype");
    if (c->format == CORPUS_RAW) {
        TRY(read_choice(o, "dtype", true, dtypes, &dtype, error));
        c->raw_bytes = dtype == 0 ? 2 : 4;
    } else if (item != NULL) {
        return job_fault(o, "dtype", item, "it for corpus.format \"raw\" only: other files say theirs",
                         error);
    }
    item = cJSON_GetObjectItemCaseSensitive(o->object, "dataset");
    if (c->format == CORPUS_HDF5)
        return read_text(o, "dataset", &c->dataset, error);
    if (item != NULL)
        return job_fault(o, "dataset", item, "it for corpus.format \"hdf5\" only", error);
    return STATUS_OK;
}

static enum status read_corpus_choice(const struct json_object *o, struct corpus_options *c,
                                      struct error *error)
{
    c->limit = -1;
    TRY(json_get_int(o, "start", false, 0, JOB_MAX_INTEGER, &c->start, error));
    TRY(json_get_int(o, "limit", false, 1, JOB_MAX_INTEGER, &c->limit, error));
    TRY(json_get_bool(o, "carry", false, &c->carry, error));
    int64_t seed = 0;
    c->has_shuffle = cJSON_GetObjectItemCaseSensitive(o->object, "shuffle_seed") != NULL;
    TRY(json_get_int(o, "shuffle_seed", false, 0, JOB_MAX_INTEGER, &seed, error));
    c->shuffle_seed = (uint64_t)seed;
    const cJSON *pad = cJSON_GetObjectItemCaseSensitive(o->object, "pad");
    c->has_pad = pad != NULL;
    if (pad != NULL && c->format == CORPUS_RAW)
        return job_fault(o, "pad", pad, "it where the corpus has rows: a raw file is one run of tokens",
                         error);
    return json_get_int(o, "pad", false, -JOB_MAX_INTEGER, JOB_MAX_INTEGER, &c->pad, error);
}

static enum status read_corpus(struct job *job, const char *folder, struct error *error)
{
    static const char *const keys[] = {"format", "path",  "dataset", "dtype",        "context", "prepend",
                                       "start",  "limit", "pad",     "shuffle_seed", "carry",   NULL};
    struct corpus_options *c = &job->corpus;
    struct json_object o;
    TRY(get_section(job, "corpus", true, &o, error));
    TRY(json_check_keys(&o, keys, error));
    TRY(read_corpus_source(&o, c, error));
    TRY(read_path(&o, "path", folder, &job->corpus_path, error));
    c->path = job->corpus_path;
    TRY(json_get_int(&o, "context", true, 1, INT32_MAX, &c->context, error));
    TRY(job_read_ids(&o, "prepend", &job->corpus_prepend, &c->n_prepend, error));
    c->prepend = job->corpus_prepend;
    if (c->n_prepend >= c->context)
        return error_set(error, STATUS_USAGE,
                         "%s: corpus.prepend has %lld ids, which leave no room in a corpus.context of %lld",
                         job->source, (long long)c->n_prepend, (long long)c->context);
    return read_corpus_choice(&o, c, error);
}

static enum status read_store(struct job *job, const char *folder, struct error *error)
{
    static const char *const keys[] = {"path", "chunk_rows", "compression", "unit_tokens", NULL};
    struct json_object o;
    TRY(get_section(job, "store", true, &o, error));
    TRY(json_check_keys(&o, keys, error));
    TRY(read_path(&o, "path", folder, &job->store_path, error));
    TRY(json_get_int(&o, "chunk_rows", false, 1, MAX_CHUNK_ROWS, &job->chunk_rows, error));
    TRY(json_get_int(&o, "unit_tokens", false, 1, MAX_UNIT_TOKENS, &job->unit_tokens, error));
    int64_t level = job->compression;
    TRY(json_get_int(&o, "compression", false, 0, MAX_COMPRESSION, &level, error));
    job->compression = (int)level;
    return STATUS_OK;
}

static enum status read_time_limit(const struct json_object *o, double *seconds, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, "time_limit");
    if (!cJSON_IsString(item))
        return json_get_double(o, "time_limit", false, 0, MAX_SECONDS, seconds, error);
    if (job_parse_duration(item->valuestring, seconds))
        return STATUS_OK;
    return job_fault(o, "time_limit", item, "seconds, or \"H:MM:SS\", or \"D-HH:MM:SS\"", error);
}

static enum status read_run(struct job *job, struct error *error)
{
    static const char *const keys[] = {"batch_tokens", "threads",      "grace_seconds",
                                       "time_limit",   "on_nonfinite", NULL};
    static const char *const reactions[] = {"count", "stop", NULL};
    struct json_object o;
    TRY(get_section(job, "run", false, &o, error));
    if (o.object == NULL)
        return STATUS_OK;
    TRY(json_check_keys(&o, keys, error));
    TRY(read_count_or_auto(&o, "batch_tokens", INT32_MAX, &job->batch_tokens, error));
    TRY(read_count_or_auto(&o, "threads", MAX_THREADS, &job->n_threads, error));
    TRY(json_get_double(&o, "grace_seconds", false, 0, MAX_SECONDS, &job->grace_seconds, error));
    TRY(read_time_limit(&o, &job->time_limit_seconds, error));
    int reaction = 0;
    TRY(read_choice(&o, "on_nonfinite", false, reactions, &reaction, error));
    job->stop_on_nonfinite = reaction == 1;
    return STATUS_OK;
}

/* ---- captures ---- */

/* A capture's name is a group's name in HDF5, beside /sequences and /statistics. */
static enum status check_capture_name(const struct json_object *captures, const char *name,
                                      struct error *error)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";
    char quoted[96];
    size_t length = strlen(name);
    const char *why = NULL;
    if (length == 0 || length > MAX_CAPTURE_NAME || strspn(name, allowed) != length)
        why = "expected 1 to 63 letters, digits, '_', '.' or '-'";
    else if (strspn(name, ".") == length)
        why = "which is nothing but dots";
    else if (strcmp(name, "sequences") == 0 || strcmp(name, "statistics") == 0)
        why = "which is a group that every store has: choose another name";
    if (why == NULL)
        return STATUS_OK;
    return error_set(error, captures->status, "%s: captures has the name %s, %s", captures->source,
                     json_quote(name, quoted, sizeof quoted), why);
}

static enum status read_values(const struct json_object *o, struct job_capture *capture, struct error *error)
{
    static const char expected[] = "a list of values, such as [\"layer_output\", \"mlp/*\"]";
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(o->object, "values"), *item;
    if (!cJSON_IsArray(list))
        return job_fault(o, "values", list, expected, error);
    if (list->child == NULL)
        return error_set(error, o->status, "%s: %s.values is empty, expected %s", o->source, o->where,
                         expected);
    void *values;
    TRY(memory_allocate_array(&values, (size_t)cJSON_GetArraySize(list), sizeof *capture->values,
                              "values of a capture", error));
    capture->values = values;
    cJSON_ArrayForEach(item, list)
    {
        if (!cJSON_IsString(item) || item->valuestring[0] == '\0') {
            char place[48];
            snprintf(place, sizeof place, "values[%lld]", (long long)capture->n_values);
            return job_fault(o, place, item, "a value's path or a pattern, such as \"mlp/*\"", error);
        }
        capture->values[capture->n_values++] = item->valuestring;
    }
    return STATUS_OK;
}

static enum status read_capture(const struct json_object *o, struct job_capture *capture, struct error *error)
{
    static const char *const keys[] = {"values",   "layers", "positions", "skip_first",
                                       "skip_ids", "dtype",  NULL};
    static const char *const dtypes[] = {"float32", "float16", "bfloat16", NULL};
    TRY(json_check_keys(o, keys, error));
    TRY(read_values(o, capture, error));
    TRY(job_read_layers(o, &capture->layers, error));
    TRY(job_read_positions(o, &capture->positions, error));
    capture->dtype = -1;
    return read_dtype(o, dtypes, &capture->dtype, error);
}

static enum status read_captures(struct job *job, struct error *error)
{
    struct json_object o;
    TRY(get_section(job, "captures", true, &o, error));
    if (o.object->child == NULL)
        return error_set(error, STATUS_USAGE, "%s: captures is empty, expected at least one capture by name",
                         job->source);
    void *captures;
    TRY(memory_allocate_array(&captures, (size_t)cJSON_GetArraySize(o.object), sizeof *job->captures,
                              "captures of the job", error));
    job->captures = captures;
    const cJSON *item;
    cJSON_ArrayForEach(item, o.object)
    {
        TRY(check_capture_name(&o, item->string, error));
        if (!cJSON_IsObject(item))
            return job_fault(&o, item->string, item, "an object", error);
        char where[96];
        snprintf(where, sizeof where, "captures.%s", item->string);
        struct json_object inner = {
            .object = item, .source = job->source, .where = where, .status = STATUS_USAGE};
        struct job_capture *capture = &job->captures[job->n_captures++];
        capture->name = item->string;
        TRY(read_capture(&inner, capture, error));
    }
    return STATUS_OK;
}

/* ---- the file ---- */

/* A null would read as an absent key here and as a fault elsewhere: none is allowed, so that a stored job
 * says what was meant. Recursion is bounded by the parser's limit on nesting. */
static enum status check_no_null(const cJSON *parent, const char *where, const char *source,
                                 struct error *error)
{
    const cJSON *item;
    int64_t index = 0;
    cJSON_ArrayForEach(item, parent)
    {
        char place[160];
        if (cJSON_IsArray(parent))
            snprintf(place, sizeof place, "%s[%lld]", where, (long long)index++);
        else
            snprintf(place, sizeof place, "%s%s%s", where, where[0] == '\0' ? "" : ".", item->string);
        if (cJSON_IsNull(item))
            return error_set(error, STATUS_USAGE, "%s: %s is null: leave the key out to get its default",
                             source, place);
        TRY(check_no_null(item, place, source, error));
    }
    return STATUS_OK;
}

static enum status read_sections(struct job *job, const char *folder, struct error *error)
{
    static const char *const keys[] = {"$schema", "model", "corpus", "captures", "store", "run", NULL};
    struct json_object top = {
        .object = job->tree, .source = job->source, .where = "", .status = STATUS_USAGE};
    TRY(json_check_keys(&top, keys, error));
    const char *schema = NULL;
    TRY(json_get_string(&top, "$schema", false, &schema, error));
    TRY(read_model(job, folder, error));
    TRY(read_corpus(job, folder, error));
    TRY(read_captures(job, error));
    TRY(read_store(job, folder, error));
    return read_run(job, error);
}

static enum status read_tree(struct job *job, const char *folder, const char *const *sets, int64_t n_sets,
                             struct error *error)
{
    if (!cJSON_IsObject(job->tree)) {
        char found[160];
        return error_set(error, STATUS_USAGE, "%s: the file holds %s, expected an object", job->source,
                         json_describe(job->tree, found, sizeof found));
    }
    TRY(job_apply_sets(job->tree, job->source, sets, n_sets, error));
    TRY(check_no_null(job->tree, "", job->source, error));
    return read_sections(job, folder, error);
}

enum status job_parse(const char *text, size_t length, const char *source, const char *folder,
                      const char *const *sets, int64_t n_sets, struct job **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct job), "the job", error));
    struct job *job = memory;
    *job = (struct job){.load_dtype = LOAD_DTYPE_OWN,
                        .chunk_rows = 1024,
                        .compression = 1,
                        .unit_tokens = 65536,
                        .grace_seconds = 30};
    enum status status;
    TRY_ELSE(join_path("", source, &job->source, error), fail);
    TRY_ELSE(json_parse(text, length, source, STATUS_USAGE, &job->tree, error), fail);
    TRY_ELSE(read_tree(job, folder, sets, n_sets, error), fail);
    *out = job;
    return STATUS_OK;
fail:
    job_free(job);
    return status;
}

enum status job_read(const char *path, const char *const *sets, int64_t n_sets, struct job **out,
                     struct error *error)
{
    char *text = NULL, *folder = NULL;
    size_t length = 0;
    TRY(json_read_text(path, MAX_FILE_BYTES, STATUS_USAGE, &text, &length, error));
    enum status status;
    TRY_ELSE(join_path("", path, &folder, error), done);
    char *slash = strrchr(folder, '/');
    /* The file's own folder; its slash stays where it is all there is of the path. */
    folder[slash == NULL ? 0 : slash == folder ? 1 : slash - folder] = '\0';
    status = job_parse(text, length, path, folder, sets, n_sets, out, error);
done:
    memory_free(folder);
    memory_free(text);
    return status;
}

void job_free(struct job *job)
{
    if (job == NULL)
        return;
    for (int64_t i = 0; i < job->n_captures; i++) {
        struct job_capture *capture = &job->captures[i];
        memory_free(capture->values);
        memory_free(capture->layers.ranges);
        memory_free(capture->layers.kinds);
        memory_free(capture->positions.list);
        memory_free(capture->positions.skip_ids);
    }
    memory_free(job->captures);
    memory_free(job->corpus_prepend);
    memory_free(job->corpus_path);
    memory_free(job->checkpoint);
    memory_free(job->store_path);
    memory_free(job->source);
    cJSON_Delete(job->tree);
    memory_free(job);
}

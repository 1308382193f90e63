/* --set a.b=VALUE: changes to a job file's tree before it is read. */
#include "pipeline/job_parts.h"

#include "kernels/base/memory.h"

#include <stdio.h>
#include <string.h>

/* The deepest key of a job file has 4 parts; the limit keeps a tree of ours from growing past what cJSON can
 * free. */
#define MAX_PARTS 16
#define MAX_PATH_LENGTH 512

static enum status out_of_memory(const char *setting, struct error *error)
{
    return error_set(error, STATUS_RESOURCE, "out of memory while applying --set %s", setting);
}

/* What stands behind the "=": JSON, or else a string. What looks like the beginning of JSON must be JSON. */
static enum status parse_value(const char *setting, const char *text, cJSON **out, struct error *error)
{
    struct error fault = {0};
    enum status status = json_parse(text, strlen(text), "VALUE", STATUS_USAGE, out, &fault);
    if (status == STATUS_RESOURCE)
        return error_set(error, status, "%s", fault.text);
    if (status == STATUS_OK)
        return STATUS_OK;
    if (text[0] == '{' || text[0] == '[' || text[0] == '"')
        return error_set(error, STATUS_USAGE, "--set %s: %s", setting, fault.text);
    *out = cJSON_CreateString(text);
    return *out == NULL ? out_of_memory(setting, error) : STATUS_OK;
}

/* Length of the key that `path` begins with: the longest one of the object's own, since names of captures may
 * hold dots, else what stands before the first dot. */
static size_t first_key_length(const cJSON *object, const char *path)
{
    size_t longest = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, object)
    {
        size_t length = strlen(item->string);
        if (length > longest && strncmp(path, item->string, length) == 0 &&
            (path[length] == '.' || path[length] == '\0'))
            longest = length;
    }
    return longest > 0 ? longest : strcspn(path, ".");
}

/* Steps into a key, making an empty object where there is none. */
static enum status descend(cJSON **object, const char *key, const char *source, const char *setting,
                           struct error *error)
{
    cJSON *inner = cJSON_GetObjectItemCaseSensitive(*object, key);
    if (inner == NULL) {
        inner = cJSON_AddObjectToObject(*object, key);
        if (inner == NULL)
            return out_of_memory(setting, error);
    }
    if (!cJSON_IsObject(inner)) {
        char found[160], quoted[96];
        return error_set(error, STATUS_USAGE, "--set %s: in %s, %s is %s, expected an object", setting,
                         source, json_quote(key, quoted, sizeof quoted),
                         json_describe(inner, found, sizeof found));
    }
    *object = inner;
    return STATUS_OK;
}

/* Takes value over, on failure too. */
static enum status put(cJSON *object, const char *key, cJSON *value, const char *setting, struct error *error)
{
    cJSON_DeleteItemFromObjectCaseSensitive(object, key);
    if (!cJSON_IsNull(value) && cJSON_AddItemToObject(object, key, value))
        return STATUS_OK;
    bool is_removal = cJSON_IsNull(value);
    cJSON_Delete(value);
    return is_removal ? STATUS_OK : out_of_memory(setting, error);
}

static enum status apply(cJSON *tree, const char *source, char *path, const char *setting, const char *text,
                         struct error *error)
{
    for (int parts = 1; parts <= MAX_PARTS; parts++) {
        size_t length = first_key_length(tree, path);
        if (length == 0)
            return error_set(error, STATUS_USAGE, "--set %s: a part of the key is empty, expected a.b=VALUE",
                             setting);
        bool is_last = path[length] == '\0';
        path[length] = '\0';
        if (is_last) {
            cJSON *value = NULL;
            TRY(parse_value(setting, text, &value, error));
            return put(tree, path, value, setting, error);
        }
        TRY(descend(&tree, path, source, setting, error));
        path += length + 1;
    }
    return error_set(error, STATUS_USAGE, "--set %s: the key has more than %d parts", setting, MAX_PARTS);
}

enum status job_apply_sets(cJSON *tree, const char *source, const char *const *sets, int64_t n_sets,
                           struct error *error)
{
    for (int64_t i = 0; i < n_sets; i++) {
        const char *equals = strchr(sets[i], '=');
        size_t length = equals == NULL ? 0 : (size_t)(equals - sets[i]);
        char path[MAX_PATH_LENGTH];
        if (length == 0 || length >= sizeof path)
            return error_set(error, STATUS_USAGE,
                             "--set %s: expected a.b=VALUE, with a key of 1 to %d characters", sets[i],
                             MAX_PATH_LENGTH - 1);
        memcpy(path, sets[i], length);
        path[length] = '\0';
        TRY(apply(tree, source, path, sets[i], equals + 1, error));
    }
    return STATUS_OK;
}

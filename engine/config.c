#include "engine/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum status config_fail(const struct json_object *c, const char *key, struct error *error, const char *format,
                        ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return error_set(error, c->status, "%s: %s%s%s %s", c->source, c->where, c->where[0] == '\0' ? "" : ".",
                     key, text);
}

static const cJSON *find(const struct json_object *c, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(c->object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

enum status config_size(const struct json_object *c, const char *key, int64_t fallback, int64_t max,
                        int64_t *out, struct error *error)
{
    int64_t value = fallback;
    TRY(json_get_int(c, key, false, 1, max, &value, error));
    *out = value;
    return STATUS_OK;
}

enum status config_int(const struct json_object *c, const char *key, int fallback, int64_t max, int *out,
                       struct error *error)
{
    int64_t value;
    TRY(config_size(c, key, fallback, max, &value, error));
    *out = (int)value;
    return STATUS_OK;
}

enum status config_auto(const struct json_object *c, const char *key, int64_t derived, int64_t max, int *out,
                        struct error *error)
{
    const cJSON *item = find(c, key);
    int64_t value = derived;
    if (cJSON_IsString(item)) {
        if (strcmp(item->valuestring, "auto") != 0)
            return config_fail(c, key, error, "is a string (\"%.40s\"), expected \"auto\" or a whole number",
                               item->valuestring);
    } else {
        TRY(json_get_int(c, key, false, 1, max, &value, error));
    }
    if (value < 1 || value > max)
        return config_fail(c, key, error, "comes to %lld, expected 1 to %lld", (long long)value,
                           (long long)max);
    *out = (int)value;
    return STATUS_OK;
}

enum status config_flag(const struct json_object *c, const char *key, bool fallback, bool *out,
                        struct error *error)
{
    bool value = fallback;
    TRY(json_get_bool(c, key, false, &value, error));
    *out = value;
    return STATUS_OK;
}

enum status config_float(const struct json_object *c, const char *key, double fallback, double max,
                         float *out, struct error *error)
{
    double value = fallback;
    TRY(json_get_double(c, key, false, 0, max, &value, error));
    *out = (float)value;
    return STATUS_OK;
}

enum status config_epsilon(const struct json_object *c, const char *key, double fallback, float *out,
                           struct error *error)
{
    float value;
    TRY(config_float(c, key, fallback, 1, &value, error));
    if (!(value > 0))
        return config_fail(c, key, error, "is %g, expected a number above 0", (double)value);
    *out = value;
    return STATUS_OK;
}

enum status config_activation(const struct json_object *c, struct error *error)
{
    const char *name = "silu";
    TRY(json_get_string(c, "hidden_act", false, &name, error));
    if (strcmp(name, "silu") == 0 || strcmp(name, "swish") == 0)
        return STATUS_OK;
    return config_fail(c, "hidden_act", error, "is a string (\"%.40s\"), expected \"silu\"", name);
}

enum status config_layer_list(const struct json_object *c, const char *key, int n_layers, const cJSON **out,
                              struct error *error)
{
    const cJSON *list = find(c, key);
    if (list != NULL && !cJSON_IsArray(list)) {
        char found[128];
        return config_fail(c, key, error, "is %s, expected a list with an item for each of the %d layers",
                           json_describe(list, found, sizeof found), n_layers);
    }
    if (list != NULL && cJSON_GetArraySize(list) != n_layers)
        return config_fail(c, key, error, "has %d items, expected %d, the number of layers",
                           cJSON_GetArraySize(list), n_layers);
    *out = list;
    return STATUS_OK;
}

enum status config_heads(const struct json_object *c, int64_t hidden_size, struct config_heads *inout,
                         struct error *error)
{
    struct config_heads h = *inout;
    TRY(config_int(c, "num_attention_heads", h.n_heads, 65536, &h.n_heads, error));
    const cJSON *kv = cJSON_GetObjectItemCaseSensitive(c->object, "num_key_value_heads");
    TRY(config_int(c, "num_key_value_heads", cJSON_IsNull(kv) ? h.n_heads : h.n_kv_heads, 65536,
                   &h.n_kv_heads, error));
    if (h.n_heads % h.n_kv_heads != 0)
        return config_fail(c, "num_key_value_heads", error,
                           "is %d, expected a divisor of num_attention_heads (%d)", h.n_kv_heads, h.n_heads);
    if (h.head_dim == 0 && find(c, "head_dim") == NULL && hidden_size % h.n_heads != 0)
        return config_fail(c, "num_attention_heads", error, "is %d, expected a divisor of hidden_size (%lld)",
                           h.n_heads, (long long)hidden_size);
    int64_t derived = h.head_dim != 0 ? h.head_dim : hidden_size >= h.n_heads ? hidden_size / h.n_heads : 1;
    TRY(config_int(c, "head_dim", (int)derived, 65536, &h.head_dim, error));
    if ((int64_t)h.n_heads * h.head_dim > CONFIG_MAX_SIZE)
        return config_fail(c, "num_attention_heads", error,
                           "is %d with a head_dim of %d, expected at most %lld together", h.n_heads,
                           h.head_dim, (long long)CONFIG_MAX_SIZE);
    *inout = h;
    return STATUS_OK;
}

static bool is_attention_word(const char *word, bool *known)
{
    bool attention = strcmp(word, "attention") == 0 || strcmp(word, "full_attention") == 0;
    *known = attention || strcmp(word, "mamba") == 0 || strcmp(word, "linear_attention") == 0;
    return attention;
}

static enum status check_list(const struct json_object *c, const char *key, const struct model *model,
                              struct error *error)
{
    const cJSON *list, *item;
    TRY(config_layer_list(c, key, model->n_layers, &list, error));
    int layer = 0;
    cJSON_ArrayForEach(item, list)
    {
        char found[128];
        bool known = false, attention = cJSON_IsString(item) && is_attention_word(item->valuestring, &known);
        if (!known)
            return config_fail(c, key, error, "names layer %d %s, expected \"attention\" or \"mamba\"", layer,
                               json_describe(item, found, sizeof found));
        if (attention != (model->blocks[layer].mixer == MIXER_ATTENTION))
            return config_fail(c, key, error,
                               "says layer %d is \"%.40s\", which the config's other keys deny", layer,
                               item->valuestring);
        layer++;
    }
    return STATUS_OK;
}

enum status config_check_layer_types(const struct json_object *c, const struct model *model,
                                     struct error *error)
{
    TRY(check_list(c, "layers_block_type", model, error));
    return check_list(c, "layer_types", model, error);
}

/* ---- rotary embedding ---- */

static double yarn_scale(double factor, double mscale)
{
    return factor <= 1 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

/* A zero counts as a missing key, as in the reference's `or`. */
static enum status get_positive(const struct json_object *o, const char *key, double fallback, double *out,
                                struct error *error)
{
    double value = fallback;
    TRY(json_get_double(o, key, false, 0, 1e12, &value, error));
    *out = value == 0 ? fallback : value;
    return STATUS_OK;
}

static enum status read_yarn(const struct json_object *c, const struct json_object *o,
                             const struct config_rope *from, struct rope *rope, struct error *error)
{
    double max_position = from->max_position, mscale = 0, mscale_all_dim = 0;
    TRY(get_positive(c, "max_position_embeddings", max_position, &max_position, error));
    TRY(get_positive(o, "original_max_position_embeddings", max_position, &rope->original_max_position,
                     error));
    /* Kept beside the parameters by some configs, and then it counts before their own. */
    if (from->outer == NULL)
        TRY(get_positive(c, "original_max_position_embeddings", rope->original_max_position,
                         &rope->original_max_position, error));
    TRY(get_positive(o, "factor", max_position / rope->original_max_position, &rope->factor, error));
    TRY(get_positive(o, "beta_fast", 32, &rope->beta_fast, error));
    TRY(get_positive(o, "beta_slow", 1, &rope->beta_slow, error));
    TRY(get_positive(o, "mscale", 0, &mscale, error));
    TRY(get_positive(o, "mscale_all_dim", 0, &mscale_all_dim, error));
    rope->attention_factor = mscale != 0 && mscale_all_dim != 0
                                 ? yarn_scale(rope->factor, mscale) / yarn_scale(rope->factor, mscale_all_dim)
                                 : yarn_scale(rope->factor, 1);
    return json_get_double(o, "attention_factor", false, 0, 1e6, &rope->attention_factor, error);
}

static enum status read_rope_type(const struct json_object *o, const char **out, struct error *error)
{
    const char *type = "default";
    TRY(json_get_string(o, "type", false, &type, error));
    TRY(json_get_string(o, "rope_type", false, &type, error));
    if (strcmp(type, "default") != 0 && strcmp(type, "yarn") != 0)
        return config_fail(o, "rope_type", error, "is a string (\"%.40s\"), expected \"default\" or \"yarn\"",
                           type);
    *out = type;
    return STATUS_OK;
}

enum status config_rope(const struct json_object *c, const struct config_rope *from, int head_dim,
                        struct rope *out, struct error *error)
{
    if (from->parameters != NULL && !cJSON_IsObject(from->parameters)) {
        char found[128];
        return config_fail(c, from->where, error, "is %s, expected an object",
                           json_describe(from->parameters, found, sizeof found));
    }
    cJSON nothing = {.type = cJSON_Object};
    struct json_object o = {.object = from->parameters != NULL ? from->parameters : &nothing,
                            .source = c->source,
                            .where = from->where,
                            .status = c->status};
    struct rope rope = {.theta = from->theta, .attention_factor = 1, .truncate = true};
    double partial = from->partial_rotary_factor;
    const char *type = "default";
    TRY(read_rope_type(&o, &type, error));
    TRY(json_get_double(&o, "rope_theta", false, 1.0001, 1e15, &rope.theta, error));
    TRY(json_get_double(&o, "partial_rotary_factor", false, 0, 1, &partial, error));
    rope.rotary_dim = (int)(head_dim * partial);
    if (rope.rotary_dim < 2 || rope.rotary_dim % 2 != 0)
        return config_fail(&o, "partial_rotary_factor", error,
                           "is %g, expected one that turns an even number of a head's %d dimensions, not %d",
                           partial, head_dim, rope.rotary_dim);
    rope.yarn = strcmp(type, "yarn") == 0;
    if (rope.yarn)
        TRY(read_yarn(c, &o, from, &rope, error));
    /* The reference looks for truncate in rope_parameters itself, also where each kind of layer has its own
     * object. */
    struct json_object t = o;
    t.object = from->outer != NULL ? from->outer : o.object;
    TRY(json_get_bool(&t, "truncate", false, &rope.truncate, error));
    *out = rope;
    return STATUS_OK;
}

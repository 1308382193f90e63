/* What the families' config readers share: typed keys of config.json with the defaults that transformers has,
 * and the options that come in several spellings.
 *
 * A missing key or a null gives the default. Every complaint (STATUS_INPUT) names the file, the key, what was
 * found and what was expected. Sizes are limited so that no product of those that belong together leaves 62
 * bits. */
#ifndef ACTDUMP_ENGINE_CONFIG_H
#define ACTDUMP_ENGINE_CONFIG_H

#include "engine/json.h"
#include "engine/model.h"

#define CONFIG_MAX_SIZE ((int64_t)1 << 24) /* widths of one tensor axis but the vocabulary's */
#define CONFIG_MAX_LAYERS 4096
#define CONFIG_MAX_EXPERTS 65536
#define CONFIG_MAX_KERNEL 1024 /* taps of a convolution */

/* "FILE: KEY <found>, expected <expected>", all of it the caller's words after the key. */
enum status config_fail(const struct json_object *c, const char *key, struct error *error, const char *format,
                        ...) __attribute__((format(printf, 4, 5)));

/* A whole number from 1 to max. */
enum status config_size(const struct json_object *c, const char *key, int64_t fallback, int64_t max,
                        int64_t *out, struct error *error);
enum status config_int(const struct json_object *c, const char *key, int fallback, int64_t max, int *out,
                       struct error *error);
/* The same, or "auto", which like a missing key and a null stands for `derived`. */
enum status config_auto(const struct json_object *c, const char *key, int64_t derived, int64_t max, int *out,
                        struct error *error);
enum status config_flag(const struct json_object *c, const char *key, bool fallback, bool *out,
                        struct error *error);
enum status config_float(const struct json_object *c, const char *key, double fallback, double max,
                         float *out, struct error *error);
/* An epsilon of a norm: above 0, at most 1. */
enum status config_epsilon(const struct json_object *c, const char *key, double fallback, float *out,
                           struct error *error);
/* hidden_act: "silu" (or its other name, "swish") is the only one that these families are released with. */
enum status config_activation(const struct json_object *c, struct error *error);
/* A list of n_layers items; NULL at *out where the key is missing or null. */
enum status config_layer_list(const struct json_object *c, const char *key, int n_layers, const cJSON **out,
                              struct error *error);

/* num_attention_heads, num_key_value_heads and head_dim (hidden_size / heads where the config has none). */
struct config_heads {
    int n_heads, n_kv_heads, head_dim; /* defaults on the way in; head_dim 0: derived */
};
enum status config_heads(const struct json_object *c, int64_t hidden_size, struct config_heads *inout,
                         struct error *error);

/* The layer_types of newer configs, or layers_block_type of older ones, against the mixers that the family's
 * own keys gave: they must agree. A missing list is fine. */
enum status config_check_layer_types(const struct json_object *c, const struct model *model,
                                     struct error *error);

/* Where one kind of attention block finds its rotary embedding. */
struct config_rope {
    const cJSON *
        parameters; /* the object that holds rope_type, rope_theta, ...; NULL: plain rotary by the defaults */
    const cJSON *outer; /* the object around it where each kind of layer has its own; else NULL */
    const char *where;  /* its key, for messages */
    double theta, partial_rotary_factor, max_position; /* for keys that it, or the config, lacks */
};
/* Reads it for heads of head_dim, the defaults filled in: YaRN's constants as in transformers'
 * modeling_rope_utils.py, _compute_yarn_parameters. Refuses rope types other than default and yarn. */
enum status config_rope(const struct json_object *c, const struct config_rope *from, int head_dim,
                        struct rope *out, struct error *error);

#endif

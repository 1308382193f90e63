/* Laguna (transformers modeling_laguna.py): attention in every block, full or within a sliding window, with
 * as many query heads as the block has, norms on queries and keys, rotary embedding by the block's kind and a
 * softplus gate on its output; then a dense MLP, or a mixture with sigmoid routing and one shared expert. */
#include "engine/families/family.h"

#include <string.h>

/* gating: true or "per-head", "per-element", or false. */
static enum status read_gating(const struct json_object *c, struct model *m, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(c->object, "gating");
    const char *word = cJSON_IsString(item) ? item->valuestring : "";
    char found[128];
    if (item == NULL || cJSON_IsNull(item) || cJSON_IsTrue(item) || strcmp(word, "per-head") == 0)
        m->gating = GATING_PER_HEAD;
    else if (strcmp(word, "per-element") == 0)
        m->gating = GATING_PER_ELEMENT;
    else if (cJSON_IsFalse(item))
        m->gating = GATING_NONE;
    else
        return config_fail(c, "gating", error, "is %s, expected true, false, \"per-head\" or \"per-element\"",
                           json_describe(item, found, sizeof found));
    return STATUS_OK;
}

/* A list that holds one of two words for each layer. */
struct word_list {
    const char *key, *words[2];
    const cJSON *list; /* NULL where the config has none */
};

/* Whether the layer's word is the second; *is_second stays where there is no list. */
static enum status read_word(const struct json_object *c, const struct word_list *from, int layer,
                             bool *is_second, struct error *error)
{
    if (from->list == NULL)
        return STATUS_OK;
    const cJSON *item = cJSON_GetArrayItem(from->list, layer);
    char found[128];
    for (int i = 0; i < 2; i++) {
        if (cJSON_IsString(item) && strcmp(item->valuestring, from->words[i]) == 0) {
            *is_second = i == 1;
            return STATUS_OK;
        }
    }
    return config_fail(c, from->key, error, "says layer %d is %s, expected \"%s\" or \"%s\"", layer,
                       json_describe(item, found, sizeof found), from->words[0], from->words[1]);
}

static enum status read_blocks(const struct json_object *c, int n_heads, struct model *m, struct error *error)
{
    struct word_list types = {.key = "layer_types", .words = {"full_attention", "sliding_attention"}};
    struct word_list mlps = {.key = "mlp_layer_types", .words = {"dense", "sparse"}};
    const cJSON *heads;
    TRY(config_layer_list(c, types.key, m->n_layers, &types.list, error));
    TRY(config_layer_list(c, mlps.key, m->n_layers, &mlps.list, error));
    TRY(config_layer_list(c, "num_attention_heads_per_layer", m->n_layers, &heads, error));
    for (int i = 0; i < m->n_layers; i++) {
        struct block *b = &m->blocks[i];
        int64_t own = n_heads;
        bool sparse = i > 0;
        char found[128];
        *b = (struct block){.mixer = MIXER_ATTENTION};
        TRY(read_word(c, &types, i, &b->sliding, error));
        TRY(read_word(c, &mlps, i, &sparse, error));
        const cJSON *item = heads != NULL ? cJSON_GetArrayItem(heads, i) : NULL;
        if (item != NULL && !json_get_integer(item, &own))
            own = 0;
        if (own < 1 || own > 65536 || own % m->n_kv_heads != 0 || own * m->head_dim > CONFIG_MAX_SIZE)
            return config_fail(c, "num_attention_heads_per_layer", error,
                               "has %s for layer %d, expected a multiple of num_key_value_heads (%d)",
                               json_describe(item, found, sizeof found), i, m->n_kv_heads);
        b->n_heads = (int)own;
        b->feed_forward = sparse ? FEED_FORWARD_MIXTURE : FEED_FORWARD_DENSE;
    }
    return STATUS_OK;
}

static bool has_block(const struct model *m, bool sliding)
{
    for (int i = 0; i < m->n_layers; i++) {
        if (m->blocks[i].sliding == sliding)
            return true;
    }
    return false;
}

static enum status read_window(const struct json_object *c, struct model *m, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(c->object, "sliding_window");
    if (cJSON_IsNull(item) && has_block(m, true))
        return config_fail(c, "sliding_window", error,
                           "is null, expected a number of keys: some layer_types are "
                           "\"sliding_attention\"");
    return config_size(c, "sliding_window", 512, INT32_MAX, &m->window, error);
}

/* rope_parameters holds an object for each kind of layer. */
static enum status read_rope(const struct json_object *c, struct model *m, struct error *error)
{
    const cJSON *all = cJSON_GetObjectItemCaseSensitive(c->object, "rope_parameters");
    all = cJSON_IsNull(all) ? NULL : all;
    for (int sliding = 0; sliding < 2; sliding++) {
        const char *kind = sliding ? "sliding_attention" : "full_attention";
        if (!has_block(m, sliding))
            continue;
        struct config_rope from = {.outer = all,
                                   .where = sliding ? "rope_parameters.sliding_attention"
                                                    : "rope_parameters.full_attention",
                                   .theta = sliding ? 10000 : 500000,
                                   .partial_rotary_factor = sliding ? 1 : 0.5,
                                   .max_position = 131072};
        if (all != NULL) {
            from.parameters = cJSON_GetObjectItemCaseSensitive(all, kind);
            if (!cJSON_IsObject(from.parameters))
                return config_fail(c, from.where, error,
                                   "is missing, expected an object: some layers are of that kind");
            from.partial_rotary_factor = 1;
            from.theta = 10000;
            TRY(json_get_double(c, "rope_theta", false, 1.0001, 1e15, &from.theta, error));
            TRY(json_get_double(c, "partial_rotary_factor", false, 0, 1, &from.partial_rotary_factor, error));
        }
        TRY(config_rope(c, &from, m->head_dim, sliding ? &m->rope_sliding : &m->rope_full, error));
    }
    return STATUS_OK;
}

static enum status read_experts(const struct json_object *c, struct model *m, struct error *error)
{
    bool weight_on_input;
    TRY(config_size(c, "moe_intermediate_size", 512, CONFIG_MAX_SIZE, &m->moe_intermediate_size, error));
    TRY(config_size(c, "shared_expert_intermediate_size", 512, CONFIG_MAX_SIZE, &m->shared_intermediate_size,
                    error));
    TRY(config_int(c, "num_experts", 256, CONFIG_MAX_EXPERTS, &m->n_experts, error));
    TRY(config_int(c, "num_experts_per_tok", 8, CONFIG_MAX_EXPERTS, &m->top_k, error));
    if (m->top_k > m->n_experts)
        return config_fail(c, "num_experts_per_tok", error, "is %d, expected at most num_experts (%d)",
                           m->top_k, m->n_experts);
    TRY(config_float(c, "moe_routed_scaling_factor", 1, 1e6, &m->routed_scale, error));
    TRY(config_float(c, "moe_router_logit_softcapping", 0, 1e6, &m->router_softcap, error));
    TRY(config_flag(c, "moe_apply_router_weight_on_input", false, &weight_on_input, error));
    if (weight_on_input)
        return config_fail(
            c, "moe_apply_router_weight_on_input", error,
            "is true, expected false: weights on the experts' inputs are not supported, neither here "
            "nor by the reference implementation");
    m->router_sigmoid = true;
    return STATUS_OK;
}

static enum status read_config(const struct json_object *c, struct model *m, struct error *error)
{
    struct config_heads heads = {.n_heads = 48, .n_kv_heads = 8, .head_dim = 128};
    TRY(model_allocate_blocks(c, 40, m, error));
    TRY(config_activation(c, error));
    TRY(config_size(c, "vocab_size", 100352, INT32_MAX, &m->vocab_size, error));
    TRY(config_size(c, "hidden_size", 2048, CONFIG_MAX_SIZE, &m->hidden_size, error));
    TRY(config_size(c, "intermediate_size", 8192, CONFIG_MAX_SIZE, &m->intermediate_size, error));
    TRY(config_epsilon(c, "rms_norm_eps", 1e-6, &m->norm_epsilon, error));
    TRY(config_flag(c, "tie_word_embeddings", false, &m->tied_lm_head, error));
    TRY(config_flag(c, "attention_bias", false, &m->attention_bias, error));
    TRY(config_heads(c, m->hidden_size, &heads, error));
    m->n_kv_heads = heads.n_kv_heads;
    m->head_dim = heads.head_dim;
    m->qk_norm = true;
    TRY(read_gating(c, m, error));
    TRY(read_blocks(c, heads.n_heads, m, error));
    TRY(read_window(c, m, error));
    TRY(read_rope(c, m, error));
    return read_experts(c, m, error);
}

static enum status load_block(struct loader *l, const struct model *m, int i, struct layer *out,
                              struct error *error)
{
    const struct block *block = &m->blocks[i];
    loader_enter(l, i, STEP_MIXER_NORM, "model.layers.%d.", i);
    TRY(loader_vector(l, "input_layernorm.weight", m->hidden_size, &out->mixer_norm, error));
    loader_enter(l, i, STEP_MIXER, "model.layers.%d.self_attn.", i);
    TRY(attention_load(l, m, block, &out->attention, error));
    loader_enter(l, i, STEP_MLP_NORM, "model.layers.%d.", i);
    TRY(loader_vector(l, "post_attention_layernorm.weight", m->hidden_size, &out->mlp_norm, error));
    loader_enter(l, i, STEP_MLP, "model.layers.%d.mlp.", i);
    if (block->feed_forward == FEED_FORWARD_MIXTURE)
        return mixture_load(l, m, "gate.weight", &out->mixture, error);
    return mlp_load(l, m, "", m->intermediate_size, &out->mlp, error);
}

static void run_block(struct forward *f, const struct layer *layer)
{
    forward_offer(f, VALUE_LAYER_INPUT, forward_tokens(f, f->stream));
    forward_norm(f, layer->mixer_norm, VALUE_ATTENTION_NORM_OUTPUT);
    attention_run(f, &layer->attention);
    forward_offer(f, VALUE_LAYER_MID, forward_tokens(f, f->stream));
    forward_norm(f, layer->mlp_norm, VALUE_MLP_NORM_OUTPUT);
    forward_offer(f, VALUE_MLP_INPUT, forward_tokens(f, f->normed));
    if (forward_block(f)->feed_forward == FEED_FORWARD_MIXTURE)
        mixture_run(f, &layer->mixture);
    else
        mlp_run(f, &layer->mlp);
    forward_offer(f, VALUE_LAYER_OUTPUT, forward_tokens(f, f->stream));
}

const struct family family_laguna = {
    .name = "laguna",
    .architecture = "LagunaForCausalLM",
    .read_config = read_config,
    .embedding = "model.embed_tokens.weight",
    .final_norm = "model.norm.weight",
    .load_block = load_block,
    .run_block = run_block,
};

/* Bamba (transformers modeling_bamba.py): Mamba-2 mixers, attention with rotary embedding over part of each
 * head at the layers that attn_layer_indices names, and a dense MLP in every block. */
#include "engine/families/family.h"

#include <math.h>
#include <stdlib.h>

static enum status read_blocks(const struct json_object *c, int n_heads, struct model *m, struct error *error)
{
    for (int i = 0; i < m->n_layers; i++)
        m->blocks[i] = (struct block){.mixer = MIXER_MAMBA2, .feed_forward = FEED_FORWARD_DENSE};
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(c->object, "attn_layer_indices"), *item;
    char found[128];
    if (list != NULL && !cJSON_IsNull(list) && !cJSON_IsArray(list))
        return config_fail(c, "attn_layer_indices", error, "is %s, expected a list of layers or null",
                           json_describe(list, found, sizeof found));
    cJSON_ArrayForEach(item, list)
    {
        int64_t layer;
        if (!json_get_integer(item, &layer) || layer < 0 || layer >= m->n_layers)
            return config_fail(c, "attn_layer_indices", error, "holds %s, expected layers from 0 to %d",
                               json_describe(item, found, sizeof found), m->n_layers - 1);
        m->blocks[layer].mixer = MIXER_ATTENTION;
        m->blocks[layer].n_heads = n_heads;
    }
    return config_check_layer_types(c, m, error);
}

/* time_step_limit: null, or [least, most], where most may be Infinity in either spelling. */
static enum status read_limit(const struct json_object *c, struct model *m, struct error *error)
{
    m->dt_min = 0;
    m->dt_max = INFINITY;
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(c->object, "time_step_limit");
    if (list == NULL || cJSON_IsNull(list))
        return STATUS_OK;
    double least = NAN, most = NAN;
    bool pair = cJSON_IsArray(list) && cJSON_GetArraySize(list) == 2 &&
                json_get_number(cJSON_GetArrayItem(list, 0), &least) &&
                json_get_number(cJSON_GetArrayItem(list, 1), &most);
    if (!pair || !(least <= most) || !(least >= 0))
        return config_fail(c, "time_step_limit", error,
                           "is not a pair of numbers with 0 <= least <= most (most may be Infinity)");
    m->dt_min = (float)least;
    m->dt_max = (float)most;
    return STATUS_OK;
}

static enum status read_mixer(const struct json_object *c, struct model *m, struct error *error)
{
    int64_t expand;
    TRY(config_size(c, "mamba_expand", 2, 64, &expand, error));
    m->mamba_width = expand * m->hidden_size;
    TRY(config_int(c, "mamba_n_heads", 128, CONFIG_MAX_SIZE, &m->n_mamba_heads, error));
    TRY(config_auto(c, "mamba_d_head", m->mamba_width / m->n_mamba_heads, CONFIG_MAX_SIZE, &m->mamba_head_dim,
                    error));
    if ((int64_t)m->mamba_head_dim * m->n_mamba_heads != m->mamba_width)
        return config_fail(
            c, "mamba_n_heads", error,
            "is %d with a mamba_d_head of %d, expected mamba_expand * hidden_size (%lld) together",
            m->n_mamba_heads, m->mamba_head_dim, (long long)m->mamba_width);
    TRY(config_int(c, "mamba_n_groups", 1, CONFIG_MAX_SIZE, &m->n_groups, error));
    if (m->n_mamba_heads % m->n_groups != 0)
        return config_fail(c, "mamba_n_groups", error, "is %d, expected a divisor of mamba_n_heads (%d)",
                           m->n_groups, m->n_mamba_heads);
    TRY(config_int(c, "mamba_d_state", 256, 65536, &m->state_dim, error));
    if ((int64_t)m->n_groups * m->state_dim > CONFIG_MAX_SIZE)
        return config_fail(c, "mamba_n_groups", error,
                           "is %d with a mamba_d_state of %d, expected at most %lld together", m->n_groups,
                           m->state_dim, (long long)CONFIG_MAX_SIZE);
    TRY(config_int(c, "mamba_d_conv", 4, CONFIG_MAX_KERNEL, &m->conv_kernel, error));
    TRY(config_int(c, "mamba_chunk_size", 256, 65536, &m->chunk, error));
    TRY(config_flag(c, "mamba_conv_bias", true, &m->conv_bias, error));
    TRY(config_flag(c, "mamba_proj_bias", false, &m->mamba_bias, error));
    return read_limit(c, m, error);
}

/* Half of each head turns, whatever a key partial_rotary_factor at the top of an old config says: only one
 * among the rope parameters themselves counts (BambaConfig.__post_init__). Old configs have rope_theta at the
 * top, and rope_scaling where newer ones have rope_parameters. */
static enum status read_rope(const struct json_object *c, struct model *m, struct error *error)
{
    const char *keys[] = {"rope_scaling", "rope_parameters"};
    struct config_rope from = {
        .where = keys[1], .theta = 10000, .partial_rotary_factor = 0.5, .max_position = 262144};
    TRY(json_get_double(c, "rope_theta", false, 1.0001, 1e15, &from.theta, error));
    for (size_t i = 0; i < 2 && from.parameters == NULL; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(c->object, keys[i]);
        if (item == NULL || cJSON_IsNull(item))
            continue;
        from.parameters = item;
        from.where = keys[i];
    }
    return config_rope(c, &from, m->head_dim, &m->rope_full, error);
}

static enum status read_config(const struct json_object *c, struct model *m, struct error *error)
{
    struct config_heads heads = {.n_heads = 32, .n_kv_heads = 8};
    TRY(model_allocate_blocks(c, 32, m, error));
    TRY(config_activation(c, error));
    TRY(config_size(c, "vocab_size", 128000, INT32_MAX, &m->vocab_size, error));
    TRY(config_size(c, "hidden_size", 4096, CONFIG_MAX_SIZE / 64, &m->hidden_size, error));
    TRY(config_size(c, "intermediate_size", 14336, CONFIG_MAX_SIZE, &m->intermediate_size, error));
    TRY(config_epsilon(c, "rms_norm_eps", 1e-5, &m->norm_epsilon, error));
    TRY(config_flag(c, "tie_word_embeddings", false, &m->tied_lm_head, error));
    TRY(config_flag(c, "attention_bias", false, &m->attention_bias, error));
    TRY(config_flag(c, "mlp_bias", false, &m->mlp_bias, error));
    TRY(config_heads(c, m->hidden_size, &heads, error));
    m->n_kv_heads = heads.n_kv_heads;
    m->head_dim = heads.head_dim;
    TRY(read_mixer(c, m, error));
    TRY(read_blocks(c, heads.n_heads, m, error));
    return read_rope(c, m, error);
}

static enum status load_block(struct loader *l, const struct model *m, int i, struct layer *out,
                              struct error *error)
{
    const struct block *block = &m->blocks[i];
    loader_enter(l, i, STEP_MIXER_NORM, "model.layers.%d.", i);
    TRY(loader_vector(l, "input_layernorm.weight", m->hidden_size, &out->mixer_norm, error));
    if (block->mixer == MIXER_ATTENTION) {
        loader_enter(l, i, STEP_MIXER, "model.layers.%d.self_attn.", i);
        TRY(attention_load(l, m, block, &out->attention, error));
    } else {
        loader_enter(l, i, STEP_MIXER, "model.layers.%d.mamba.", i);
        TRY(mamba2_load(l, m, &out->mamba2, error));
    }
    loader_enter(l, i, STEP_MLP_NORM, "model.layers.%d.", i);
    TRY(loader_vector(l, "pre_ff_layernorm.weight", m->hidden_size, &out->mlp_norm, error));
    loader_enter(l, i, STEP_MLP, "model.layers.%d.feed_forward.", i);
    return mlp_load(l, m, "", m->intermediate_size, &out->mlp, error);
}

static void run_block(struct forward *f, const struct layer *layer)
{
    forward_offer(f, VALUE_LAYER_INPUT, forward_tokens(f, f->stream));
    forward_norm(f, layer->mixer_norm, VALUE_ATTENTION_NORM_OUTPUT);
    if (forward_block(f)->mixer == MIXER_ATTENTION)
        attention_run(f, &layer->attention);
    else
        mamba2_run(f, &layer->mamba2);
    forward_offer(f, VALUE_LAYER_MID, forward_tokens(f, f->stream));
    forward_norm(f, layer->mlp_norm, VALUE_MLP_NORM_OUTPUT);
    forward_offer(f, VALUE_MLP_INPUT, forward_tokens(f, f->normed));
    mlp_run(f, &layer->mlp);
    forward_offer(f, VALUE_LAYER_OUTPUT, forward_tokens(f, f->stream));
}

const struct family family_bamba = {
    .name = "bamba",
    .architecture = "BambaForCausalLM",
    .read_config = read_config,
    .embedding = "model.embed_tokens.weight",
    .final_norm = "model.final_layernorm.weight",
    .load_block = load_block,
    .run_block = run_block,
};

/* Jamba (Lieber et al. 2024; transformers modeling_jamba.py): Mamba-1 mixers with norms on step, B and C, an
 * attention block without rotary embedding once a period, and dense MLPs and mixtures of experts by a period
 * of their own. */
#include "engine/families/family.h"

struct period {
    int64_t every, offset; /* layer i is meant where i % every == offset */
};

static enum status read_period(const struct json_object *c, const char *every, const char *offset,
                               struct period *inout, struct error *error)
{
    TRY(config_size(c, every, inout->every, CONFIG_MAX_SIZE, &inout->every, error));
    TRY(json_get_int(c, offset, false, 0, CONFIG_MAX_SIZE, &inout->offset, error));
    if (inout->offset >= inout->every)
        return config_fail(c, offset, error, "is %lld, expected less than %s (%lld)",
                           (long long)inout->offset, every, (long long)inout->every);
    return STATUS_OK;
}

static enum status read_blocks(const struct json_object *c, int n_heads, struct model *m, struct error *error)
{
    struct period attention = {8, 4}, expert = {2, 1};
    TRY(read_period(c, "attn_layer_period", "attn_layer_offset", &attention, error));
    TRY(read_period(c, "expert_layer_period", "expert_layer_offset", &expert, error));
    for (int i = 0; i < m->n_layers; i++) {
        struct block *b = &m->blocks[i];
        bool mixture = m->n_experts > 1 && i % expert.every == expert.offset;
        b->mixer = i % attention.every == attention.offset ? MIXER_ATTENTION : MIXER_MAMBA1;
        b->n_heads = b->mixer == MIXER_ATTENTION ? n_heads : 0;
        b->feed_forward = mixture ? FEED_FORWARD_MIXTURE : FEED_FORWARD_DENSE;
    }
    return config_check_layer_types(c, m, error);
}

static enum status read_mixer(const struct json_object *c, struct model *m, struct error *error)
{
    int64_t expand;
    TRY(config_size(c, "mamba_expand", 2, 64, &expand, error));
    m->mamba_width = expand * m->hidden_size;
    m->mamba_norms = true;
    TRY(config_int(c, "mamba_d_state", 16, 65536, &m->state_dim, error));
    TRY(config_int(c, "mamba_d_conv", 4, CONFIG_MAX_KERNEL, &m->conv_kernel, error));
    TRY(config_auto(c, "mamba_dt_rank", (m->hidden_size + 15) / 16, CONFIG_MAX_SIZE, &m->dt_rank, error));
    TRY(config_flag(c, "mamba_conv_bias", true, &m->conv_bias, error));
    return config_flag(c, "mamba_proj_bias", false, &m->mamba_bias, error);
}

static enum status read_experts(const struct json_object *c, struct model *m, struct error *error)
{
    /* The experts are as wide as the dense MLPs. */
    TRY(config_size(c, "intermediate_size", 14336, CONFIG_MAX_SIZE, &m->intermediate_size, error));
    m->moe_intermediate_size = m->intermediate_size;
    int fallback = 16;
    TRY(config_int(c, "num_local_experts", fallback, CONFIG_MAX_EXPERTS, &fallback, error));
    TRY(config_int(c, "num_experts", fallback, CONFIG_MAX_EXPERTS, &m->n_experts, error));
    TRY(config_int(c, "num_experts_per_tok", 2, CONFIG_MAX_EXPERTS, &m->top_k, error));
    if (m->n_experts > 1 && m->top_k > m->n_experts)
        return config_fail(c, "num_experts_per_tok", error, "is %d, expected at most num_experts (%d)",
                           m->top_k, m->n_experts);
    m->routed_scale = 1;
    return STATUS_OK;
}

static enum status read_config(const struct json_object *c, struct model *m, struct error *error)
{
    struct config_heads heads = {.n_heads = 32, .n_kv_heads = 8};
    TRY(model_allocate_blocks(c, 32, m, error));
    TRY(config_activation(c, error));
    TRY(config_size(c, "vocab_size", 65536, INT32_MAX, &m->vocab_size, error));
    TRY(config_size(c, "hidden_size", 4096, CONFIG_MAX_SIZE / 64, &m->hidden_size, error));
    TRY(config_epsilon(c, "rms_norm_eps", 1e-6, &m->norm_epsilon, error));
    TRY(config_flag(c, "tie_word_embeddings", false, &m->tied_lm_head, error));
    TRY(config_heads(c, m->hidden_size, &heads, error));
    m->n_kv_heads = heads.n_kv_heads;
    m->head_dim = heads.head_dim;
    TRY(read_mixer(c, m, error));
    TRY(read_experts(c, m, error));
    return read_blocks(c, heads.n_heads, m, error);
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
        TRY(mamba1_load(l, m, &out->mamba1, error));
    }
    loader_enter(l, i, STEP_MLP_NORM, "model.layers.%d.", i);
    TRY(loader_vector(l, "pre_ff_layernorm.weight", m->hidden_size, &out->mlp_norm, error));
    loader_enter(l, i, STEP_MLP, "model.layers.%d.feed_forward.", i);
    if (block->feed_forward == FEED_FORWARD_MIXTURE)
        return mixture_load(l, m, "router.weight", &out->mixture, error);
    return mlp_load(l, m, "", m->intermediate_size, &out->mlp, error);
}

static void run_block(struct forward *f, const struct layer *layer)
{
    forward_offer(f, VALUE_LAYER_INPUT, forward_tokens(f, f->stream));
    forward_norm(f, layer->mixer_norm, VALUE_ATTENTION_NORM_OUTPUT);
    if (forward_block(f)->mixer == MIXER_ATTENTION)
        attention_run(f, &layer->attention);
    else
        mamba1_run(f, &layer->mamba1);
    forward_offer(f, VALUE_LAYER_MID, forward_tokens(f, f->stream));
    forward_norm(f, layer->mlp_norm, VALUE_MLP_NORM_OUTPUT);
    forward_offer(f, VALUE_MLP_INPUT, forward_tokens(f, f->normed));
    if (forward_block(f)->feed_forward == FEED_FORWARD_MIXTURE)
        mixture_run(f, &layer->mixture);
    else
        mlp_run(f, &layer->mlp);
    forward_offer(f, VALUE_LAYER_OUTPUT, forward_tokens(f, f->stream));
}

const struct family family_jamba = {
    .name = "jamba",
    .architecture = "JambaForCausalLM",
    .read_config = read_config,
    .embedding = "model.embed_tokens.weight",
    .final_norm = "model.final_layernorm.weight",
    .load_block = load_block,
    .run_block = run_block,
};

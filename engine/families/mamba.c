/* Mamba (Gu and Dao 2023; transformers modeling_mamba.py): blocks of one sublayer each, a selective
 * state-space mixer. */
#include "engine/families/family.h"

static enum status read_config(const struct json_object *c, struct model *m, struct error *error)
{
    double expand = 2;
    TRY(model_allocate_blocks(c, 32, m, error));
    TRY(config_activation(c, error));
    TRY(config_size(c, "vocab_size", 50280, INT32_MAX, &m->vocab_size, error));
    TRY(config_size(c, "hidden_size", 768, CONFIG_MAX_SIZE, &m->hidden_size, error));
    TRY(json_get_double(c, "expand", false, 0, 64, &expand, error));
    /* intermediate_size is written beside expand, and is what counts where they differ. */
    m->mamba_width = (int64_t)(expand * (double)m->hidden_size);
    TRY(config_size(c, "intermediate_size", m->mamba_width, CONFIG_MAX_SIZE, &m->mamba_width, error));
    if (m->mamba_width < 1 || m->mamba_width > CONFIG_MAX_SIZE)
        return config_fail(c, "expand", error, "is %g, expected one that gives an inner width from 1 to %lld",
                           expand, (long long)CONFIG_MAX_SIZE);
    TRY(config_int(c, "state_size", 16, 65536, &m->state_dim, error));
    TRY(config_int(c, "conv_kernel", 4, CONFIG_MAX_KERNEL, &m->conv_kernel, error));
    TRY(config_auto(c, "time_step_rank", (m->hidden_size + 15) / 16, CONFIG_MAX_SIZE, &m->dt_rank, error));
    TRY(config_epsilon(c, "layer_norm_epsilon", 1e-5, &m->norm_epsilon, error));
    TRY(config_flag(c, "residual_in_fp32", true, &m->residual_f32, error));
    TRY(config_flag(c, "use_bias", false, &m->mamba_bias, error));
    TRY(config_flag(c, "use_conv_bias", true, &m->conv_bias, error));
    TRY(config_flag(c, "tie_word_embeddings", true, &m->tied_lm_head, error));
    for (int i = 0; i < m->n_layers; i++)
        m->blocks[i] = (struct block){.mixer = MIXER_MAMBA1, .feed_forward = FEED_FORWARD_NONE};
    return STATUS_OK;
}

static enum status load_block(struct loader *l, const struct model *m, int i, struct layer *out,
                              struct error *error)
{
    loader_enter(l, i, STEP_MIXER_NORM, "backbone.layers.%d.", i);
    TRY(loader_vector(l, "norm.weight", m->hidden_size, &out->mixer_norm, error));
    loader_enter(l, i, STEP_MIXER, "backbone.layers.%d.mixer.", i);
    return mamba1_load(l, m, &out->mamba1, error);
}

static void run_block(struct forward *f, const struct layer *layer)
{
    forward_offer(f, VALUE_LAYER_INPUT, forward_tokens(f, f->stream));
    forward_norm(f, layer->mixer_norm, VALUE_ATTENTION_NORM_OUTPUT);
    mamba1_run(f, &layer->mamba1);
    forward_offer(f, VALUE_LAYER_OUTPUT, forward_tokens(f, f->stream));
}

const struct family family_mamba = {
    .name = "mamba",
    .architecture = "MambaForCausalLM",
    .read_config = read_config,
    .embedding = "backbone.embeddings.weight",
    .old_embedding = "backbone.embedding.weight",
    .final_norm = "backbone.norm_f.weight",
    .load_block = load_block,
    .run_block = run_block,
};

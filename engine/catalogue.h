/* The catalogue: every value that a capture can name, over all families.
 *
 * A value's path is host/name, or the bare name for the values of the model and of a layer as a whole:
 * "logits", "layer_output", "linear_attn/states", "mlp/shared_experts/mlp_neurons". Names, hosts and axes are fixed:
 * stores and their readers rely on them. Which of them a given model has, and how wide, is asked of the model
 * (engine/model.h: model_describe_value). */
#ifndef ACTDUMP_ENGINE_CATALOGUE_H
#define ACTDUMP_ENGINE_CATALOGUE_H

#include <stdbool.h>

enum value_host { HOST_MODEL, HOST_LAYER, HOST_LINEAR_ATTN, HOST_SELF_ATTN, HOST_MLP, HOST_SHARED_EXPERTS, HOST_COUNT };

enum value_id {
    /* model */
    VALUE_LOGITS,
    VALUE_TOKEN_EMBEDDINGS,
    VALUE_FINAL_NORM_OUTPUT,
    VALUE_LM_HEAD_OUTPUT,
    VALUE_NEXT_TOKEN_PROBS,
    VALUE_INPUT_IDS,
    VALUE_ATTENTION_MASK,
    VALUE_INPUT_SIZE,
    /* layer */
    VALUE_LAYER_INPUT,
    VALUE_ATTENTION_NORM_OUTPUT,
    VALUE_LAYER_MID,
    VALUE_MLP_NORM_OUTPUT,
    VALUE_MLP_INPUT,
    VALUE_LAYER_OUTPUT,
    /* linear_attn */
    VALUE_LINEAR_OUTPUT,
    VALUE_LINEAR_STATES,
    VALUE_LINEAR_STATE,
    VALUE_LINEAR_QUERIES,
    VALUE_LINEAR_KEYS,
    VALUE_LINEAR_VALUES,
    VALUE_LINEAR_BETAS,
    VALUE_LINEAR_DECAYS,
    VALUE_LINEAR_STATE_INPUT,
    VALUE_LINEAR_HEAD_OUTPUTS,
    VALUE_LINEAR_STATE_OUTPUT,
    /* self_attn */
    VALUE_ATTN_QUERIES,
    VALUE_ATTN_KEYS,
    VALUE_ATTN_VALUES,
    VALUE_ATTN_SCORES,
    VALUE_ATTN_PREMIX,
    VALUE_ATTN_OUTPUT,
    VALUE_ATTN_PROBABILITIES,
    VALUE_ATTN_HEAD_OUTPUTS,
    /* mlp */
    VALUE_MLP_ACTIVATION,
    VALUE_MLP_NEURONS,
    VALUE_MLP_OUTPUT,
    VALUE_ROUTER_LOGITS,
    VALUE_EXPERT_WEIGHTS,
    VALUE_EXPERT_INDICES,
    VALUE_EXPERT_OUTPUTS,
    VALUE_EXPERT_NEURONS,
    VALUE_ROUTED_OUTPUT,
    VALUE_SHARED_EXPERT_OUTPUT,
    /* mlp/shared_experts */
    VALUE_SHARED_ACTIVATION,
    VALUE_SHARED_NEURONS,
    VALUE_SHARED_OUTPUT, /* no family has it: its reason is in the catalogue all the same */
    VALUE_COUNT
};

enum value_per { PER_TOKEN, PER_SEQUENCE };

struct catalogue_entry {
    enum value_host host;
    const char *name;
    enum value_per per;
    const char *description; /* one line, as it goes into the store's attributes */
};

const struct catalogue_entry *catalogue_get(enum value_id value);
/* "" for HOST_MODEL and HOST_LAYER, "linear_attn", "mlp/shared_experts", ... */
const char *catalogue_host_path(enum value_host host);
/* "linear_attn/states"; static storage. */
const char *catalogue_path(enum value_id value);
/* The value of that path; false where there is none. */
bool catalogue_find(const char *path, enum value_id *out);
/* The path nearest to a misspelt one, for error messages. Never NULL. */
const char *catalogue_nearest(const char *path);
static inline bool value_is_per_layer(enum value_id value)
{
    return value >= VALUE_LAYER_INPUT;
}

#endif

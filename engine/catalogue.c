#include "engine/catalogue.h"

#include "engine/json.h"

#include <assert.h>
#include <string.h>

struct row {
    const char *path;
    struct catalogue_entry entry;
};

static const struct row table[VALUE_COUNT] = {
    [VALUE_LOGITS] = {"logits",
                      {HOST_MODEL, "logits", PER_TOKEN,
                       "logits as the model returns them, after anything done past lm_head"}},
    [VALUE_TOKEN_EMBEDDINGS] = {"token_embeddings",
                                {HOST_MODEL, "token_embeddings", PER_TOKEN, "output of the embedding"}},
    [VALUE_FINAL_NORM_OUTPUT] = {"final_norm_output",
                                 {HOST_MODEL, "final_norm_output", PER_TOKEN,
                                  "residual stream after the final norm: what lm_head reads"}},
    [VALUE_LM_HEAD_OUTPUT] = {"lm_head_output",
                              {HOST_MODEL, "lm_head_output", PER_TOKEN,
                               "output of lm_head, before anything done past it"}},
    [VALUE_NEXT_TOKEN_PROBS] = {"next_token_probs",
                                {HOST_MODEL, "next_token_probs", PER_SEQUENCE,
                                 "softmax of the logits at the sequence's last position, float32"}},
    [VALUE_INPUT_IDS] = {"input_ids", {HOST_MODEL, "input_ids", PER_TOKEN, "token id"}},
    [VALUE_ATTENTION_MASK] =
        {"attention_mask",
         {HOST_MODEL, "attention_mask", PER_TOKEN,
          "1 on a token, 0 on padding (padding is never run, so a stored row is always 1)"}},
    [VALUE_INPUT_SIZE] = {"input_size",
                          {HOST_MODEL, "input_size", PER_SEQUENCE,
                           "[batch seq] of the call that ran the sequence: [1, length]"}},
    [VALUE_LAYER_INPUT] = {"layer_input",
                           {HOST_LAYER, "layer_input", PER_TOKEN, "residual stream entering the block"}},
    [VALUE_ATTENTION_NORM_OUTPUT] = {"attention_norm_output",
                                     {HOST_LAYER, "attention_norm_output", PER_TOKEN,
                                      "output of the norm before the mixer or attention"}},
    [VALUE_LAYER_MID] = {"layer_mid",
                         {HOST_LAYER, "layer_mid", PER_TOKEN,
                          "residual stream after the mixer's or attention's add"}},
    [VALUE_MLP_NORM_OUTPUT] = {"mlp_norm_output",
                               {HOST_LAYER, "mlp_norm_output", PER_TOKEN,
                                "output of the norm before the MLP"}},
    [VALUE_MLP_INPUT] = {"mlp_input", {HOST_LAYER, "mlp_input", PER_TOKEN, "what the MLP is called with"}},
    [VALUE_LAYER_OUTPUT] = {"layer_output",
                            {HOST_LAYER, "layer_output", PER_TOKEN, "residual stream leaving the block"}},
    [VALUE_LINEAR_OUTPUT] = {"linear_attn/attention_output",
                             {HOST_LINEAR_ATTN, "attention_output", PER_TOKEN,
                              "what the mixer adds to the stream (out_proj's output)"}},
    [VALUE_LINEAR_STATES] = {"linear_attn/states",
                             {HOST_LINEAR_ATTN, "states", PER_TOKEN, "state after every token"}},
    [VALUE_LINEAR_STATE] = {"linear_attn/state",
                            {HOST_LINEAR_ATTN, "state", PER_TOKEN,
                             "state after the tokens that the capture's positions name"}},
    [VALUE_LINEAR_QUERIES] = {"linear_attn/attention_queries",
                              {HOST_LINEAR_ATTN, "attention_queries", PER_TOKEN,
                               "C: what each token reads the state with"}},
    [VALUE_LINEAR_KEYS] = {"linear_attn/attention_keys",
                           {HOST_LINEAR_ATTN, "attention_keys", PER_TOKEN,
                            "B: what each token writes the state with"}},
    [VALUE_LINEAR_VALUES] = {"linear_attn/attention_values",
                             {HOST_LINEAR_ATTN, "attention_values", PER_TOKEN,
                              "x: the scan's input, after the convolution and silu"}},
    [VALUE_LINEAR_BETAS] = {"linear_attn/betas",
                            {HOST_LINEAR_ATTN, "betas", PER_TOKEN,
                             "step size: softplus(dt + dt_bias), clamped to time_step_limit on bamba"}},
    [VALUE_LINEAR_DECAYS] = {"linear_attn/decays",
                             {HOST_LINEAR_ATTN, "decays", PER_TOKEN,
                              "log decay of the state: betas * A, A = -exp(A_log)"}},
    [VALUE_LINEAR_STATE_INPUT] =
        {"linear_attn/state_input",
         {HOST_LINEAR_ATTN, "state_input", PER_SEQUENCE,
          "state entering the call: none on a sequence's first window, the carried state on a later one"}},
    [VALUE_LINEAR_HEAD_OUTPUTS] = {"linear_attn/attention_head_outputs",
                                   {HOST_LINEAR_ATTN, "attention_head_outputs", PER_TOKEN,
                                    "y = C.h + D x: the scan's read, before the gate and out_proj"}},
    [VALUE_LINEAR_STATE_OUTPUT] = {"linear_attn/state_output",
                                   {HOST_LINEAR_ATTN, "state_output", PER_SEQUENCE,
                                    "state after the call's last token: states at that position"}},
    [VALUE_ATTN_QUERIES] = {"self_attn/attention_queries",
                            {HOST_SELF_ATTN, "attention_queries", PER_TOKEN, "queries entering attention"}},
    [VALUE_ATTN_KEYS] = {"self_attn/attention_keys",
                         {HOST_SELF_ATTN, "attention_keys", PER_TOKEN, "keys entering attention"}},
    [VALUE_ATTN_VALUES] = {"self_attn/attention_values",
                           {HOST_SELF_ATTN, "attention_values", PER_TOKEN, "values entering attention"}},
    [VALUE_ATTN_SCORES] = {"self_attn/attention_scores",
                           {HOST_SELF_ATTN, "attention_scores", PER_TOKEN,
                            "scaled scores entering the softmax; -inf where the mask hides the key"}},
    [VALUE_ATTN_PREMIX] = {"self_attn/attention_premix",
                           {HOST_SELF_ATTN, "attention_premix", PER_TOKEN,
                            "what o_proj takes: laguna's is gated by softplus(g_proj(x))"}},
    [VALUE_ATTN_OUTPUT] = {"self_attn/attention_output",
                           {HOST_SELF_ATTN, "attention_output", PER_TOKEN,
                            "what attention adds to the stream (o_proj's output)"}},
    [VALUE_ATTN_PROBABILITIES] = {"self_attn/attention_probabilities",
                                  {HOST_SELF_ATTN, "attention_probabilities", PER_TOKEN,
                                   "softmax of the scores; 0 where masked"}},
    [VALUE_ATTN_HEAD_OUTPUTS] = {"self_attn/attention_head_outputs",
                                 {HOST_SELF_ATTN, "attention_head_outputs", PER_TOKEN,
                                  "each head's output before o_proj, and on laguna before the gate"}},
    [VALUE_MLP_ACTIVATION] = {"mlp/mlp_activation",
                              {HOST_MLP, "mlp_activation", PER_TOKEN, "silu(gate_proj(x)) of a dense block"}},
    [VALUE_MLP_NEURONS] = {"mlp/mlp_neurons",
                           {HOST_MLP, "mlp_neurons", PER_TOKEN,
                            "silu(gate) * up: what down_proj takes on a dense block"}},
    [VALUE_MLP_OUTPUT] = {"mlp/mlp_output",
                          {HOST_MLP, "mlp_output", PER_TOKEN,
                           "what the MLP or the mixture adds to the stream"}},
    [VALUE_ROUTER_LOGITS] = {"mlp/router_logits",
                             {HOST_MLP, "router_logits", PER_TOKEN,
                              "router's projection before any scoring or softcap; float32 on laguna"}},
    [VALUE_EXPERT_WEIGHTS] = {"mlp/expert_weights",
                              {HOST_MLP, "expert_weights", PER_TOKEN,
                               "weight that scales each selected expert's output"}},
    [VALUE_EXPERT_INDICES] =
        {"mlp/expert_indices",
         {HOST_MLP, "expert_indices", PER_TOKEN,
          "expert of each routing slot; laguna chooses by sigmoid + e_score_correction_bias"}},
    [VALUE_EXPERT_OUTPUTS] = {"mlp/expert_outputs",
                              {HOST_MLP, "expert_outputs", PER_TOKEN,
                               "each slot's output times its weight (laguna: before the scaling factor)"}},
    [VALUE_EXPERT_NEURONS] =
        {"mlp/expert_neurons",
         {HOST_MLP, "expert_neurons", PER_TOKEN,
          "silu(gate) * up of each slot: what its down projection takes (served by no reference tool)"}},
    [VALUE_ROUTED_OUTPUT] = {"mlp/routed_output",
                             {HOST_MLP, "routed_output", PER_TOKEN,
                              "sum of expert_outputs, on laguna times moe_routed_scaling_factor"}},
    [VALUE_SHARED_EXPERT_OUTPUT] = {"mlp/shared_expert_output",
                                    {HOST_MLP, "shared_expert_output", PER_TOKEN, "shared expert's output"}},
    [VALUE_SHARED_ACTIVATION] = {"mlp/shared_experts/mlp_activation",
                                 {HOST_SHARED_EXPERTS, "mlp_activation", PER_TOKEN,
                                  "silu(gate) of the shared expert"}},
    [VALUE_SHARED_NEURONS] = {"mlp/shared_experts/mlp_neurons",
                              {HOST_SHARED_EXPERTS, "mlp_neurons", PER_TOKEN,
                               "what the shared expert's down_proj takes"}},
    [VALUE_SHARED_OUTPUT] = {"mlp/shared_experts/mlp_output",
                             {HOST_SHARED_EXPERTS, "mlp_output", PER_TOKEN,
                              "what the block adds is the mixture's sum: read mlp_output, or "
                              "shared_expert_output for this term"}},
};

static const char *const host_paths[HOST_COUNT] = {
    [HOST_MODEL] = "",
    [HOST_LAYER] = "",
    [HOST_LINEAR_ATTN] = "linear_attn",
    [HOST_SELF_ATTN] = "self_attn",
    [HOST_MLP] = "mlp",
    [HOST_SHARED_EXPERTS] = "mlp/shared_experts",
};

const struct catalogue_entry *catalogue_get(enum value_id value)
{
    assert(value < VALUE_COUNT);
    return &table[value].entry;
}

const char *catalogue_host_path(enum value_host host)
{
    assert(host < HOST_COUNT);
    return host_paths[host];
}

const char *catalogue_path(enum value_id value)
{
    assert(value < VALUE_COUNT);
    return table[value].path;
}

bool catalogue_find(const char *path, enum value_id *out)
{
    for (int i = 0; i < VALUE_COUNT; i++) {
        if (strcmp(table[i].path, path) == 0) {
            *out = (enum value_id)i;
            return true;
        }
    }
    return false;
}

const char *catalogue_nearest(const char *path)
{
    const char *candidates[VALUE_COUNT + 1];
    for (int i = 0; i < VALUE_COUNT; i++)
        candidates[i] = table[i].path;
    candidates[VALUE_COUNT] = NULL;
    return json_nearest(path, candidates);
}

/* A model as its config.json describes it: family, blocks, sizes, and the values it can give. No weights are read.
 *
 * Configs come in old and new spellings and from other people's tools: everything is checked, unknown families and
 * impossible sizes are refused (STATUS_INPUT) naming the file, the key, what was found and what was expected. */
#ifndef ACTDUMP_ENGINE_MODEL_H
#define ACTDUMP_ENGINE_MODEL_H

#include "engine/catalogue.h"
#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

struct family; /* engine/families/family.h */

enum mixer { MIXER_MAMBA1, MIXER_MAMBA2, MIXER_ATTENTION };
enum feed_forward { FEED_FORWARD_NONE, FEED_FORWARD_DENSE, FEED_FORWARD_MIXTURE };
enum head_gating { GATING_NONE, GATING_PER_HEAD, GATING_PER_ELEMENT };

/* What one block is made of. */
struct block {
    enum mixer mixer;
    bool sliding;        /* attention within a window */
    int n_heads;         /* query heads of an attention block */
    enum feed_forward feed_forward;
};

/* Rotary embedding of one kind of attention block. */
struct rope {
    int rotary_dim; /* dimensions of each head that turn; 0: no rotary */
    double theta;
    bool yarn;
    double factor, beta_fast, beta_slow, attention_factor, original_max_position;
    bool truncate;
};

struct model {
    const struct family *family;
    char name[32];         /* "mamba", "jamba", "bamba", "laguna" */
    char *checkpoint;      /* the folder; owned */
    enum dtype file_dtype; /* the config's own dtype (torch_dtype, dtype); float32 where it says none */
    enum dtype load_dtype; /* what weights and activations are run in: DTYPE_F32 or DTYPE_BF16 */
    int n_layers;
    struct block *blocks; /* [n_layers], owned */

    int64_t hidden_size, vocab_size; /* vocab_size: rows of the embedding */
    float norm_epsilon;
    bool tied_lm_head;
    bool residual_f32; /* mamba's residual_in_fp32: the stream is float32 whatever the load */

    /* Mamba mixers */
    int64_t mamba_width; /* d_inner: channels; for MIXER_MAMBA2 n_mamba_heads * mamba_head_dim */
    int state_dim, conv_kernel, dt_rank;
    int n_mamba_heads, mamba_head_dim, n_groups, chunk;
    float dt_min, dt_max; /* time_step_limit */
    bool conv_bias, mamba_bias;
    bool mamba_norms; /* jamba's norms on step, B and C */

    /* attention */
    int n_kv_heads, head_dim;
    int64_t window; /* of sliding blocks */
    bool attention_bias, qk_norm;
    enum head_gating gating;
    struct rope rope_full, rope_sliding;

    /* feed-forward */
    int64_t intermediate_size, moe_intermediate_size, shared_intermediate_size; /* shared 0: no shared expert */
    int n_experts, top_k;
    bool mlp_bias;
    bool router_sigmoid;
    float router_softcap, routed_scale;
};

enum { LOAD_DTYPE_OWN = -1 }; /* the checkpoint's own dtype; float16 files load as float32 */

/* Reads checkpoint/config.json. load_dtype is DTYPE_F32, DTYPE_BF16 or LOAD_DTYPE_OWN. Returns owned at *out. */
enum status model_open(const char *checkpoint, int load_dtype, struct model **out, struct error *error);
void model_close(struct model *model); /* NULL is fine */

#define VALUE_MAX_AXES 3

/* A value as this model has it at one layer. */
struct value_description {
    bool available;
    char reason[256]; /* why not */
    int n_axes;       /* after the row axis */
    const char *axis_names[VALUE_MAX_AXES]; /* "hidden_size", "num_heads", "key", ... */
    int64_t axis_sizes[VALUE_MAX_AXES];
    int64_t width;    /* elements a row: the product of the axes; 1 where there are none */
    enum dtype dtype; /* as computed under the model's load */
};

/* layer is ignored for model values. n_keys: size of the key axis of scores and probabilities (the context length).
 * Never fails: what is not there is described with its reason. */
void model_describe_value(const struct model *model, enum value_id value, int layer, int64_t n_keys,
                          struct value_description *out);

/* True where `layer` is of the kind "mamba", "attention", "moe", "dense", "sliding" or "full"; false with *known false
 * where no such kind exists. */
bool model_layer_is_kind(const struct model *model, int layer, const char *kind, bool *known);

#endif

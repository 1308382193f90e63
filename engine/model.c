#include "engine/model.h"

#include "engine/families/family.h"
#include "kernels/base/memory.h"

#include <stdio.h>
#include <string.h>

static const struct family *const families[] = {&family_mamba, &family_jamba, &family_bamba, &family_laguna};

enum { N_FAMILIES = sizeof families / sizeof families[0] };

/* ---- config.json ---- */

static bool lists_architecture(const cJSON *architectures, const char *name)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, architectures)
    {
        if (cJSON_IsString(item) && strcmp(item->valuestring, name) == 0)
            return true;
    }
    return false;
}

static enum status find_family(const struct json_object *c, const struct family **out, struct error *error)
{
    const cJSON *architectures = cJSON_GetObjectItemCaseSensitive(c->object, "architectures");
    const char *type = NULL;
    const struct family *family = NULL;
    TRY(json_get_string(c, "model_type", false, &type, error));
    for (int i = 0; i < N_FAMILIES && family == NULL; i++) {
        if (type != NULL ? strcmp(families[i]->name, type) == 0
                         : lists_architecture(architectures, families[i]->architecture))
            family = families[i];
    }
    if (family == NULL)
        return config_fail(c, "model_type", error, "is %s%.60s%s, expected mamba, jamba, bamba or laguna",
                           type != NULL ? "\"" : "", type != NULL ? type : "missing",
                           type != NULL ? "\"" : "");
    if (architectures != NULL && !cJSON_IsNull(architectures) &&
        !lists_architecture(architectures, family->architecture)) {
        char found[128];
        const cJSON *first =
            cJSON_IsArray(architectures) ? cJSON_GetArrayItem(architectures, 0) : architectures;
        return config_fail(c, "architectures", error, "names %s, expected \"%s\"",
                           json_describe(first, found, sizeof found), family->architecture);
    }
    *out = family;
    return STATUS_OK;
}

static enum status read_dtype(const struct json_object *c, enum dtype *out, struct error *error)
{
    const char *key = "dtype", *name = NULL;
    TRY(json_get_string(c, "dtype", false, &name, error));
    if (name == NULL) {
        key = "torch_dtype";
        TRY(json_get_string(c, key, false, &name, error));
    }
    enum dtype dtype = DTYPE_F32;
    if (name != NULL && (!dtype_parse(name, &dtype) || !dtype_is_float(dtype)))
        return config_fail(c, key, error, "is \"%.40s\", expected float32, bfloat16 or float16", name);
    *out = dtype;
    return STATUS_OK;
}

enum status model_allocate_blocks(const struct json_object *config, int fallback, struct model *model,
                                  struct error *error)
{
    void *blocks;
    TRY(config_int(config, "num_hidden_layers", fallback, CONFIG_MAX_LAYERS, &model->n_layers, error));
    TRY(memory_allocate_array(&blocks, (size_t)model->n_layers, sizeof *model->blocks, "the model's blocks",
                              error));
    model->blocks = blocks;
    return STATUS_OK;
}

static enum status read_config(const struct json_object *c, struct model *m, struct error *error)
{
    const cJSON *quantized = cJSON_GetObjectItemCaseSensitive(c->object, "quantization_config");
    char found[128];
    if (!cJSON_IsObject(c->object))
        return error_set(error, STATUS_INPUT, "%s: holds %s, expected an object", c->source,
                         json_describe(c->object, found, sizeof found));
    if (quantized != NULL && !cJSON_IsNull(quantized))
        return config_fail(c, "quantization_config", error,
                           "is there, expected none: only float32, bfloat16 and float16 weights can be read");
    TRY(find_family(c, &m->family, error));
    snprintf(m->name, sizeof m->name, "%s", m->family->name);
    TRY(read_dtype(c, &m->file_dtype, error));
    return m->family->read_config(c, m, error);
}

static enum status copy_text(const char *text, char **out, struct error *error)
{
    void *copy;
    size_t bytes = strlen(text) + 1;
    TRY(memory_allocate(&copy, bytes, "a path", error));
    memcpy(copy, text, bytes);
    *out = copy;
    return STATUS_OK;
}

static enum status open_into(struct model *m, const char *checkpoint, int load_dtype, struct error *error)
{
    char path[4096];
    cJSON *root;
    if (snprintf(path, sizeof path, "%s/config.json", checkpoint) >= (int)sizeof path)
        return error_set(error, STATUS_INPUT, "the checkpoint's path is longer than %zu bytes", sizeof path);
    TRY(copy_text(checkpoint, &m->checkpoint, error));
    TRY(json_read_file(path, STATUS_INPUT, &root, error));
    struct json_object c = {.object = root, .source = path, .where = "", .status = STATUS_INPUT};
    enum status status = read_config(&c, m, error);
    cJSON_Delete(root);
    enum dtype own = m->file_dtype == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
    m->load_dtype = load_dtype == LOAD_DTYPE_OWN ? own : (enum dtype)load_dtype;
    return status;
}

enum status model_open(const char *checkpoint, int load_dtype, struct model **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct model), "the model's description", error));
    enum status status = open_into(memory, checkpoint, load_dtype, error);
    if (status != STATUS_OK) {
        model_close(memory);
        return status;
    }
    *out = memory;
    return STATUS_OK;
}

void model_close(struct model *model)
{
    if (model == NULL)
        return;
    memory_free(model->blocks);
    memory_free(model->checkpoint);
    memory_free(model);
}

/* ---- what there is of each value ---- */

static const char *mixer_words(enum mixer mixer)
{
    switch (mixer) {
    case MIXER_MAMBA1:
        return "a Mamba-1 state-space mixer";
    case MIXER_MAMBA2:
        return "a Mamba-2 state-space mixer";
    case MIXER_ATTENTION:
        break;
    }
    return "attention";
}

static bool needs_router(enum value_id value)
{
    return value >= VALUE_ROUTER_LOGITS && value <= VALUE_SHARED_OUTPUT;
}

static bool needs_shared_expert(enum value_id value)
{
    return value >= VALUE_SHARED_EXPERT_OUTPUT && value <= VALUE_SHARED_OUTPUT;
}

/* Why the block has no such value, or NULL where it has one. Values of the mixers are looked at elsewhere. */
static const char *find_reason(const struct model *m, enum value_id value, const struct block *b)
{
    bool past_mixer = value == VALUE_LAYER_MID || value == VALUE_MLP_NORM_OUTPUT ||
                      value == VALUE_MLP_INPUT || value >= VALUE_MLP_ACTIVATION;
    if (!past_mixer)
        return NULL;
    if (b->feed_forward == FEED_FORWARD_NONE)
        return "a state-space block has one sublayer, its mixer: there is no stream between sublayers and no "
               "MLP";
    if (needs_router(value) && b->feed_forward == FEED_FORWARD_DENSE)
        return "this block's MLP is dense: it has no router";
    if (needs_shared_expert(value) && m->shared_intermediate_size == 0)
        return "the mixture has no shared expert";
    if (value == VALUE_SHARED_OUTPUT)
        return "what the block adds is the mixture's sum: read mlp_output, or shared_expert_output for this "
               "term";
    if ((value == VALUE_MLP_ACTIVATION || value == VALUE_MLP_NEURONS) &&
        b->feed_forward == FEED_FORWARD_MIXTURE)
        return "a mixture of experts has no single activation: read expert_outputs, or the shared expert's "
               "under "
               "mlp/shared_experts";
    return NULL;
}

static bool check_block(const struct model *m, enum value_id value, const struct block *b,
                        struct value_description *out)
{
    enum value_host host = catalogue_get(value)->host;
    bool attention = b->mixer == MIXER_ATTENTION;
    if ((host == HOST_LINEAR_ATTN && attention) || (host == HOST_SELF_ATTN && !attention)) {
        snprintf(out->reason, sizeof out->reason, "this block's mixer is %s: it has no %s values",
                 mixer_words(b->mixer), catalogue_host_path(host));
        return false;
    }
    const char *reason = find_reason(m, value, b);
    if (reason != NULL)
        snprintf(out->reason, sizeof out->reason, "%s", reason);
    return reason == NULL;
}

static void axis(struct value_description *out, const char *name, int64_t size)
{
    out->axis_names[out->n_axes] = name;
    out->axis_sizes[out->n_axes++] = size;
}

static void describe_state(const struct model *m, struct value_description *out)
{
    if (m->n_mamba_heads > 0)
        axis(out, "heads", m->n_mamba_heads);
    else
        axis(out, "channels", m->mamba_width);
    axis(out, "state_dim", m->state_dim);
    if (m->n_mamba_heads > 0)
        axis(out, "head_dim", m->mamba_head_dim);
}

static void describe_linear(const struct model *m, enum value_id value, struct value_description *out)
{
    bool by_head = m->n_mamba_heads > 0;
    switch (value) {
    case VALUE_LINEAR_OUTPUT:
        axis(out, "hidden_size", m->hidden_size);
        break;
    case VALUE_LINEAR_QUERIES:
    case VALUE_LINEAR_KEYS:
        axis(out, "groups", by_head ? m->n_groups : 1);
        axis(out, "state_dim", m->state_dim);
        break;
    case VALUE_LINEAR_VALUES:
    case VALUE_LINEAR_HEAD_OUTPUTS:
        axis(out, by_head ? "heads" : "channels", by_head ? m->n_mamba_heads : m->mamba_width);
        if (by_head)
            axis(out, "head_dim", m->mamba_head_dim);
        break;
    case VALUE_LINEAR_BETAS:
        axis(out, by_head ? "heads" : "channels", by_head ? m->n_mamba_heads : m->mamba_width);
        break;
    case VALUE_LINEAR_DECAYS:
        if (by_head)
            axis(out, "heads", m->n_mamba_heads);
        else
            describe_state(m, out);
        break;
    default:
        describe_state(m, out);
    }
    if (value >= VALUE_LINEAR_BETAS || value == VALUE_LINEAR_STATES || value == VALUE_LINEAR_STATE)
        out->dtype = DTYPE_F32;
}

static void describe_attention(const struct model *m, enum value_id value, const struct block *b,
                               int64_t n_keys, struct value_description *out)
{
    if (value == VALUE_ATTN_OUTPUT) {
        axis(out, "hidden_size", m->hidden_size);
    } else if (value == VALUE_ATTN_SCORES || value == VALUE_ATTN_PROBABILITIES) {
        axis(out, "num_heads", b->n_heads);
        axis(out, "key", n_keys);
    } else if (value == VALUE_ATTN_KEYS || value == VALUE_ATTN_VALUES) {
        axis(out, "num_kv_heads", m->n_kv_heads);
        axis(out, "head_dim", m->head_dim);
    } else {
        axis(out, "num_heads", b->n_heads);
        axis(out, "head_dim", m->head_dim);
    }
}

static void describe_mlp(const struct model *m, enum value_id value, struct value_description *out)
{
    switch (value) {
    case VALUE_MLP_ACTIVATION:
    case VALUE_MLP_NEURONS:
        axis(out, "intermediate_size", m->intermediate_size);
        break;
    case VALUE_ROUTER_LOGITS:
        axis(out, "num_experts", m->n_experts);
        out->dtype = m->router_sigmoid ? DTYPE_F32 : m->load_dtype;
        break;
    case VALUE_EXPERT_WEIGHTS:
    case VALUE_EXPERT_INDICES:
        axis(out, "top_k", m->top_k);
        out->dtype = value == VALUE_EXPERT_INDICES ? DTYPE_I32 : m->load_dtype;
        break;
    case VALUE_EXPERT_OUTPUTS:
    case VALUE_EXPERT_NEURONS:
        axis(out, "top_k", m->top_k);
        if (value == VALUE_EXPERT_OUTPUTS)
            axis(out, "hidden_size", m->hidden_size);
        else
            axis(out, "moe_intermediate_size", m->moe_intermediate_size);
        break;
    case VALUE_SHARED_ACTIVATION:
    case VALUE_SHARED_NEURONS:
        axis(out, "shared_expert_intermediate_size", m->shared_intermediate_size);
        break;
    default:
        axis(out, "hidden_size", m->hidden_size);
    }
}

static void describe_model(const struct model *m, enum value_id value, struct value_description *out)
{
    switch (value) {
    case VALUE_INPUT_IDS:
    case VALUE_ATTENTION_MASK:
        out->dtype = DTYPE_I32;
        break;
    case VALUE_INPUT_SIZE:
        axis(out, "2", 2);
        out->dtype = DTYPE_I32;
        break;
    case VALUE_TOKEN_EMBEDDINGS:
    case VALUE_FINAL_NORM_OUTPUT:
        axis(out, "hidden_size", m->hidden_size);
        break;
    default:
        axis(out, "vocab_size", m->vocab_size);
        out->dtype = value == VALUE_NEXT_TOKEN_PROBS ? DTYPE_F32 : m->load_dtype;
    }
}

/* The stream itself is float32 under residual_in_fp32, and what a final norm makes of it is so in the
 * reference, where the norm gives back its input's dtype. */
static bool is_of_stream(enum value_id value)
{
    return value == VALUE_LAYER_INPUT || value == VALUE_LAYER_OUTPUT || value == VALUE_LAYER_MID ||
           value == VALUE_FINAL_NORM_OUTPUT;
}

void model_describe_value(const struct model *model, enum value_id value, int layer, int64_t n_keys,
                          struct value_description *out)
{
    enum value_host host = catalogue_get(value)->host;
    *out = (struct value_description){.dtype = model->load_dtype, .width = 1};
    const struct block *block = value_is_per_layer(value) ? &model->blocks[layer] : NULL;
    if (block != NULL && !check_block(model, value, block, out))
        return;
    out->available = true;
    if (host == HOST_MODEL)
        describe_model(model, value, out);
    else if (host == HOST_LAYER)
        axis(out, "hidden_size", model->hidden_size);
    else if (host == HOST_LINEAR_ATTN)
        describe_linear(model, value, out);
    else if (host == HOST_SELF_ATTN)
        describe_attention(model, value, block, n_keys, out);
    else
        describe_mlp(model, value, out);
    if (model->residual_f32 && is_of_stream(value))
        out->dtype = DTYPE_F32;
    for (int i = 0; i < out->n_axes; i++)
        out->width *= out->axis_sizes[i];
}

/* ---- kinds ---- */

bool model_layer_is_kind(const struct model *model, int layer, const char *kind, bool *known)
{
    const struct block *b = &model->blocks[layer];
    bool attention = b->mixer == MIXER_ATTENTION;
    const struct {
        const char *kind;
        bool is;
    } kinds[] = {
        {"mamba", !attention},
        {"attention", attention},
        {"moe", b->feed_forward == FEED_FORWARD_MIXTURE},
        {"dense", b->feed_forward == FEED_FORWARD_DENSE},
        {"sliding", attention && b->sliding},
        {"full", attention && !b->sliding},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strcmp(kind, kinds[i].kind) == 0) {
            *known = true;
            return kinds[i].is;
        }
    }
    *known = false;
    return false;
}

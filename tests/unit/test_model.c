/* Models as their config.json describes them: every spelling, every refusal, every value's shape and reason.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/model.h"
#include "engine/rope.h"
#include "kernels/base/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/test_model.XXXXXX");
    return mkdtemp(folder) == NULL;
}

static int remove_folder(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    unlink(path);
    return rmdir(folder);
}

static void write_config(const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* Small configs that are right, to which rows of the tables below add keys. */
static const char *const bases[] = {
    "\"model_type\": \"mamba\", \"hidden_size\": 24, \"num_hidden_layers\": 3, \"vocab_size\": 97",
    "\"model_type\": \"jamba\", \"hidden_size\": 32, \"num_hidden_layers\": 5, \"vocab_size\": 97, "
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 48",
    "\"model_type\": \"bamba\", \"hidden_size\": 32, \"num_hidden_layers\": 4, \"vocab_size\": 97, "
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 48, \"mamba_n_heads\": 8",
    "\"model_type\": \"laguna\", \"hidden_size\": 32, \"num_hidden_layers\": 3, \"vocab_size\": 97, "
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 16, \"num_experts\": 8, "
    "\"num_experts_per_tok\": 3, \"moe_intermediate_size\": 24, \"shared_expert_intermediate_size\": 20",
};

enum { MAMBA, JAMBA, BAMBA, LAGUNA };

static void write_base(int base, const char *keys)
{
    char text[4096];
    snprintf(text, sizeof text, "{%s%s%s}", bases[base], keys[0] == '\0' ? "" : ", ", keys);
    write_config(text);
}

/* cJSON keeps both of two equal keys and finds the first, and our reader refuses them: a row that replaces a
 * key of the base has to leave the base's out. */
static void write_with(int base, const char *keys)
{
    char text[4096] = "{", name[64];
    const char *at = bases[base];
    while (*at != '\0') {
        const char *end = strstr(at, ", \"");
        size_t n = end == NULL ? strlen(at) : (size_t)(end - at);
        size_t name_length = (size_t)(strchr(at + 1, '"') + 1 - at);
        snprintf(name, sizeof name, "%.*s:", (int)name_length, at);
        if (strstr(keys, name) == NULL)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%.*s, ", (int)n, at);
        at += end == NULL ? n : n + 2;
    }
    if (keys[0] == '\0')
        text[strlen(text) - 2] = '\0';
    snprintf(text + strlen(text), sizeof text - strlen(text), "%s}", keys);
    write_config(text);
}

static struct model *open_or_fail(int load_dtype)
{
    struct error error = {0};
    struct model *model;
    if (model_open(folder, load_dtype, &model, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return model;
}

static struct model *open_with(int base, const char *keys)
{
    write_with(base, keys);
    return open_or_fail(LOAD_DTYPE_OWN);
}

/* ---- refusals ---- */

struct refusal {
    int base;
    const char *keys;
    const char *message; /* part of the sentence */
};

static const struct refusal refusals[] = {
    {MAMBA, "\"model_type\": \"llama\"", "model_type is \"llama\", expected mamba, jamba, bamba or laguna"},
    {MAMBA, "\"model_type\": \"mamba2\"", "model_type is \"mamba2\""},
    {MAMBA, "\"model_type\": 3", "model_type is a number (3), expected a string"},
    {MAMBA, "\"model_type\": null", "model_type is missing"},
    {MAMBA, "\"architectures\": [\"JambaForCausalLM\"]",
     "architectures names a string (\"JambaForCausalLM\"), "
     "expected \"MambaForCausalLM\""},
    {MAMBA, "\"architectures\": []", "architectures names missing"},
    {JAMBA, "\"architectures\": [\"JambaForSequenceClassification\"]", "expected \"JambaForCausalLM\""},
    {MAMBA, "\"quantization_config\": {\"bits\": 4}", "quantization_config is there"},
    {MAMBA, "\"dtype\": \"int8\"", "dtype is \"int8\", expected float32, bfloat16 or float16"},
    {MAMBA, "\"torch_dtype\": \"float64\"", "torch_dtype is \"float64\""},
    {MAMBA, "\"dtype\": \"int32\"", "dtype is \"int32\""},
    {MAMBA, "\"hidden_act\": \"gelu\"", "hidden_act is a string (\"gelu\"), expected \"silu\""},
    {MAMBA, "\"hidden_size\": 0", "hidden_size is a number (0), expected a whole number from 1"},
    {MAMBA, "\"hidden_size\": -8", "hidden_size is a number (-8)"},
    {MAMBA, "\"hidden_size\": 24.5", "hidden_size is a number (24.5)"},
    {MAMBA, "\"hidden_size\": 1e300", "hidden_size is a number"},
    {MAMBA, "\"hidden_size\": NaN", "hidden_size is a number"},
    {MAMBA, "\"hidden_size\": Infinity", "hidden_size is a number"},
    {MAMBA, "\"hidden_size\": \"24\"", "hidden_size is a string (\"24\")"},
    {MAMBA, "\"hidden_size\": [24]", "hidden_size is a list"},
    {MAMBA, "\"hidden_size\": 99999999", "hidden_size is a number (99999999)"},
    {MAMBA, "\"vocab_size\": 4294967296", "vocab_size is a number (4294967296)"},
    {MAMBA, "\"num_hidden_layers\": 0", "num_hidden_layers is a number (0)"},
    {MAMBA, "\"num_hidden_layers\": 1000000000", "num_hidden_layers is a number"},
    {MAMBA, "\"conv_kernel\": 0", "conv_kernel is a number (0)"},
    {MAMBA, "\"state_size\": 0", "state_size is a number (0)"},
    {MAMBA, "\"time_step_rank\": \"automatic\"",
     "time_step_rank is a string (\"automatic\"), expected \"auto\""},
    {MAMBA, "\"time_step_rank\": 0", "time_step_rank is a number (0)"},
    {MAMBA, "\"expand\": 0", "expand is 0, expected one that gives an inner width"},
    {MAMBA, "\"expand\": 1000", "expand is a number (1000)"},
    {MAMBA, "\"intermediate_size\": 0", "intermediate_size is a number (0)"},
    {MAMBA, "\"layer_norm_epsilon\": 0", "layer_norm_epsilon is 0, expected a number above 0"},
    {MAMBA, "\"layer_norm_epsilon\": -1e-5", "layer_norm_epsilon is a number"},
    {MAMBA, "\"use_bias\": 1", "use_bias is a number (1), expected true or false"},
    {MAMBA, "\"tie_word_embeddings\": \"yes\"", "tie_word_embeddings is a string"},
    {JAMBA, "\"num_attention_heads\": 5",
     "num_key_value_heads is 2, expected a divisor of num_attention_heads (5)"},
    {JAMBA, "\"num_attention_heads\": 6", "num_attention_heads is 6, expected a divisor of hidden_size (32)"},
    {JAMBA, "\"num_key_value_heads\": 0", "num_key_value_heads is a number (0)"},
    {JAMBA, "\"attn_layer_offset\": 8", "attn_layer_offset is 8, expected less than attn_layer_period (8)"},
    {JAMBA, "\"attn_layer_period\": 0", "attn_layer_period is a number (0)"},
    {JAMBA, "\"expert_layer_offset\": -1", "expert_layer_offset is a number (-1)"},
    {JAMBA, "\"expert_layer_period\": 2, \"expert_layer_offset\": 2", "expert_layer_offset is 2"},
    {JAMBA, "\"num_experts\": 2, \"num_experts_per_tok\": 3",
     "num_experts_per_tok is 3, expected at most num_experts "
     "(2)"},
    {JAMBA, "\"num_experts\": 0", "num_experts is a number (0)"},
    {JAMBA, "\"layers_block_type\": [\"mamba\"]", "layers_block_type has 1 items, expected 5"},
    {JAMBA, "\"layers_block_type\": \"mamba\"", "layers_block_type is a string (\"mamba\"), expected a list"},
    {JAMBA, "\"layers_block_type\": [\"mamba\", \"mamba\", \"mamba\", \"mamba\", \"mamba\"]",
     "layers_block_type says layer 4 is \"mamba\", which the config's other keys deny"},
    {JAMBA, "\"layers_block_type\": [\"mamba\", \"mamba\", \"mamba\", \"mamba\", 4]",
     "layers_block_type names layer 4 a number (4)"},
    {BAMBA, "\"attn_layer_indices\": [4]",
     "attn_layer_indices holds a number (4), expected layers from 0 to 3"},
    {BAMBA, "\"attn_layer_indices\": [-1]", "attn_layer_indices holds a number (-1)"},
    {BAMBA, "\"attn_layer_indices\": [\"1\"]", "attn_layer_indices holds a string"},
    {BAMBA, "\"attn_layer_indices\": 1", "attn_layer_indices is a number (1), expected a list"},
    {BAMBA, "\"mamba_n_heads\": 7",
     "mamba_n_heads is 7 with a mamba_d_head of 9, expected mamba_expand * hidden_size "
     "(64) together"},
    {BAMBA, "\"mamba_n_heads\": 128", "mamba_d_head comes to 0"},
    {BAMBA, "\"mamba_d_head\": 16", "mamba_n_heads is 8 with a mamba_d_head of 16"},
    {BAMBA, "\"mamba_n_groups\": 3", "mamba_n_groups is 3, expected a divisor of mamba_n_heads (8)"},
    {BAMBA, "\"mamba_chunk_size\": 0", "mamba_chunk_size is a number (0)"},
    {BAMBA, "\"time_step_limit\": [0.5, 0.1]", "time_step_limit is not a pair"},
    {BAMBA, "\"time_step_limit\": [0.0]", "time_step_limit is not a pair"},
    {BAMBA, "\"time_step_limit\": 0.1", "time_step_limit is not a pair"},
    {BAMBA, "\"time_step_limit\": [NaN, 1]", "time_step_limit is not a pair"},
    {BAMBA, "\"time_step_limit\": [-1, 1]", "time_step_limit is not a pair"},
    {BAMBA, "\"time_step_limit\": [0, {\"__float__\": \"big\"}]", "time_step_limit is not a pair"},
    {BAMBA, "\"rope_parameters\": {\"rope_type\": \"llama3\"}",
     "rope_parameters.rope_type is a string (\"llama3\"), "
     "expected \"default\" or \"yarn\""},
    {BAMBA, "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}",
     "rope_scaling.rope_type is a string "
     "(\"linear\")"},
    {BAMBA, "\"rope_parameters\": 3", "rope_parameters is a number (3), expected an object"},
    {BAMBA, "\"rope_parameters\": {\"rope_theta\": 0}", "rope_parameters.rope_theta is a number (0)"},
    {BAMBA, "\"rope_parameters\": {\"partial_rotary_factor\": 0.4}",
     "partial_rotary_factor is 0.4, expected one that turns an even number"},
    {BAMBA, "\"rope_theta\": -1", "rope_theta is a number (-1)"},
    {LAGUNA, "\"gating\": \"per-layer\"", "gating is a string (\"per-layer\"), expected true, false"},
    {LAGUNA, "\"gating\": 1", "gating is a number (1)"},
    {LAGUNA, "\"layer_types\": [\"full_attention\"]", "layer_types has 1 items, expected 3"},
    {LAGUNA, "\"layer_types\": [\"full_attention\", \"linear_attention\", \"full_attention\"]",
     "layer_types says layer 1 is a string (\"linear_attention\"), expected \"full_attention\" or"},
    {LAGUNA, "\"mlp_layer_types\": [\"dense\", \"moe\", \"sparse\"]",
     "mlp_layer_types says layer 1 is a string"},
    {LAGUNA, "\"num_attention_heads_per_layer\": [4, 5, 4]",
     "num_attention_heads_per_layer has a number (5) for layer "
     "1, expected a multiple of num_key_value_heads (2)"},
    {LAGUNA, "\"num_attention_heads_per_layer\": [4, 4]", "num_attention_heads_per_layer has 2 items"},
    {LAGUNA, "\"num_attention_heads_per_layer\": [4, 0, 4]", "has a number (0) for layer 1"},
    {LAGUNA, "\"num_attention_heads_per_layer\": [4, null, 4]", "has null for layer 1"},
    {LAGUNA, "\"moe_apply_router_weight_on_input\": true",
     "moe_apply_router_weight_on_input is true, expected false: weights on the experts' inputs are not "
     "supported"},
    {LAGUNA, "\"num_experts_per_tok\": 9", "num_experts_per_tok is 9, expected at most num_experts (8)"},
    {LAGUNA,
     "\"sliding_window\": null, \"layer_types\": [\"full_attention\", \"sliding_attention\", "
     "\"full_attention\"]",
     "sliding_window is null, expected a number of keys"},
    {LAGUNA, "\"sliding_window\": 0", "sliding_window is a number (0)"},
    {LAGUNA, "\"rope_parameters\": {\"sliding_attention\": {\"rope_type\": \"default\"}}",
     "rope_parameters.full_attention is missing"},
    {LAGUNA, "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}",
     "rope_parameters.full_attention is missing"},
    {LAGUNA, "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"longrope\"}}",
     "rope_parameters.full_attention.rope_type is a string (\"longrope\")"},
    {LAGUNA, "\"moe_router_logit_softcapping\": -1", "moe_router_logit_softcapping is a number (-1)"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(refusals); i++) {
        struct error error = {0};
        struct model *model = NULL;
        size_t used = memory_in_use();
        write_with(refusals[i].base, refusals[i].keys);
        enum status status = model_open(folder, LOAD_DTYPE_OWN, &model, &error);
        if (status != STATUS_INPUT || strstr(error.text, refusals[i].message) == NULL ||
            strstr(error.text, "config.json") == NULL)
            fail_msg("%s: status %d, \"%s\"", refusals[i].keys, status, error.text);
        assert_int_equal(memory_in_use(), used);
    }
}

static void test_files_that_are_no_config(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "[]", "3", "{", "{\"model_type\": \"mamba\"} x", "\x00", "nul"};
    for (size_t i = 0; i < COUNT(texts); i++) {
        struct error error = {0};
        struct model *model = NULL;
        write_config(texts[i]);
        assert_int_equal(model_open(folder, LOAD_DTYPE_OWN, &model, &error), STATUS_INPUT);
        assert_non_null(strstr(error.text, "config.json"));
    }
    struct error error = {0};
    struct model *model = NULL;
    assert_int_equal(model_open("/nonexistent", LOAD_DTYPE_OWN, &model, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "/nonexistent/config.json"));
}

static void test_every_allocation_may_fail(void **state)
{
    (void)state;
    write_base(LAGUNA, "");
    size_t used = memory_in_use();
    int n = 0;
    for (;; n++) {
        struct error error = {0};
        struct model *model;
        memory_fail_at(n);
        enum status status = model_open(folder, LOAD_DTYPE_OWN, &model, &error);
        memory_fail_at(-1);
        if (status == STATUS_OK) {
            model_close(model);
            break;
        }
        assert_int_equal(status, STATUS_RESOURCE);
        assert_int_equal(memory_in_use(), used);
    }
    assert_true(n > 2);
}

/* ---- spellings ---- */

static void test_dtypes(void **state)
{
    (void)state;
    static const struct {
        const char *keys;
        int load;
        enum dtype file, loaded;
    } rows[] = {
        {"", LOAD_DTYPE_OWN, DTYPE_F32, DTYPE_F32},
        {"\"torch_dtype\": \"float32\"", LOAD_DTYPE_OWN, DTYPE_F32, DTYPE_F32},
        {"\"torch_dtype\": \"bfloat16\"", LOAD_DTYPE_OWN, DTYPE_BF16, DTYPE_BF16},
        {"\"torch_dtype\": \"torch.bfloat16\"", LOAD_DTYPE_OWN, DTYPE_BF16, DTYPE_BF16},
        {"\"dtype\": \"bfloat16\"", LOAD_DTYPE_OWN, DTYPE_BF16, DTYPE_BF16},
        {"\"dtype\": \"bfloat16\", \"torch_dtype\": \"float32\"", LOAD_DTYPE_OWN, DTYPE_BF16, DTYPE_BF16},
        {"\"dtype\": null, \"torch_dtype\": \"bfloat16\"", LOAD_DTYPE_OWN, DTYPE_BF16, DTYPE_BF16},
        {"\"dtype\": \"float16\"", LOAD_DTYPE_OWN, DTYPE_F16, DTYPE_F32},
        {"\"dtype\": \"float16\"", DTYPE_BF16, DTYPE_F16, DTYPE_BF16},
        {"\"dtype\": \"bfloat16\"", DTYPE_F32, DTYPE_BF16, DTYPE_F32},
        {"\"dtype\": \"float32\"", DTYPE_BF16, DTYPE_F32, DTYPE_BF16},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        write_with(MAMBA, rows[i].keys);
        struct model *m = open_or_fail(rows[i].load);
        assert_int_equal(m->file_dtype, rows[i].file);
        assert_int_equal(m->load_dtype, rows[i].loaded);
        model_close(m);
    }
}

static void test_mamba_options(void **state)
{
    (void)state;
    struct model *m = open_with(MAMBA, "");
    assert_string_equal(m->name, "mamba");
    assert_int_equal(m->mamba_width, 48);
    assert_int_equal(m->dt_rank, 2); /* ceil(24 / 16) */
    assert_int_equal(m->state_dim, 16);
    assert_int_equal(m->conv_kernel, 4);
    assert_true(m->conv_bias && !m->mamba_bias && m->tied_lm_head && m->residual_f32);
    model_close(m);
    m = open_with(
        MAMBA, "\"expand\": 3, \"time_step_rank\": \"auto\", \"use_bias\": true, \"use_conv_bias\": false, "
               "\"tie_word_embeddings\": false, \"residual_in_fp32\": false, \"hidden_size\": 33");
    assert_int_equal(m->mamba_width, 99);
    assert_int_equal(m->dt_rank, 3);
    assert_true(!m->conv_bias && m->mamba_bias && !m->tied_lm_head && !m->residual_f32);
    model_close(m);
    m = open_with(MAMBA, "\"intermediate_size\": 40, \"time_step_rank\": 7, \"expand\": 1.5");
    assert_int_equal(m->mamba_width, 40);
    assert_int_equal(m->dt_rank, 7);
    model_close(m);
}

static void test_architectures_stand_in_for_model_type(void **state)
{
    (void)state;
    write_config("{\"architectures\": [\"BambaForCausalLM\"], \"hidden_size\": 32, \"mamba_n_heads\": 8, "
                 "\"num_attention_heads\": 4, \"num_key_value_heads\": 2}");
    struct model *m = open_or_fail(LOAD_DTYPE_OWN);
    assert_string_equal(m->name, "bamba");
    model_close(m);
}

static void check_mixers(const struct model *m, const char *expected)
{
    for (int i = 0; i < m->n_layers; i++) {
        bool attention = m->blocks[i].mixer == MIXER_ATTENTION;
        if (attention != (expected[i] == 'a'))
            fail_msg("layer %d of %s", i, expected);
    }
}

static void test_jamba_periods(void **state)
{
    (void)state;
    struct model *m =
        open_with(JAMBA, "\"attn_layer_period\": 2, \"attn_layer_offset\": 1, \"expert_layer_period\": 3, "
                         "\"expert_layer_offset\": 0, \"num_experts\": 4");
    check_mixers(m, "mamam");
    for (int i = 0; i < 5; i++)
        assert_int_equal(m->blocks[i].feed_forward, i % 3 == 0 ? FEED_FORWARD_MIXTURE : FEED_FORWARD_DENSE);
    assert_int_equal(m->dt_rank, 2);
    assert_int_equal(m->mamba_width, 64);
    assert_true(m->mamba_norms && !m->router_sigmoid);
    assert_int_equal(m->moe_intermediate_size, 48);
    assert_int_equal(m->rope_full.rotary_dim, 0);
    model_close(m);
    m = open_with(JAMBA, "\"num_experts\": 1, \"num_key_value_heads\": null, \"mamba_dt_rank\": \"auto\"");
    for (int i = 0; i < 5; i++)
        assert_int_equal(m->blocks[i].feed_forward, FEED_FORWARD_DENSE);
    assert_int_equal(m->n_kv_heads, 4);
    model_close(m);
    m = open_with(JAMBA,
                  "\"layers_block_type\": [\"mamba\", \"mamba\", \"mamba\", \"mamba\", \"attention\"], "
                  "\"layer_types\": [\"linear_attention\", \"linear_attention\", \"linear_attention\", "
                  "\"linear_attention\", \"full_attention\"], \"head_dim\": 24");
    check_mixers(m, "mmmma");
    assert_int_equal(m->head_dim, 24);
    model_close(m);
}

static void test_bamba_options(void **state)
{
    (void)state;
    struct model *m = open_with(BAMBA, "\"attn_layer_indices\": null, \"mamba_d_head\": \"auto\", "
                                       "\"time_step_limit\": null");
    check_mixers(m, "mmmm");
    assert_int_equal(m->mamba_head_dim, 8);
    assert_true(m->dt_min == 0 && isinf(m->dt_max));
    assert_int_equal(m->rope_full.rotary_dim, 4);
    assert_true(m->rope_full.theta == 10000 && !m->rope_full.yarn);
    model_close(m);
    m = open_with(BAMBA, "\"attn_layer_indices\": [], \"time_step_limit\": [0.0, Infinity]");
    check_mixers(m, "mmmm");
    assert_true(isinf(m->dt_max));
    model_close(m);
    m = open_with(
        BAMBA, "\"attn_layer_indices\": [1, 3], \"time_step_limit\": [0.25, {\"__float__\": \"Infinity\"}], "
               "\"rope_theta\": 5000.0, \"partial_rotary_factor\": 1.0, \"attention_bias\": true, "
               "\"mlp_bias\": true");
    check_mixers(m, "mama");
    assert_true(m->dt_min == 0.25f && isinf(m->dt_max));
    assert_int_equal(m->rope_full.rotary_dim, 4); /* half a head, whatever the key at the top says */
    assert_true(m->rope_full.theta == 5000);
    assert_true(m->attention_bias && m->mlp_bias);
    model_close(m);
    m = open_with(BAMBA,
                  "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 20000.0, "
                  "\"partial_rotary_factor\": 1.0}, \"rope_theta\": 5000.0, \"time_step_limit\": [0.1, 0.5]");
    assert_int_equal(m->rope_full.rotary_dim, 8);
    assert_true(m->rope_full.theta == 20000);
    assert_true(m->dt_max == 0.5f);
    model_close(m);
    m = open_with(BAMBA,
                  "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0}, \"max_position_embeddings\": 64, "
                  "\"rope_theta\": 5000.0");
    assert_true(m->rope_full.yarn && m->rope_full.factor == 4 && m->rope_full.original_max_position == 64);
    assert_true(m->rope_full.theta == 5000);
    model_close(m);
}

static void test_laguna_options(void **state)
{
    (void)state;
    struct model *m = open_with(LAGUNA, "");
    assert_int_equal(m->gating, GATING_PER_HEAD);
    assert_int_equal(m->blocks[0].feed_forward, FEED_FORWARD_DENSE);
    assert_int_equal(m->blocks[1].feed_forward, FEED_FORWARD_MIXTURE);
    assert_int_equal(m->rope_full.rotary_dim, 8);
    assert_true(m->rope_full.theta == 500000 && m->qk_norm && m->router_sigmoid);
    model_close(m);
    m = open_with(LAGUNA,
                  "\"gating\": \"per-element\", \"num_attention_heads_per_layer\": [2, 6, 4], "
                  "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\"], "
                  "\"mlp_layer_types\": [\"sparse\", \"dense\", \"sparse\"], \"sliding_window\": 5, "
                  "\"moe_routed_scaling_factor\": 2.5, \"moe_router_logit_softcapping\": 30.0, "
                  "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
                  "\"rope_theta\": 500000.0, \"original_max_position_embeddings\": 16, "
                  "\"partial_rotary_factor\": 0.5, \"truncate\": false}, \"sliding_attention\": {}}");
    assert_int_equal(m->gating, GATING_PER_ELEMENT);
    assert_int_equal(m->blocks[1].n_heads, 6);
    assert_true(m->blocks[0].sliding && !m->blocks[1].sliding && m->blocks[2].sliding);
    assert_int_equal(m->blocks[1].feed_forward, FEED_FORWARD_DENSE);
    assert_int_equal(m->window, 5);
    assert_true(m->routed_scale == 2.5f && m->router_softcap == 30.0f);
    assert_true(m->rope_full.yarn && m->rope_full.beta_fast == 32 && m->rope_full.beta_slow == 1);
    assert_true(m->rope_full.truncate); /* the reference does not look for it there */
    assert_true(fabs(m->rope_full.attention_factor - (0.1 * log(4.0) + 1)) < 1e-12);
    assert_int_equal(m->rope_sliding.rotary_dim, 16);
    assert_true(m->rope_sliding.theta == 10000 && !m->rope_sliding.yarn);
    model_close(m);
    m = open_with(LAGUNA,
                  "\"gating\": false, \"sliding_window\": null, \"rope_parameters\": {\"truncate\": false, "
                  "\"full_attention\": {\"rope_type\": \"yarn\", \"factor\": null, \"mscale\": 2.0, "
                  "\"mscale_all_dim\": 0.5, \"original_max_position_embeddings\": 1024}}, "
                  "\"max_position_embeddings\": 8192, \"partial_rotary_factor\": 0.25");
    assert_int_equal(m->gating, GATING_NONE);
    assert_true(m->rope_full.factor == 8 && !m->rope_full.truncate);
    assert_int_equal(m->rope_full.rotary_dim, 4);
    assert_true(fabs(m->rope_full.attention_factor - (0.2 * log(8.0) + 1) / (0.05 * log(8.0) + 1)) < 1e-12);
    model_close(m);
}

/* ---- values ---- */

struct shape {
    enum value_id value;
    int layer;
    const char *axes; /* "name:size name:size"; "-" and a reason where there is none */
    enum dtype dtype;
};

static void check_shapes(const struct model *m, const struct shape *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct value_description d;
        char axes[512] = "";
        model_describe_value(m, rows[i].value, rows[i].layer, 21, &d);
        int64_t width = 1;
        for (int a = 0; a < d.n_axes; a++) {
            snprintf(axes + strlen(axes), sizeof axes - strlen(axes), "%s%s:%lld", a == 0 ? "" : " ",
                     d.axis_names[a], (long long)d.axis_sizes[a]);
            width *= d.axis_sizes[a];
        }
        if (!d.available)
            snprintf(axes, sizeof axes, "- %s", d.reason);
        if (strcmp(axes, rows[i].axes) != 0 ||
            (d.available && (d.dtype != rows[i].dtype || d.width != width)))
            fail_msg("%s layer %d %s: %s %s", m->name, rows[i].layer, catalogue_path(rows[i].value), axes,
                     dtype_name(d.dtype));
    }
}

#define ONE_SUBLAYER                                                                                         \
    "- a state-space block has one sublayer, its mixer: there is no stream between sublayers and no MLP"
#define DENSE "- this block's MLP is dense: it has no router"
#define MIXED                                                                                                \
    "- a mixture of experts has no single activation: read expert_outputs, or the shared expert's under "    \
    "mlp/shared_experts"

static void test_mamba_values(void **state)
{
    (void)state;
    static const struct shape rows[] = {
        {VALUE_LOGITS, -1, "vocab_size:97", DTYPE_BF16},
        {VALUE_NEXT_TOKEN_PROBS, -1, "vocab_size:97", DTYPE_F32},
        {VALUE_INPUT_IDS, -1, "", DTYPE_I32},
        {VALUE_ATTENTION_MASK, -1, "", DTYPE_I32},
        {VALUE_INPUT_SIZE, -1, "2:2", DTYPE_I32},
        {VALUE_TOKEN_EMBEDDINGS, -1, "hidden_size:24", DTYPE_BF16},
        {VALUE_FINAL_NORM_OUTPUT, -1, "hidden_size:24", DTYPE_F32},
        {VALUE_LAYER_INPUT, 0, "hidden_size:24", DTYPE_F32},
        {VALUE_LAYER_OUTPUT, 2, "hidden_size:24", DTYPE_F32},
        {VALUE_ATTENTION_NORM_OUTPUT, 1, "hidden_size:24", DTYPE_BF16},
        {VALUE_LAYER_MID, 1, ONE_SUBLAYER, 0},
        {VALUE_MLP_NORM_OUTPUT, 1, ONE_SUBLAYER, 0},
        {VALUE_MLP_INPUT, 1, ONE_SUBLAYER, 0},
        {VALUE_MLP_OUTPUT, 1, ONE_SUBLAYER, 0},
        {VALUE_ROUTER_LOGITS, 1, ONE_SUBLAYER, 0},
        {VALUE_SHARED_NEURONS, 1, ONE_SUBLAYER, 0},
        {VALUE_ATTN_SCORES, 1,
         "- this block's mixer is a Mamba-1 state-space mixer: it has no self_attn values", 0},
        {VALUE_LINEAR_OUTPUT, 1, "hidden_size:24", DTYPE_BF16},
        {VALUE_LINEAR_STATES, 1, "channels:48 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_STATE, 1, "channels:48 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_STATE_INPUT, 1, "channels:48 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_STATE_OUTPUT, 1, "channels:48 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_QUERIES, 1, "groups:1 state_dim:16", DTYPE_BF16},
        {VALUE_LINEAR_KEYS, 1, "groups:1 state_dim:16", DTYPE_BF16},
        {VALUE_LINEAR_VALUES, 1, "channels:48", DTYPE_BF16},
        {VALUE_LINEAR_BETAS, 1, "channels:48", DTYPE_F32},
        {VALUE_LINEAR_DECAYS, 1, "channels:48 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_HEAD_OUTPUTS, 1, "channels:48", DTYPE_F32},
    };
    struct model *m = open_with(MAMBA, "\"dtype\": \"bfloat16\"");
    check_shapes(m, rows, COUNT(rows));
    model_close(m);
}

static void test_jamba_values(void **state)
{
    (void)state;
    static const struct shape rows[] = {
        {VALUE_LAYER_INPUT, 0, "hidden_size:32", DTYPE_BF16},
        {VALUE_LAYER_MID, 0, "hidden_size:32", DTYPE_BF16},
        {VALUE_MLP_ACTIVATION, 0, "intermediate_size:48", DTYPE_BF16},
        {VALUE_ROUTER_LOGITS, 0, DENSE, 0},
        {VALUE_SHARED_EXPERT_OUTPUT, 0, DENSE, 0},
        {VALUE_MLP_ACTIVATION, 1, MIXED, 0},
        {VALUE_MLP_NEURONS, 1, MIXED, 0},
        {VALUE_ROUTER_LOGITS, 1, "num_experts:16", DTYPE_BF16},
        {VALUE_EXPERT_WEIGHTS, 1, "top_k:2", DTYPE_BF16},
        {VALUE_EXPERT_INDICES, 1, "top_k:2", DTYPE_I32},
        {VALUE_EXPERT_OUTPUTS, 1, "top_k:2 hidden_size:32", DTYPE_BF16},
        {VALUE_EXPERT_NEURONS, 1, "top_k:2 moe_intermediate_size:48", DTYPE_BF16},
        {VALUE_ROUTED_OUTPUT, 1, "hidden_size:32", DTYPE_BF16},
        {VALUE_SHARED_EXPERT_OUTPUT, 1, "- the mixture has no shared expert", 0},
        {VALUE_SHARED_NEURONS, 1, "- the mixture has no shared expert", 0},
        {VALUE_ATTN_QUERIES, 4, "num_heads:4 head_dim:8", DTYPE_BF16},
        {VALUE_ATTN_KEYS, 4, "num_kv_heads:2 head_dim:8", DTYPE_BF16},
        {VALUE_ATTN_VALUES, 4, "num_kv_heads:2 head_dim:8", DTYPE_BF16},
        {VALUE_ATTN_SCORES, 4, "num_heads:4 key:21", DTYPE_BF16},
        {VALUE_ATTN_PROBABILITIES, 4, "num_heads:4 key:21", DTYPE_BF16},
        {VALUE_ATTN_PREMIX, 4, "num_heads:4 head_dim:8", DTYPE_BF16},
        {VALUE_ATTN_OUTPUT, 4, "hidden_size:32", DTYPE_BF16},
        {VALUE_LINEAR_STATES, 4, "- this block's mixer is attention: it has no linear_attn values", 0},
    };
    struct model *m = open_with(JAMBA, "\"dtype\": \"bfloat16\"");
    check_shapes(m, rows, COUNT(rows));
    model_close(m);
}

static void test_bamba_values(void **state)
{
    (void)state;
    static const struct shape rows[] = {
        {VALUE_LINEAR_STATES, 0, "heads:8 state_dim:16 head_dim:8", DTYPE_F32},
        {VALUE_LINEAR_QUERIES, 0, "groups:2 state_dim:16", DTYPE_F32},
        {VALUE_LINEAR_VALUES, 0, "heads:8 head_dim:8", DTYPE_F32},
        {VALUE_LINEAR_BETAS, 0, "heads:8", DTYPE_F32},
        {VALUE_LINEAR_DECAYS, 0, "heads:8", DTYPE_F32},
        {VALUE_LINEAR_HEAD_OUTPUTS, 0, "heads:8 head_dim:8", DTYPE_F32},
        {VALUE_ATTN_OUTPUT, 0,
         "- this block's mixer is a Mamba-2 state-space mixer: it has no self_attn values", 0},
        {VALUE_ATTN_OUTPUT, 1, "hidden_size:32", DTYPE_F32},
        {VALUE_EXPERT_OUTPUTS, 1, DENSE, 0},
        {VALUE_MLP_NEURONS, 1, "intermediate_size:48", DTYPE_F32},
    };
    struct model *m =
        open_with(BAMBA, "\"attn_layer_indices\": [1], \"mamba_n_groups\": 2, \"mamba_d_state\": 16");
    check_shapes(m, rows, COUNT(rows));
    model_close(m);
}

static void test_laguna_values(void **state)
{
    (void)state;
    static const struct shape rows[] = {
        {VALUE_ATTN_QUERIES, 0, "num_heads:4 head_dim:16", DTYPE_BF16},
        {VALUE_ATTN_QUERIES, 1, "num_heads:6 head_dim:16", DTYPE_BF16},
        {VALUE_ATTN_PREMIX, 1, "num_heads:6 head_dim:16", DTYPE_BF16},
        {VALUE_ROUTER_LOGITS, 1, "num_experts:8", DTYPE_F32},
        {VALUE_EXPERT_NEURONS, 1, "top_k:3 moe_intermediate_size:24", DTYPE_BF16},
        {VALUE_SHARED_EXPERT_OUTPUT, 1, "hidden_size:32", DTYPE_BF16},
        {VALUE_SHARED_ACTIVATION, 1, "shared_expert_intermediate_size:20", DTYPE_BF16},
        {VALUE_SHARED_OUTPUT, 1,
         "- what the block adds is the mixture's sum: read mlp_output, or shared_expert_output for this term",
         0},
        {VALUE_SHARED_OUTPUT, 0, DENSE, 0},
        {VALUE_SHARED_ACTIVATION, 0, DENSE, 0},
        {VALUE_LINEAR_OUTPUT, 0, "- this block's mixer is attention: it has no linear_attn values", 0},
    };
    struct model *m =
        open_with(LAGUNA, "\"dtype\": \"bfloat16\", \"num_attention_heads_per_layer\": [4, 6, 4]");
    check_shapes(m, rows, COUNT(rows));
    model_close(m);
}

static void test_layer_kinds(void **state)
{
    (void)state;
    static const struct {
        const char *kind, *layers;
    } rows[] = {{"mamba", ""},  {"attention", "012"}, {"moe", "12"},
                {"dense", "0"}, {"sliding", "1"},     {"full", "02"}};
    struct model *m = open_with(LAGUNA, "\"layer_types\": [\"full_attention\", \"sliding_attention\", "
                                        "\"full_attention\"]");
    bool known;
    for (size_t i = 0; i < COUNT(rows); i++) {
        for (int layer = 0; layer < 3; layer++) {
            bool expected = strchr(rows[i].layers, '0' + layer) != NULL;
            assert_int_equal(model_layer_is_kind(m, layer, rows[i].kind, &known), expected);
            assert_true(known);
        }
    }
    assert_false(model_layer_is_kind(m, 0, "sparse", &known));
    assert_false(known);
    model_close(m);
    m = open_with(MAMBA, "");
    assert_true(model_layer_is_kind(m, 0, "mamba", &known));
    assert_false(model_layer_is_kind(m, 0, "full", &known));
    assert_false(model_layer_is_kind(m, 0, "dense", &known));
    model_close(m);
}

/* ---- rotary tables ---- */

static void test_plain_rotary_table(void **state)
{
    (void)state;
    const struct rope rope = {.rotary_dim = 4, .theta = 10000, .attention_factor = 1, .truncate = true};
    float cosine[3 * 2], sine[3 * 2];
    rope_fill(&rope, 3, cosine, sine);
    for (int p = 0; p < 3; p++) {
        assert_true(fabs(cosine[p * 2] - cos(p)) < 1e-6 && fabs(sine[p * 2] - sin(p)) < 1e-6);
        assert_true(fabs(cosine[p * 2 + 1] - cos(p * 0.01)) < 1e-6 &&
                    fabs(sine[p * 2 + 1] - sin(p * 0.01)) < 1e-6);
    }
}

/* Dimension 8, theta 500000, factor 4, 16 positions: the pair that turns 32 times lies below 0, the one that
 * turns once at 8 ln(16 / 2 pi) / (2 ln 500000) = 0.285; without truncation pair 0 keeps its frequency and
 * all others are slowed, with it the ramp ends at 1: the same. */
static void test_yarn_table(void **state)
{
    (void)state;
    struct rope rope = {.rotary_dim = 8,
                        .theta = 500000,
                        .yarn = true,
                        .factor = 4,
                        .beta_fast = 32,
                        .beta_slow = 1,
                        .attention_factor = 1.25,
                        .original_max_position = 16,
                        .truncate = true};
    for (int truncate = 0; truncate < 2; truncate++) {
        float cosine[2 * 4], sine[2 * 4];
        rope.truncate = truncate;
        rope_fill(&rope, 2, cosine, sine);
        for (int i = 0; i < 4; i++) {
            double frequency = pow(500000, -2.0 * i / 8) / (i == 0 ? 1 : 4);
            assert_true(cosine[i] == 1.25f && sine[i] == 0);
            assert_true(fabs(cosine[4 + i] - 1.25 * cos(frequency)) < 1e-6);
            assert_true(fabs(sine[4 + i] - 1.25 * sin(frequency)) < 1e-6);
        }
    }
    /* Where the ramp passes between pairs: 16384 positions, dimension 64, theta 10000: from 64 ln(16384 / 64
     * pi) / (2 ln 10000) = 15.29 to 27.33, or from 15 to 28 once truncated. */
    rope = (struct rope){.rotary_dim = 64,
                         .theta = 10000,
                         .yarn = true,
                         .factor = 4,
                         .beta_fast = 32,
                         .beta_slow = 1,
                         .attention_factor = 1,
                         .original_max_position = 16384};
    for (int truncate = 0; truncate < 2; truncate++) {
        float cosine[2 * 32], sine[2 * 32];
        double low = truncate ? 15 : 15.28787, high = truncate ? 28 : 27.32986;
        rope.truncate = truncate;
        rope_fill(&rope, 2, cosine, sine);
        for (int i = 0; i < 32; i++) {
            double slowed = fmin(fmax((i - low) / (high - low), 0), 1), plain = pow(10000, -2.0 * i / 64);
            double frequency = plain / 4 * slowed + plain * (1 - slowed);
            if (fabs(sine[32 + i] - sin(frequency)) > 1e-6)
                fail_msg("pair %d: %g, expected %g", i, (double)sine[32 + i], sin(frequency));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_files_that_are_no_config),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_mamba_options),
        cmocka_unit_test(test_architectures_stand_in_for_model_type),
        cmocka_unit_test(test_jamba_periods),
        cmocka_unit_test(test_bamba_options),
        cmocka_unit_test(test_laguna_options),
        cmocka_unit_test(test_mamba_values),
        cmocka_unit_test(test_jamba_values),
        cmocka_unit_test(test_bamba_values),
        cmocka_unit_test(test_laguna_values),
        cmocka_unit_test(test_layer_kinds),
        cmocka_unit_test(test_plain_rotary_table),
        cmocka_unit_test(test_yarn_table),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}

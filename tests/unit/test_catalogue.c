/* The catalogue: paths that stores rely on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/catalogue.h"

static void test_every_value_is_found_by_its_path(void **state)
{
    (void)state;
    for (int i = 0; i < VALUE_COUNT; i++) {
        enum value_id value = (enum value_id)i, found;
        const struct catalogue_entry *entry = catalogue_get(value);
        char path[128];
        const char *host = catalogue_host_path(entry->host);
        snprintf(path, sizeof path, "%s%s%s", host, host[0] == '\0' ? "" : "/", entry->name);
        assert_string_equal(catalogue_path(value), path);
        assert_true(catalogue_find(path, &found));
        assert_int_equal(found, value);
        assert_true(strlen(entry->description) > 0);
        assert_null(strchr(entry->description, '\n'));
    }
}

/* The names themselves, a few of each host, written out here as the store's readers know them. */
static void test_names(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        enum value_id value;
        enum value_host host;
        enum value_per per;
    } rows[] = {
        {"logits", VALUE_LOGITS, HOST_MODEL, PER_TOKEN},
        {"next_token_probs", VALUE_NEXT_TOKEN_PROBS, HOST_MODEL, PER_SEQUENCE},
        {"input_size", VALUE_INPUT_SIZE, HOST_MODEL, PER_SEQUENCE},
        {"layer_input", VALUE_LAYER_INPUT, HOST_LAYER, PER_TOKEN},
        {"layer_output", VALUE_LAYER_OUTPUT, HOST_LAYER, PER_TOKEN},
        {"linear_attn/attention_output", VALUE_LINEAR_OUTPUT, HOST_LINEAR_ATTN, PER_TOKEN},
        {"linear_attn/states", VALUE_LINEAR_STATES, HOST_LINEAR_ATTN, PER_TOKEN},
        {"linear_attn/state", VALUE_LINEAR_STATE, HOST_LINEAR_ATTN, PER_TOKEN},
        {"linear_attn/state_input", VALUE_LINEAR_STATE_INPUT, HOST_LINEAR_ATTN, PER_SEQUENCE},
        {"linear_attn/state_output", VALUE_LINEAR_STATE_OUTPUT, HOST_LINEAR_ATTN, PER_SEQUENCE},
        {"linear_attn/attention_head_outputs", VALUE_LINEAR_HEAD_OUTPUTS, HOST_LINEAR_ATTN, PER_TOKEN},
        {"self_attn/attention_scores", VALUE_ATTN_SCORES, HOST_SELF_ATTN, PER_TOKEN},
        {"self_attn/attention_probabilities", VALUE_ATTN_PROBABILITIES, HOST_SELF_ATTN, PER_TOKEN},
        {"mlp/mlp_output", VALUE_MLP_OUTPUT, HOST_MLP, PER_TOKEN},
        {"mlp/expert_neurons", VALUE_EXPERT_NEURONS, HOST_MLP, PER_TOKEN},
        {"mlp/shared_expert_output", VALUE_SHARED_EXPERT_OUTPUT, HOST_MLP, PER_TOKEN},
        {"mlp/shared_experts/mlp_neurons", VALUE_SHARED_NEURONS, HOST_SHARED_EXPERTS, PER_TOKEN},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        enum value_id found;
        if (!catalogue_find(rows[i].path, &found) || found != rows[i].value)
            fail_msg("%s", rows[i].path);
        assert_int_equal(catalogue_get(found)->host, rows[i].host);
        assert_int_equal(catalogue_get(found)->per, rows[i].per);
    }
}

static void test_unknown_paths(void **state)
{
    (void)state;
    enum value_id value;
    assert_false(catalogue_find("", &value));
    assert_false(catalogue_find("states", &value));
    assert_false(catalogue_find("linear_attn/", &value));
    assert_false(catalogue_find("layers/0/layer_output", &value));
    assert_string_equal(catalogue_nearest("layer_outptu"), "layer_output");
    assert_string_equal(catalogue_nearest("linear_attn/sttaes"), "linear_attn/states");
    assert_string_equal(catalogue_nearest("mlp/router_logit"), "mlp/router_logits");
}

static void test_layer_values(void **state)
{
    (void)state;
    for (int i = 0; i < VALUE_COUNT; i++)
        assert_int_equal(value_is_per_layer((enum value_id)i),
                         catalogue_get((enum value_id)i)->host != HOST_MODEL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_value_is_found_by_its_path),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_unknown_paths),
        cmocka_unit_test(test_layer_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

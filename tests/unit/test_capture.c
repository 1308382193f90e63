/* Captures: which rows, which layers, which columns, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pipeline/capture.h"

#define FIXTURE(name) TEST_DATA "/fixtures/" name

/* ---------------------------------------------------------------- rows */

struct row_case {
    const char *what;
    struct positions positions;
    int64_t length;
    int32_t expected[12];
    int64_t n;
};

static int64_t ends[] = {-1, 0};
static int64_t overlapping[] = {-3, -2, -1, 0, 1, 9};
static int32_t skipped[] = {7, 0};

static void test_rows(void **state)
{
    (void)state;
    const int32_t ids[] = {0, 7, 5, 0, 7, 6, 5, 5};
    const struct row_case cases[] = {
        {"all", {.kind = POSITIONS_ALL}, 4, {0, 1, 2, 3}, 4},
        {"last", {.kind = POSITIONS_LAST}, 4, {3}, 1},
        {"last of one", {.kind = POSITIONS_LAST}, 1, {0}, 1},
        {"first", {.kind = POSITIONS_FIRST, .n = 2}, 4, {0, 1}, 2},
        {"first beyond the end", {.kind = POSITIONS_FIRST, .n = 9}, 3, {0, 1, 2}, 3},
        {"every", {.kind = POSITIONS_EVERY, .n = 3, .offset = 1}, 8, {1, 4, 7}, 3},
        {"every from beyond", {.kind = POSITIONS_EVERY, .n = 3, .offset = 9}, 8, {0}, 0},
        {"list from both ends", {.kind = POSITIONS_LIST, .list = ends, .n_list = 2}, 5, {0, 4}, 2},
        {"a list that meets itself",
         {.kind = POSITIONS_LIST, .list = overlapping, .n_list = 6},
         2,
         {0, 1},
         2},
        {"skip_first", {.kind = POSITIONS_ALL, .skip_first = 2}, 4, {2, 3}, 2},
        {"skip_first of everything", {.kind = POSITIONS_ALL, .skip_first = 9}, 4, {0}, 0},
        {"skip_ids, 0 among them",
         {.kind = POSITIONS_ALL, .skip_ids = skipped, .n_skip_ids = 2},
         8,
         {2, 5, 6, 7},
         4},
        {"both",
         {.kind = POSITIONS_ALL, .skip_first = 6, .skip_ids = skipped, .n_skip_ids = 2},
         8,
         {6, 7},
         2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t rows[12] = {0};
        int64_t n = capture_select(&cases[i].positions, 3, ids, cases[i].length, rows);
        if (n != cases[i].n || memcmp(rows, cases[i].expected, (size_t)n * sizeof *rows) != 0)
            fail_msg("%s: wrong rows", cases[i].what);
    }
}

static void test_sample_depends_on_seed_sequence_and_position_alone(void **state)
{
    (void)state;
    enum { LENGTH = 4000 };
    static int32_t a[LENGTH], b[LENGTH], c[LENGTH], d[LENGTH];
    struct positions p = {.kind = POSITIONS_SAMPLE, .fraction = 0.1, .seed = 1};
    int64_t n = capture_select(&p, 5, NULL, LENGTH, a);
    /* a binomial of 4000 at 0.1: mean 400, deviation 19; six of them on either side */
    assert_in_range(n, 286, 514);
    assert_int_equal(capture_select(&p, 5, NULL, LENGTH / 2, b), capture_select(&p, 5, NULL, LENGTH / 2, c));
    int64_t half = capture_select(&p, 5, NULL, LENGTH / 2, b);
    assert_memory_equal(a, b, (size_t)half * sizeof *a);
    int64_t other = capture_select(&p, 6, NULL, LENGTH, c);
    assert_false(other == n && memcmp(a, c, (size_t)n * sizeof *a) == 0);
    p.seed = 2;
    other = capture_select(&p, 5, NULL, LENGTH, d);
    assert_false(other == n && memcmp(a, d, (size_t)n * sizeof *a) == 0);
    p.fraction = 1.0;
    assert_int_equal(capture_select(&p, 5, NULL, LENGTH, d), LENGTH);
    p.fraction = 0.0;
    assert_int_equal(capture_select(&p, 5, NULL, LENGTH, d), 0);
}

static void test_chunk_rows(void **state)
{
    (void)state;
    assert_int_equal(capture_chunk_rows(1024, 3072), 1024);
    assert_int_equal(capture_chunk_rows(1024, 8192), 512);
    assert_int_equal(capture_chunk_rows(1024, 16 << 20), 1);
    assert_int_equal(capture_chunk_rows(16, 4), 16);
}

/* ---------------------------------------------------------------- columns */

struct resolve_case {
    const char *fixture;
    const char *capture; /* the capture's JSON */
    enum status status;
    const char *expected; /* columns' paths joined by spaces, or part of the message */
};

static const struct resolve_case resolve_cases[] = {
    {"mamba", "{\"values\": [\"layer_output\"], \"layers\": [0, -1]}", STATUS_OK,
     "layers/0/layer_output layers/2/layer_output"},
    {"mamba", "{\"values\": [\"layer_output\", \"logits\"], \"layers\": \"1-2\"}", STATUS_OK,
     "logits layers/1/layer_output layers/2/layer_output"},
    {"mamba", "{\"values\": [\"layer_*\"], \"layers\": \"0-2:2\"}", STATUS_OK,
     "layers/0/layer_input layers/0/layer_output layers/2/layer_input layers/2/layer_output"},
    {"mamba", "{\"values\": [\"linear_attn/state\"], \"layers\": \"mamba\"}", STATUS_OK,
     "layers/0/linear_attn/state layers/1/linear_attn/state layers/2/linear_attn/state"},
    {"jamba", "{\"values\": [\"mlp/router_logits\"]}", STATUS_OK,
     "layers/1/mlp/router_logits layers/3/mlp/router_logits"},
    {"jamba", "{\"values\": [\"mlp/router_logits\"], \"layers\": [\"attention\", 3]}", STATUS_OK,
     "layers/3/mlp/router_logits"},
    {"jamba", "{\"values\": [\"self_attn/attention_o*\", \"self_attn/attention_o*\"]}", STATUS_OK,
     "layers/2/self_attn/attention_output"},
    {"laguna", "{\"values\": [\"attention_norm_output\"], \"layers\": \"sliding\"}", STATUS_OK,
     "layers/1/attention_norm_output layers/2/attention_norm_output layers/3/attention_norm_output"},
    {"mamba", "{\"values\": [\"layer_mid\"]}", STATUS_USAGE, "one sublayer, its mixer"},
    {"mamba", "{\"values\": [\"layer_outptu\"]}", STATUS_USAGE, "did you mean \"layer_output\""},
    {"mamba", "{\"values\": [\"nothing/*\"]}", STATUS_USAGE, "no value matches \"nothing/*\""},
    {"mamba", "{\"values\": [\"mlp/*\"]}", STATUS_USAGE, "nothing that \"mlp/*\" matches"},
    {"mamba", "{\"values\": [\"logits\"], \"layers\": [3]}", STATUS_USAGE,
     "no layer 3; the model has layers 0 to 2"},
    {"mamba", "{\"values\": [\"logits\"], \"layers\": [-4]}", STATUS_USAGE, "no layer -4"},
    {"mamba", "{\"values\": [\"layer_output\"], \"layers\": \"moe\"}", STATUS_USAGE, "has no \"moe\" layer"},
    {"jamba", "{\"values\": [\"self_attn/attention_queries\"], \"layers\": [0]}", STATUS_USAGE,
     "captures.it.values"},
    {"jamba", "{\"values\": [\"mlp/shared_expert_output\"]}", STATUS_USAGE, "no shared expert"},
    {"jamba", "{\"values\": [\"mlp/mlp_neurons\"], \"layers\": [1]}", STATUS_USAGE, "no single activation"},
    {"laguna", "{\"values\": [\"mlp/shared_experts/mlp_output\"]}", STATUS_USAGE, "shared_expert_output"},
};

static void join_columns(const struct capture *capture, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < capture->n_columns && used < size; i++)
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", i > 0 ? " " : "", capture->columns[i].path);
}

static void check_resolve(const struct resolve_case *c)
{
    char text[2048], joined[2048], folder[512];
    struct job *job;
    struct model *model;
    struct capture_list captures = {0};
    struct error error = {0};
    snprintf(folder, sizeof folder, FIXTURE("%s"), c->fixture);
    snprintf(
        text, sizeof text,
        "{\"model\": {\"checkpoint\": \".\"}, \"corpus\": {\"format\": \"megatron\", \"path\": \"corpus\", "
        "\"context\": 32}, \"captures\": {\"it\": %s}, \"store\": {\"path\": \"out\"}}",
        c->capture);
    assert_int_equal(job_parse(text, strlen(text), "job.json", folder, NULL, 0, &job, &error), STATUS_OK);
    assert_int_equal(model_open(folder, LOAD_DTYPE_OWN, &model, &error), STATUS_OK);
    enum status status = capture_resolve(job, model, 32, &captures, &error);
    if (status != c->status)
        fail_msg("%s: status %d: %s", c->capture, status, error.text);
    if (status == STATUS_OK) {
        join_columns(&captures.list[0], joined, sizeof joined);
        assert_string_equal(joined, c->expected);
    } else if (strstr(error.text, c->expected) == NULL) {
        fail_msg("%s: \"%s\" does not say \"%s\"", c->capture, error.text, c->expected);
    }
    capture_list_free(&captures);
    model_close(model);
    job_free(job);
}

static void test_resolve(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof resolve_cases / sizeof *resolve_cases; i++)
        check_resolve(&resolve_cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_sample_depends_on_seed_sequence_and_position_alone),
        cmocka_unit_test(test_chunk_rows),
        cmocka_unit_test(test_resolve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

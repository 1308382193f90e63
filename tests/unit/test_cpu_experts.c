/* route, the ways of slots, and softmax of the CPU's backend against float64 references. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "op_check.h"

struct route_case {
    const char *name;
    int n_experts, top_k;
    enum router router;
    enum dtype logits, weights;
    float softcap;
    bool with_bias;
};

static const struct route_case route_cases[] = {
    {"one of one", 1, 1, ROUTER_SOFTMAX, DTYPE_F32, DTYPE_F32, 0, false},
    {"softmax", 8, 2, ROUTER_SOFTMAX, DTYPE_F32, DTYPE_F32, 0, false},
    {"softmax, bfloat16", 16, 2, ROUTER_SOFTMAX, DTYPE_BF16, DTYPE_BF16, 0, false},
    {"softmax, odd", 13, 13, ROUTER_SOFTMAX, DTYPE_F32, DTYPE_F32, 0, false},
    {"sigmoid", 32, 4, ROUTER_SIGMOID, DTYPE_F32, DTYPE_F32, 0, false},
    {"sigmoid, bias", 33, 4, ROUTER_SIGMOID, DTYPE_F32, DTYPE_F32, 0, true},
    {"sigmoid, bias, cap", 256, 8, ROUTER_SIGMOID, DTYPE_F32, DTYPE_F32, 3, true},
    {"sigmoid, small cap", 20, 3, ROUTER_SIGMOID, DTYPE_BF16, DTYPE_BF16, 0.1f, true},
};

/* Scores of one token in float64. */
static void reference_scores(const struct route_args *a, int64_t token, double *scores)
{
    double largest = -INFINITY, sum = 0;
    int64_t n = a->logits.cols;

    for (int64_t e = 0; e < n; e++) {
        scores[e] = element_get(&a->logits, token, e);
        largest = fmax(largest, scores[e]);
    }
    for (int64_t e = 0; e < n; e++) {
        if (a->router == ROUTER_SOFTMAX) {
            sum += scores[e] = exp(scores[e] - largest);
            continue;
        }
        double x = a->softcap > 0 ? tanh(scores[e] / (double)a->softcap) * (double)a->softcap : scores[e];
        scores[e] = 1 / (1 + exp(-x));
    }
    for (int64_t e = 0; e < n && a->router == ROUTER_SOFTMAX; e++)
        scores[e] /= sum;
}

/* The choice may differ from float64's only where selection scores are equal but for rounding. */
static void check_choice(const struct route_args *a, int64_t token, const double *scores, const char *what)
{
    double before = INFINITY, sum = 0;
    int64_t n = a->logits.cols;
    bool chosen[256] = {false};

    for (int k = 0; k < a->top_k; k++) {
        int e = (int)element_get(&a->indices, token, k);
        assert_in_range(e, 0, n - 1);
        assert_false(chosen[e]);
        chosen[e] = true;
        sum += scores[e];
        double selection = scores[e] + (a->selection_bias != NULL ? (double)a->selection_bias[e] : 0);
        if (!(selection <= before + 1e-6))
            fail_msg("%s: token %lld: choice %d rises", what, (long long)token, k);
        before = selection;
    }
    for (int e = 0; e < n; e++) {
        double selection = scores[e] + (a->selection_bias != NULL ? (double)a->selection_bias[e] : 0);
        if (!chosen[e] && selection > before + 1e-6)
            fail_msg("%s: token %lld: expert %d was passed over", what, (long long)token, e);
    }
    for (int k = 0; k < a->top_k; k++) {
        double want =
            scores[(int)element_get(&a->indices, token, k)] / (a->router == ROUTER_SIGMOID ? sum : 1);
        double got = element_get(&a->weights, token, k);
        if (!(fabs(got - want) <= (a->weights.dtype == DTYPE_BF16 ? 4e-3 : 2e-6) * want))
            fail_msg("%s: token %lld, weight %d: got %.9g, expected %.9g", what, (long long)token, k, got,
                     want);
    }
}

static void route_case_run(struct backend *b, const struct route_case *c)
{
    uint64_t seed = 99;
    float bias[256];
    char what[200];
    double *scores = doubles_create(c->n_experts);

    struct guarded logits = guarded_random(c->logits, 77, c->n_experts, 2, &seed);
    struct guarded weights = guarded_create(c->weights, 77, c->top_k, 2);
    struct guarded indices = guarded_create(DTYPE_I32, 77, c->top_k, 1);
    for (int e = 0; e < c->n_experts; e++)
        bias[e] = (float)(0.3 * random_normal(&seed));
    struct route_args a = {.logits = logits.t,
                           .router = c->router,
                           .top_k = c->top_k,
                           .softcap = c->softcap,
                           .selection_bias = c->with_bias ? bias : NULL,
                           .weights = weights.t,
                           .indices = indices.t};
    b->ops->route(b, &a);
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    snprintf(what, sizeof what, "%s: %s", b->name, c->name);
    for (int64_t t = 0; t < 77; t++) {
        reference_scores(&a, t, scores);
        check_choice(&a, t, scores, what);
    }
    guarded_check(&weights, what);
    guarded_check(&indices, what);
    guarded_destroy(&logits);
    guarded_destroy(&weights);
    guarded_destroy(&indices);
    free(scores);
}

static void route_cases_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(route_cases); i++)
        route_case_run(b, &route_cases[i]);
}

static void test_route_equals_reference(void **state)
{
    (void)state;
    for_each_backend(route_cases_run);
}

/* Equal scores: lower indices first. The second token has one NaN, which no order is promised for but valid
 * indices are; the third has nothing but NaNs. */
static void ties_run(struct backend *b)
{
    const enum router routers[] = {ROUTER_SOFTMAX, ROUTER_SIGMOID};

    for (int i = 0; i < 2; i++) {
        struct guarded logits = guarded_create(DTYPE_F32, 3, 20, 0);
        struct guarded weights = guarded_create(DTYPE_F32, 3, 5, 0),
                       indices = guarded_create(DTYPE_I32, 3, 5, 0);
        for (int e = 0; e < 20; e++) {
            element_set(&logits.t, 0, e, e == 7 || e == 12 ? 2 : e == 3 ? 3 : 1);
            element_set(&logits.t, 1, e, e == 4 ? NAN : 1);
            element_set(&logits.t, 2, e, NAN);
        }
        struct route_args a = {
            .logits = logits.t, .router = routers[i], .top_k = 5, .weights = weights.t, .indices = indices.t};
        const int want[] = {3, 7, 12, 0, 1};
        b->ops->route(b, &a);
        for (int k = 0; k < 5; k++) {
            assert_int_equal(element_get(&indices.t, 0, k), want[k]);
            assert_int_equal(element_get(&indices.t, 2, k), k);
            for (int t = 1; t < 3; t++)
                assert_in_range((int)element_get(&indices.t, t, k), 0, 19);
            for (int j = 0; j < k; j++)
                assert_int_not_equal(element_get(&indices.t, 1, k), element_get(&indices.t, 1, j));
        }
        guarded_destroy(&logits);
        guarded_destroy(&weights);
        guarded_destroy(&indices);
    }
}

static void test_ties_go_to_lower_indices(void **state)
{
    (void)state;
    for_each_backend(ties_run);
}

struct slot_case {
    int64_t n_tokens;
    int n_experts, top_k, width;
    enum dtype dtype;
};

static const struct slot_case slot_cases[] = {
    {1, 1, 1, 1, DTYPE_F32},    {10, 4, 2, 17, DTYPE_F32},    {50, 8, 3, 64, DTYPE_BF16},
    {7, 300, 4, 33, DTYPE_F32}, {130, 5, 5, 100, DTYPE_BF16},
};

/* Distinct random experts for each token; the last expert is never chosen where there are enough others. */
static struct guarded choose_experts(const struct slot_case *c, uint64_t *seed)
{
    struct guarded indices = guarded_create(DTYPE_I32, c->n_tokens, c->top_k, 3);
    int usable = c->n_experts > c->top_k ? c->n_experts - 1 : c->n_experts;

    for (int64_t t = 0; t < c->n_tokens; t++) {
        int32_t *row = tensor_row(&indices.t, t), first = (int32_t)(random_uniform(seed) * usable);
        for (int k = 0; k < c->top_k; k++)
            row[k] = (first + k) % usable;
    }
    return indices;
}

static void check_groups(const struct slot_case *c, const struct tensor *indices,
                         const struct expert_groups *groups)
{
    int64_t n_slots = c->n_tokens * c->top_k;

    assert_int_equal(groups->offsets[0], 0);
    assert_int_equal(groups->offsets[c->n_experts], n_slots);
    for (int e = 0; e < c->n_experts; e++)
        for (int32_t i = groups->offsets[e]; i < groups->offsets[e + 1]; i++) {
            int32_t slot = groups->order[i];
            assert_in_range(slot, 0, n_slots - 1);
            assert_int_equal(groups->places[slot], i);
            assert_int_equal(element_get(indices, slot / c->top_k, slot % c->top_k), e);
            if (i > groups->offsets[e])
                assert_true(slot > groups->order[i - 1]);
        }
}

static void check_combine(struct backend *b, const struct slot_case *c, const struct expert_groups *groups,
                          const struct tensor *yg, const struct tensor *weights)
{
    const float scale = 2.5f;
    struct guarded out = guarded_create(c->dtype, c->n_tokens, c->width, 3);
    double *want = doubles_create(c->n_tokens * c->width);

    b->ops->combine_slots(b, *yg, groups, *weights, scale, out.t);
    for (int64_t t = 0; t < c->n_tokens; t++)
        for (int64_t col = 0; col < c->width; col++)
            for (int k = 0; k < c->top_k; k++)
                want[t * c->width + col] += (double)scale * element_get(weights, t, k) *
                                            element_get(yg, groups->places[t * c->top_k + k], col);
    check_tensor(&out.t, want, 3e-6, 1e-6, "combine_slots");
    guarded_check(&out, "combine_slots");
    free(want);
    guarded_destroy(&out);
}

static void check_ungroup(struct backend *b, const struct slot_case *c, const struct expert_groups *groups,
                          const struct tensor *yg, const struct tensor *weights, enum dtype dtype)
{
    int32_t rows[200];
    int64_t n = 0;

    for (int32_t t = 0; t < c->n_tokens; t += 1 + t % 3)
        rows[n++] = t;
    struct guarded out = guarded_create(dtype, n, (int64_t)c->top_k * c->width, 2);
    double *want = doubles_create(n * c->top_k * c->width);
    b->ops->ungroup_slots(b, *yg, groups, *weights, (struct row_list){.index = rows, .n = n}, out.t);
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < c->top_k; k++)
            for (int64_t col = 0; col < c->width; col++) {
                double weight = weights->data != NULL ? element_get(weights, rows[i], k) : 1;
                want[(i * c->top_k + k) * c->width + col] =
                    weight * element_get(yg, groups->places[rows[i] * c->top_k + k], col);
            }
    check_tensor(&out.t, want, 1e-30, weights->data != NULL ? 1e-7 : 0, "ungroup_slots");
    guarded_check(&out, "ungroup_slots");
    free(want);
    guarded_destroy(&out);
}

static void slot_case_run(struct backend *b, const struct slot_case *c)
{
    uint64_t seed = 5;
    int64_t n_slots = c->n_tokens * c->top_k;
    struct guarded indices = choose_experts(c, &seed);
    struct guarded order = guarded_create(DTYPE_I32, 1, n_slots, 0),
                   places = guarded_create(DTYPE_I32, 1, n_slots, 0);
    struct guarded offsets = guarded_create(DTYPE_I32, 1, c->n_experts + 1, 0);
    struct expert_groups groups = {.order = order.t.data,
                                   .places = places.t.data,
                                   .offsets = offsets.t.data,
                                   .n_experts = c->n_experts,
                                   .top_k = c->top_k,
                                   .n_tokens = c->n_tokens};
    struct guarded yg = guarded_random(c->dtype, n_slots, c->width, 1, &seed);
    struct guarded weights = guarded_random(c->dtype, c->n_tokens, c->top_k, 1, &seed);
    struct tensor none = {0};

    b->ops->group_experts(b, indices.t, &groups);
    check_groups(c, &indices.t, &groups);
    guarded_check(&order, "order");
    guarded_check(&places, "places");
    guarded_check(&offsets, "offsets");
    check_combine(b, c, &groups, &yg.t, &weights.t);
    check_ungroup(b, c, &groups, &yg.t, &weights.t, c->dtype);
    check_ungroup(b, c, &groups, &yg.t, &none, c->dtype);
    check_ungroup(b, c, &groups, &yg.t, &weights.t, DTYPE_F32);
    struct guarded *all[] = {&indices, &order, &places, &offsets, &yg, &weights};
    for (size_t i = 0; i < COUNT(all); i++)
        guarded_destroy(all[i]);
}

static void slot_cases_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(slot_cases); i++)
        slot_case_run(b, &slot_cases[i]);
}

static void test_slots_go_out_and_back(void **state)
{
    (void)state;
    for_each_backend(slot_cases_run);
}

static void softmax_run(struct backend *b)
{
    const int widths[] = {1, 2, 7, 8, 16, 31, 100, 513};
    uint64_t seed = 3;

    for (size_t i = 0; i < COUNT(widths); i++)
        for (int half = 0; half < 2; half++) {
            int64_t n = widths[i];
            struct guarded x = guarded_random(half ? DTYPE_BF16 : DTYPE_F32, 9, n, 5, &seed);
            struct guarded y = guarded_create(DTYPE_F32, 9, n, 3);
            element_set(&x.t, 2, 0, 200);
            element_set(&x.t, 3, n - 1, -3e38f);
            for (int64_t c = 0; c < n; c++)
                element_set(&x.t, 4, c, -1000 - (float)c);
            double *want = doubles_create(9 * n);
            for (int64_t r = 0; r < 9; r++) {
                double largest = -INFINITY, sum = 0;
                for (int64_t c = 0; c < n; c++)
                    largest = fmax(largest, element_get(&x.t, r, c));
                for (int64_t c = 0; c < n; c++)
                    sum += want[r * n + c] = exp(element_get(&x.t, r, c) - largest);
                for (int64_t c = 0; c < n; c++)
                    want[r * n + c] /= sum;
            }
            b->ops->softmax(b, x.t, y.t);
            check_tensor(&y.t, want, 1e-37, 2e-6, "softmax");
            guarded_check(&y, "softmax");
            free(want);
            guarded_destroy(&x);
            guarded_destroy(&y);
        }
}

static void test_softmax_equals_reference(void **state)
{
    (void)state;
    for_each_backend(softmax_run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route_equals_reference),
        cmocka_unit_test(test_ties_go_to_lower_indices),
        cmocka_unit_test(test_slots_go_out_and_back),
        cmocka_unit_test(test_softmax_equals_reference),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

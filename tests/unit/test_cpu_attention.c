/* attention and rotary of the CPU's backend against float64 references. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "op_check.h"

struct attention_case {
    const char *name;
    int n_heads, n_kv_heads, head_dim;
    int64_t window, past;
    enum dtype dtype;
    int lengths[8];  /* of the runs, to the first 0 */
    double scale_up; /* of the queries: large ones make the softmax sharp */
};

static const struct attention_case attention_cases[] = {
    {"one token", 2, 1, 8, 0, 0, DTYPE_F32, {1}, 1},
    {"odd widths", 3, 3, 5, 0, 0, DTYPE_F32, {7, 1, 33}, 1},
    {"head_dim 1", 2, 2, 1, 0, 0, DTYPE_F32, {65}, 1},
    {"grouped, 64 wide", 12, 4, 64, 0, 0, DTYPE_F32, {130, 1, 64, 63}, 1},
    {"grouped, bfloat16", 12, 4, 64, 0, 0, DTYPE_BF16, {130, 1, 64, 63}, 1},
    {"one key head for all", 7, 1, 80, 0, 0, DTYPE_F32, {300}, 1},
    {"more heads than a tile has rows", 200, 1, 16, 0, 0, DTYPE_F32, {9, 4}, 1},
    {"wide heads", 2, 1, 192, 0, 0, DTYPE_F32, {150}, 1},
    {"wider than a block", 2, 2, 300, 0, 0, DTYPE_F32, {70}, 1},
    {"much wider, bfloat16", 2, 1, 521, 0, 0, DTYPE_BF16, {140}, 1},
    {"long", 2, 1, 32, 0, 0, DTYPE_F32, {700}, 1},
    {"sharp", 2, 1, 32, 0, 0, DTYPE_F32, {400}, 30},
    {"window 1", 2, 2, 16, 1, 0, DTYPE_F32, {90}, 1},
    {"window 2", 4, 2, 16, 2, 0, DTYPE_F32, {90, 3}, 1},
    {"window 64", 4, 2, 24, 64, 0, DTYPE_F32, {500, 64, 65}, 1},
    {"window past the run", 4, 2, 24, 1000, 0, DTYPE_F32, {300}, 1},
    {"window 100, bfloat16", 4, 2, 128, 100, 0, DTYPE_BF16, {333}, 4},
    {"sharp, bfloat16", 2, 1, 32, 0, 0, DTYPE_BF16, {400}, 30},
    {"head_dim 2, bfloat16", 2, 2, 2, 0, 0, DTYPE_BF16, {65, 1}, 1},
    {"wide heads, bfloat16", 2, 1, 190, 0, 0, DTYPE_BF16, {151}, 1},
    {"past, bfloat16", 4, 2, 80, 0, 151, DTYPE_BF16, {100, 21}, 1},
    {"past under a window, bfloat16", 4, 2, 40, 47, 151, DTYPE_BF16, {100, 20}, 1},
    {"past", 4, 2, 40, 0, 150, DTYPE_F32, {100, 20}, 1},
    {"past under a window", 4, 2, 40, 48, 150, DTYPE_F32, {100, 20}, 1},
};

struct attention_data {
    struct guarded q, k, v, y;
    struct attention_args args;
    struct run list[8];
};

/* What the references read. */
struct inputs {
    const struct attention_args *args;
    double *q, *k, *v;
};

static struct inputs inputs_create(const struct attention_args *args)
{
    return (struct inputs){
        .args = args, .q = doubles_copy(&args->q), .k = doubles_copy(&args->k), .v = doubles_copy(&args->v)};
}

static void inputs_destroy(struct inputs *in)
{
    free(in->q);
    free(in->k);
    free(in->v);
}

/* Row `row` of a head's columns. */
static const double *head_get(const double *values, int64_t row, int64_t n_heads, int64_t head,
                              int64_t head_dim)
{
    return values + (row * n_heads + head) * head_dim;
}

/* The score of query row t against key row r, in float64. */
static double score_get(const struct inputs *in, int64_t t, int64_t r, int head)
{
    const struct attention_args *a = in->args;
    const double *q = head_get(in->q, t, a->n_heads, head, a->head_dim);
    const double *k = head_get(in->k, r, a->n_kv_heads, head / (a->n_heads / a->n_kv_heads), a->head_dim);
    double sum = 0;

    for (int i = 0; i < a->head_dim; i++)
        sum += q[i] * k[i];
    return sum * (double)a->scale;
}

/* First key row that query row t of run `run` sees; the last is t + past. */
static int64_t first_key(const struct attention_args *a, int64_t run, int64_t t)
{
    int64_t first = run == 0 ? 0 : a->runs.list[run].start + a->past;
    int64_t windowed = t + a->past - a->window + 1;

    return a->window > 0 && windowed > first ? windowed : first;
}

/* probabilities[r] of query row t over key rows [first, t + past], at probabilities[r - first]; scores
 * likewise. */
static void reference_row(const struct inputs *in, int64_t run, int64_t t, int head, double *scores,
                          double *probabilities)
{
    int64_t first = first_key(in->args, run, t), n = t + in->args->past - first + 1;
    double largest = -INFINITY, sum = 0;

    for (int64_t i = 0; i < n; i++) {
        scores[i] = score_get(in, t, first + i, head);
        largest = fmax(largest, scores[i]);
    }
    for (int64_t i = 0; i < n; i++)
        sum += probabilities[i] = exp(scores[i] - largest);
    for (int64_t i = 0; i < n; i++)
        probabilities[i] /= sum;
}

static void reference_attention(const struct attention_args *a, double *y)
{
    int64_t n_keys = a->past + a->q.rows, width = (int64_t)a->n_heads * a->head_dim;
    double *scores = doubles_create(n_keys), *probabilities = doubles_create(n_keys);
    struct inputs in = inputs_create(a);

    for (int64_t run = 0; run < a->runs.n; run++)
        for (int64_t i = 0; i < a->runs.list[run].length; i++)
            for (int head = 0; head < a->n_heads; head++) {
                int64_t t = a->runs.list[run].start + i, first = first_key(a, run, t);
                double *out = y + t * width + (int64_t)head * a->head_dim;

                reference_row(&in, run, t, head, scores, probabilities);
                for (int64_t r = first; r <= t + a->past; r++) {
                    const double *v =
                        head_get(in.v, r, a->n_kv_heads, head / (a->n_heads / a->n_kv_heads), a->head_dim);
                    for (int d = 0; d < a->head_dim; d++)
                        out[d] += probabilities[r - first] * v[d];
                }
            }
    inputs_destroy(&in);
    free(scores);
    free(probabilities);
}

static void attention_data_init(struct attention_data *data, const struct attention_case *c)
{
    uint64_t seed = 88172645463325252ull;
    int n_runs = 0;

    while (n_runs < 8 && c->lengths[n_runs] > 0)
        n_runs++;
    memset(data, 0, sizeof *data);
    struct attention_args *a = &data->args;
    a->runs = runs_make(data->list, c->lengths, n_runs);
    a->runs.carry_in = c->past > 0;
    if (c->past > 0)
        data->list[0].position = (int32_t)c->past;
    int64_t T = runs_tokens(&a->runs);
    data->q = guarded_random(c->dtype, T, (int64_t)c->n_heads * c->head_dim, c->scale_up, &seed);
    data->k = guarded_random(c->dtype, T + c->past, (int64_t)c->n_kv_heads * c->head_dim, 1, &seed);
    data->v = guarded_random(c->dtype, T + c->past, (int64_t)c->n_kv_heads * c->head_dim, 1, &seed);
    data->y = guarded_create(c->dtype, T, (int64_t)c->n_heads * c->head_dim, 3);
    a->q = data->q.t, a->k = data->k.t, a->v = data->v.t, a->y = data->y.t;
    a->n_heads = c->n_heads, a->n_kv_heads = c->n_kv_heads, a->head_dim = c->head_dim;
    a->past = c->past, a->window = c->window;
    a->scale = (float)(1 / sqrt(c->head_dim));
}

static void attention_data_fini(struct attention_data *data)
{
    guarded_destroy(&data->q);
    guarded_destroy(&data->k);
    guarded_destroy(&data->v);
    guarded_destroy(&data->y);
}

static void attention_case_run(struct backend *b, const struct attention_case *c)
{
    struct attention_data data;
    char what[200];

    attention_data_init(&data, c);
    double *reference = doubles_create(data.y.t.rows * data.y.t.cols);
    reference_attention(&data.args, reference);
    b->ops->attention(b, &data.args);
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    snprintf(what, sizeof what, "%s: %s", b->name, c->name);
    check_tensor(&data.y.t, reference, c->scale_up > 1 ? 4e-5 : 3e-6, 3e-6, what);
    guarded_check(&data.y, what);
    free(reference);
    attention_data_fini(&data);
}

static void attention_cases_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(attention_cases); i++)
        attention_case_run(b, &attention_cases[i]);
}

static void test_attention_equals_reference(void **state)
{
    (void)state;
    for_each_backend(attention_cases_run);
}

/* Scores and probabilities of some rows: float64 reference, -inf and 0 elsewhere, y unchanged by asking. */
static void patterns_run(struct backend *b, const struct attention_case *c, enum dtype dtype, int64_t extra)
{
    struct attention_data data;
    const int32_t rows[] = {0, 1, 5, 64, 77, 99, 110};
    char what[200];

    attention_data_init(&data, c);
    struct attention_args *a = &data.args;
    a->n_keys = data.list[0].length + data.list[0].position + extra;
    for (int64_t i = 1; i < a->runs.n; i++)
        if (data.list[i].length > a->n_keys)
            a->n_keys = data.list[i].length + extra;
    int64_t n = COUNT(rows), width = c->n_heads * a->n_keys, n_keys = a->n_keys;
    a->pattern_rows = (struct row_list){.index = rows, .n = n};
    b->ops->attention(b, a);
    struct guarded y = guarded_create(c->dtype, a->y.rows, a->y.cols, 2);
    struct guarded scores = guarded_create(dtype, n, width, 3),
                   probabilities = guarded_create(dtype, n, width, 1);
    struct tensor plain = a->y;
    a->y = y.t, a->scores = scores.t, a->probabilities = probabilities.t;
    b->ops->attention(b, a);

    double *want_scores = doubles_create(n * width), *want_probabilities = doubles_create(n * width);
    double *s = doubles_create(n_keys), *p = doubles_create(n_keys);
    struct inputs in = inputs_create(a);
    for (int64_t i = 0; i < n * width; i++)
        want_scores[i] = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        for (int head = 0; head < c->n_heads; head++) {
            int64_t run = 0, t = rows[i];
            while (t >= data.list[run].start + data.list[run].length)
                run++;
            /* Of key row r: its position in the document's run. */
            int64_t shift = run == 0 ? data.list[0].position - c->past : -(data.list[run].start + c->past);
            int64_t first = first_key(a, run, t), at = (i * c->n_heads + head) * n_keys + first + shift;
            reference_row(&in, run, t, head, s, p);
            for (int64_t j = 0; j <= t + c->past - first; j++) {
                want_scores[at + j] = s[j];
                want_probabilities[at + j] = p[j];
            }
        }
    snprintf(what, sizeof what, "%s: %s: patterns", b->name, c->name);
    check_tensor(&scores.t, want_scores, 3e-6, 3e-6, what);
    check_tensor(&probabilities.t, want_probabilities, 1e-7, 5e-6, what);
    check_same_bits(&plain, &y.t, 0, plain.rows, what);
    guarded_check(&scores, what);
    guarded_check(&probabilities, what);
    /* Each alone too. */
    struct guarded alone = guarded_create(dtype, n, width, 3);
    a->scores = alone.t;
    a->probabilities.data = NULL;
    b->ops->attention(b, a);
    check_same_bits(&alone.t, &scores.t, 0, n, what);
    a->scores.data = NULL;
    a->probabilities = alone.t;
    b->ops->attention(b, a);
    check_same_bits(&alone.t, &probabilities.t, 0, n, what);

    free(want_scores), free(want_probabilities), free(s), free(p);
    inputs_destroy(&in);
    guarded_destroy(&alone);
    guarded_destroy(&y);
    guarded_destroy(&scores);
    guarded_destroy(&probabilities);
    attention_data_fini(&data);
}

static void all_patterns_run(struct backend *b)
{
    const struct attention_case plain = {"plain", 4, 2, 24, 0, 0, DTYPE_F32, {80, 10, 30}, 1};
    const struct attention_case windowed = {"window", 4, 2, 64, 20, 0, DTYPE_F32, {80, 10, 30}, 1};
    const struct attention_case half = {"bfloat16", 3, 1, 33, 0, 0, DTYPE_BF16, {80, 10, 30}, 1};
    const struct attention_case even = {"bfloat16, even", 3, 1, 34, 30, 0, DTYPE_BF16, {80, 10, 30}, 1};
    const struct attention_case carried = {"past", 4, 2, 24, 0, 50, DTYPE_F32, {80, 10, 30}, 1};

    patterns_run(b, &plain, DTYPE_F32, 0);
    patterns_run(b, &plain, DTYPE_BF16, 37);
    patterns_run(b, &windowed, DTYPE_F32, 11);
    patterns_run(b, &half, DTYPE_BF16, 5);
    patterns_run(b, &half, DTYPE_F32, 5);
    patterns_run(b, &even, DTYPE_F32, 5);
    patterns_run(b, &carried, DTYPE_F32, 7);
}

static void test_patterns_equal_reference(void **state)
{
    (void)state;
    for_each_backend(all_patterns_run);
}

/* A run cut in two: the second half, given the first half's keys, is the whole's. */
static void halves_run(struct backend *b)
{
    const struct attention_case c = {"whole", 6, 2, 48, 0, 0, DTYPE_F32, {357}, 1};
    struct attention_data data;

    for (int64_t window = 0; window <= 90; window += 90) {
        attention_data_init(&data, &c);
        data.args.window = window;
        b->ops->attention(b, &data.args);
        double *whole = doubles_create(data.y.t.rows * data.y.t.cols);
        for (int64_t i = 0; i < data.y.t.rows * data.y.t.cols; i++)
            whole[i] = element_get(&data.y.t, i / data.y.t.cols, i % data.y.t.cols);

        int32_t cut = 201;
        struct run half = {.start = 0, .length = 357 - cut, .position = cut};
        struct guarded y = guarded_create(DTYPE_F32, 357 - cut, data.y.t.cols, 1);
        struct attention_args a = data.args;
        a.runs = (struct runs){.list = &half, .n = 1, .carry_in = true};
        a.q = tensor_rows(a.q, cut, 357 - cut);
        a.past = cut;
        a.y = y.t;
        b->ops->attention(b, &a);
        check_tensor(&y.t, whole + cut * data.y.t.cols, 1e-6, 1e-6, "second half");
        /* With a window, keys that nobody sees any more may be gone. */
        if (window > 0) {
            int64_t gone = cut - (window - 1);
            a.k = tensor_rows(a.k, gone, a.k.rows - gone);
            a.v = tensor_rows(a.v, gone, a.v.rows - gone);
            a.past = window - 1;
            b->ops->attention(b, &a);
            check_tensor(&y.t, whole + cut * data.y.t.cols, 1e-6, 1e-6, "second half, old keys gone");
        }
        guarded_check(&y, "second half");
        guarded_destroy(&y);
        free(whole);
        attention_data_fini(&data);
    }
}

static void test_halves_equal_the_whole(void **state)
{
    (void)state;
    for_each_backend(halves_run);
}

/* Other tokens in one run leave the other runs' bits alone, even where they are not finite. */
static void neighbours_of_dtype_run(struct backend *b, enum dtype dtype)
{
    const struct attention_case c = {"neighbours", 6, 2, 24, 0, 0, dtype, {70, 50, 90}, 1};
    struct attention_data data;

    attention_data_init(&data, &c);
    b->ops->attention(b, &data.args);
    struct guarded y = guarded_create(dtype, data.y.t.rows, data.y.t.cols, 0);
    struct tensor first = data.args.y;
    for (int64_t r = 70; r < 120; r++)
        for (int64_t i = 0; i < data.k.t.cols; i++) {
            element_set(&data.k.t, r, i, r % 2 ? NAN : 1e30f);
            element_set(&data.v.t, r, i, r % 2 ? INFINITY : -3);
        }
    data.args.y = y.t;
    b->ops->attention(b, &data.args);
    check_same_bits(&first, &y.t, 0, 70, "run before");
    check_same_bits(&first, &y.t, 120, 90, "run behind");
    guarded_destroy(&y);
    attention_data_fini(&data);
}

static void neighbours_run(struct backend *b)
{
    neighbours_of_dtype_run(b, DTYPE_F32);
    neighbours_of_dtype_run(b, DTYPE_BF16);
}

static void test_neighbours_are_untouched(void **state)
{
    (void)state;
    for_each_backend(neighbours_run);
}

/* What a query may not see does not reach it, however large; what it sees does. */
static void hidden_keys_of_dtype_run(struct backend *b, enum dtype dtype)
{
    const struct attention_case c = {"hidden", 3, 1, 20, 40, 0, dtype, {200}, 1};
    struct attention_data data;

    attention_data_init(&data, &c);
    b->ops->attention(b, &data.args);
    struct guarded y = guarded_create(dtype, data.y.t.rows, data.y.t.cols, 0);
    struct tensor first = data.args.y;
    for (int64_t i = 0; i < data.k.t.cols; i++)
        element_set(&data.v.t, 101, i, 1e30f);
    data.args.y = y.t;
    b->ops->attention(b, &data.args);
    check_same_bits(&first, &y.t, 0, 101, "queries before");
    check_same_bits(&first, &y.t, 141, 59, "queries that it has left the window of");
    for (int64_t r = 101; r < 141; r++)
        assert_true(element_get(&y.t, r, 0) > 1e20);
    guarded_destroy(&y);
    attention_data_fini(&data);
}

static void hidden_keys_run(struct backend *b)
{
    hidden_keys_of_dtype_run(b, DTYPE_F32);
    hidden_keys_of_dtype_run(b, DTYPE_BF16);
}

static void test_hidden_keys_do_not_leak(void **state)
{
    (void)state;
    for_each_backend(hidden_keys_run);
}

struct rotary_case {
    int n_heads, head_dim, rotary_dim;
    enum dtype dtype;
};

static const struct rotary_case rotary_cases[] = {
    {1, 2, 2, DTYPE_F32},    {3, 10, 6, DTYPE_F32},  {4, 64, 64, DTYPE_F32}, {4, 128, 64, DTYPE_BF16},
    {2, 80, 80, DTYPE_BF16}, {2, 48, 46, DTYPE_F32}, {2, 33, 0, DTYPE_F32},
};

static void rotary_case_run(struct backend *b, const struct rotary_case *c)
{
    const int lengths[] = {3, 1, 40};
    struct run list[3];
    uint64_t seed = 7;
    int half = c->rotary_dim / 2;

    struct rotary_args a = {.n_heads = c->n_heads, .head_dim = c->head_dim, .rotary_dim = c->rotary_dim};
    a.runs = runs_make(list, lengths, 3);
    list[0].position = 9;
    struct guarded x = guarded_random(c->dtype, 44, (int64_t)c->n_heads * c->head_dim, 2, &seed);
    float *tables = malloc(sizeof(float) * (size_t)(2 * 40 * half + 1));
    assert_non_null(tables);
    for (int i = 0; i < 40 * half; i++) {
        tables[i] = (float)random_normal(&seed);
        tables[40 * half + i] = (float)random_normal(&seed);
    }
    a.x = x.t, a.cosine = tables, a.sine = tables + 40 * half;
    double *want = doubles_create(44 * x.t.cols);
    for (int64_t t = 0; t < 44; t++)
        for (int64_t i = 0; i < x.t.cols; i++) {
            int64_t in_head = i % c->head_dim, run = t < 3 ? 0 : t < 4 ? 1 : 2;
            int64_t position = t - list[run].start + list[run].position,
                    pair = in_head % (half > 0 ? half : 1);
            double value = element_get(&x.t, t, i);
            want[t * x.t.cols + i] = value;
            if (in_head >= c->rotary_dim)
                continue;
            double cosine = (double)a.cosine[position * half + pair],
                   sine = (double)a.sine[position * half + pair];
            double other = in_head < half ? -element_get(&x.t, t, i + half) : element_get(&x.t, t, i - half);
            want[t * x.t.cols + i] = value * cosine + other * sine;
        }
    b->ops->rotary(b, &a);
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    check_tensor(&x.t, want, 2e-6, 1e-6, "rotary");
    guarded_check(&x, "rotary");
    free(want);
    free(tables);
    guarded_destroy(&x);
}

static void rotary_cases_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(rotary_cases); i++)
        rotary_case_run(b, &rotary_cases[i]);
}

static void test_rotary_equals_reference(void **state)
{
    (void)state;
    for_each_backend(rotary_cases_run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_equals_reference), cmocka_unit_test(test_patterns_equal_reference),
        cmocka_unit_test(test_halves_equal_the_whole),     cmocka_unit_test(test_neighbours_are_untouched),
        cmocka_unit_test(test_hidden_keys_do_not_leak),    cmocka_unit_test(test_rotary_equals_reference),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

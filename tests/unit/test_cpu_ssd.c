/* ssd_scan of the CPU's backend against the recurrence in float64. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "op_check.h"

#define MAX_RUNS 8

struct ssd_case {
    const char *name;
    int n_heads, head_dim, state_dim, n_groups, chunk;
    enum dtype dtype;
    float dt_min, dt_max;
    double decay;          /* A is about -decay */
    int lengths[MAX_RUNS]; /* of the runs, to the first 0 */
};

static const struct ssd_case ssd_cases[] = {
    {"one token", 2, 8, 4, 1, 64, DTYPE_F32, 0, INFINITY, 1, {1}},
    {"all ones", 1, 1, 1, 1, 1, DTYPE_F32, 0, INFINITY, 1, {5}},
    {"odd widths", 6, 5, 3, 3, 7, DTYPE_F32, 0, INFINITY, 1, {30, 1, 7, 8}},
    {"bamba's", 8, 64, 128, 1, 256, DTYPE_F32, 0, INFINITY, 1, {200, 64, 1, 65}},
    {"bamba's, bfloat16", 8, 64, 128, 1, 256, DTYPE_BF16, 0, INFINITY, 1, {200, 64, 1, 65}},
    {"groups", 12, 16, 20, 4, 32, DTYPE_F32, 0, INFINITY, 1, {100, 33}},
    {"a group each", 3, 24, 17, 3, 64, DTYPE_F32, 0, INFINITY, 1, {90}},
    {"wide heads", 2, 200, 40, 1, 64, DTYPE_F32, 0, INFINITY, 1, {70, 70}},
    {"wide states", 2, 33, 300, 2, 64, DTYPE_F32, 0, INFINITY, 1, {130}},
    {"very wide states", 1, 40, 5000, 1, 64, DTYPE_F32, 0, INFINITY, 1, {70}},
    {"limits", 4, 16, 16, 1, 64, DTYPE_F32, 0.5f, 0.75f, 1, {100}},
    {"slow decay", 4, 32, 16, 1, 64, DTYPE_F32, 0, INFINITY, 1e-4, {700}},
    {"fast decay", 4, 32, 16, 1, 64, DTYPE_F32, 0, INFINITY, 80, {300}},
    {"no decay at all", 4, 32, 16, 1, 64, DTYPE_F32, 0, 0.02f, 0, {150}},
    {"state gone in a token", 2, 16, 8, 1, 64, DTYPE_F32, 0, INFINITY, 1e6, {100}},
};

struct ssd_data {
    struct guarded x, dt, B, C, y, betas;
    float *dt_bias, *A, *D, *carry;
    struct ssd_scan_args args;
    struct run list[MAX_RUNS];
};

/* What the recurrence gives, in float64. states: of every token, or NULL. */
struct ssd_reference {
    double *y, *betas, *states, *carry;
};

static int64_t state_size(const struct ssd_scan_args *a)
{
    return (int64_t)a->n_heads * a->state_dim * a->head_dim;
}

static double reference_beta(const struct ssd_scan_args *a, int64_t t, int head)
{
    double raw = element_get(&a->dt, t, head) + (double)a->dt_bias[head];
    double beta = raw > 20 ? raw : log1p(exp(raw));

    return fmin(fmax(beta, (double)a->dt_min), (double)a->dt_max);
}

/* One token of one head; state [N, P]. */
static void reference_step(const struct ssd_scan_args *a, int64_t t, int head, double *state, double *y)
{
    int64_t group = head / (a->n_heads / a->n_groups), P = a->head_dim;
    double beta = reference_beta(a, t, head), decay = exp(beta * (double)a->A[head]);

    for (int64_t p = 0; p < P; p++)
        y[p] = (double)a->D[head] * element_get(&a->x, t, head * P + p);
    for (int64_t n = 0; n < a->state_dim; n++) {
        double B = element_get(&a->B, t, group * a->state_dim + n),
               C = element_get(&a->C, t, group * a->state_dim + n);
        for (int64_t p = 0; p < P; p++) {
            double *s = &state[n * P + p];
            *s = *s * decay + beta * B * element_get(&a->x, t, head * P + p);
            y[p] += C * *s;
        }
    }
}

static void reference_scan(const struct ssd_scan_args *a, struct ssd_reference *r)
{
    int64_t size = (int64_t)a->state_dim * a->head_dim;
    double *state = doubles_create(size);

    for (int64_t run = 0; run < a->runs.n; run++)
        for (int head = 0; head < a->n_heads; head++) {
            for (int64_t i = 0; i < size; i++)
                state[i] = run == 0 && a->runs.carry_in ? r->carry[head * size + i] : 0;
            for (int64_t t = a->runs.list[run].start; t < a->runs.list[run].start + a->runs.list[run].length;
                 t++) {
                reference_step(a, t, head, state,
                               r->y + t * a->n_heads * a->head_dim + (int64_t)head * a->head_dim);
                r->betas[t * a->n_heads + head] = reference_beta(a, t, head);
                if (r->states != NULL)
                    memcpy(r->states + t * state_size(a) + head * size, state, (size_t)size * sizeof *state);
            }
        }
    free(state);
}

static float *floats_create(int64_t n)
{
    float *values = calloc((size_t)n, sizeof *values);
    assert_non_null(values);
    return values;
}

static void ssd_data_init(struct ssd_data *data, const struct ssd_case *c)
{
    uint64_t seed = 88172645463325252ull;
    int n_runs = 0;

    while (n_runs < MAX_RUNS && c->lengths[n_runs] > 0)
        n_runs++;
    memset(data, 0, sizeof *data);
    struct ssd_scan_args *a = &data->args;
    a->runs = runs_make(data->list, c->lengths, n_runs);
    int64_t T = runs_tokens(&a->runs), width = (int64_t)c->n_heads * c->head_dim;
    data->x = guarded_random(c->dtype, T, width, 1, &seed);
    data->dt = guarded_random(c->dtype, T, c->n_heads, 2, &seed);
    data->B = guarded_random(c->dtype, T, (int64_t)c->n_groups * c->state_dim, 1 / sqrt(c->state_dim), &seed);
    data->C = guarded_random(c->dtype, T, (int64_t)c->n_groups * c->state_dim, 1, &seed);
    data->y = guarded_create(c->dtype, T, width, 3);
    data->betas = guarded_create(DTYPE_F32, T, c->n_heads, 2);
    data->dt_bias = floats_create(c->n_heads);
    data->A = floats_create(c->n_heads);
    data->D = floats_create(c->n_heads);
    data->carry = floats_create((int64_t)c->n_heads * c->head_dim * c->state_dim);
    for (int h = 0; h < c->n_heads; h++) {
        data->dt_bias[h] = (float)(random_normal(&seed) - 1);
        data->A[h] = (float)(-c->decay * (0.5 + random_uniform(&seed)));
        data->D[h] = (float)random_normal(&seed);
    }
    a->x = data->x.t, a->dt = data->dt.t, a->B = data->B.t, a->C = data->C.t;
    a->y = data->y.t, a->betas = data->betas.t;
    a->dt_bias = data->dt_bias, a->A = data->A, a->D = data->D, a->carry = data->carry;
    a->n_heads = c->n_heads, a->head_dim = c->head_dim, a->state_dim = c->state_dim,
    a->n_groups = c->n_groups;
    a->dt_min = c->dt_min, a->dt_max = c->dt_max, a->chunk = c->chunk;
}

static void ssd_data_fini(struct ssd_data *data)
{
    struct guarded *tensors[] = {&data->x, &data->dt, &data->B, &data->C, &data->y, &data->betas};

    for (size_t i = 0; i < COUNT(tensors); i++)
        guarded_destroy(tensors[i]);
    free(data->dt_bias);
    free(data->A);
    free(data->D);
    free(data->carry);
}

static struct ssd_reference reference_create(const struct ssd_scan_args *a, bool with_states)
{
    return (struct ssd_reference){.y = doubles_create(a->y.rows * a->y.cols),
                                  .betas = doubles_create(a->y.rows * a->n_heads),
                                  .states = with_states ? doubles_create(a->y.rows * state_size(a)) : NULL,
                                  .carry = doubles_create(state_size(a))};
}

static void reference_destroy(struct ssd_reference *r)
{
    free(r->y);
    free(r->betas);
    free(r->states);
    free(r->carry);
}

/* What float32 may lose of sums of hundreds of terms: by the size of what they add up to, and by how many. */
static double tolerance(const double *reference, int64_t n, int state_dim)
{
    double power = 0;

    for (int64_t i = 0; i < n; i++)
        power += reference[i] * reference[i];
    return 6e-6 * (1 + sqrt(power / (double)n)) * (1 + sqrt(state_dim) / 32);
}

static void ssd_case_run(struct backend *b, const struct ssd_case *c)
{
    struct ssd_data data;
    char what[200];

    ssd_data_init(&data, c);
    struct ssd_reference r = reference_create(&data.args, false);
    reference_scan(&data.args, &r);
    b->ops->ssd_scan(b, &data.args);
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    snprintf(what, sizeof what, "%s: %s", b->name, c->name);
    check_tensor(&data.y.t, r.y, tolerance(r.y, data.y.t.rows * data.y.t.cols, c->state_dim), 4e-6, what);
    check_tensor(&data.betas.t, r.betas, 1e-12, 1e-6, what);
    guarded_check(&data.y, what);
    guarded_check(&data.betas, what);
    /* Nobody asks for the betas. */
    struct guarded y = guarded_create(c->dtype, data.y.t.rows, data.y.t.cols, 0);
    data.args.y = y.t;
    data.args.betas.data = NULL;
    b->ops->ssd_scan(b, &data.args);
    check_same_bits(&data.y.t, &y.t, 0, y.t.rows, what);
    guarded_destroy(&y);
    reference_destroy(&r);
    ssd_data_fini(&data);
}

static void ssd_cases_run(struct backend *b)
{
    for (size_t i = 0; i < COUNT(ssd_cases); i++)
        ssd_case_run(b, &ssd_cases[i]);
}

static void test_scan_equals_recurrence(void **state)
{
    (void)state;
    for_each_backend(ssd_cases_run);
}

/* x of 2^-130 is a zero, and so is what a state of ordinary size has become after 2^-130. */
static void subnormals_run(struct backend *b)
{
    const struct ssd_case c = {"subnormals", 2, 40, 8, 1, 64, DTYPE_F32, 1, 1, 1, {40}};
    struct ssd_data data;

    ssd_data_init(&data, &c);
    for (int h = 0; h < c.n_heads; h++)
        data.A[h] = (float)(-3 * log(2)); /* beta is 1: 2^-3 a token */
    for (int64_t t = 0; t < data.x.t.rows; t++)
        for (int64_t i = 0; i < data.x.t.cols; i++)
            element_set(&data.x.t, t, i, t == 0 ? 1 : 0x1p-130f);
    struct ssd_reference r = reference_create(&data.args, false);
    reference_scan(&data.args, &r);
    b->ops->ssd_scan(b, &data.args);
    check_tensor(&data.y.t, r.y, 0x1p-125, 1e-5, "subnormals");
    reference_destroy(&r);
    ssd_data_fini(&data);
}

static void test_subnormals_are_zeros(void **state)
{
    (void)state;
    for_each_backend(subnormals_run);
}

static void chunks_run(struct backend *b)
{
    const struct ssd_case c = {"chunks", 4, 24, 20, 2, 1, DTYPE_F32, 0, INFINITY, 0.3, {300, 5, 64}};
    const int chunks[] = {1, 2, 7, 64, 100, 256};
    struct ssd_data data;

    ssd_data_init(&data, &c);
    struct ssd_reference r = reference_create(&data.args, false);
    reference_scan(&data.args, &r);
    for (size_t i = 0; i < COUNT(chunks); i++) {
        data.args.chunk = chunks[i];
        memset(data.y.t.data, 0, 8);
        b->ops->ssd_scan(b, &data.args);
        check_tensor(&data.y.t, r.y, 8e-6, 2e-6, "chunks");
    }
    reference_destroy(&r);
    ssd_data_fini(&data);
}

static void test_chunks_differ_by_rounding_only(void **state)
{
    (void)state;
    for_each_backend(chunks_run);
}

/* States of chosen rows, with the chosen rows dense, sparse and at the ends of chunks and runs. */
static void states_run(struct backend *b, const struct ssd_case *c, const int32_t *rows, int64_t n)
{
    struct ssd_data data;
    char what[200];

    ssd_data_init(&data, c);
    b->ops->ssd_scan(b, &data.args);
    struct ssd_reference r = reference_create(&data.args, true);
    reference_scan(&data.args, &r);
    struct guarded states = guarded_create(DTYPE_F32, n, state_size(&data.args), 7);
    struct guarded y = guarded_create(c->dtype, data.y.t.rows, data.y.t.cols, 1);
    data.args.state_rows = (struct row_list){.index = rows, .n = n};
    data.args.states = states.t;
    data.args.y = y.t;
    b->ops->ssd_scan(b, &data.args);
    double *want = doubles_create(n * state_size(&data.args));
    for (int64_t i = 0; i < n; i++)
        memcpy(want + i * state_size(&data.args), r.states + rows[i] * state_size(&data.args),
               (size_t)state_size(&data.args) * sizeof *want);
    snprintf(what, sizeof what, "%s: states: %s", b->name, c->name);
    check_tensor(&states.t, want, 4e-6, 4e-6, what);
    guarded_check(&states, what);
    check_same_bits(&y.t, &data.y.t, 0, y.t.rows, what);
    free(want);
    guarded_destroy(&states);
    guarded_destroy(&y);
    reference_destroy(&r);
    ssd_data_fini(&data);
}

static void all_states_run(struct backend *b)
{
    const struct ssd_case small = {"small", 4, 12, 9, 2, 16, DTYPE_F32, 0, INFINITY, 1, {60, 1, 40}};
    const struct ssd_case wide = {"wide", 3, 70, 16, 1, 64, DTYPE_BF16, 0, INFINITY, 1, {60, 1, 40}};
    const int32_t some[] = {0, 1, 15, 16, 17, 31, 47, 58, 59, 60, 61, 100};
    int32_t all[101];

    for (int i = 0; i < 101; i++)
        all[i] = i;
    states_run(b, &small, some, COUNT(some));
    states_run(b, &small, all, 101);
    states_run(b, &small, all + 99, 1);
    states_run(b, &wide, some, COUNT(some));
}

static void test_states_equal_recurrence(void **state)
{
    (void)state;
    for_each_backend(all_states_run);
}

/* A run in two batches, the state carried over; other runs before and behind it. */
static void carry_run(struct backend *b)
{
    const struct ssd_case c = {"whole", 4, 40, 24, 2, 32, DTYPE_F32, 0, INFINITY, 0.2, {250}};
    const int32_t cut = 133;
    struct ssd_data data;

    ssd_data_init(&data, &c);
    struct ssd_reference r = reference_create(&data.args, true);
    reference_scan(&data.args, &r);

    /* First batch: a short run, then the run's first part; the carry is written only. */
    struct ssd_scan_args a = data.args;
    struct run first[] = {{.start = 0, .length = 3}, {.start = 3, .length = cut - 3}};
    a.runs = (struct runs){.list = first, .n = 1, .carry_out = true};
    first[0].length = cut;
    memset(data.carry, 0x7f, (size_t)state_size(&a) * sizeof(float));
    b->ops->ssd_scan(b, &a);
    struct tensor carry = tensor_make(data.carry, DTYPE_F32, 1, state_size(&a));
    check_tensor(&carry, r.states + (cut - 1) * state_size(&a), 4e-6, 4e-6, "carry");

    /* Second batch: the rest, then the run anew as one that has nothing to do with it, whose state is kept.
     */
    struct guarded x = guarded_create(DTYPE_F32, 250 - cut + 20, data.x.t.cols, 0);
    struct run second[] = {{.start = cut, .length = 250 - cut - 20, .position = cut},
                           {.start = 230, .length = 20}};
    struct ssd_scan_args both = data.args;
    second[0].start = 0, second[1].start = second[0].length;
    both.x = tensor_rows(both.x, cut, 250 - cut), both.dt = tensor_rows(both.dt, cut, 250 - cut);
    both.B = tensor_rows(both.B, cut, 250 - cut), both.C = tensor_rows(both.C, cut, 250 - cut);
    both.y = tensor_rows(both.y, cut, 250 - cut), both.betas = tensor_rows(both.betas, cut, 250 - cut);
    both.runs = (struct runs){.list = second, .n = 2, .carry_in = true, .carry_out = true};
    b->ops->ssd_scan(b, &both);
    struct tensor y = tensor_rows(data.y.t, 0, 230);
    check_tensor(&y, r.y, 1e-5, 4e-6, "carried");
    struct ssd_scan_args last = both;
    last.runs = (struct runs){.list = second + 1, .n = 1};
    struct ssd_reference alone = reference_create(&data.args, true);
    reference_scan(&last, &alone);
    check_tensor(&carry, alone.states + (250 - cut - 1) * state_size(&a), 4e-6, 4e-6,
                 "carry of the last run");
    guarded_check(&data.y, "carry");
    guarded_destroy(&x);
    reference_destroy(&alone);
    reference_destroy(&r);
    ssd_data_fini(&data);
}

static void test_carry_continues_a_run(void **state)
{
    (void)state;
    for_each_backend(carry_run);
}

/* Other tokens in one run, finite or not, leave the other runs' bits alone, wherever they lie. */
static void neighbours_run(struct backend *b)
{
    const struct ssd_case c = {"neighbours", 4, 24, 20, 1, 64, DTYPE_F32, 0, INFINITY, 1, {70, 50, 90}};
    const int alone[] = {90};
    struct ssd_data data;

    ssd_data_init(&data, &c);
    b->ops->ssd_scan(b, &data.args);
    struct guarded y = guarded_create(DTYPE_F32, data.y.t.rows, data.y.t.cols, 0);
    struct tensor first = data.args.y;
    for (int64_t r = 70; r < 120; r++)
        for (int64_t i = 0; i < data.x.t.cols; i++)
            element_set(&data.x.t, r, i, r % 2 ? NAN : 1e30f);
    data.args.y = y.t;
    b->ops->ssd_scan(b, &data.args);
    check_same_bits(&first, &y.t, 0, 70, "run before");
    check_same_bits(&first, &y.t, 120, 90, "run behind");

    struct ssd_scan_args a = data.args;
    struct run list[1];
    a.runs = runs_make(list, alone, 1);
    a.x = tensor_rows(a.x, 120, 90), a.dt = tensor_rows(a.dt, 120, 90);
    a.B = tensor_rows(a.B, 120, 90), a.C = tensor_rows(a.C, 120, 90);
    a.y = tensor_rows(a.y, 120, 90), a.betas = tensor_rows(a.betas, 120, 90);
    memset(tensor_row(&y.t, 120), 0, 90 * (size_t)y.t.stride * sizeof(float));
    b->ops->ssd_scan(b, &a);
    check_same_bits(&first, &y.t, 120, 90, "run alone");
    guarded_destroy(&y);
    ssd_data_fini(&data);
}

static void test_neighbours_are_untouched(void **state)
{
    (void)state;
    for_each_backend(neighbours_run);
}

/* The number of threads changes no bit. */
static void test_threads_change_no_bit(void **state)
{
    const struct ssd_case c = {"threads", 6, 72, 20, 2, 64, DTYPE_F32, 0, INFINITY, 1, {200}};
    const int threads[] = {1, 2, 5, 16};
    struct guarded first = {0};

    (void)state;
    for (size_t i = 0; i < COUNT(threads); i++) {
        struct op_backend kind = {"baseline", threads[i]};
        struct backend *b = op_backend_create(&kind);
        struct ssd_data data;
        ssd_data_init(&data, &c);
        b->ops->ssd_scan(b, &data.args);
        if (i == 0) {
            first = data.y;
            data.y = guarded_create(DTYPE_F32, 1, 1, 0);
        } else {
            check_same_bits(&first.t, &data.y.t, 0, first.t.rows, "threads");
        }
        ssd_data_fini(&data);
        backend_destroy(b);
    }
    guarded_destroy(&first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scan_equals_recurrence),
        cmocka_unit_test(test_subnormals_are_zeros),
        cmocka_unit_test(test_chunks_differ_by_rounding_only),
        cmocka_unit_test(test_states_equal_recurrence),
        cmocka_unit_test(test_carry_continues_a_run),
        cmocka_unit_test(test_neighbours_are_untouched),
        cmocka_unit_test(test_threads_change_no_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

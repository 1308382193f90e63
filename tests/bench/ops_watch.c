#include "tests/bench/ops_watch.h"

#include "pipeline/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CALLS = 16384, MAX_TIMES = 96 };

/* One matrix product of a forward. */
struct call {
    struct tensor x, y;
    const struct matrix *w;        /* linear */
    struct matrix *const *experts; /* grouped_linear */
    struct expert_groups groups;   /* with offsets of its own */
};

static const struct backend_ops *real;
static struct backend_ops watching;
static struct call calls[MAX_CALLS];
static int n_calls;
static bool recording;
static struct op_time times[MAX_TIMES];
static int n_times;

/* ---------------------------------------------------------------- times */

/* The operation's entry; NULL where there are too many. */
static struct op_time *find(const char *name)
{
    int i = 0;
    while (i < n_times && strcmp(times[i].name, name) != 0)
        i++;
    if (i == MAX_TIMES)
        return NULL;
    if (i == n_times) {
        times[n_times++] = (struct op_time){.calls = 0};
        snprintf(times[i].name, sizeof times[i].name, "%s", name);
    }
    return &times[i];
}

static void note(const char *name, double start_s, double multiply_adds)
{
    double seconds = clock_seconds() - start_s;
    struct op_time *t = find(name);
    if (t == NULL)
        return;
    t->calls++;
    t->seconds += seconds;
    t->multiply_adds += multiply_adds;
}

static struct op_time *find_product(const char *kind, const struct tensor *x, const struct tensor *y)
{
    char name[sizeof times->name];
    snprintf(name, sizeof name, "%s %lld x %lld", kind, (long long)y->cols, (long long)x->cols);
    return find(name);
}

static void note_product(const char *kind, double start_s, const struct tensor *x, const struct tensor *y)
{
    double seconds = clock_seconds() - start_s;
    struct op_time *t = find_product(kind, x, y);
    if (t == NULL)
        return;
    t->calls++;
    t->seconds += seconds;
    t->multiply_adds += (double)x->rows * (double)x->cols * (double)y->cols;
}

void ops_watch_reset(void)
{
    n_times = 0;
}

static int compare_times(const void *a, const void *b)
{
    const struct op_time *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

int ops_watch_get(struct op_time *out, int max)
{
    qsort(times, (size_t)n_times, sizeof *times, compare_times);
    int n = n_times < max ? n_times : max;
    memcpy(out, times, (size_t)n * sizeof *out);
    return n;
}

/* ---------------------------------------------------------------- products */

static void forget_calls(void)
{
    for (int i = 0; i < n_calls; i++) {
        if (calls[i].experts != NULL)
            free(calls[i].groups.offsets);
    }
    n_calls = 0;
}

void ops_watch_record(bool on)
{
    if (on)
        forget_calls();
    recording = on;
}

double ops_watch_replay(struct backend *b)
{
    const struct tensor none = {0};
    double start = clock_seconds(), before = start;
    for (int i = 0; i < n_calls; i++) {
        const struct call *c = &calls[i];
        if (c->experts != NULL)
            real->grouped_linear(b, c->x, &c->groups, c->experts, c->y);
        else
            real->linear(b, c->x, c->w, NULL, none, c->y);
        struct op_time *t = find_product(c->experts != NULL ? "experts" : "linear", &c->x, &c->y);
        double now = clock_seconds();
        if (t != NULL)
            t->replayed_s += now - before;
        before = now;
    }
    return clock_seconds() - start;
}

static void linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                   struct tensor addend, struct tensor y)
{
    if (recording && n_calls < MAX_CALLS)
        calls[n_calls++] = (struct call){.x = x, .y = y, .w = w};
    double start = clock_seconds();
    real->linear(b, x, w, bias, addend, y);
    note_product("linear", start, &x, &y);
}

static void record_experts(struct tensor xg, const struct expert_groups *groups,
                           struct matrix *const *experts, struct tensor yg)
{
    if (!recording || n_calls == MAX_CALLS)
        return;
    struct call *call = &calls[n_calls++];
    size_t bytes = ((size_t)groups->n_experts + 1) * sizeof(int32_t);
    *call = (struct call){.x = xg, .y = yg, .experts = experts, .groups = *groups};
    call->groups.offsets = malloc(bytes);
    memcpy(call->groups.offsets, groups->offsets, bytes);
}

static void grouped_linear(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                           struct matrix *const *experts, struct tensor yg)
{
    record_experts(xg, groups, experts, yg);
    double start = clock_seconds();
    real->grouped_linear(b, xg, groups, experts, yg);
    note_product("experts", start, &xg, &yg);
}

/* Run again it is its product alone, of rows that are together already. */
static void gathered_linear(struct backend *b, struct tensor x, const struct expert_groups *groups,
                            struct matrix *const *experts, struct tensor xg, struct tensor yg)
{
    record_experts(xg, groups, experts, yg);
    double start = clock_seconds();
    real->gathered_linear(b, x, groups, experts, xg, yg);
    note_product("experts", start, &xg, &yg);
}

/* ---------------------------------------------------------------- everything else */

static enum status matrix_create(struct backend *b, const struct tensor *w, enum dtype compute,
                                 const char *name, struct matrix **out, struct error *error)
{
    double start = clock_seconds();
    enum status status = real->matrix_create(b, w, compute, name, out, error);
    note("matrix_create", start, 0);
    return status;
}

static void upload(struct backend *b, void *to, const void *from_host, size_t bytes)
{
    double start = clock_seconds();
    real->upload(b, to, from_host, bytes);
    note("upload", start, 0);
}

static void embed(struct backend *b, struct tensor table, const int32_t *ids, struct tensor out)
{
    double start = clock_seconds();
    real->embed(b, table, ids, out);
    note("embed", start, 0);
}

static void rms_norm(struct backend *b, const struct norm_args *args)
{
    double start = clock_seconds();
    real->rms_norm(b, args);
    note(args->gate.data != NULL ? "rms_norm gated" : "rms_norm", start, 0);
}

static void add(struct backend *b, struct tensor x, struct tensor y, struct tensor out)
{
    double start = clock_seconds();
    real->add(b, x, y, out);
    note("add", start, 0);
}

static void add_scaled(struct backend *b, struct tensor x, struct tensor y, float scale, struct tensor out)
{
    double start = clock_seconds();
    real->add_scaled(b, x, y, scale, out);
    note("add_scaled", start, 0);
}

static void silu_mul(struct backend *b, struct tensor gate, struct tensor up, struct tensor activation,
                     struct tensor y)
{
    double start = clock_seconds();
    real->silu_mul(b, gate, up, activation, y);
    note("silu_mul", start, 0);
}

static void conv_silu(struct backend *b, const struct conv_args *args)
{
    double start = clock_seconds();
    real->conv_silu(b, args);
    note("conv_silu", start, 0);
}

static void selective_scan(struct backend *b, const struct selective_scan_args *args)
{
    double start = clock_seconds();
    real->selective_scan(b, args);
    note("selective_scan", start, 0);
}

static void ssd_scan(struct backend *b, const struct ssd_scan_args *args)
{
    double start = clock_seconds();
    real->ssd_scan(b, args);
    note("ssd_scan", start, 0);
}

static void rotary(struct backend *b, const struct rotary_args *args)
{
    double start = clock_seconds();
    real->rotary(b, args);
    note("rotary", start, 0);
}

/* Of what the mask lets through: queries times keys, and probabilities times values. */
static double count_attention(const struct attention_args *args)
{
    double pairs = 0;
    for (int64_t i = 0; i < args->runs.n; i++) {
        double n = args->runs.list[i].length, past = i == 0 ? (double)args->past : 0;
        double w = args->window > 0 && (double)args->window < n + past ? (double)args->window : n + past;
        /* Queries whose window still reaches back to the first key see 1, 2, ... keys, the others w. */
        double growing = w > past ? w - past : 0;
        pairs += growing * past + growing * (growing + 1) / 2 + (n - growing) * w;
    }
    return 2 * pairs * args->n_heads * args->head_dim;
}

static void attention(struct backend *b, const struct attention_args *args)
{
    double start = clock_seconds();
    real->attention(b, args);
    note(args->window > 0 ? "attention in windows" : "attention", start, count_attention(args));
}

static void softplus_gate(struct backend *b, struct tensor x, struct tensor gate, int head_dim,
                          struct tensor y)
{
    double start = clock_seconds();
    real->softplus_gate(b, x, gate, head_dim, y);
    note("softplus_gate", start, 0);
}

static void route(struct backend *b, const struct route_args *args)
{
    double start = clock_seconds();
    real->route(b, args);
    note("route", start, 0);
}

static void group_experts(struct backend *b, struct tensor indices, struct expert_groups *groups)
{
    double start = clock_seconds();
    real->group_experts(b, indices, groups);
    note("group_experts", start, 0);
}

static void combine_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                          struct tensor weights, float scale, struct tensor out)
{
    double start = clock_seconds();
    real->combine_slots(b, yg, groups, weights, scale, out);
    note("combine_slots", start, 0);
}

static void ungroup_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                          struct tensor weights, struct row_list rows, struct tensor out)
{
    double start = clock_seconds();
    real->ungroup_slots(b, yg, groups, weights, rows, out);
    note("ungroup_slots", start, 0);
}

static void softmax(struct backend *b, struct tensor x, struct tensor y)
{
    double start = clock_seconds();
    real->softmax(b, x, y);
    note("softmax", start, 0);
}

static void gather_rows(struct backend *b, struct tensor x, struct row_list rows, struct tensor out)
{
    double start = clock_seconds();
    real->gather_rows(b, x, rows, out);
    note("gather_rows", start, 0);
}

static void collect(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype,
                    void *host)
{
    double start = clock_seconds();
    real->collect(b, x, rows, n, dtype, host);
    note("collect", start, 0);
}

void ops_watch_install(struct backend *b)
{
    real = b->ops;
    watching = *real;
    watching.matrix_create = matrix_create;
    watching.upload = upload;
    watching.embed = embed;
    watching.linear = linear;
    watching.rms_norm = rms_norm;
    watching.add = add;
    watching.add_scaled = add_scaled;
    watching.silu_mul = silu_mul;
    watching.conv_silu = conv_silu;
    watching.selective_scan = selective_scan;
    watching.ssd_scan = ssd_scan;
    watching.rotary = rotary;
    watching.attention = attention;
    watching.softplus_gate = softplus_gate;
    watching.route = route;
    watching.group_experts = group_experts;
    watching.grouped_linear = grouped_linear;
    watching.gathered_linear = gathered_linear;
    watching.combine_slots = combine_slots;
    watching.ungroup_slots = ungroup_slots;
    watching.softmax = softmax;
    watching.gather_rows = gather_rows;
    watching.collect = collect;
    b->ops = &watching;
}

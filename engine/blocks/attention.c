#include "engine/blocks/attention.h"

#include <math.h>

static int64_t q_width(const struct forward *f)
{
    return (int64_t)forward_block(f)->n_heads * f->model->head_dim;
}

static int64_t kv_width(const struct forward *f)
{
    return (int64_t)f->model->n_kv_heads * f->model->head_dim;
}

/* Columns of the gate: one a head, or one a channel. */
static int64_t gate_width(const struct model *m, const struct block *block)
{
    return m->gating == GATING_PER_HEAD ? block->n_heads : (int64_t)block->n_heads * m->head_dim;
}

enum status attention_load(struct loader *l, const struct model *m, const struct block *block,
                           struct attention *out, struct error *error)
{
    int64_t q = (int64_t)block->n_heads * m->head_dim, kv = (int64_t)m->n_kv_heads * m->head_dim,
            D = m->hidden_size;
    const struct loader_part weights[] = {{"q_proj.weight", q}, {"k_proj.weight", kv}, {"v_proj.weight", kv}};
    const struct loader_part biases[] = {{"q_proj.bias", q}, {"k_proj.bias", kv}, {"v_proj.bias", kv}};
    TRY(loader_fused(l, weights, 3, D, &out->qkv, error));
    if (m->attention_bias) {
        TRY(loader_fused_vector(l, biases, 3, &out->qkv_bias, error));
        TRY(loader_vector(l, "o_proj.bias", D, &out->o_bias, error));
    }
    if (m->qk_norm) {
        TRY(loader_vector(l, "q_norm.weight", m->head_dim, &out->q_norm, error));
        TRY(loader_vector(l, "k_norm.weight", m->head_dim, &out->k_norm, error));
    }
    if (m->gating != GATING_NONE)
        TRY(loader_matrix(l, "g_proj.weight", gate_width(m, block), D, &out->gate, error));
    return loader_matrix(l, "o_proj.weight", D, q, &out->o_proj, error);
}

/* A run at work, and its scratch. */
struct run_state {
    const struct attention *attention;
    struct tensor qkv;     /* [T, (heads + 2 * kv heads) * head_dim] */
    struct tensor q, k, v; /* its columns */
    struct tensor y;       /* [T, heads * head_dim] */
    struct tensor gate;    /* [T, gate_width], where the model has one */
};

static struct run_state take_scratch(struct forward *f)
{
    const struct model *m = f->model;
    int64_t T = f->limits.max_tokens;
    f->scratch.used = 0;
    return (struct run_state){
        .qkv = forward_take(f, T, q_width(f) + 2 * kv_width(f), m->load_dtype),
        .y = forward_take(f, T, q_width(f), m->load_dtype),
        .gate = forward_take_if(f, m->gating != GATING_NONE, gate_width(m, forward_block(f)), m->load_dtype),
    };
}

void attention_plan(struct forward *f)
{
    take_scratch(f);
}

void attention_take_cache(const struct forward *f, struct arena *arena, struct key_cache *out)
{
    int64_t rows = forward_round_rows(f->limits.max_position) + BACKEND_ROW_PADDING;
    size_t bytes = (size_t)(rows * kv_width(f)) * dtype_size(f->model->load_dtype);
    out->keys =
        tensor_make(arena_take(arena, bytes), f->model->load_dtype, f->limits.max_position, kv_width(f));
    out->values = out->keys;
    out->values.data = arena_take(arena, bytes);
}

size_t attention_row_bytes(const struct forward *f)
{
    int rows = forward_wants(f, VALUE_ATTN_SCORES) + forward_wants(f, VALUE_ATTN_PROBABILITIES);
    return (size_t)rows * (size_t)forward_block(f)->n_heads * (size_t)f->limits.max_position *
           dtype_size(f->model->load_dtype);
}

/* ---- queries, keys, values ---- */

static void norm_heads(struct forward *f, struct tensor x, const float *weight)
{
    struct norm_args args = {.x = x,
                             .weight = weight,
                             .group = f->model->head_dim,
                             .weight_per_group = true,
                             .epsilon = f->model->norm_epsilon,
                             .y = x};
    f->backend->ops->rms_norm(f->backend, &args);
}

static void turn_heads(struct forward *f, struct tensor x)
{
    bool sliding = forward_block(f)->sliding;
    struct rotary_args args = {.x = x,
                               .n_heads = (int)(x.cols / f->model->head_dim),
                               .head_dim = f->model->head_dim,
                               .rotary_dim =
                                   (sliding ? f->model->rope_sliding : f->model->rope_full).rotary_dim,
                               .cosine = f->rotary[sliding].cosine,
                               .sine = f->rotary[sliding].sine,
                               .runs = f->runs};
    if (args.rotary_dim > 0)
        f->backend->ops->rotary(f->backend, &args);
}

static void project_in(struct forward *f, struct run_state *s)
{
    const struct attention *a = s->attention;
    f->backend->ops->linear(f->backend, forward_tokens(f, f->normed), a->qkv, a->qkv_bias, (struct tensor){0},
                            s->qkv);
    s->q = tensor_cols(s->qkv, 0, q_width(f));
    s->k = tensor_cols(s->qkv, q_width(f), kv_width(f));
    s->v = tensor_cols(s->qkv, q_width(f) + kv_width(f), kv_width(f));
    if (f->model->qk_norm) {
        norm_heads(f, s->q, a->q_norm);
        norm_heads(f, s->k, a->k_norm);
    }
    turn_heads(f, s->q);
    turn_heads(f, s->k);
    forward_offer(f, VALUE_ATTN_QUERIES, s->q);
    forward_offer(f, VALUE_ATTN_KEYS, s->k);
    forward_offer(f, VALUE_ATTN_VALUES, s->v);
}

/* ---- the run that goes on from batch to batch ---- */

/* Puts the keys and values of run r into the cache, each at its position. */
static void keep_keys(struct forward *f, const struct run_state *s, const struct run *r)
{
    const struct key_cache *cache = &s->attention->cache;
    struct row_list rows = {f->identity, r->length};
    const struct backend_ops *ops = f->backend->ops;
    ops->gather_rows(f->backend, tensor_rows(s->k, r->start, r->length), rows,
                     tensor_rows(cache->keys, r->position, r->length));
    ops->gather_rows(f->backend, tensor_rows(s->v, r->start, r->length), rows,
                     tensor_rows(cache->values, r->position, r->length));
}

static void keep_carried_run(struct forward *f, const struct run_state *s)
{
    if (f->runs.carry_in)
        keep_keys(f, s, &f->runs.list[0]);
}

/* After attention, since until then the cache holds the keys of the run that came in. */
static void keep_last_run(struct forward *f, const struct run_state *s)
{
    bool is_in_place = f->runs.carry_in && f->runs.n == 1;
    if (f->runs.carry_out && !is_in_place)
        keep_keys(f, s, &f->runs.list[f->runs.n - 1]);
}

/* ---- attention itself ---- */

static struct row_list find_pattern_rows(struct forward *f)
{
    forward_mark_all(f, forward_rows(f, VALUE_ATTN_SCORES));
    forward_mark_all(f, forward_rows(f, VALUE_ATTN_PROBABILITIES));
    return forward_collect(f);
}

/* Keys and values that the piece's queries see: from the first token of the run that its first token is in.
 */
static void place_keys(struct forward *f, const struct run_state *s, const struct cut *cut,
                       struct attention_args *args)
{
    const struct run *r = &f->runs.list[cut->run];
    bool is_carried = cut->run == 0 && f->runs.carry_in;
    args->past = is_carried ? r->position + cut->first - r->start : cut->first - r->start;
    args->k = is_carried ? tensor_rows(s->attention->cache.keys, 0, args->past + cut->n)
                         : tensor_rows(s->k, r->start, args->past + cut->n);
    args->v = is_carried ? tensor_rows(s->attention->cache.values, 0, args->past + cut->n)
                         : tensor_rows(s->v, r->start, args->past + cut->n);
}

static void run_piece(struct forward *f, const struct run_state *s, const struct cut *cut,
                      struct attention_args *args)
{
    args->q = tensor_rows(s->q, cut->first, cut->n);
    args->y = tensor_rows(s->y, cut->first, cut->n);
    args->runs = cut->runs;
    args->pattern_rows = cut->relative[0];
    args->scores.rows = args->probabilities.rows = cut->relative[0].n;
    place_keys(f, s, cut, args);
    f->backend->ops->attention(f->backend, args);
    forward_offer_piece(f, VALUE_ATTN_SCORES, args->scores, cut->absolute[0].index, cut->absolute[0].n);
    forward_offer_piece(f, VALUE_ATTN_PROBABILITIES, args->probabilities, cut->absolute[0].index,
                        cut->absolute[0].n);
}

static void attend(struct forward *f, const struct run_state *s)
{
    const struct model *m = f->model;
    const struct block *block = forward_block(f);
    bool scores = forward_wants(f, VALUE_ATTN_SCORES),
         probabilities = forward_wants(f, VALUE_ATTN_PROBABILITIES);
    struct attention_args args = {.n_heads = block->n_heads,
                                  .n_kv_heads = m->n_kv_heads,
                                  .head_dim = m->head_dim,
                                  .window = block->sliding ? m->window : 0,
                                  .scale = (float)(1 / sqrt((double)m->head_dim)),
                                  .n_keys = f->limits.max_position};
    struct cut cut = {.wanted[0] = find_pattern_rows(f)};
    if (f->runs.carry_in)
        cut.stop = f->runs.list[0].start + f->runs.list[0].length;
    if (scores || probabilities) {
        size_t row = attention_row_bytes(f) / (size_t)(scores + probabilities);
        cut.max_rows[0] = forward_piece_rows(f, row, scores + probabilities);
        struct tensor pattern = tensor_make(f->piece, m->load_dtype, 0, block->n_heads * args.n_keys);
        if (scores)
            args.scores = pattern;
        pattern.data = (char *)f->piece + (scores ? (size_t)cut.max_rows[0] * row : 0);
        if (probabilities)
            args.probabilities = pattern;
    }
    while (forward_cut(f, &cut))
        run_piece(f, s, &cut, &args);
    forward_close(f, VALUE_ATTN_SCORES);
    forward_close(f, VALUE_ATTN_PROBABILITIES);
}

static void gate_output(struct forward *f, struct run_state *s)
{
    const struct backend_ops *ops = f->backend->ops;
    if (f->done || s->attention->gate == NULL)
        return;
    ops->linear(f->backend, forward_tokens(f, f->normed), s->attention->gate, NULL, (struct tensor){0},
                s->gate);
    ops->softplus_gate(f->backend, s->y, s->gate, f->model->head_dim, s->y);
}

void attention_run(struct forward *f, const struct attention *attention)
{
    if (f->done)
        return;
    struct run_state s = take_scratch(f);
    s.attention = attention;
    s.qkv.rows = s.y.rows = s.gate.rows = f->n_tokens;
    project_in(f, &s);
    if (f->done)
        return;
    keep_carried_run(f, &s);
    attend(f, &s);
    keep_last_run(f, &s);
    forward_offer(f, VALUE_ATTN_HEAD_OUTPUTS, s.y);
    gate_output(f, &s);
    forward_offer(f, VALUE_ATTN_PREMIX, s.y);
    forward_project(f, s.y, attention->o_proj, attention->o_bias, VALUE_ATTN_OUTPUT);
}

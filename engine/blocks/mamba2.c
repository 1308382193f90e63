#include "engine/blocks/mamba2.h"

/* Columns of what the convolution reads: x, B and C side by side. */
static int64_t conv_width(const struct model *m)
{
    return m->mamba_width + 2 * (int64_t)m->n_groups * m->state_dim;
}

static int64_t in_width(const struct model *m)
{
    return m->mamba_width + conv_width(m) + m->n_mamba_heads;
}

enum status mamba2_load(struct loader *l, const struct model *m, struct mamba2 *out, struct error *error)
{
    int64_t heads = m->n_mamba_heads;
    TRY(loader_matrix(l, "in_proj.weight", in_width(m), m->hidden_size, &out->in_proj, error));
    TRY(loader_conv(l, "conv1d.weight", conv_width(m), m->conv_kernel, &out->conv_weight, error));
    if (m->conv_bias)
        TRY(loader_vector(l, "conv1d.bias", conv_width(m), &out->conv_bias, error));
    TRY(loader_vector(l, "dt_bias", heads, &out->dt_bias, error));
    TRY(loader_decay(l, "A_log", heads, 0, &out->A, error));
    TRY(loader_vector(l, "D", heads, &out->D, error));
    TRY(loader_vector(l, "norm.weight", m->mamba_width, &out->norm, error));
    TRY(loader_matrix(l, "out_proj.weight", m->hidden_size, m->mamba_width, &out->out_proj, error));
    if (m->mamba_bias) {
        TRY(loader_vector(l, "in_proj.bias", in_width(m), &out->in_bias, error));
        TRY(loader_vector(l, "out_proj.bias", m->hidden_size, &out->out_bias, error));
    }
    return STATUS_OK;
}

struct run_state {
    const struct mamba2 *mixer;
    struct tensor in;            /* [T, in_width]: z, x|B|C, dt */
    struct tensor xBC;           /* [T, conv_width] after the convolution */
    struct tensor y;             /* [T, width] float32 into the norm, as in the reference */
    struct tensor normed;        /* [T, width] */
    struct tensor betas, decays; /* [T, heads] float32, where wanted */
};

static struct run_state take_scratch(struct forward *f)
{
    const struct model *m = f->model;
    int64_t T = f->limits.max_tokens;
    bool decays = forward_wants(f, VALUE_LINEAR_DECAYS),
         betas = decays || forward_wants(f, VALUE_LINEAR_BETAS);
    f->scratch.used = 0;
    return (struct run_state){
        .in = forward_take(f, T, in_width(m), m->load_dtype),
        .xBC = forward_take(f, T, conv_width(m), m->load_dtype),
        .y = forward_take(f, T, m->mamba_width, DTYPE_F32),
        .normed = forward_take(f, T, m->mamba_width, m->load_dtype),
        .betas = forward_take_if(f, betas, m->n_mamba_heads, DTYPE_F32),
        .decays = forward_take_if(f, decays, m->n_mamba_heads, DTYPE_F32),
    };
}

void mamba2_plan(struct forward *f)
{
    take_scratch(f);
}

void mamba2_take_carry(const struct forward *f, struct arena *arena, struct scan_carry *out)
{
    const struct model *m = f->model;
    size_t state = (size_t)m->mamba_width * (size_t)m->state_dim;
    *out = (struct scan_carry){0};
    out->conv_tail = arena_take(arena, (size_t)(m->conv_kernel - 1) * (size_t)conv_width(m) * sizeof(float));
    out->state = arena_take(arena, state * sizeof(float));
    if (forward_wants(f, VALUE_LINEAR_STATE_INPUT))
        out->last_state = arena_take(arena, state * sizeof(float));
}

/* x, B or C of the convolved columns. */
static struct tensor xBC_part(const struct forward *f, const struct run_state *s, int part)
{
    int64_t width = f->model->mamba_width, states = (int64_t)f->model->n_groups * f->model->state_dim;
    return part == 0 ? tensor_cols(s->xBC, 0, width)
                     : tensor_cols(s->xBC, width + (part - 1) * states, states);
}

static struct tensor dt_part(const struct forward *f, const struct run_state *s)
{
    return tensor_cols(s->in, f->model->mamba_width + conv_width(f->model), f->model->n_mamba_heads);
}

static void project_in(struct forward *f, struct run_state *s)
{
    const struct mamba2 *mixer = s->mixer;
    const struct backend_ops *ops = f->backend->ops;
    ops->linear(f->backend, forward_tokens(f, f->normed), mixer->in_proj, mixer->in_bias, (struct tensor){0},
                s->in);
    struct conv_args conv = {.x = tensor_cols(s->in, f->model->mamba_width, conv_width(f->model)),
                             .weight = mixer->conv_weight,
                             .bias = mixer->conv_bias,
                             .kernel = f->model->conv_kernel,
                             .runs = f->runs,
                             .tail = mixer->carry.conv_tail,
                             .y = s->xBC};
    ops->conv_silu(f->backend, &conv);
    forward_offer(f, VALUE_LINEAR_VALUES, xBC_part(f, s, 0));
    forward_offer(f, VALUE_LINEAR_KEYS, xBC_part(f, s, 1));
    forward_offer(f, VALUE_LINEAR_QUERIES, xBC_part(f, s, 2));
}

static void run_piece(struct forward *f, const void *mixer, const struct scan_piece *piece)
{
    const struct run_state *s = mixer;
    const struct model *m = f->model;
    int64_t first = piece->first, n = piece->n;
    struct ssd_scan_args args = {.x = tensor_rows(xBC_part(f, s, 0), first, n),
                                 .dt = tensor_rows(dt_part(f, s), first, n),
                                 .B = tensor_rows(xBC_part(f, s, 1), first, n),
                                 .C = tensor_rows(xBC_part(f, s, 2), first, n),
                                 .dt_bias = s->mixer->dt_bias,
                                 .A = s->mixer->A,
                                 .D = s->mixer->D,
                                 .n_heads = m->n_mamba_heads,
                                 .head_dim = m->mamba_head_dim,
                                 .state_dim = m->state_dim,
                                 .n_groups = m->n_groups,
                                 .dt_min = m->dt_min,
                                 .dt_max = m->dt_max,
                                 .chunk = m->chunk,
                                 .runs = piece->runs,
                                 .carry = piece->state,
                                 .y = tensor_rows(s->y, first, n),
                                 .betas = tensor_rows(s->betas, first, n),
                                 .state_rows = piece->state_rows,
                                 .states = piece->states};
    f->backend->ops->ssd_scan(f->backend, &args);
}

/* One number a head: too little for an operation of its own, so the host multiplies. */
static void offer_decays(struct forward *f, const struct run_state *s)
{
    if (!forward_wants(f, VALUE_LINEAR_DECAYS))
        return;
    const struct backend_ops *ops = f->backend->ops;
    int64_t heads = f->model->n_mamba_heads, n = f->n_tokens * heads;
    float *A = f->host_floats, *values = A + heads;
    ops->download(f->backend, A, s->mixer->A, (size_t)heads * sizeof(float));
    ops->download(f->backend, values, s->betas.data, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        values[i] *= A[i % heads];
    ops->upload(f->backend, s->decays.data, values, (size_t)n * sizeof(float));
    forward_offer(f, VALUE_LINEAR_DECAYS, s->decays);
}

static void norm_by_group(struct forward *f, const struct run_state *s)
{
    struct norm_args args = {.x = s->y,
                             .gate = tensor_cols(s->in, 0, f->model->mamba_width),
                             .weight = s->mixer->norm,
                             .group = f->model->mamba_width / f->model->n_groups,
                             .epsilon = f->model->norm_epsilon,
                             .y = s->normed};
    if (!f->done)
        f->backend->ops->rms_norm(f->backend, &args);
}

void mamba2_run(struct forward *f, const struct mamba2 *mixer)
{
    if (f->done)
        return;
    struct run_state s = take_scratch(f);
    s.mixer = mixer;
    s.in.rows = s.xBC.rows = s.y.rows = s.normed.rows = s.betas.rows = s.decays.rows = f->n_tokens;
    project_in(f, &s);
    if (f->done)
        return;
    struct scan scan = {.carry = &mixer->carry,
                        .state_width = f->model->mamba_width * f->model->state_dim,
                        .mixer = &s,
                        .run = run_piece};
    scan_run(f, &scan);
    forward_offer(f, VALUE_LINEAR_BETAS, s.betas);
    offer_decays(f, &s);
    forward_offer(f, VALUE_LINEAR_HEAD_OUTPUTS, s.y);
    norm_by_group(f, &s);
    forward_project(f, s.normed, mixer->out_proj, mixer->out_bias, VALUE_LINEAR_OUTPUT);
}

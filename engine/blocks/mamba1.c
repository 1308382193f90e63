#include "engine/blocks/mamba1.h"

enum status mamba1_load(struct loader *l, const struct model *m, struct mamba1 *out, struct error *error)
{
    int64_t width = m->mamba_width, rank = m->dt_rank, N = m->state_dim;
    TRY(loader_matrix(l, "in_proj.weight", 2 * width, m->hidden_size, &out->in_proj, error));
    TRY(loader_conv(l, "conv1d.weight", width, m->conv_kernel, &out->conv_weight, error));
    if (m->conv_bias)
        TRY(loader_vector(l, "conv1d.bias", width, &out->conv_bias, error));
    TRY(loader_matrix(l, "x_proj.weight", rank + 2 * N, width, &out->x_proj, error));
    if (m->mamba_norms) {
        TRY(loader_vector(l, "dt_layernorm.weight", rank, &out->dt_norm, error));
        TRY(loader_vector(l, "b_layernorm.weight", N, &out->b_norm, error));
        TRY(loader_vector(l, "c_layernorm.weight", N, &out->c_norm, error));
    }
    TRY(loader_matrix(l, "dt_proj.weight", width, rank, &out->dt_proj, error));
    TRY(loader_vector(l, "dt_proj.bias", width, &out->dt_bias, error));
    TRY(loader_decay(l, "A_log", width, N, &out->A, error));
    TRY(loader_vector(l, "D", width, &out->D, error));
    TRY(loader_matrix(l, "out_proj.weight", m->hidden_size, width, &out->out_proj, error));
    if (m->mamba_bias) {
        TRY(loader_vector(l, "in_proj.bias", 2 * width, &out->in_bias, error));
        TRY(loader_vector(l, "out_proj.bias", m->hidden_size, &out->out_bias, error));
    }
    return STATUS_OK;
}

/* A run at work, and its scratch. */
struct run_state {
    const struct mamba1 *mixer;
    struct tensor xz;  /* [T, 2 * channels] */
    struct tensor x;   /* [T, channels] after the convolution; the scan puts its gated outputs, which
                          out_proj reads, in their place */
    struct tensor rBC; /* [T, dt_rank + 2 * state_dim] */
    struct tensor dt;  /* [T, channels] */
    struct tensor betas, outputs; /* [T, channels] float32, where wanted */
};

static struct run_state take_scratch(struct forward *f)
{
    const struct model *m = f->model;
    int64_t T = f->limits.max_tokens, width = m->mamba_width;
    f->scratch.used = 0;
    return (struct run_state){
        .xz = forward_take(f, T, 2 * width, m->load_dtype),
        .x = forward_take(f, T, width, m->load_dtype),
        .rBC = forward_take(f, T, m->dt_rank + 2 * (int64_t)m->state_dim, m->load_dtype),
        .dt = forward_take(f, T, width, m->load_dtype),
        .betas = forward_take_if(f, forward_wants(f, VALUE_LINEAR_BETAS), width, DTYPE_F32),
        .outputs = forward_take_if(f, forward_wants(f, VALUE_LINEAR_HEAD_OUTPUTS), width, DTYPE_F32),
    };
}

void mamba1_plan(struct forward *f)
{
    take_scratch(f);
}

void mamba1_take_carry(const struct forward *f, struct arena *arena, struct scan_carry *out)
{
    const struct model *m = f->model;
    size_t width = (size_t)m->mamba_width, state = width * (size_t)m->state_dim;
    *out = (struct scan_carry){0};
    out->conv_tail = arena_take(arena, (size_t)(m->conv_kernel - 1) * width * sizeof(float));
    out->state = arena_take(arena, state * sizeof(float));
    if (forward_wants(f, VALUE_LINEAR_STATE_INPUT))
        out->last_state = arena_take(arena, state * sizeof(float));
}

static struct tensor rBC_part(const struct forward *f, const struct run_state *s, int part)
{
    int64_t rank = f->model->dt_rank, N = f->model->state_dim;
    return part == 0 ? tensor_cols(s->rBC, 0, rank) : tensor_cols(s->rBC, rank + (part - 1) * N, N);
}

static void norm_in_place(struct forward *f, struct tensor x, const float *weight)
{
    struct norm_args args = {
        .x = x, .weight = weight, .group = x.cols, .epsilon = f->model->norm_epsilon, .y = x};
    f->backend->ops->rms_norm(f->backend, &args);
}

static void project_in(struct forward *f, struct run_state *s)
{
    const struct mamba1 *mixer = s->mixer;
    const struct backend_ops *ops = f->backend->ops;
    ops->linear(f->backend, forward_tokens(f, f->normed), mixer->in_proj, mixer->in_bias, (struct tensor){0},
                s->xz);
    struct conv_args conv = {.x = tensor_cols(s->xz, 0, f->model->mamba_width),
                             .weight = mixer->conv_weight,
                             .bias = mixer->conv_bias,
                             .kernel = f->model->conv_kernel,
                             .runs = f->runs,
                             .tail = mixer->carry.conv_tail,
                             .y = s->x};
    ops->conv_silu(f->backend, &conv);
    forward_offer(f, VALUE_LINEAR_VALUES, s->x);
}

static void project_steps(struct forward *f, struct run_state *s)
{
    const struct mamba1 *mixer = s->mixer;
    const struct backend_ops *ops = f->backend->ops;
    if (f->done)
        return;
    ops->linear(f->backend, s->x, mixer->x_proj, NULL, (struct tensor){0}, s->rBC);
    if (f->model->mamba_norms) {
        norm_in_place(f, rBC_part(f, s, 0), mixer->dt_norm);
        norm_in_place(f, rBC_part(f, s, 1), mixer->b_norm);
        norm_in_place(f, rBC_part(f, s, 2), mixer->c_norm);
    }
    forward_offer(f, VALUE_LINEAR_KEYS, rBC_part(f, s, 1));
    forward_offer(f, VALUE_LINEAR_QUERIES, rBC_part(f, s, 2));
    if (!f->done)
        ops->linear(f->backend, rBC_part(f, s, 0), mixer->dt_proj, NULL, (struct tensor){0}, s->dt);
}

static void run_piece(struct forward *f, const void *mixer, const struct scan_piece *piece)
{
    const struct run_state *s = mixer;
    int64_t width = f->model->mamba_width, first = piece->first, n = piece->n;
    struct selective_scan_args args = {.x = tensor_rows(s->x, first, n),
                                       .dt = tensor_rows(s->dt, first, n),
                                       .B = tensor_rows(rBC_part(f, s, 1), first, n),
                                       .C = tensor_rows(rBC_part(f, s, 2), first, n),
                                       .z = tensor_cols(tensor_rows(s->xz, first, n), width, width),
                                       .dt_bias = s->mixer->dt_bias,
                                       .A = s->mixer->A,
                                       .D = s->mixer->D,
                                       .state_dim = f->model->state_dim,
                                       .runs = piece->runs,
                                       .carry = piece->state,
                                       .y = tensor_rows(s->x, first, n),
                                       .betas = tensor_rows(s->betas, first, n),
                                       .outputs = tensor_rows(s->outputs, first, n),
                                       .state_rows = piece->state_rows,
                                       .states = piece->states,
                                       .decay_rows = piece->decay_rows,
                                       .decays = piece->decays};
    f->backend->ops->selective_scan(f->backend, &args);
}

void mamba1_run(struct forward *f, const struct mamba1 *mixer)
{
    if (f->done)
        return;
    struct run_state s = take_scratch(f);
    s.mixer = mixer;
    s.xz.rows = s.x.rows = s.rBC.rows = s.dt.rows = s.betas.rows = s.outputs.rows = f->n_tokens;
    project_in(f, &s);
    project_steps(f, &s);
    if (f->done)
        return;
    struct scan scan = {.carry = &mixer->carry,
                        .state_width = f->model->mamba_width * f->model->state_dim,
                        .has_decay_rows = true,
                        .mixer = &s,
                        .run = run_piece};
    scan_run(f, &scan);
    forward_offer(f, VALUE_LINEAR_BETAS, s.betas);
    forward_offer(f, VALUE_LINEAR_HEAD_OUTPUTS, s.outputs);
    forward_project(f, s.x, mixer->out_proj, mixer->out_bias, VALUE_LINEAR_OUTPUT);
}

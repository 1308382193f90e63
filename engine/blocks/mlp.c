#include "engine/blocks/mlp.h"

#include <stdio.h>

static const struct mlp_values dense_values = {VALUE_MLP_ACTIVATION, VALUE_MLP_NEURONS};

enum status mlp_load(struct loader *l, const struct model *m, const char *prefix, int64_t width,
                     struct mlp *out, struct error *error)
{
    char gate[64], up[64], down[64];
    snprintf(gate, sizeof gate, "%sgate_proj.weight", prefix);
    snprintf(up, sizeof up, "%sup_proj.weight", prefix);
    snprintf(down, sizeof down, "%sdown_proj.weight", prefix);
    out->width = width;
    TRY(loader_fused(l, (struct loader_part[]){{gate, width}, {up, width}}, 2, m->hidden_size, &out->gate_up,
                     error));
    TRY(loader_matrix(l, down, m->hidden_size, width, &out->down, error));
    if (!m->mlp_bias)
        return STATUS_OK;
    snprintf(gate, sizeof gate, "%sgate_proj.bias", prefix);
    snprintf(up, sizeof up, "%sup_proj.bias", prefix);
    snprintf(down, sizeof down, "%sdown_proj.bias", prefix);
    TRY(loader_fused_vector(l, (struct loader_part[]){{gate, width}, {up, width}}, 2, &out->gate_up_bias,
                            error));
    return loader_vector(l, down, m->hidden_size, &out->down_bias, error);
}

struct mlp_scratch mlp_take_scratch(struct forward *f, int64_t width, const struct mlp_values *values)
{
    return (struct mlp_scratch){
        .gate_up = forward_take(f, f->limits.max_tokens, 2 * width, f->model->load_dtype),
        .neurons = forward_take(f, f->limits.max_tokens, width, f->model->load_dtype),
        .activation = forward_take_if(f, forward_wants(f, values->activation), width, f->model->load_dtype),
    };
}

struct tensor mlp_run_neurons(struct forward *f, const struct mlp *mlp, struct mlp_scratch *scratch,
                              const struct mlp_values *values)
{
    const struct backend_ops *ops = f->backend->ops;
    scratch->gate_up.rows = scratch->neurons.rows = scratch->activation.rows = f->n_tokens;
    struct tensor gate = tensor_cols(scratch->gate_up, 0, mlp->width);
    struct tensor up = tensor_cols(scratch->gate_up, mlp->width, mlp->width);
    ops->linear(f->backend, forward_tokens(f, f->normed), mlp->gate_up, mlp->gate_up_bias, (struct tensor){0},
                scratch->gate_up);
    ops->silu_mul(f->backend, gate, up, scratch->activation, scratch->neurons);
    forward_offer(f, values->activation, scratch->activation);
    forward_offer(f, values->neurons, scratch->neurons);
    return scratch->neurons;
}

void mlp_plan(struct forward *f)
{
    f->scratch.used = 0;
    mlp_take_scratch(f, f->model->intermediate_size, &dense_values);
}

void mlp_run(struct forward *f, const struct mlp *mlp)
{
    if (f->done)
        return;
    f->scratch.used = 0;
    struct mlp_scratch scratch = mlp_take_scratch(f, mlp->width, &dense_values);
    struct tensor neurons = mlp_run_neurons(f, mlp, &scratch, &dense_values);
    forward_project(f, neurons, mlp->down, mlp->down_bias, VALUE_MLP_OUTPUT);
}
